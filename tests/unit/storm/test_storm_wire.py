"""The storm's clients: what comes over the wire, and what they call it."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from shoal.core.fields.check import check as check_fields
from shoal.core.fields.kinds import Facts
from shoal.core.translation import StreamFailure
from shoal.gateway.dialects import DIALECTS
from shoal.net import errors
from tests.storm import swaps
from tests.storm.apis import TRANSLATED
from tests.storm.ground import MODEL_PATH
from tests.storm.journals import WRONG, read_attempts
from tests.storm.load import Journal, check
from tests.storm.plan import ATTACKS, Answers, Ask, Phase, Target, asks, attacked_field
from tests.storm.sdk import Sdk
from tests.storm.wire import Clients, End, exchange
from tests.support.engines import make_models


@pytest.fixture(scope="module", autouse=True)
def models() -> None:
    make_models()


STREAM = Ask("id", 0.0, "m", "stream", 3, 4)
SHORT = replace(STREAM, kind="short")


def event(text: str) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"text": text}]}) + b"\n\n"


def error(**fields: Any) -> bytes:
    return b"data: " + orjson.dumps({"error": {"message": "no", **fields}}) + b"\n\n"


def chunked(*parts: bytes, end: bool = True) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-shoal-request-id: r1\r\n"
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return head + b"transfer-encoding: chunked\r\n\r\n" + body + (b"0\r\n\r\n" if end else b"")


def whole(status: int, body: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n%s\r\n%s" % (status, len(body), headers, body)


@asynccontextmanager
async def serving(answer: bytes, *, hold: bool = False) -> AsyncGenerator[Clients]:
    """A server that says this to every request, and then hangs up or, with `hold`, says nothing more."""
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(length)
        writer.write(answer)
        await writer.drain()
        if hold:
            await done.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    clients = Clients("127.0.0.1", server.sockets[0].getsockname()[1], "sk")
    try:
        yield clients
    finally:
        done.set()
        clients.close()
        server.close()


async def asked(ask: Ask, answer: bytes, *, hold: bool = False) -> End:
    async with serving(answer, hold=hold) as clients:
        wire = await clients.wire(reuse=True)
        assert wire is not None
        end = await exchange(clients, wire, ask, ask.id, lambda _: None)
        wire.hang_up()
        return end


OK = b'{"choices": [{"text": "all of it"}]}'


@pytest.mark.parametrize(
    ("ask", "answer", "outcome"),
    [
        (SHORT, whole(200, OK), "answered"),
        (SHORT, whole(200, b'{"choices": []}'), "lost"),
        (SHORT, whole(200, b""), "lost"),
        (SHORT, whole(503, b"{}", b"retry-after: 7\r\n"), "refused"),
        (SHORT, whole(429, b"{}", b"retry-after: 60\r\n"), "refused"),
        (SHORT, whole(503, b"{}", b"retry-after: 61\r\n"), "lost"),
        (SHORT, whole(503, b"{}"), "lost"),
        (SHORT, whole(502, b"{}"), "lost"),
        (SHORT, whole(502, b'{"error": {"code": "replica_lost_twice"}}'), "failed"),
        (SHORT, whole(500, b'{"error": {"code": "replica_lost_twice"}}'), "lost"),
        (SHORT, whole(504, b"{}"), "lost"),
        (SHORT, whole(400, b"{}"), "lost"),
        (replace(SHORT, kind="wrong"), whole(400, b"{}"), "answered"),
        (replace(SHORT, kind="wrong"), whole(200, OK), "lost"),
        (SHORT, b"", "broken"),
        (SHORT, whole(200, OK)[:-3], "broken"),
        (STREAM, chunked(event("a"), event("b"), b"data: [DONE]\n\n"), "answered"),
        (STREAM, chunked(event("a")), "broken"),
        (STREAM, chunked(event("a"), end=False), "broken"),
        (STREAM, chunked(event("a"), error(retry_after=5)), "failed"),
        (STREAM, chunked(b": waiting\n\n", error(retry_after=5)), "refused"),
        (STREAM, chunked(b": waiting\n\n", error()), "lost"),
        (STREAM, chunked(error(code="x")), "lost"),
        (STREAM, chunked(b": waiting\n\n", error(code="replica_lost_twice")), "failed"),
        (STREAM, chunked(b"data: what\n\n"), "lost"),
        (STREAM, whole(503, b"{}", b"retry-after: 1\r\n"), "refused"),
    ],
)
async def test_what_comes_is_called_what_it_is(ask: Ask, answer: bytes, outcome: str) -> None:
    end = await asked(ask, answer)
    assert end.outcome == outcome, end.why


MESSAGE = replace(STREAM, kind="message")
MESSAGES = replace(STREAM, kind="message_stream")
RESPONSE = replace(STREAM, kind="response")
RESPONSES = replace(STREAM, kind="response_stream")
COMPLETION = {
    "model": "m",
    "choices": [{"index": 0, "message": {"content": "a fox"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}
CHUNKS = (
    {"choices": [{"index": 0, "delta": {"content": "a "}}]},
    {"choices": [{"index": 0, "delta": {"content": "fox"}, "finish_reason": "length"}]},
    {"choices": [], "usage": COMPLETION["usage"]},
)
REFUSED = errors.unavailable("Wait.", "hold_full", 5).failure("r1")
TWICE = errors.lost_twice().failure("r1")


def streamed(ask: Ask, *, end: bool = True, failure: StreamFailure | None = None, chunks: int = 3) -> bytes:
    """What a gateway makes of an engine's stream."""
    events = DIALECTS[ask.path].events("r1", "m")
    made = [events.chunk(chunk) for chunk in CHUNKS[:chunks]]
    if failure is not None:
        made.append(events.error(failure))
    elif end:
        made.append(events.end())
    return chunked(*filter(None, made))


@pytest.mark.parametrize("ask", [MESSAGE, RESPONSE])
async def test_answers_of_other_apis_are_read(ask: Ask) -> None:
    dialect = DIALECTS[ask.path]
    end = await asked(ask, whole(200, orjson.dumps(dialect.answer(COMPLETION, "r1"))))
    assert (end.outcome, end.text, end.usage) == ("answered", "a fox", (9, 3))
    assert (await asked(ask, whole(200, orjson.dumps(COMPLETION)))).outcome == "lost"
    twice = whole(502, dialect.error(errors.lost_twice(), "r1"))
    assert (await asked(ask, twice)).outcome == "failed"


@pytest.mark.parametrize("ask", [MESSAGES, RESPONSES])
async def test_streams_of_other_apis_are_read(ask: Ask) -> None:
    end = await asked(ask, streamed(ask))
    assert (end.outcome, end.text, end.usage) == ("answered", "a fox", (9, 3))
    for answer, outcome in (
        (streamed(ask, end=False), "broken"),
        (streamed(ask, failure=REFUSED), "failed"),
        (streamed(ask, failure=REFUSED, chunks=0), "refused"),
        (streamed(ask, failure=TWICE, chunks=0), "failed"),
        (chunked(event("a"), b"data: {}\n\n"), "broken"),
    ):
        assert (await asked(ask, answer)).outcome == outcome


async def test_a_client_that_leaves_has_cancelled() -> None:
    end = await asked(replace(STREAM, leave_after=0.05), chunked(event("a"), end=False), hold=True)
    assert (end.outcome, end.text) == ("cancelled", "")
    assert end.first is not None


async def test_comments_are_no_answer_and_a_connection_is_used_again() -> None:
    comments = chunked(b": waiting for a replica\n\n", end=False)
    end = await asked(STREAM, comments)
    assert (end.outcome, end.first, end.why.partition(":")[0]) == ("broken", None, "while held")
    async with serving(whole(200, OK), hold=True) as clients:
        wire = await clients.wire(reuse=True)
        assert wire is not None
        assert (await exchange(clients, wire, SHORT, "id", lambda _: None)).outcome == "answered"
        assert await clients.wire(reuse=True) is wire
        wire.hang_up()


def test_answers_are_checked_word_by_word() -> None:
    answers = Answers(MODEL_PATH)
    right = answers.right(SHORT)[0]
    for outcome, text, expected in (
        ("answered", right, "answered"),
        ("answered", right[:-1], "lost"),
        ("answered", answers.right(replace(SHORT, prompt=4))[0] + "x", "lost"),
        ("failed", right[:3], "failed"),
        ("cancelled", "other words", "lost"),
    ):
        end = End(outcome, "", text=text)  # pyright: ignore[reportArgumentType]
        check(end, SHORT, answers)
        assert end.outcome == expected


def test_an_answer_must_be_of_one_of_its_adapters_revisions() -> None:
    answers = Answers(MODEL_PATH, swaps.folders())
    ask = replace(SHORT, model=swaps.SWAPPED, max_tokens=40)
    first, second = answers.right(ask)
    (other,) = answers.right(replace(ask, model="storm-legal"))
    (base,) = answers.right(replace(ask, model="storm-steady"))
    mixed = Answers(MODEL_PATH, swaps.folders(), {"storm-front": ("storm-legal",)})
    assert mixed.by_weights(replace(ask, model="storm-front")) == (("", base), ("storm-legal", other))
    assert mixed.right(replace(ask, model="storm-legal")) == (other,)
    assert {name for name, _ in mixed.by_weights(ask)} == {ask.model}
    assert len({first, second, other, base}) == 4
    mixed = first[: len(first) // 2] + second[len(first) // 2 :]
    for text, expected in ((first, "answered"), (second, "answered"), (other, "lost"), (base, "lost"), (mixed, "lost")):
        end = End("answered", "", text=text)
        check(end, ask, answers)
        assert end.outcome == expected
        assert end.why.startswith(WRONG) == (expected == "lost")


def test_a_plan_is_the_same_for_the_same_seed_and_follows_the_bursts() -> None:
    targets = (Target("steady", 0.5), Target("bursty", 0.5, Phase(10.0, 5.0)))
    plan = list(asks(7, 2000, 100.0, targets))
    assert plan == list(asks(7, 2000, 100.0, targets))
    assert len({ask.id for ask in plan}) == 2000
    assert abs(plan[-1].at - 20.0) < 2.0
    assert all(ask.at % 10.0 < 5.0 for ask in plan if ask.model == "bursty")
    assert {ask.kind for ask in plan} == {"short", "chat", "stream", "long", "leaver", "wrong", "attack", *TRANSLATED}
    plain = list(asks(7, 2000, 100.0, targets, translated=False))
    assert {ask.kind for ask in plain} == {ask.kind for ask in plan} - TRANSLATED.keys()


@pytest.mark.parametrize("number", range(len(ATTACKS)))
def test_an_attack_is_refused_by_its_field_alone(number: int) -> None:
    ask = Ask("a", 0.0, "m", "attack", number, 4)
    facts = Facts(vocabulary=512, context_length=4096)
    refused = check_fields(orjson.loads(ask.body()), ask.path, facts)
    assert refused is not None
    assert refused.param == attacked_field(ask)
    harmless = replace(ask, kind="short").body()
    assert check_fields(orjson.loads(harmless), ask.path, facts) is None


async def test_an_sdk_connection_that_is_closed_as_soon_as_it_is_open_is_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk, journal = Sdk("http://127.0.0.1:9/v1", "key"), Journal.at(tmp_path / "client.jsonl")
    what = "'NoneType' object has no attribute 'getpeername'"

    async def send(_request: httpx.AsyncClient, *_args: Any, **_more: Any) -> httpx.Response:
        raise AttributeError(what)

    monkeypatch.setattr(sdk._client._client, "send", send.__get__(sdk._client._client))
    try:
        await sdk.one(STREAM, journal, None)
        assert read_attempts(tmp_path / "client.jsonl")["id"].outcome == "broken"
        what = "'End' object has no attribute 'texts'"
        with pytest.raises(AttributeError, match="texts"):
            await sdk.one(STREAM, journal, None)
    finally:
        await sdk.close()
        os.close(journal.file)
