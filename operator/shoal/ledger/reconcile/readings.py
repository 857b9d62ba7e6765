"""What agents say of their engines' counters, from the moment it is heard until it is kept."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from shoal.api.replica import ReplicaKeys
from shoal.core.reconcile import HOUR_MS, CounterReading
from shoal.ledger.reconcile.pods import EnginePod


class Readings:
    """The last reading of each engine boot. `now` is milliseconds since 1970 (UTC)."""

    def __init__(self, pods: Mapping[str, EnginePod], now: Callable[[], int]) -> None:
        self._pods = pods
        """By uid; a live view."""
        self._now = now
        self._live: dict[str, CounterReading] = {}
        """By uid of the pod: the last of a stream that is live."""
        self._waiting: dict[str, CounterReading] = {}
        """By boot: what is not kept yet."""
        self._hour = 0

    @property
    def waiting(self) -> int:
        """Engine boots whose last reading is not kept yet."""
        return len(self._waiting)

    def report(self, uid: str, keys: ReplicaKeys | None) -> bool:
        """What the stream of a pod says, None: it is down. True when an engine is gone, so that what it said last
        should be kept soon."""
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
        """What has to be kept now. In each hour every engine that is heard is kept once, also where nothing grew:
        an hour that nobody heard of is unknown, and not zero."""
        now = self._now()
        if now // HOUR_MS != self._hour:
            self._hour = now // HOUR_MS
            for uid, reading in self._live.items():
                self._live[uid] = again = replace(reading, read_at=now)
                self._wait(again)
        taken, self._waiting = list(self._waiting.values()), {}
        return taken

    def give_back(self, readings: list[CounterReading]) -> None:
        """They could not be kept; later ones of the same boot stay."""
        self._waiting = {reading.boot: reading for reading in readings} | self._waiting

    def _wait(self, reading: CounterReading) -> None:
        before = self._waiting.get(reading.boot)
        if before is not None:
            # A counter that became unknown says nothing of what it had counted.
            reading = replace(
                reading,
                prompt=_known(reading.prompt, before.prompt),
                generation=_known(reading.generation, before.generation),
            )
        self._waiting[reading.boot] = reading


def _known(now: int | None, before: int | None) -> int | None:
    return before if now is None else now if before is None else max(now, before)
