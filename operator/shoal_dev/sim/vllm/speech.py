"""/v1/audio/transcriptions of a vLLM whose model hears: what vLLM answers for Whisper."""

import math
import time
import uuid
from collections.abc import Mapping
from typing import Any, Final

import orjson

from shoal.core.architectures.names import TRANSCRIBES
from shoal.core.fields.images import UnreadableError
from shoal.core.fields.recordings import recording
from shoal.engine.vllm.wire import WIRE
from shoal_dev.sim.engine import RequestBatch, Sampling
from shoal_dev.sim.http import Exchange
from shoal_dev.sim.scheduler import Sequence
from shoal_dev.sim.speech import PREFIX, clips, form
from shoal_dev.sim.vllm import protocol as p
from shoal_dev.sim.vllm.engine import VLLMEngine
from shoal_dev.sim.vllm.openai import Generating, Job
from shoal_dev.sim.vllm.writers import Writer

HEARS: Final = TRANSCRIBES - WIRE.differences.not_transcribed
ONLY_HEARS: Final = frozenset({"WhisperForConditionalGeneration"})
"""Of these, the ones for which vLLM has no other endpoint."""
_WHOLE: Final = ("json", "text", "verbose_json")
_FORMATS: Final = (*_WHOLE, "srt", "vtt", "diarized_json")
_LONGEST: Final = 448
_CODES: Final = (
    "af ar az be bg bs ca cs cy da de el en es et fa fi fr gl he hi hr hu hy id is it ja kk kn ko lt lv mi mk mr ms ne "
    "nl no pl pt ro ru sk sl sr sv sw ta th tl tr uk ur vi zh"
)
_LANGUAGES: Final = frozenset(_CODES.split())


class Speech:
    """The route of one engine that turns speech into text."""

    def __init__(self, engine: VLLMEngine, generating: Generating) -> None:
        self._engine = engine
        self._generating = generating

    async def transcribe(self, exchange: Exchange) -> None:
        texts, audio = form(exchange.headers.get("content-type", ""), await exchange.body())
        if audio is None:
            detail = {"type": "missing", "loc": "body.file", "msg": "Field required", "input": "<dict of 15 items>"}
            message = f"1 validation error:\n  {detail}"
            raise p.RefusedError(400, message, kind="Bad Request", param="body.file")
        kind, stream = texts.get("response_format", "json"), texts.get("stream", "").lower() in ("true", "1")
        self._check(texts, kind, stream=stream)
        try:
            seconds = recording(audio).most_seconds
        except UnreadableError:
            text = "Invalid or corrupted audio data. Ensure the input is a valid audio or video file (e.g. a complete "
            raise p.RefusedError(400, text + "WAV, MP3, or MP4).") from None
        # The encoder's positions are no tokens here.
        prompts = clips(audio, seconds, PREFIX, self._engine.model.config.get("vocab_size"))
        rid = "transcribe-" + (exchange.headers.get("x-request-id") or uuid.uuid4().hex[:16])
        model = texts.get("model") or self._engine.args.served_model_name
        job = Job(prompts, Sampling(_LONGEST - PREFIX), rid, model, stream=stream)
        if stream:
            await self._generating.stream(exchange, job, _TranscriptWriter(job))
        else:
            await self._generating.answer(exchange, job, lambda batch: _whole(batch, kind, texts, seconds))

    def _check(self, texts: Mapping[str, str], kind: str, *, stream: bool) -> None:
        if kind not in _FORMATS:
            message = f"1 validation error:\n  {{'type': 'literal_error', 'msg': 'Input should be {_FORMATS}'}}"
            raise p.RefusedError(400, message, kind="Bad Request", param="body.response_format")
        self._engine.named(texts.get("model"))
        if kind == "diarized_json":
            raise p.RefusedError(400, f"Currently do not support diarized_json for {texts.get('model')}")
        if kind not in _WHOLE:
            raise p.RefusedError(
                400, "Currently only support response_format: `text`, `json`, `verbose_json` or `diarized_json`"
            )
        if kind == "verbose_json" and stream:
            raise p.RefusedError(400, f"{kind} format doesn't support streaming case")
        language = texts.get("language")
        if language is not None and language not in _LANGUAGES:
            raise p.RefusedError(400, f"Unsupported language: {language!r}.  Must be one of {sorted(_LANGUAGES)}.")


def _whole(batch: RequestBatch, kind: str, texts: Mapping[str, str], seconds: float) -> dict[str, Any]:
    text = " ".join(sequence.text for sequence in batch.sequences)
    if kind != "verbose_json":  # a `text` too
        return {"text": text, "usage": {"type": "duration", "seconds": math.ceil(seconds)}}
    segment: dict[str, Any] = {
        "id": 0, "avg_logprob": -1.0, "compression_ratio": 1.0, "end": seconds, "no_speech_prob": None, "seek": 0,
        "start": 0.0, "temperature": 0.0, "text": text, "tokens": [],
    }  # fmt: skip
    language = texts.get("language", "en")
    return {"duration": seconds, "language": language, "text": text, "segments": [segment], "words": None}


class _TranscriptWriter(Writer):
    """The text of each clip as it grows, one clip after the other."""

    kind = "transcription.chunk"

    def __init__(self, job: Job) -> None:
        super().__init__(
            rid=job.rid, model=job.model, created=int(time.time()), n=1, echo=[], labels=[], cache=False, usage=False,
            each=False,
        )  # fmt: skip
        self._waiting: list[list[bytes]] = [[] for _ in job.prompts]
        self._ended = [False] * len(job.prompts)
        self._turn = 0
        """The clip whose text is being sent."""

    def chunks(self, index: int, sequence: Sequence, text: str) -> list[bytes]:
        begins = index > 0 and len(sequence.text) == len(text)
        choice: dict[str, Any] = {"delta": {"content": " " + text if begins and text else text}}
        if sequence.finish is not None:
            self._ended[index] = True
            choice |= {"finish_reason": sequence.finish.type, "stop_reason": None}
        if text or sequence.finish is not None:
            self._waiting[index].append(orjson.dumps({**self._head(), "choices": [choice]}))
        return self._due()

    def _due(self) -> list[bytes]:
        due: list[bytes] = []
        while self._turn < len(self._waiting):
            due += self._waiting[self._turn]
            self._waiting[self._turn] = []
            if not self._ended[self._turn]:
                break
            self._turn += 1
        return due
