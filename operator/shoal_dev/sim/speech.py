"""/v1/audio/transcriptions of models that hear: what SGLang answers for Whisper."""

import email
import hashlib
import math
import random
import time
import uuid
from collections.abc import Mapping
from email.message import Message
from typing import Any, Final, NamedTuple, cast

import orjson

from shoal.core.architectures.names import TRANSCRIBES
from shoal.core.fields.images import UnreadableError
from shoal.core.fields.recordings import recording
from shoal_dev.sim import protocol as p
from shoal_dev.sim.engine import RequestBatch, Sampling
from shoal_dev.sim.http import Exchange
from shoal_dev.sim.openai import Job, OpenAI, RefusedError

_CLIP_SECONDS: Final = 30
_POSITIONS: Final = 1_500
"""Of the encoder for each clip; they count as prompt tokens."""
PREFIX: Final = 4
"""Tokens before the text."""
_LONGEST: Final = 448
_FORMATS: Final = ("json", "text", "verbose_json")


class _Asked(NamedTuple):
    texts: Mapping[str, str]
    audio: bytes

    @property
    def form(self) -> str:
        return self.texts.get("response_format", "json")


class Speech(OpenAI):
    """The route of one engine that turns speech into text."""

    async def transcribe(self, exchange: Exchange) -> None:
        texts, audio = form(exchange.headers.get("content-type", ""), await exchange.body())
        if audio is None:
            missing = "{'type': 'missing', 'loc': ('body', 'file'), 'msg': 'Field required', 'input': None}"
            raise RefusedError(400, p.error_body(f"1 validation error:\n  {missing}", kind="Bad Request"))
        asked = _Asked(texts, audio)
        if asked.form not in _FORMATS:
            raise RefusedError(400, {"error": {"message": "Only 'json', 'text', and 'verbose_json' formats supported"}})
        if TRANSCRIBES.isdisjoint(self._engine.model.architectures):
            raise RefusedError(400, p.error_body("The model does not transcribe."))
        try:
            seconds = recording(asked.audio).most_seconds
        except UnreadableError as error:
            raise RefusedError(400, p.error_body(f"Could not decode audio: {error}")) from None
        stream = asked.texts.get("stream", "").lower() in ("true", "1")
        prompts = clips(asked.audio, seconds, _POSITIONS + PREFIX, self._engine.model.config.get("vocab_size"))
        model = asked.texts.get("model", p.DEFAULT_MODEL)
        job = Job(prompts, 1, Sampling(_LONGEST), None, model, stream=stream)

        async def work() -> None:
            async with self._batch(exchange, job) as batch:
                with self._engine.traced(exchange.headers, batch):
                    if job.stream:
                        await self._events(exchange, batch, job)
                        return
                    await self._wait(exchange, batch, job)
                text = " ".join(sequence.text for sequence in batch.sequences)
                await _answer(exchange, asked, text, seconds)

        await self._guarded(exchange, job, work)

    async def _events(self, exchange: Exchange, batch: RequestBatch, job: Job) -> None:
        """The text of each clip as it grows, one clip after the other."""
        head = {"id": f"trsc-{uuid.uuid4().hex}", "object": "transcription.chunk", "created": int(time.time())}

        async def event(delta: dict[str, str], reason: str | None = None) -> None:
            choice = {"delta": delta, "finish_reason": reason}
            await exchange.event(orjson.dumps({**head, "model": job.model, "choices": [choice], "usage": None}))

        for place, sequence in enumerate(batch.sequences):
            sent = 0
            while True:
                if batch.struck:
                    await self._strike(exchange, batch, job)
                ended, text = sequence.finish is not None, sequence.text
                if len(text) > sent:
                    if exchange.status is None:
                        await exchange.begin_stream()
                    await event({"content": (" " if place and not sent else "") + text[sent:]})
                    sent = len(text)
                if ended:
                    break
                await batch.change()
        if exchange.status is None:
            await exchange.begin_stream()
        await event({}, "stop")
        await exchange.event(b"[DONE]")
        await exchange.end_stream()


def clips(audio: bytes, seconds: float, tokens: int, vocabulary: int | None) -> list[tuple[int, ...]]:
    """A prompt of so many tokens for each clip, which stands for what is in it: the same audio gives the same text."""
    found: list[tuple[int, ...]] = []
    for clip in range(max(1, math.ceil(seconds / _CLIP_SECONDS))):
        digest = hashlib.blake2b(audio + bytes([clip & 255, clip >> 8 & 255]), digest_size=8).digest()
        source = random.Random(digest)  # noqa: S311 - reproducible on purpose
        found.append(tuple(source.randrange(vocabulary or 256) for _ in range(tokens)))
    return found


def form(content_type: str, body: bytes) -> tuple[dict[str, str], bytes | None]:
    """The texts of a form, and its file; None: it has none."""
    message = email.message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode("latin-1") + body)
    texts: dict[str, str] = {}
    audio: bytes | None = None
    for part in cast(list[Message], message.get_payload()) if message.is_multipart() else ():
        name, content = part.get_param("name", header="content-disposition"), part.get_payload(decode=True)
        if not isinstance(name, str) or not isinstance(content, bytes):
            continue
        if part.get_filename() is not None and name == "file":
            audio = content
        else:
            texts[name] = content.decode("utf-8", "replace")
    return texts, audio


async def _answer(exchange: Exchange, asked: _Asked, text: str, seconds: float) -> None:
    if asked.form == "text":
        await exchange.answer(text.encode(), "text/plain; charset=utf-8")
        return
    usage = {"type": "duration", "seconds": math.ceil(seconds)}
    if asked.form == "json":
        await exchange.json({"text": text, "usage": usage})
        return
    verbose: dict[str, Any] = {
        "task": "transcribe",
        "language": asked.texts.get("language", "en"),
        "duration": round(seconds, 2),
        "text": text,
        "segments": [{"id": 0, "start": 0.0, "end": round(seconds, 2), "text": text}],
        "usage": usage,
    }
    await exchange.json(verbose)
