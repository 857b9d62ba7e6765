"""A provider that lies, floods, trickles or breaks off: nothing of it reaches other requests, memory or bills."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.provider import CLOSING, DONE, TOKEN, Answer, Provider, beside, event, stream, whole
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.gateway.test_gateway_external import CHAT, ONLY, WITH_FALLBACK, ask

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
BODY = b'{"model": "m", "choices": [{"index": 0, "message": {"content": "Hello"}}]}'
MILLION = 1_000_000


def raw(*parts: bytes, closes: bool = True) -> Answer:
    """Sends these bytes, and closes."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if closes:
            raise ConnectionError("the provider closes")

    return answer


def flood(begin: bytes, part: bytes) -> tuple[Answer, list[int]]:
    """Sends `begin`, and then a part after the other until nobody reads; counts the bytes."""
    sent = [0]

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        while sent[0] < 100 * MILLION:
            writer.write(part)
            await writer.drain()
            sent[0] += len(part)
            await asyncio.sleep(0)  # `drain` alone would not let the loop see that the gateway has gone

    return answer, sent


FLOODS = {
    "1xx": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"x-a: b\r\n" * 100),
    "one header": (b"HTTP/1.1 200 OK\r\nx-a: ", b"b" * 4096),
    "trailers": (OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"x-a: b\r\n" * 100),
    "one trailer": (OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx-a: ", b"b" * 4096),
    "a chunk's extension": (OK + b"transfer-encoding: chunked\r\n\r\n2;x=", b"b" * 4096),
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_around_an_answer_is_cut_and_the_fallback_answers(tmp_path: Path, kind: str) -> None:
    answer, sent = flood(*FLOODS[kind])
    engine = ScriptedEngine()
    async with beside(tmp_path, Provider(answer), engine, WITH_FALLBACK) as it:
        await ask(it)
        assert len(engine.requests) == 1
    assert sent[0] < 10 * MILLION, "most of it is what the kernel and TLS hold"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_an_event_without_end_is_cut(tmp_path: Path, path: str) -> None:
    begin = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: "
    answer, sent = flood(begin, b"x" * 65536)
    engine = ScriptedEngine()
    serves = {"endpoints": ["/v1/chat/completions", "/v1/messages"]}
    async with beside(tmp_path, Provider(answer), engine, WITH_FALLBACK, changed=serves) as it:
        response = await it.post({**CHAT, "max_tokens": 9, "stream": True}, path)
        await response.read()
        assert response.status == 200
        assert len(engine.requests) == 1
    assert sent[0] < 16 * MILLION


LIES: dict[str, tuple[Answer, bool]] = {
    "shorter than it says": (raw(OK + b"content-length: 1000\r\n\r\n" + BODY), False),
    "two lengths": (raw(OK + b"content-length: 10\r\ncontent-length: 20\r\n\r\n" + BODY), False),
    "a negative length": (raw(OK + b"content-length: -1\r\n\r\n" + BODY), False),
    "length and chunks": (raw(OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + BODY), False),
    "a chunk of 2^64": (raw(OK + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n" + BODY), False),
    "compressed": (whole(b"\x1f\x8b" + b"\0" * 1000, content_encoding="gzip"), False),
    "compressed in transfer": (
        raw(OK + b"transfer-encoding: gzip, chunked\r\n\r\n4\r\n\x1f\x8b\0\0\r\n0\r\n\r\n"),
        False,
    ),
    "another protocol": (
        raw(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"),
        False,
    ),
    "no HTTP": (raw(b"SSH-2.0-OpenSSH_9.6\r\n"), False),
    "a page of a proxy": (whole(b"<html>Sign in</html>", kind="text/html"), False),
    "no UTF-8": (whole(b'{"choices": "\xff"}'), False),
    "until it closes": (raw(OK + b"\r\n" + BODY), True),
    "one hint before it": (
        raw(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + OK + b"content-length: 74\r\n\r\n" + BODY),
        True,
    ),
}


@pytest.mark.parametrize("kind", LIES)
async def test_an_answer_that_lies_about_itself_reaches_no_client(tmp_path: Path, kind: str) -> None:
    answer, fine = LIES[kind]
    engine = ScriptedEngine()
    async with beside(tmp_path, Provider(answer), engine, WITH_FALLBACK) as it:
        got = await ask(it)
        assert got["model"] == "front" if fine else len(engine.requests) == 1
        assert len(engine.requests) == (0 if fine else 1)


async def test_a_second_answer_to_one_request_is_for_nobody(tmp_path: Path) -> None:
    """Bytes behind an answer would be the answer to the next request on the connection, which is another tenant's."""
    stolen = b'{"model": "m", "choices": [{"index": 0, "message": {"content": "of another"}}]}'
    first = OK + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    second = OK + b"content-length: %d\r\n\r\n" % len(stolen) + stolen
    provider = Provider(raw(first + second, closes=False))
    async with beside(tmp_path, provider, ScriptedEngine(), ONLY) as it:
        for _ in range(3):
            assert (await ask(it))["choices"][0]["message"]["content"] == "Hello"
        assert provider.connections == 3


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "usage",
    [
        {},
        {"prompt_tokens": -7, "completion_tokens": 3},
        {"prompt_tokens": 7, "completion_tokens": -3},
        {"prompt_tokens": 7.5, "completion_tokens": 3},
        {"prompt_tokens": 7, "completion_tokens": 1e300},
        {"prompt_tokens": 10**40, "completion_tokens": 3},
        {"prompt_tokens": "7", "completion_tokens": 3},
        {"prompt_tokens": 7},
    ],
    ids=["empty", "input below 0", "output below 0", "a fraction", "1e300", "10^40", "text", "no output"],
)
async def test_a_usage_that_is_none_is_estimated(tmp_path: Path, usage: dict[str, Any], streamed: bool) -> None:
    body = {"model": "m", "choices": [{"index": 0, "message": {"content": "eight by"}}], "usage": usage}
    told = b"data: " + json.dumps({"model": "m", "choices": [], "usage": usage}).encode() + b"\n\n"
    answer = stream(event("a"), event("b"), told, DONE) if streamed else whole(body)
    async with beside(tmp_path, Provider(answer), ScriptedEngine(), ONLY) as it:
        await (await it.post({**CHAT, "stream": streamed})).read()
        (record,) = await it.records()
        assert (record.data.count_source, record.data.output_tokens, record.data.outcome) == (
            "estimated",
            2,
            "answered",
        )
        assert 0 < (record.data.input_tokens or 0) < 100


async def test_usage_in_the_last_chunk_of_an_answer_is_its_usage(tmp_path: Path) -> None:
    last = CLOSING.replace(b'"choices": []', b'"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]')
    async with beside(tmp_path, Provider(stream(event("a"), last, DONE)), ScriptedEngine(), ONLY) as it:
        await (await it.post({**CHAT, "stream": True})).read()
        (record,) = await it.records()
        assert (record.data.count_source, record.data.input_tokens, record.data.output_tokens) == ("final", 7, 3)


async def test_a_head_that_trickles_is_not_waited_for(tmp_path: Path) -> None:
    async def trickles(writer: asyncio.StreamWriter) -> None:
        for byte in OK * 1000:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.1)

    engine, slow = ScriptedEngine(), {"timeouts": {"firstByteSeconds": 1}}
    async with beside(tmp_path, Provider(trickles), engine, WITH_FALLBACK, changed=slow) as it:
        await ask(it)
        assert it.metric("shoal_gateway_external_requests_total", outcome="too_slow") == 1


async def test_comments_alone_are_no_answer(tmp_path: Path) -> None:
    async def comments(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        while True:
            writer.write(b": still thinking\n\n")
            await writer.drain()
            await asyncio.sleep(0.1)

    engine, slow = ScriptedEngine(), {"timeouts": {"firstByteSeconds": 1}}
    async with beside(tmp_path, Provider(comments), engine, WITH_FALLBACK, changed=slow) as it:
        response = await it.post({**CHAT, "stream": True})
        assert b"[DONE]" in await response.read()
        assert len(engine.requests) == 1


async def test_a_stream_that_is_no_text_ends_and_is_recorded(tmp_path: Path) -> None:
    answer = stream(event("a"), b"data: \xff\xfe\x00\n\n", DONE)
    async with beside(tmp_path, Provider(answer), ScriptedEngine(), ONLY) as it:
        response = await it.post({**CHAT, "stream": True})
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
        (record,) = await it.records()
        assert (record.data.outcome, record.data.count_source) == ("answered", "estimated")


async def test_a_client_gets_no_header_of_the_provider(tmp_path: Path) -> None:
    mean = {"set_cookie": "a=b", "x_evil": "1", "location": "http://x", "access_control_allow_origin": "*"}
    async with beside(tmp_path, Provider(whole(**mean)), ScriptedEngine(), ONLY) as it:
        response = await it.post(CHAT)
        assert response.status == 200
        assert {name.replace("_", "-") for name in mean}.isdisjoint(name.lower() for name in response.headers)


async def test_a_client_gets_no_error_that_repeats_the_key(tmp_path: Path) -> None:
    error = {"error": {"message": f"cannot parse the header 'Bearer {TOKEN}'", "type": "invalid_request_error"}}
    async with beside(tmp_path, Provider(whole(error, "400 Bad Request")), ScriptedEngine(), ONLY) as it:
        answer = await ask(it, 400)
        assert TOKEN not in json.dumps(answer)
        assert answer["error"]["message"] == "the engine answered with status 400"
