"""Inputs of the advice: requests as gateways saw them, and the fleet that served them. None is unknown."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from shoal.api.traffic import (
    ADAPTER_KNOWN,
    ADAPTER_RESIDENT,
    AFTER_ANSWER,
    MARK,
    STREAM,
    UNKNOWN,
    ModelTraffic,
    TrafficRow,
    rows_of,
)

_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class PromptMark(NamedTuple):
    """A prompt's beginning."""

    key: int
    """The same for equal beginnings."""
    tokens: int
    """Its length."""


def after_answer(key: int) -> int:
    """Key of a prompt with its answer, from the prompt's key."""
    return ((key ^ _MASK) * _ODD) & _MASK


@dataclass(frozen=True, slots=True)
class RequestFact:
    """One answered request. Times in seconds, from one clock; lengths in tokens."""

    at: float
    sent: float
    """When a replica got it: after waiting."""
    first: float | None
    """First token of the answer."""
    ended: float
    prompt: int
    cached: int | None
    """Of the prompt, as the engine reported it."""
    answer: int
    replica: int
    """Identifies one start of one engine."""
    gpu_class: str | None
    adapter: int | None = None
    adapter_resident: bool | None = None
    """A replica had the adapter loaded when the request came."""
    stream: bool = True
    marks: tuple[PromptMark, ...] = ()
    """In growing length; the last is the whole prompt. Empty: the prompt is not understood."""


@dataclass(frozen=True, slots=True)
class ClassFact:
    """A GPU class that the Model uses."""

    gpus: int | None = None
    """GPUs of a replica."""
    kv_tokens: int | None = None
    """Of a replica."""
    hourly_cost: Decimal | None = None
    """Of one GPU."""
    currency: str | None = None


@dataclass(frozen=True, slots=True)
class TrafficWindow:
    """Requests of one Model, complete between two times (seconds since 1970), by arrival."""

    since: float
    until: float
    requests: tuple[RequestFact, ...]
    gateways: int = 1
    """Whose requests these are."""

    @property
    def seconds(self) -> float:
        return max(0.0, self.until - self.since)


def window_of(parts: Sequence[ModelTraffic], *, since: float, until: float) -> TrafficWindow:
    """The requests of one Model from all gateways, from when on each gateway's part is complete. Raises ValueError for
    rows that are not understood."""
    start = max([since, *(part.since for part in parts)])
    found = [fact for part in parts for fact in _facts(part) if start <= fact.at < until]
    found.sort(key=lambda fact: fact.at)
    return TrafficWindow(min(start, until), until, tuple(found), len(parts))


def _facts(part: ModelTraffic) -> Iterable[RequestFact]:
    for row, marks in rows_of(part):
        first = None if row.first == UNKNOWN else row.admitted + row.first / 1e3
        if not (math.isfinite(row.admitted) and 0 < row.prompt < UNKNOWN):
            continue
        yield RequestFact(
            row.admitted,
            row.admitted + row.sent / 1e3,
            first,
            max(row.admitted + row.ended / 1e3, first or 0.0),
            row.prompt,
            None if row.cached == UNKNOWN else min(row.cached, row.prompt),
            0 if row.answer == UNKNOWN else row.answer,
            row.replica,
            part.classes[row.gpu_class - 1] if 0 < row.gpu_class <= len(part.classes) else None,
            row.adapter or None,
            bool(row.flags & ADAPTER_RESIDENT) if row.flags & ADAPTER_KNOWN else None,
            bool(row.flags & STREAM),
            prompt_marks_of(row, marks),
        )


def prompt_marks_of(row: TrafficRow, packed: bytes) -> tuple[PromptMark, ...]:
    """Marks with their lengths in tokens: the engine's count of the whole prompt, in proportion."""
    found: list[PromptMark] = []
    whole = 0
    if packed:
        _, whole = MARK.unpack_from(packed, len(packed) - MARK.size)
        whole &= AFTER_ANSWER - 1
    if not whole:
        return ()
    for name, size in MARK.iter_unpack(packed):
        key = int.from_bytes(name)
        if size & AFTER_ANSWER:
            size &= AFTER_ANSWER - 1
            if not found:
                continue
            key = after_answer(found[-1].key)
        found.append(PromptMark(key, min(row.prompt, row.prompt * size // whole)))
    return tuple(found)


Fleet = Mapping[str, ClassFact]
"""Facts of the GPU classes, by name."""
