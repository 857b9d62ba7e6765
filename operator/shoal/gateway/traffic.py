"""The last answered requests of each Model, in memory: what `shoal advise` replays. No prompts, nothing on disk.

A request is one `bytes` object (`HEAD`, and its marks) of 100 to 250 bytes, which the garbage collector need not
follow. The sample has a bound in requests; Models share it, and a busy Model does not displace the requests of others.

Times are kept by `time.monotonic`, and become times of day when they are read: a clock that is set must not make
requests look older or newer than they are.
"""

import struct
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from shoal.api.traffic import ADAPTER_KNOWN, ADAPTER_RESIDENT, HEAD, STREAM, UNKNOWN
from shoal.core.lora.placement.rendezvous import digest
from shoal.gateway.prepared import Prepared
from shoal.metering.meter import Meter

_MOST_CLASSES: Final = 255
_ADMITTED: Final = struct.Struct("<d")
_SET_SECONDS: Final = 1.0
"""By so much the clock has to differ from before to count as one that was set."""
_LONGEST: Final = UNKNOWN - 1
"""Milliseconds, and tokens."""


@dataclass(slots=True)
class _ModelSample:
    since: float
    """From then on all requests are here (`time.monotonic`)."""
    requests: deque[bytes] = field(default_factory=deque[bytes])


class TrafficSample:
    """Requests by key of a Model. `most` of them in all; 0: none are kept."""

    def __init__(self, most: int, now: float | None = None) -> None:
        self.most = most
        self.classes: list[str] = []
        self._ahead = time.time() - time.monotonic()
        """The clock less `time.monotonic`."""
        self._began = time.monotonic() if now is None else now - self._ahead
        self._models: dict[str, _ModelSample] = {}
        self._count = 0
        self._largest = ""

    @property
    def began(self) -> float:
        """Seconds since 1970: from then on requests were kept, also of Models of which there are none."""
        return self._began + self._clock_ahead()

    def __len__(self) -> int:
        return self._count

    def add(self, meter: Meter, prepared: Prepared) -> None:
        """Keeps an answered request whose prompt the engine counted."""
        if not self.most or meter.outcome != "answered" or meter.replica is None or meter.count_source != "final":
            return
        counts = meter.tokens()
        prompt, cached, answer = counts["inputTokens"], counts["cachedTokens"], counts["outputTokens"]
        if not prompt or prompt > _LONGEST:
            return
        replica, first, seconds = meter.replica, meter.seconds_to_first_byte, meter.seconds
        accepted = time.monotonic() - seconds
        adapter, missed = prepared.model.adapter, meter.adapter_missed
        flags = STREAM if prepared.stream else 0
        if missed is not None:
            flags |= ADAPTER_KNOWN if missed else ADAPTER_KNOWN | ADAPTER_RESIDENT
        marks = prepared.marks
        head = HEAD.pack(
            accepted,
            _milliseconds(meter.sent_at - accepted),
            UNKNOWN if first is None else _milliseconds(first),
            _milliseconds(seconds),
            prompt,
            UNKNOWN if cached is None else min(cached, _LONGEST),
            UNKNOWN if answer is None else min(answer, _LONGEST),
            digest(f"{replica.uid} {meter.engine_boot}"),
            0 if adapter is None else digest(adapter.uid),
            self._class(replica.gpu_class),
            flags,
            0 if marks is None else len(marks) // 8,
        )
        self._put(meter.model, head if marks is None else head + marks)

    def _put(self, model: str, kept: bytes) -> None:
        sample = self._models.get(model)
        if sample is None:
            sample = self._models[model] = _ModelSample(self._began)
        sample.requests.append(kept)
        self._count += 1
        if self._count > self.most:
            self._drop(model)

    def _drop(self, model: str) -> None:
        """Drops the oldest request of the Model that has most, or of this one if it has its share."""
        fair = self.most // len(self._models)
        if len(self._models[model].requests) > fair:
            victim = model
        else:
            victim = self._largest
            if victim not in self._models or len(self._models[victim].requests) <= fair:
                victim = self._largest = max(self._models, key=lambda key: len(self._models[key].requests))
        sample = self._models[victim]
        dropped = sample.requests.popleft()
        self._count -= 1
        sample.since = max(sample.since, admitted(dropped))
        if not sample.requests:
            # What comes later would look complete from the beginning.
            self._began = max(self._began, sample.since)
            del self._models[victim]

    def _class(self, name: str | None) -> int:
        """Index from 1; 0: unknown."""
        if name is None:
            return 0
        if name not in self.classes:
            if len(self.classes) >= _MOST_CLASSES:
                return 0
            self.classes.append(name)
        return self.classes.index(name) + 1

    def models(self) -> Iterator[str]:
        """Keys of the Models with requests."""
        yield from list(self._models)

    def newest(self, model: str, since: float, most: int) -> tuple[float, list[bytes]]:
        """From when on the requests are complete, and the newest of them, oldest first. Times in seconds since 1970."""
        sample, ahead = self._models.get(model), self._clock_ahead()
        if sample is None:
            return self._began + ahead, []
        found: list[bytes] = []
        complete = sample.since
        for kept in reversed(sample.requests):
            at = admitted(kept)
            if len(found) >= most:
                complete = max(complete, at)
                break
            if at + ahead >= since:
                found.append(_ADMITTED.pack(at + ahead) + kept[_ADMITTED.size :])
        found.reverse()
        return complete + ahead, found

    def _clock_ahead(self) -> float:
        """The clock less `time.monotonic`; the same number until the clock is set."""
        ahead = time.time() - time.monotonic()
        if abs(ahead - self._ahead) > _SET_SECONDS:
            self._ahead = ahead
        return self._ahead


def admitted(kept: bytes) -> float:
    """When a request was admitted (`time.monotonic`)."""
    at: float = _ADMITTED.unpack_from(kept)[0]
    return at


def _milliseconds(seconds: float) -> int:
    found = round(seconds * 1000)
    return found if 0 <= found <= _LONGEST else min(_LONGEST, max(0, found))
