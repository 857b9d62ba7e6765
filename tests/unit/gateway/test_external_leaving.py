"""Clients that leave in the middle of an external target's stream: it is read on for its usage, within bounds."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shoal.gateway import remainders
from tests.support.gateway import GatewayUnderTest, tenant
from tests.support.provider import CLOSING, DONE, Provider, beside, event
from tests.support.routes import target
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until_async
from tests.unit.gateway.test_external_native import DELTA, ENDING, MESSAGE, START, STOP

CHAT: dict[str, Any] = {"model": "front", "messages": [{"role": "user", "content": "hi"}], "stream": True}
ONLY = {"targets": [{"external": {"name": "outside"}}]}
WITH_FALLBACK = {**ONLY, "fallback": {"targets": [target("llama")]}}
OTHER = "sk-test-globex"


@dataclass
class Halves:
    """A provider's stream that goes on when it is told to."""

    first: bytes = field(default_factory=lambda: event("Hel"))
    rest: tuple[bytes, ...] = (CLOSING, DONE)
    on: asyncio.Event = field(default_factory=asyncio.Event)
    ends: bool = True

    async def __call__(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await self._write(writer, self.first)
        await self.on.wait()
        for part in self.rest:
            await self._write(writer, part)
        if not self.ends:
            raise ConnectionError("the provider breaks off")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _write(self, writer: asyncio.StreamWriter, part: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        await writer.drain()


def running(it: GatewayUnderTest) -> int:
    return it.app.remainders.running


async def leave(it: GatewayUnderTest, body: dict[str, Any] = CHAT, path: str = "/v1/chat/completions", **more: Any):
    """Reads the first line of a stream, and leaves."""
    response = await it.post(body, path, **more)
    assert response.status == 200
    await response.content.readline()
    response.close()


async def left(it: GatewayUnderTest, answer: Halves, *args: Any) -> tuple[object, ...]:
    """What is recorded of a client that left before the provider went on."""
    await leave(it, *args)
    await until_async(lambda: running(it) == 1)
    answer.on.set()
    (record,) = await it.records()
    await until_async(lambda: it.app.in_flight == 0)
    assert running(it) == 0
    data = record.data
    return data.outcome, data.count_source, data.input_tokens, data.output_tokens


async def test_the_usage_at_the_end_of_a_stream_is_billed_to_a_client_that_left_before(tmp_path: Path) -> None:
    """The whole answer had reached it, but for its usage."""
    answer = Halves()
    provider = Provider(answer)
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        assert await left(it, answer) == ("cancelled", "final", 7, 3)
        assert it.metric("shoal_gateway_cancellations_total", counts="exact") == 1
        assert it.metric("shoal_gateway_external_requests_total", outcome="answered") == 1
        assert provider.connections == len(provider.writers) == 1, "the connection is kept for the next request"


async def test_the_same_where_the_provider_serves_the_clients_api_itself(tmp_path: Path) -> None:
    answer = Halves(START, (DELTA, ENDING, STOP))
    changed = {"endpoints": ["/v1/messages"]}
    async with beside(tmp_path, Provider(answer), ScriptedEngine(), ONLY, changed=changed) as it:
        found = await left(it, answer, {**MESSAGE, "stream": True}, "/v1/messages")
        assert found == ("cancelled", "final", 28, 9)


async def test_the_same_for_a_stream_that_is_translated(tmp_path: Path) -> None:
    answer = Halves()
    async with beside(tmp_path, Provider(answer), ScriptedEngine(), ONLY) as it:
        body = {"model": "front", "input": "hi", "stream": True}
        assert await left(it, answer, body, "/v1/responses") == ("cancelled", "final", 7, 3)


@pytest.mark.parametrize(
    "answer",
    [
        lambda: Halves(rest=(), ends=False),
        lambda: Halves(rest=(b'data: {"error":{"message":"no","type":"server_error"}}\n\n',)),
        lambda: Halves(rest=(event("lo"), DONE)),
    ],
    ids=["breaks off", "an error", "no usage"],
)
async def test_without_a_usage_it_is_estimated_as_ever(tmp_path: Path, answer: Callable[[], Halves]) -> None:
    async with beside(tmp_path, Provider(halves := answer()), engine := ScriptedEngine(), WITH_FALLBACK) as it:
        assert (await left(it, halves))[:2] == ("cancelled", "estimated")
        assert it.metric("shoal_gateway_cancellations_total", counts="estimated") == 1
        assert it.metric("shoal_gateway_errors_total") == 0, "nobody is there to get one"
        assert not engine.requests


async def test_it_is_not_read_on_for_longer_than_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remainders, "SECONDS", 0.2)
    async with beside(tmp_path, Provider(Halves()), ScriptedEngine(), ONLY) as it:
        await leave(it)
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source) == ("cancelled", "estimated")
        await until_async(lambda: it.app.in_flight == 0)
        assert running(it) == 0


async def test_it_is_not_read_on_for_more_than_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remainders, "SECONDS", 600.0)
    answer = Halves(rest=tuple(event("x" * 60_000) for _ in range(40)))
    async with beside(tmp_path, Provider(answer), ScriptedEngine(), ONLY) as it:
        assert (await left(it, answer))[:2] == ("cancelled", "estimated")


async def test_a_client_that_reads_nothing_and_leaves_does_not_stop_the_reading(tmp_path: Path) -> None:
    """What the provider has sent waits for the client until then."""
    answer = Halves(first=event("x" * 200_000))
    async with beside(tmp_path, Provider(answer), ScriptedEngine(), ONLY) as it:
        assert await left(it, answer) == ("cancelled", "final", 7, 3)


async def test_one_tenant_has_a_share_of_the_streams_that_are_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remainders, "SECONDS", 600.0)
    monkeypatch.setattr(remainders, "MOST_OF_TENANT", 2)
    monkeypatch.setattr(remainders, "MOST", 3)
    answer, provider = Halves(), Provider()
    provider.answer = answer
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        it.tenants["globex"] = tenant("globex", OTHER, routes=[{"namespace": "chat"}])
        it.changed()
        for _ in range(4):
            await leave(it)
        await until_async(lambda: it.app.in_flight == 2)
        assert running(it) == 2
        for _ in range(3):
            await leave(it, key=OTHER)
        await until_async(lambda: it.app.in_flight == 3)
        assert running(it) == 3
        answer.on.set()
        records = await it.records(count=7)
        assert sorted(each.data.count_source for each in records) == ["estimated"] * 4 + ["final"] * 3
        await until_async(lambda: it.app.in_flight == 0)
        assert running(it) == 0


async def test_it_counts_among_its_tenants_requests_and_those_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remainders, "SECONDS", 600.0)
    answer = Halves()
    async with beside(tmp_path, Provider(answer), ScriptedEngine(), ONLY, changed={"maxConcurrentRequests": 1}) as it:
        await leave(it)
        await until_async(lambda: running(it) == 1)
        response = await it.post(CHAT)
        assert response.status == 503
        answer.on.set()
        await until_async(lambda: it.app.in_flight == 0)
        assert (await it.post(CHAT)).status == 200


async def test_a_client_that_leaves_before_the_first_event_is_cut_off_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remainders, "SECONDS", 600.0)
    answer = Halves(first=b": nothing yet\n\n")
    provider = Provider(answer)
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        post = asyncio.create_task(it.post(CHAT))
        await until_async(lambda: len(provider.heads) == 1)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
        await until_async(lambda: it.app.in_flight == 0)
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source) == ("cancelled", "estimated")


async def test_a_stream_whose_usage_is_there_is_not_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remainders, "SECONDS", 600.0)
    answer = Halves(first=event("Hel") + CLOSING, rest=())
    async with beside(tmp_path, Provider(answer), ScriptedEngine(), ONLY) as it:
        await leave(it)
        await until_async(lambda: it.app.in_flight == 0)
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source) == ("cancelled", "final")
