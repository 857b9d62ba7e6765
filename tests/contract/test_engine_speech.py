"""/v1/audio/transcriptions of an engine, and the gateway in front of it with the unmodified client of OpenAI."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.contract.conftest import ALL_KINDS, VLLM_KINDS, Client
from tests.contract.test_gateway_scoring import in_front
from tests.support.behaviour import words_of
from tests.support.engines import API_KEY as ENGINE_KEY
from tests.support.engines import SERVED, EngineProcess, Kind
from tests.support.gateway import API_KEY
from tests.support.recordings import flac, opus, vorbis, wav
from tests.support.speech_engine import running_speech_engine

PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module", params=ALL_KINDS)
def speaker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    kind: Kind = request.param
    with running_speech_engine(kind, tmp_path_factory.mktemp(f"speaker-{kind}")) as engine:
        yield engine


def noise(seconds: float) -> bytes:
    head, source = wav(seconds)[:44], random.Random(1)  # noqa: S311 - the same every time
    return head + source.randbytes(len(wav(seconds)) - 44)


async def ask(engine: EngineProcess, audio: bytes | None, **fields: str) -> tuple[int, str, bytes]:
    form = aiohttp.FormData()
    for name, value in ({"model": SERVED} | fields).items():
        form.add_field(name, value)
    if audio is not None:
        form.add_field("file", audio, filename="a.wav", content_type="audio/wav")
    headers = {"authorization": f"Bearer {ENGINE_KEY}"}
    async with aiohttp.ClientSession() as session:
        answer = await session.post(engine.url + PATH, data=form, headers=headers)
        return answer.status, answer.content_type, await answer.read()


async def test_the_formats_of_an_answer(speaker: EngineProcess) -> None:
    found = words_of(speaker).differences
    status, kind, body = await ask(speaker, noise(3.2), language="en")
    assert (status, kind) == (200, "application/json")
    answer = json.loads(body)
    assert (type(answer["text"]), answer["usage"]) == (str, {"type": "duration", "seconds": 4})
    status, kind, body = await ask(speaker, noise(3.2), language="en", response_format="verbose_json")
    verbose = json.loads(body)
    assert {"language", "duration", "text", "segments"} <= set(verbose)
    assert (verbose["duration"], "usage" in verbose) == (3.2, found.verbose_usage)
    status, kind, body = await ask(speaker, noise(3.2), language="en", response_format="text")
    assert (status, kind) == (200, found.text_transcript)


async def test_what_a_clip_counts(speaker: EngineProcess) -> None:
    async with aiohttp.ClientSession() as session:
        client = Client(speaker, session)
        before = await client.metric(client.words.counter("prompt_tokens"))
        assert (await ask(speaker, noise(3.2), language="en"))[0] == 200
        counted = await client.metric(client.words.counter("prompt_tokens")) - before
    assert counted == words_of(speaker).differences.clip_tokens


@pytest.mark.parametrize("speaker", VLLM_KINDS, indirect=True)
async def test_the_bound_of_ten_minutes_is_lifted(speaker: EngineProcess) -> None:
    status, _, body = await ask(speaker, flac(75), language="en")
    assert (status, json.loads(body)["usage"]["seconds"]) == (200, math.ceil(75 * 65_535 / 8_000))


async def test_a_stream_has_no_usage(speaker: EngineProcess) -> None:
    status, kind, body = await ask(speaker, noise(1), language="en", stream="true")
    assert (status, kind) == (200, "text/event-stream")
    events = [block.removeprefix("data: ") for block in body.decode().split("\n\n") if block]
    assert events[-1] == "[DONE]"
    chunks: list[dict[str, Any]] = [json.loads(event) for event in events[:-1]]
    assert all(chunk["object"] == "transcription.chunk" and chunk.get("usage") is None for chunk in chunks)
    assert {chunk["model"] for chunk in chunks} == {SERVED}


@pytest.mark.parametrize("response_format", ["srt", "vtt"])
async def test_a_format_that_it_has_not(speaker: EngineProcess, response_format: str) -> None:
    assert (await ask(speaker, noise(1), language="en", response_format=response_format))[0] == 400


async def test_what_it_cannot_decode_and_what_is_missing(speaker: EngineProcess) -> None:
    assert (await ask(speaker, b"no sound at all", language="en"))[0] == 400
    assert (await ask(speaker, None, language="en"))[0] == 400


@pytest.mark.parametrize(
    ("audio", "measured"),
    [
        (wav(3.2), 3_200),
        (flac(20, rate=16_000, block=4_096), 5_120),
        (wav(0.5, rate=48_000, channels=2), 500),
        (wav(29), 29_000),  # 0.9 MiB, which the gateway writes in slices
    ],
    ids=["wav", "flac", "stereo", "long"],
)
async def test_the_gateway_measures_what_the_engine_hears(
    speaker: EngineProcess, tmp_path: Path, audio: bytes, measured: int
) -> None:
    async with in_front(speaker, tmp_path, "transcribe") as it:
        client = openai.AsyncOpenAI(api_key=API_KEY, base_url=f"{it.url}/v1", max_retries=0, timeout=120)
        found = await client.audio.transcriptions.create(model="tiny", file=("a.bin", audio), language="en")
        assert found.usage is not None
        assert found.usage.type == "duration"
        assert found.usage.seconds == math.ceil(measured / 1000)
        text = await client.audio.transcriptions.create(
            model="tiny", file=("a.bin", audio), language="en", response_format="text"
        )
        assert text == found.text
        verbose = await client.audio.transcriptions.create(
            model="tiny", file=("a.bin", audio), language="en", response_format="verbose_json"
        )
        assert verbose.usage is not None
        assert verbose.usage.seconds == found.usage.seconds
        await client.close()
        records = await it.records(count=3)
        assert {(r.data.audio_ms, r.data.audio_source, r.data.count_source) for r in records} == {
            (measured, "measured", "final")
        }
        assert it.app.body_budget.held == 0


async def test_what_the_gateway_refuses_never_reaches_the_engine(speaker: EngineProcess, tmp_path: Path) -> None:
    async with in_front(speaker, tmp_path, "transcribe") as it:
        client = openai.AsyncOpenAI(api_key=API_KEY, base_url=f"{it.url}/v1", max_retries=0)
        for audio in (flac(600), opus(31_000, toc=b"\x0b\x06", samples=5_760), vorbis(8_000)):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.audio.transcriptions.create(model="tiny", file=("a", audio), language="en")
            assert refused.value.code == "too_much_work"
        await client.close()
        assert (await ask(speaker, noise(1), language="en"))[0] == 200
