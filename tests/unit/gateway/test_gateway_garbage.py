"""What a request leaves behind: nothing that only the garbage collector could free, whose pauses others would feel."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.gateway.choices import ChoiceMemory
from tests.support.adapter_agents import AdapterAgent, TunedGateway, name_of, tuned
from tests.support.gateway import GatewayUnderTest, gateway, lines, tenant
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally

TIMES = 5
OF_CONNECTIONS = ("_Connection", "UpstreamAddress")
"""A closed connection is a cycle with its parser; a request whose answer is not read to its end costs one."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def of_requests() -> Counter[str]:
    """Objects of our own classes, by class."""
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(
        kind.__qualname__ for kind in kinds if str(kind.__module__).startswith(("shoal.gateway", "shoal.core"))
    )


async def whole(it: GatewayUnderTest) -> None:
    response = await it.post({"model": "llama", "messages": [{"role": "user", "content": "hi"}]})
    assert response.status == 200
    await response.read()


async def stream(it: GatewayUnderTest) -> None:
    response = await it.post({"model": "llama", "messages": [{"role": "user", "content": "hi"}], "stream": True})
    assert [line async for line in lines(response)][-1] == b"[DONE]"


async def refused_by_the_engine(it: GatewayUnderTest) -> None:
    response = await it.post({"model": "llama", "messages": [{"role": "user", "content": "hi"}], "seed": 400})
    assert response.status == 400
    await response.read()


async def another_try(it: GatewayUnderTest) -> None:
    response = await it.post({"model": "llama", "messages": [{"role": "user", "content": "hi"}], "seed": 503})
    assert response.status == 200
    await response.read()


async def held(it: GatewayUnderTest) -> None:
    it.hear(1, phase="stalled")
    it.hear(2, phase="stalled")
    asked = asyncio.create_task(whole(it))
    while not it.app.holds.waiting:
        await asyncio.sleep(0.005)
    it.hear(1)
    it.hear(2)
    await asked


KINDS = [whole, stream, refused_by_the_engine, another_try, held]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("limits", [{}, {"requestsPerMinute": 1000, "concurrentRequests": 1000}], ids=["", "limits"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
async def test_a_request_leaves_nothing_to_collect(tmp_path: Path, kind, limits):
    refused: set[str] = set()

    async def answer(request: EngineRequest) -> None:
        seed, rid = request.body.get("seed"), request.body["rid"].partition(".")[0]
        if seed == 400:
            await request.answer(400, b'{"object":"error","message":"no","type":"BadRequestError","code":400}')
        elif seed == 503 and rid not in refused:
            refused.add(rid)
            await request.answer(503, b'{"object":"error","message":"busy","type":"Busy","code":503}')
        else:
            await serve_normally(request)

    async with gateway(tmp_path, ScriptedEngine(answer), ScriptedEngine(answer)) as it:
        it.tenants["acme"] = tenant(limits=limits)
        it.changed()
        it.app.choices = ChoiceMemory(1)  # what it remembers is bounded, and no garbage
        for _ in range(TIMES):
            await kind(it)
        before = of_requests()
        for _ in range(TIMES):
            await kind(it)
        await it.records(count=2 * TIMES)
        grown = {
            name: n - before[name]
            for name, n in of_requests().items()
            if n - before[name] >= TIMES and name not in OF_CONNECTIONS
        }
        assert not grown


async def adapter_answers(it: TunedGateway) -> None:
    response = await it.ask()
    assert response.status == 200
    await response.read()


async def adapter_streams(it: TunedGateway) -> None:
    response = await it.ask(stream=True)
    assert [line async for line in lines(response)][-1] == b"[DONE]"


async def adapter_is_loaded(it: TunedGateway) -> None:
    it.it.app.leases.drop("pod-1", name_of())
    await adapter_answers(it)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", [adapter_answers, adapter_streams, adapter_is_loaded], ids=lambda k: k.__name__)
async def test_a_request_for_an_adapter_leaves_nothing_to_collect(tmp_path: Path, kind):
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        it.it.app.choices = ChoiceMemory(1)
        for _ in range(TIMES):
            await kind(it)
        before = of_requests()
        for _ in range(TIMES):
            await kind(it)
        await it.it.records(count=2 * TIMES)
        grown = {
            name: n - before[name]
            for name, n in of_requests().items()
            if n - before[name] >= TIMES and name not in OF_CONNECTIONS
        }
        assert not grown
