"""The drain of this replica: the connected gateways and their acknowledgements, the waiting preStop hook, and its end.

This module keeps the state; `core/drain.py` decides. Everything runs in the event loop's thread.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from shoal.api.replica import Ack
from shoal.core import drain
from shoal.core.drain import EngineObservation, EngineProgress, GatewayProgress, Stop, Wait
from shoal.net.hub import Caller

FORGET_SECONDS: Final = 60.0
"""A gateway without a stream for this long, and without running adapters in its last message, holds no claim."""
TICK_SECONDS: Final = 0.25
"""Interval between decisions without events: claims end by time."""
REMIND_SECONDS: Final = 30.0
"""Interval between log lines about what a drain waits for."""

log = structlog.get_logger()

Key = tuple[str, str]
"""Name and boot id of a gateway; a restarted gateway has another key."""


@dataclass(slots=True)
class _Episode:
    """One drain, from its first hook until the engine is gone or keeps running."""

    boot: str | None
    began: float
    barrier: int
    returned: float | None = None


class Drain:
    """`publish` sends the phase on the stream and returns the message's seq."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._seconds = seconds
        self._gateways: dict[Key, GatewayProgress] = {}
        self._streams: dict[Key, int] = {}
        self._engine = EngineProgress()
        self._restarted: float | None = None
        self._started = clock()
        self._episode: _Episode | None = None
        self._changed = asyncio.Event()
        self.publish: Callable[[], int] = lambda: 0
        self.waits_for = ""
        """Reason and sentence of the current or last drain, for people."""
        self.stopped: Stop | None = None
        """Answer to the last hook."""

    @property
    def draining(self) -> bool:
        return self._episode is not None

    @property
    def seconds(self) -> float:
        """Limit of a drain in seconds."""
        return self._seconds

    @property
    def has_observed(self) -> bool:
        """Whether the engine was observed since the agent's start."""
        return self._engine.observed_at is not None

    @property
    def gateways(self) -> tuple[GatewayProgress, ...]:
        """The known gateways; disconnected ones are kept for a minute."""
        return tuple(self._gateways.values())

    def listens(self, key: Key) -> bool:
        """Whether the gateway has a stream."""
        return key in self._streams

    # --- events -------------------------------------------------------------------------------------------------------

    def opened(self, caller: Caller) -> None:
        """A gateway has opened a stream."""
        key, now = _key(caller), self.clock()
        self._streams[key] = self._streams.get(key, 0) + 1
        name = caller.name or "an unnamed gateway"
        self._gateways[key] = drain.opened(self._gateways.get(key), name, now)
        self._changed.set()

    def closed(self, caller: Caller) -> None:
        """A stream of a gateway has ended; the gateway may already have another one."""
        key, now = _key(caller), self.clock()
        left = self._streams[key] - 1
        if left:
            self._streams[key] = left
        else:
            del self._streams[key]
            self._gateways[key] = drain.closed(self._gateways[key], now)
        for old, gateway in list(self._gateways.items()):
            keep = max(FORGET_SECONDS, self._seconds) if gateway.adapters else FORGET_SECONDS
            if gateway.closed is not None and now - max(gateway.closed, gateway.last_message) > keep:
                del self._gateways[old]
        self._changed.set()

    def acked(self, ack: Ack) -> None:
        """A gateway has acknowledged the stream."""
        key = ack.gateway, ack.boot
        known = self._gateways.get(key)
        adapters = frozenset(name for name, running in ack.running_by_adapter.items() if running)
        self._gateways[key] = drain.acked(known, ack.gateway, ack.seq, ack.running, self.clock(), adapters)
        self._changed.set()

    def observed(self, observation: EngineObservation) -> None:
        """The observer has observed the engine."""
        if not self.has_observed:
            self._restarted = self._started if observation.boot is not None else None
            if self._episode is not None:
                self._episode.boot = observation.boot  # the hook came before the first observation
        self._engine = drain.observe(self._engine, observation)
        episode = self._episode
        if episode is not None and drain.over(episode.boot, self._engine, episode.returned, self.clock()):
            log.info("drain.ended", engine_boot=observation.boot, restarted=observation.boot != episode.boot)
            self._episode = None
            # Not published here: the observer publishes this observation itself.
        self._changed.set()

    # --- the hook -----------------------------------------------------------------------------------------------------

    async def wait(self, waited_seconds: float = 0.0) -> Stop:
        """Begins a drain, or joins the current one; returns when the engine may be stopped.

        `waited_seconds` is how long the hook has waited: longer than this call if the agent restarted during the drain.
        """
        episode = self._episode
        if episode is None:
            episode = self._episode = _Episode(self._engine.boot, self.clock() - waited_seconds, 0)
            # Gateways stop sending at once; their acknowledgements of this message count.
            episode.barrier = self.publish()
            log.info("drain.began", barrier=episode.barrier, gateways=len(self._gateways), seconds=self._seconds)
        logged, logged_at = "", -REMIND_SECONDS
        while True:
            self._changed.clear()
            if self._episode is not episode:
                self.stopped = Stop("restarted", "the engine to be stopped is gone")
                return self.stopped
            now = self.clock()
            decision = self._decide(episode, now)
            if isinstance(decision, Stop):
                self.stopped = decision
                episode.returned = now
                log.info(
                    "drain.done", reason=decision.reason, why=decision.message, seconds=round(now - episode.began, 2)
                )
                return decision
            if decision.reason != logged or now - logged_at >= REMIND_SECONDS:
                logged, logged_at = decision.reason, now
                self.waits_for = f"{decision.reason}: {decision.message}"
                log.info("drain.waits", reason=decision.reason, why=decision.message)
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _decide(self, episode: _Episode, now: float) -> Wait | Stop:
        return drain.decide(
            drain.DrainState(
                began=episode.began,
                barrier=episode.barrier,
                drain_seconds=self._seconds,
                gateways=self.gateways,
                engine=self._engine,
                restarted=self._restarted,
            ),
            now,
        )


def _key(caller: Caller) -> Key:
    return caller.name, caller.boot
