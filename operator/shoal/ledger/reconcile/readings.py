"""Readings of engines' counters from the agents' streams, until they are stored."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from shoal.api.replica import ReplicaKeys
from shoal.core.reconcile import HOUR_MS, CounterReading
from shoal.ledger.reconcile.pods import EnginePod


class Readings:
    """The last reading of each engine boot. `now` is milliseconds since 1970 (UTC)."""

    def __init__(self, pods: Mapping[str, EnginePod], now: Callable[[], int]) -> None:
        self._pods = pods
        """By uid; a live view of the pods."""
        self._now = now
        self._live: dict[str, CounterReading] = {}
        """Last reading of each live stream, by uid of the pod."""
        self._waiting: dict[str, CounterReading] = {}
        """Readings that are not stored yet, by boot id."""
        self._hour = 0

    @property
    def waiting(self) -> int:
        """Number of engine boots whose last reading is not stored yet."""
        return len(self._waiting)

    def report(self, uid: str, keys: ReplicaKeys | None) -> bool:
        """Takes the keys of a pod's stream; None: the stream is down. Returns True when an engine is gone, so that its
        last reading should be stored soon."""
        before = self._live.get(uid)
        pod = self._pods.get(uid)
        if keys is None or keys.engine_boot is None or pod is None:
            return self._live.pop(uid, None) is not None
        counters = (keys.prompt_tokens_total, keys.generation_tokens_total)
        if before is not None and (before.boot, before.prompt, before.generation) == (keys.engine_boot, *counters):
            return False
        reading = CounterReading(
            keys.engine_boot, pod.model, pod.gpu_class, pod.key, pod.node, self._now(), counters[0], counters[1]
        )
        self._live[uid] = reading
        self._wait(reading)
        return before is not None and before.boot != reading.boot

    def take(self) -> list[CounterReading]:
        """Readings to store now. Each live engine is stored once per hour even without increase: an hour without
        readings is unknown, not zero."""
        now = self._now()
        if now // HOUR_MS != self._hour:
            self._hour = now // HOUR_MS
            for uid, reading in self._live.items():
                self._live[uid] = again = replace(reading, read_at=now)
                self._wait(again)
        taken, self._waiting = list(self._waiting.values()), {}
        return taken

    def give_back(self, readings: list[CounterReading]) -> None:
        """Returns readings that could not be stored; later readings of the same boot take precedence."""
        self._waiting = {reading.boot: reading for reading in readings} | self._waiting

    def _wait(self, reading: CounterReading) -> None:
        before = self._waiting.get(reading.boot)
        if before is not None:
            # A counter that became unknown does not invalidate its earlier value.
            reading = replace(
                reading,
                prompt=_known(reading.prompt, before.prompt),
                generation=_known(reading.generation, before.generation),
            )
        self._waiting[reading.boot] = reading


def _known(now: int | None, before: int | None) -> int | None:
    return before if now is None else now if before is None else max(now, before)
