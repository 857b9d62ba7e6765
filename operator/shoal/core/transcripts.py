"""Transcripts in OpenAI's API: whole ones, and the events of a stream, from the chunks of an engine, which are those of
a chat."""

import math
from collections.abc import Mapping
from typing import Any, Final, cast

import orjson

from shoal.core.translation import StreamFailure

_LONGEST: Final = 1e9
"""Seconds that an engine may tell."""


def usage_of(answer: Mapping[str, object]) -> dict[str, object] | None:
    """The usage of a whole transcript: vLLM's `verbose_json` has none, and tells the length. None: it tells neither."""
    usage, duration = answer.get("usage"), answer.get("duration")
    if isinstance(usage, dict):
        return cast(dict[str, object], usage)
    if type(duration) not in (int, float) or not 0 <= cast(float, duration) <= _LONGEST:
        return None
    return {"type": "duration", "seconds": math.ceil(cast(float, duration))}


class TranscriptEvents:
    """The events of one stream: a delta for each piece of text, and the whole text at the end."""

    def __init__(self, _id: str, _model_name: str) -> None:
        self._texts: list[str] = []
        self._held = 0
        """Bytes of the text in memory: the last event repeats it."""

    def held_after(self, more: int) -> int:
        return self._held + more

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        return b"".join([self._delta(text) for text in _texts(chunk)])

    def end(self) -> bytes:
        return _event({"type": "transcript.text.done", "text": "".join(self._texts)})

    def error(self, failure: StreamFailure) -> bytes:
        """In the shape of a chat, as OpenAI's clients read it in a stream of a transcript."""
        error = {"message": failure.message, "type": failure.type, "param": failure.param, "code": failure.code}
        return _event({"error": error})

    def _delta(self, text: str) -> bytes:
        self._texts.append(text)
        self._held += len(text)
        return _event({"type": "transcript.text.delta", "delta": text})


def _texts(chunk: Mapping[str, Any]) -> list[str]:
    choices: object = chunk.get("choices")
    found: list[str] = []
    for choice in cast(list[object], choices) if isinstance(choices, list) else ():
        delta = cast(dict[str, object], choice).get("delta") if isinstance(choice, dict) else None
        text = cast(dict[str, object], delta).get("content") if isinstance(delta, dict) else None
        if isinstance(text, str) and text:
            found.append(text)
    return found


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(data)
