"""/v1/audio/transcriptions through the gateway: what the engine gets, what the client gets, and what is recorded."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from shoal.core.capabilities import Capability
from tests.support.gateway import API_KEY, GatewayUnderTest, gateway, tenant
from tests.support.recordings import BOUNDARY, TYPE, asked, flac, form, part, read_form, vorbis, wav, webm
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

PATH = "/v1/audio/transcriptions"
ABLE: frozenset[Capability] = frozenset({"transcribe"})
HEADERS = {"content-type": TYPE.decode()}


def transcript(seconds: float | None = 1, text: str = "a fox") -> bytes:
    usage = {} if seconds is None else {"usage": {"type": "duration", "seconds": seconds}}
    return json.dumps({"text": text, **usage}, separators=(",", ":")).encode()


class Listener(ScriptedEngine):
    def __init__(self, answer: bytes = b"", status: int = 200, content_type: str = "application/json") -> None:
        async def behave(request: EngineRequest) -> None:
            await request.answer(status, answer or transcript(), content_type)

        super().__init__(behave)


def chunk(text: str) -> bytes:
    event = {
        "id": "trsc-1", "object": "transcription.chunk", "created": 1, "model": "chat/llama",
        "choices": [{"delta": {"content": text}, "finish_reason": None}], "usage": None,
    }  # fmt: skip
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def streaming(
    *texts: str, done: bool = True, then: Callable[[EngineRequest], Awaitable[None]] | None = None
) -> ScriptedEngine:
    async def behave(request: EngineRequest) -> None:
        await request.begin_stream()
        for text in texts:
            await request.chunk(chunk(text))
        if then is not None:
            await then(request)
        if done:
            await request.chunk(b"data: [DONE]\n\n")
            await request.end_stream()
        else:
            request.writer.transport.abort()

    return ScriptedEngine(behave)


def listens(it: GatewayUnderTest) -> None:
    it.model(capabilities=ABLE)


async def send(it: GatewayUnderTest, body: bytes, **headers: str) -> aiohttp.ClientResponse:
    return await it.post(body, PATH, headers=HEADERS | {"content-type": headers.get("content_type", TYPE.decode())})


async def error(response: aiohttp.ClientResponse) -> dict[str, Any]:
    return (await response.json())["error"]


async def test_a_transcript_and_its_record(tmp_path: Path) -> None:
    engine = Listener(transcript(4))
    audio = wav(3.2)
    async with gateway(tmp_path, engine) as it:
        listens(it)
        response = await send(it, asked(audio, language="en", temperature="0.5", response_format="json"))
        assert (response.status, await response.json()) == (200, json.loads(transcript(4)))
        (request,) = engine.requests
        assert request.path == PATH
        assert read_form(request.headers["content-type"], request.raw) == {
            "model": "chat/llama",
            "language": "en",
            "temperature": "0.5",
            "response_format": "json",
            "file": ("audio.wav", "audio/wav", audio),
        }
        data = (await it.records())[0].data
        assert (data.endpoint, data.outcome, data.status, data.stream) == (PATH, "answered", 200, False)
        assert (data.audio_ms, data.audio_source, data.count_source) == (3200, "measured", "final")
        assert (data.input_tokens, data.output_tokens) == (None, None)


async def test_what_a_browser_records_is_measured_also_in_a_stream(tmp_path: Path) -> None:
    audio = webm(160)
    async with gateway(tmp_path, streaming("a fox")) as it:
        listens(it)
        response = await send(it, asked(audio, stream="true"))
        assert response.status == 200
        await response.read()
        data = (await it.records())[0].data
        assert (data.audio_ms, data.audio_source) == (3194, "measured")


async def test_the_unmodified_client_of_openai(tmp_path: Path) -> None:
    async def behave(request: EngineRequest) -> None:
        fields = read_form(request.headers["content-type"], request.raw)
        if fields.get("stream") == "true":
            await request.begin_stream()
            for text in ("a", " fox"):
                await request.chunk(chunk(text))
            await request.chunk(b"data: [DONE]\n\n")
            await request.end_stream()
        elif fields.get("response_format") == "text":
            await request.answer(200, b"a fox", "text/plain; charset=utf-8")
        elif fields.get("response_format") == "verbose_json":
            assert fields["timestamp_granularities[]"] == ["word", "segment"]
            segment = {"id": 0, "start": 0.0, "end": 1.0, "text": "a fox"}
            more = {"task": "transcribe", "language": "en", "duration": 1.0, "segments": [segment]}
            await request.answer(200, json.dumps({**json.loads(transcript(1)), **more}).encode())
        else:
            await request.answer(200, transcript(1))

    async with gateway(tmp_path, ScriptedEngine(behave)) as it:
        listens(it)
        client = openai.AsyncOpenAI(api_key=API_KEY, base_url=f"{it.url}/v1", max_retries=0)
        file = ('über/../"a\r\n.wav', wav())
        create = client.audio.transcriptions.create
        whole = await create(model="llama", file=file)
        assert whole.text == "a fox"
        assert whole.usage is not None
        assert whole.usage.type == "duration"
        assert await create(model="llama", file=file, response_format="text") == "a fox"
        verbose = await create(
            model="llama", file=file, response_format="verbose_json", timestamp_granularities=["word", "segment"]
        )
        assert verbose.segments is not None
        assert (verbose.duration, verbose.segments[0].text) == (1.0, "a fox")
        stream = await create(model="llama", file=file, stream=True)
        told = [event async for event in stream]
        assert [event.type for event in told] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
        assert told[-1].type == "transcript.text.done"
        assert told[-1].text == "a fox"
        with pytest.raises(openai.BadRequestError) as refused:
            await create(model="llama", file=("a.txt", b"no sound"))
        assert (refused.value.code, refused.value.param) == ("audio_not_supported", "file")
        records = await it.records(count=4)
        assert {(r.data.audio_ms, r.data.audio_source, r.data.count_source) for r in records} == {
            (1000, "measured", "final")
        }
        await client.close()


async def test_a_text_has_no_usage_and_is_billed_as_measured(tmp_path: Path) -> None:
    async with gateway(tmp_path, Listener(b"a fox", content_type="text/plain; charset=utf-8")) as it:
        listens(it)
        response = await send(it, asked(response_format="text"))
        assert (await response.text(), response.headers["content-type"]) == ("a fox", "text/plain; charset=utf-8")
        data = (await it.records())[0].data
        assert (data.audio_ms, data.count_source) == (1000, "final")


async def test_a_text_that_the_engine_puts_into_json_is_the_text_alone(tmp_path: Path) -> None:
    """As vLLM does."""
    async with gateway(tmp_path, Listener(transcript(1, "a\nfox"))) as it:
        listens(it)
        response = await send(it, asked(response_format="text"))
        assert (await response.text(), response.headers["content-type"]) == ("a\nfox", "text/plain; charset=utf-8")
        data = (await it.records())[0].data
        assert (data.audio_ms, data.count_source) == (1000, "final")


async def test_a_length_without_a_usage_is_one(tmp_path: Path) -> None:
    """vLLM's `verbose_json`: the duration of a file whose length only the engine knows is billed, and told."""
    verbose = {"duration": 2.2, "language": "en", "text": "a fox", "segments": [], "words": None}
    async with gateway(tmp_path, Listener(json.dumps(verbose).encode())) as it:
        listens(it)
        response = await send(it, asked(vorbis(9), response_format="verbose_json"))
        assert await response.json() == {**verbose, "usage": {"type": "duration", "seconds": 3}}
        data = (await it.records())[0].data
        assert (data.audio_ms, data.audio_source, data.count_source) == (3000, "engine", "final")


async def test_where_only_the_engine_knows_the_length(tmp_path: Path) -> None:
    """Vorbis states no length that can be trusted: the engine's seconds count, and without them the request is refused
    before an engine has it."""
    engine = Listener(transcript(3))
    async with gateway(tmp_path, engine) as it:
        listens(it)
        audio = vorbis(9)
        for fields in ({"response_format": "text"}, {"stream": "true"}):
            refused = await error(await send(it, asked(audio, **fields)))
            assert (refused["code"], refused["param"]) == ("length_not_known", "file")
        assert not engine.requests
        assert (await send(it, asked(audio))).status == 200
        data = (await it.records())[0].data
        assert (data.audio_source, data.count_source) == ("engine", "final")
        # No more than any decoder makes of it: 11 packets of at most 4096 samples, at 8 kHz.
        assert data.audio_ms == 3000


async def test_an_engine_that_hears_far_more_than_the_file_says(tmp_path: Path) -> None:
    async with gateway(tmp_path, Listener(transcript(20))) as it:
        listens(it)
        assert (await send(it, asked(wav(20, stated=32_000)))).status == 200
        data = (await it.records())[0].data
        assert (data.audio_ms, data.audio_source) == (20_000, "engine")


async def test_an_engine_that_hears_far_less_than_the_file_says(tmp_path: Path) -> None:
    """A damaged file: what the engine did not hear is not billed."""
    async with gateway(tmp_path, Listener(transcript(3))) as it:
        listens(it)
        assert (await send(it, asked(wav(20)))).status == 200
        data = (await it.records())[0].data
        assert (data.audio_ms, data.audio_source) == (3_000, "engine")


@pytest.mark.parametrize("seconds", [None, 0, -1, "4", True, 1e30])
async def test_seconds_that_are_none_leave_the_measured_length(tmp_path: Path, seconds: Any) -> None:
    async with gateway(tmp_path, Listener(transcript(seconds))) as it:
        listens(it)
        assert (await send(it, asked())).status == 200
        data = (await it.records())[0].data
        assert (data.audio_ms, data.audio_source, data.count_source) == (1000, "measured", "final")


async def test_a_stream_has_no_usage(tmp_path: Path) -> None:
    async with gateway(tmp_path, streaming("a", " fox")) as it:
        listens(it)
        response = await send(it, asked(stream="true"))
        text = await response.text()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert [json.loads(line[6:]) for line in text.split("\n") if line] == [
            {"type": "transcript.text.delta", "delta": "a"},
            {"type": "transcript.text.delta", "delta": " fox"},
            {"type": "transcript.text.done", "text": "a fox"},
        ]
        data = (await it.records())[0].data
        assert (data.stream, data.outcome, data.audio_ms, data.count_source) == (True, "answered", 1000, "final")


async def test_a_client_that_leaves_before_the_end_has_had_its_audio_read(tmp_path: Path) -> None:
    async def wait(request: EngineRequest) -> None:
        await request.gone.wait()

    async with gateway(tmp_path, streaming("a", done=False, then=wait)) as it:
        listens(it)
        response = await send(it, asked(stream="true"))
        await response.content.readline()
        response.close()
        data = (await it.records())[0].data
        assert (data.outcome, data.count_source, data.audio_ms) == ("cancelled", "continuous", 1000)


async def test_a_stream_of_chunks_with_usage_is_translated_too(tmp_path: Path) -> None:
    async def tells(request: EngineRequest) -> None:
        request.body["model"] = "chat/llama"
        request.body["rid"] = "r1"
        await request.begin_stream()
        for number, text in enumerate(("a", " fox"), 1):
            await request.chunk(request.delta(text, number))
            await asyncio.sleep(0.05)
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    async with gateway(tmp_path, ScriptedEngine(tells)) as it:
        listens(it)
        raw = await (await send(it, asked(stream="true"))).read()
        assert b"choices" not in raw
        assert b'"type":"transcript.text.done","text":"a fox"' in raw


async def test_a_stream_that_the_engine_breaks_off_is_not_billed(tmp_path: Path) -> None:
    async with gateway(tmp_path, streaming("a", done=False)) as it:
        listens(it)
        text = await (await send(it, asked(stream="true"))).text()
        first, last = [json.loads(line[6:]) for line in text.split("\n") if line]
        assert first == {"type": "transcript.text.delta", "delta": "a"}
        assert last["error"]["code"] == "replica_lost"
        data = (await it.records())[0].data
        assert (data.outcome, data.count_source) == ("failed", "estimated")


async def test_a_replica_that_is_lost_before_the_first_byte_leaves_it_to_another(tmp_path: Path) -> None:
    async def lost(request: EngineRequest) -> None:
        request.writer.transport.abort()

    first, second = ScriptedEngine(lost), Listener()
    async with gateway(tmp_path, first, second) as it:
        listens(it)
        for _ in range(4):
            assert (await send(it, asked())).status == 200
        assert first.requests
        forms = [read_form(request.headers["content-type"], request.raw) for request in second.requests]
        assert {one["file"][2] for one in forms} == {wav()}
        attempts = await it.records("attempt")
        assert {(one.data.count_source, one.data.input_tokens) for one in attempts} == {("estimated", None)}


async def test_the_engines_own_refusal(tmp_path: Path) -> None:
    said = b'{"error":{"message":"Could not decode audio: /opt/sglang/x.py","type":"BadRequestError","code":400}}'
    async with gateway(tmp_path, Listener(said, 400)) as it:
        listens(it)
        response = await send(it, asked(response_format="srt"))
        assert (response.status, (await error(response))["type"]) == (400, "invalid_request_error")
        data = (await it.records())[0].data
        assert (data.outcome, data.count_source) == ("rejected", "none")


@pytest.mark.parametrize("answer", [b"no json", b"[]", b'{"x":1}', b'{"text":7}'])
async def test_what_is_no_transcript_does_not_reach_the_client(tmp_path: Path, answer: bytes) -> None:
    async with gateway(tmp_path, Listener(answer)) as it:
        listens(it)
        response = await send(it, asked())
        assert (response.status, (await error(response))["code"]) == (502, "bad_answer")
        assert (await it.records())[0].data.count_source == "estimated"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (form(part("file", wav(), filename="a")), "model", "missing_model"),
        (form(part("model", ""), part("file", wav(), filename="a")), "model", "missing_model"),
        (form(part("model", "llama")), "file", "invalid_form"),
        (form(part("model", "llama"), part("file", wav())), "file", "invalid_form"),
        (asked(model="nobody"), "model", "model_not_found"),
        (asked(b"text"), "file", "audio_not_supported"),
        (asked(b"\0\0\0\x20ftypM4A " + bytes(100)), "file", "audio_not_supported"),
        (asked(flac(600)), "file", "too_much_work"),
        (asked(language="English"), "language", "invalid_value"),
        (asked(language="<|"), "language", "invalid_value"),
        (asked(prompt="x" * 9000), "prompt", "string_too_long"),
        (asked(response_format="xml"), "response_format", "invalid_value"),
        (asked(temperature="1.5"), "temperature", "invalid_value"),
        (asked(temperature="nan"), "temperature", "invalid_type"),
        (asked(temperature="1e-5"), "temperature", "invalid_type"),
        (asked(stream="yes"), "stream", "invalid_type"),
        (asked(timestamp_granularities__="line"), "timestamp_granularities[]", "invalid_value"),
        (asked(chunking_strategy="auto"), "chunking_strategy", "unsupported_field"),
        (asked(include__="logprobs"), "include[]", "unsupported_field"),
        (asked(lora_path="x"), "lora_path", "unsupported_field"),
        (asked(rid="x"), "rid", "unsupported_field"),
        (asked(anything="x"), "anything", "unknown_field"),
        (
            form(part("model", "llama"), part("model", "other"), part("file", wav(), filename="a")),
            "model",
            "invalid_value",
        ),
        (form(part("model", "llama"), part("file", wav(), filename="../../a\r\nb")), None, "invalid_form"),
        (asked()[:-10], None, "invalid_form"),
        (asked()[: -len(BOUNDARY) * 2], None, "invalid_form"),
        (b"", None, "invalid_form"),
        (b"{}", None, "invalid_form"),
    ],
)
async def test_a_bad_form_is_a_clear_answer(tmp_path: Path, body: bytes, param: str | None, code: str) -> None:
    engine = Listener()
    async with gateway(tmp_path, engine) as it:
        listens(it)
        response = await send(it, body)
        found = await error(response)
        assert (response.status, found["param"], found["code"]) == (
            404 if code == "model_not_found" else 400,
            param,
            code,
        )
        assert not engine.requests
        assert it.app.body_budget.held == 0


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "application/x-www-form-urlencoded"])
async def test_another_content_type(tmp_path: Path, content_type: str) -> None:
    async with gateway(tmp_path, Listener()) as it:
        listens(it)
        response = await send(it, b'{"model":"llama","file":"x"}', content_type=content_type)
        assert (response.status, (await error(response))["code"]) == (415, "unsupported_media_type")


async def test_a_body_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async with gateway(tmp_path, Listener()) as it:
        listens(it)
        reader, writer = await asyncio.open_connection("127.0.0.1", it.server.port)
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {API_KEY}\r\ncontent-type: {TYPE.decode()}\r\n"
            f"content-length: {100 << 20}\r\n\r\n"
        )
        writer.write(head.encode())
        async with asyncio.timeout(5):
            answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert answer.startswith("http/1.1 413")
        assert "connection: close" in answer
        writer.close()


async def test_a_form_in_chunks_is_cut_before_it_is_held(tmp_path: Path) -> None:
    """It says nowhere how long it is: 100 MB are refused when the bound is reached, whatever else would come."""
    most, sent = 0, 0
    async with gateway(tmp_path, Listener()) as it:
        listens(it)
        reader, writer = await asyncio.open_connection("127.0.0.1", it.server.port)
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {API_KEY}\r\ncontent-type: {TYPE.decode()}\r\n"
            "transfer-encoding: chunked\r\n\r\n"
        )
        writer.write(head.encode())
        piece = b"40000\r\n" + bytes(0x40000) + b"\r\n"
        answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        while not answer.done() and sent < 100 << 20:
            with contextlib.suppress(ConnectionError):
                writer.write(piece)
                await writer.drain()
            await asyncio.sleep(0)
            sent, most = sent + 0x40000, max(most, it.app.body_budget.held)
        async with asyncio.timeout(5):
            text = (await answer).decode().lower()
        assert text.startswith("http/1.1 413")
        assert "connection: close" in text
        assert it.app.memory.form // 2 < most <= it.app.memory.form
        assert it.app.body_budget.held == 0
        writer.close()


async def test_a_model_that_cannot_says_what_it_can(tmp_path: Path) -> None:
    engine = Listener()
    async with gateway(tmp_path, engine) as it:
        it.model(capabilities=frozenset({"generate"}))
        response = await send(it, asked())
        found = await error(response)
        assert (response.status, found["code"]) == (400, "wrong_endpoint")
        assert "it can generate" in found["message"]
        listens(it)
        chat = await it.post({"model": "llama", "messages": [{"role": "user", "content": "x"}]})
        assert (chat.status, (await error(chat))["code"]) == (400, "wrong_endpoint")
        listed = await (
            await it.session.get(it.url + "/v1/models", headers={"authorization": f"Bearer {API_KEY}"})
        ).json()
        assert listed["data"][0]["capabilities"] == ["transcribe"]
        assert not engine.requests


async def test_limits_count_audio_and_not_its_bytes(tmp_path: Path) -> None:
    """20 s of audio count for 1,000 tokens, although they are 640 KB."""
    async with gateway(tmp_path, Listener(transcript(None))) as it:
        it.tenants["acme"] = tenant(limits={"tokensPerMinute": 1_500})
        listens(it)
        assert (await send(it, asked(wav(20)))).status == 200
        await it.records()
        refused = await send(it, asked(wav(20)))
        assert refused.status == 429
        assert (await send(it, asked(wav(9)))).status == 200


async def test_the_request_log_has_the_text_and_never_the_audio(tmp_path: Path) -> None:
    audio = wav(0.1).replace(b"\0\0\0\0" * 100, b"FISH" * 100)
    engine = Listener(transcript(1, "my key is sk-proj-abcdefghijklmnopqrstuvwxyz0123456789ABCD"))
    async with gateway(tmp_path, engine, log_dir=tmp_path / "logs") as it:
        it.tenants["acme"] = tenant(logging={"mode": "Full", "retentionDays": 1})
        listens(it)
        assert (await send(it, asked(audio, language="en", user="u1"))).status == 200
        async with asyncio.timeout(20):
            while True:
                page = await it.session.get(it.url + "/v1/logs", headers={"authorization": f"Bearer {API_KEY}"})
                if entries := (await page.json())["data"]:
                    break
                await asyncio.sleep(0.05)
        (entry,) = entries
        assert entry["request"] == {"language": "en", "file": f"[audio/wav, {len(audio)} bytes, not logged]"}
        assert entry["audioMs"] == 100
        assert entry["answer"][0]["text"].startswith("my key is ")
        assert "abcdefghijklmnop" not in json.dumps(entry)
        assert "FISH" not in json.dumps(entry)
