"""KEDA and two operators: the one that leads answers, over TLS; then the other one, in its place."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from shoal.api import names
from shoal.api.config import KEDA, Scaling
from shoal.controllers.keda.protocol import externalscaler_pb2 as pb
from shoal.kube.errors import NotFound
from shoal.kube.resources import ENDPOINTSLICES
from shoal.runtime.operator import OperatorProcess
from shoal.runtime.scaler import ScalerPlace
from tests.support.controlplane import Fleet, free_ports
from tests.support.kedaclient import keda, write_certificate
from tests.support.kedastandin import install_keda_crds, remove_keda_crds
from tests.support.operators import CONFIG, NAMESPACE, eventually, model
from tests.support.waiting import until_async

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
]

_DRIVEN = CONFIG.model_copy(update={"scaling": Scaling(driver="KEDA", keda=KEDA(polling_seconds=1))})


class Process:
    """An operator that can be ended at any time."""

    def __init__(self, fleet: Fleet, number: int, certificate: Path) -> None:
        self.port, self.address = free_ports(1)[0], f"10.1.0.{number}"
        place = ScalerPlace("127.0.0.1", self.port, self.address, certificate=certificate)
        identity = f"operator-{number}"
        self.operator = OperatorProcess(
            fleet.client, _DRIVEN, NAMESPACE, identity=identity, kubeconfig=fleet.kubeconfig, scaler=place
        )
        self._task = asyncio.create_task(self.operator.run())

    async def end(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


async def number_at(stub: Any, ref: pb.ScaledObjectRef) -> float | None:
    """What KEDA is answered; None: UNAVAILABLE."""
    try:
        found = await stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=ref, metricName="replicas"), timeout=10)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return None
    return found.metricValues[0].metricValueFloat


async def sent_to(fleet: Fleet) -> tuple[list[str], int] | None:
    try:
        found = await fleet.client.get(ENDPOINTSLICES, names.SCALER_SERVICE, NAMESPACE)
    except NotFound:
        return None
    return found["endpoints"][0]["addresses"], found["ports"][0]["port"]


async def ends_well(stream: Any) -> grpc.StatusCode:
    while await stream.read() is not getattr(grpc.aio, "EOF"):  # noqa: B009 - the stubs do not know it
        pass
    return await stream.code()


async def test_the_next_leader_answers_in_the_old_ones_place(fleet: Fleet, tmp_path: Path) -> None:
    ca = write_certificate(tmp_path)
    ref = pb.ScaledObjectRef(namespace=fleet.namespace, name="chat-l4")
    running: list[Process] = []
    await install_keda_crds(fleet.client)
    try:
        running.append(first := Process(fleet, 1, tmp_path))
        await until_async(lambda: first.operator.elector.leading, within=60)
        running.append(second := Process(fleet, 2, tmp_path))
        await until_async(second.operator.watcher.synced.is_set, within=60)
        assert first.operator.keda.port is None, "no Model is driven by KEDA yet"

        await fleet.apply(model("chat", fleet.namespace, scaling={"minReplicas": 2}))
        async with keda(second.port, ca) as closed, keda(first.port, ca) as stub:
            await eventually(lambda: number_at(stub, ref), lambda n: n == 2.0, what="two replicas")
            there = [first.address], first.port
            await eventually(lambda: sent_to(fleet), lambda found: found == there, what="the leader's address")
            assert await number_at(closed, ref) is None, "who does not lead answers nothing"
            async for _ in stub.StreamIsActive(ref):
                pass  # the first of a term ends at once
            stream = stub.StreamIsActive(ref)
            assert (await stream.read()).result
            ending = asyncio.ensure_future(ends_well(stream))

            await first.end()

            async with asyncio.timeout(20):
                assert await ending is grpc.StatusCode.OK
            assert await number_at(stub, ref) is None
        async with keda(second.port, ca) as stub:
            await eventually(lambda: number_at(stub, ref), lambda n: n == 2.0, what="two replicas")
        there = [second.address], second.port
        await eventually(lambda: sent_to(fleet), lambda found: found == there, what="the successor's address")
    finally:
        for process in running:
            await process.end()
        await remove_keda_crds(fleet.client)
        await fleet.client.delete(ENDPOINTSLICES, names.SCALER_SERVICE, NAMESPACE)
