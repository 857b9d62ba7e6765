"""What KEDA hears from the operator's external scaler, over real gRPC."""

import asyncio
import socket
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from shoal.controllers.keda import service
from shoal.controllers.keda.protocol import externalscaler_pb2 as pb
from shoal.controllers.keda.server import ScalerServer
from tests.support.controlplane import free_ports
from tests.support.kedaclient import NAME, NAMESPACE, REF, Leadership, Said, keda, leading, scaler, wants
from tests.support.waiting import until_async

LIMIT = 20.0
END: Any = getattr(grpc.aio, "EOF")  # noqa: B009 - the stubs do not know it


async def first_of_a_term(stub: Any) -> list[bool]:
    """A ScaledObject's first stream of a term: what it says before it ends."""
    async with asyncio.timeout(LIMIT):
        return [said.result async for said in stub.StreamIsActive(REF)]


async def test_keda_reads_the_number_that_was_decided() -> None:
    said, certain = Said(), Leadership()
    said.say(wants(3))
    server = scaler(said, certain)
    async with leading(server), keda(server.port) as stub:
        spec = (await stub.GetMetricSpec(REF)).metricSpecs[0]
        value = (await stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=REF, metricName="replicas"))).metricValues[
            0
        ]
        active = (await stub.IsActive(REF)).result

    assert (spec.metricName, spec.targetSizeFloat) == ("replicas", 1.0)
    assert (value.metricName, value.metricValueFloat, value.metricValue) == ("replicas", 3.0, 3)
    assert active
    assert set(said.questions) == {(NAMESPACE, NAME)}


async def test_zero_is_zero_in_both_fields() -> None:
    """KEDA reads the integer where the float is 0."""
    said, certain = Said(), Leadership()
    said.say(wants(0))
    server = scaler(said, certain)
    async with leading(server), keda(server.port) as stub:
        value = (await stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=REF))).metricValues[0]
        assert (value.metricValueFloat, value.metricValue) == (0.0, 0)
        assert not (await stub.IsActive(REF)).result


async def test_what_is_not_decided_is_unavailable_and_not_zero() -> None:
    said, certain = Said(), Leadership()
    server = scaler(said, certain)
    async with leading(server), keda(server.port) as stub:
        for call in (
            stub.IsActive(REF),
            stub.GetMetricSpec(REF),
            stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=REF)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "nothing is decided for ScaledObject ml/chat-h100: the replicas stay as they are" in (
                caught.value.details() or ""
            )


async def test_who_may_lead_no_more_answers_nothing() -> None:
    said, certain = Said(), Leadership()
    said.say(wants(3))
    server = scaler(said, certain)
    async with leading(server), keda(server.port) as stub:
        assert await first_of_a_term(stub) == [True]
        certain.certain = False
        with pytest.raises(grpc.aio.AioRpcError, match="does not lead") as caught:
            await stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=REF))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        stream = stub.StreamIsActive(REF)
        reading = asyncio.ensure_future(stream.read())
        await until_async(lambda: bool(server.streams))
        said.say(wants(4))
        await asyncio.sleep(2 * service.TICK_SECONDS)
        assert not reading.done()
        certain.certain = True
        said.say(wants(5))
        async with asyncio.timeout(LIMIT):
            assert (await reading).result
        stream.cancel()


async def test_a_wake_is_pushed_and_pushed_again_until_replicas_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PUSH_SECONDS", 0.3)
    said, certain = Said(), Leadership()
    said.say(wants(0))
    server = scaler(said, certain)
    async with leading(server), keda(server.port) as stub:
        assert await first_of_a_term(stub) == [False]
        stream = stub.StreamIsActive(REF)
        async with asyncio.timeout(LIMIT):
            assert not (await stream.read()).result
            said.say(wants(1))
            pushed = [(await stream.read()).result for _ in range(4)]
            assert pushed == [True] * 4
            said.say(wants(1, standing=True))
            assert (await stream.read()).result
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(4 * service.PUSH_SECONDS)
        assert not reading.done()  # each push costs KEDA a write, and none is needed any more
        said.say(wants(0))
        async with asyncio.timeout(LIMIT):
            assert not (await reading).result
        stream.cancel()


async def test_the_first_stream_of_a_term_ends_well_so_that_keda_opens_the_next_one_soon() -> None:
    """KEDA waits up to a minute after streams that ended badly, and only one that ends well sets this back."""
    said, certain = Said(), Leadership()
    said.say(wants(2))
    server = scaler(said, certain)
    async with leading(server), keda(server.port) as stub:
        stream = stub.StreamIsActive(REF)
        async with asyncio.timeout(LIMIT):
            assert (await stream.read()).result
            assert await stream.read() is END
        assert await stream.code() is grpc.StatusCode.OK
        second = stub.StreamIsActive(REF)
        async with asyncio.timeout(LIMIT):
            assert [(await second.read()).result for _ in range(2)] == [True, True]
        second.cancel()


async def test_streams_end_well_when_the_operator_leads_no_more_and_open_again_in_its_next_term() -> None:
    said, certain = Said(), Leadership()
    said.say(wants(2))
    server = scaler(said, certain, port=free_ports(1)[0])
    for _ in range(2):
        async with leading(server) as term, keda(server.port) as stub:
            assert await first_of_a_term(stub) == [True]
            stream, specs = stub.StreamIsActive(REF), stub.StreamMetricSpec(REF)
            async with asyncio.timeout(LIMIT):
                assert (await stream.read()).result
                assert (await specs.read()).metricSpecs[0].targetSizeFloat == 1.0
                ending = asyncio.gather(drained(stream), drained(specs))
                await term.end()
                assert await ending == [grpc.StatusCode.OK] * 2
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.IsActive(REF)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.port is None


async def test_another_target_reaches_keda_at_once_and_both_ways_say_the_same() -> None:
    said, certain = Said(), Leadership()
    said.say(wants(2))
    server = scaler(said, certain)
    async with leading(server), keda(server.port) as stub:
        specs = stub.StreamMetricSpec(REF)
        async with asyncio.timeout(LIMIT):
            assert (await specs.read()).metricSpecs[0].targetSizeFloat == 1.0
            said.say(wants(5))  # the same target: nothing to say
            said.say(replace(wants(5), target=0.5))
            assert (await specs.read()).metricSpecs[0].targetSizeFloat == 0.5
        assert (await stub.GetMetricSpec(REF)).metricSpecs[0].targetSizeFloat == 0.5
        specs.cancel()


async def test_streams_that_keda_leaves_are_forgotten() -> None:
    said, certain = Said(), Leadership()
    said.say(wants(0))
    server = scaler(said, certain)
    async with leading(server):
        async with keda(server.port) as stub:
            streams = [stub.StreamMetricSpec(REF) for _ in range(3)]
            await until_async(lambda: server.streams == 3)
            del streams
        await until_async(lambda: server.streams == 0)


async def test_it_does_not_listen_before_a_model_is_driven_by_keda() -> None:
    server = ScalerServer(Said(), Leadership(), host="127.0.0.1", port=0, certificate=None, endpoints=None)
    task = asyncio.ensure_future(server.run())
    await asyncio.sleep(0.1)
    assert server.port is None
    server.need()
    await until_async(lambda: server.port is not None)
    task.cancel()
    await asyncio.wait([task])


async def test_a_port_that_is_taken_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.controllers.keda.server.RETRY_SECONDS", 0.1)
    said, certain = Said(), Leadership()
    said.say(wants(1))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = scaler(said, certain, port=port)
        task = asyncio.ensure_future(server.run())
        await until_async(lambda: server.problem is not None)
        assert server.problem == (
            f"the external scaler cannot listen on 127.0.0.1:{port}: another process has the port; KEDA keeps the "
            "replicas as they are until it is free"
        )
    await until_async(lambda: server.port == port)
    assert server.problem is None
    task.cancel()
    await asyncio.wait([task])


async def drained(stream: Any) -> grpc.StatusCode:
    while await stream.read() is not END:
        pass
    return await stream.code()
