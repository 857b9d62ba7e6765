"""When an engine that is to go may be stopped (streams.md, "Acknowledgement"): pure, asked again at every change.

A drain begins with a barrier: the `seq` of the message that makes gateways choose other replicas. A gateway that may
still send, or has a request in flight, holds a claim:

    a gateway that acknowledged the barrier with nothing in flight      none
    one whose stream is open                                            until 12 s after its last word, or the barrier
    one whose stream closed                                             until 12 s after that
    those whom an agent that restarted beside its engine may not know   until 15 s after its start

12 s, because a gateway goes on choosing a replica for 12 s after the last message that it received (rule 1 and the
silence limit). After the claims have ended, the engine must be idle for a second: idle at the beginning and at the end,
with no request in between. A request that was on its way arrives within that second.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from shoal.api.replica import SILENCE_SECONDS

CLAIM_SECONDS: Final[float] = SILENCE_SECONDS
"""How long a gateway whose stream is down may still send requests here."""
RESTART_SECONDS: Final[float] = 15.0
"""After its own start an agent does not know who held a stream of its predecessor: the claim, and time to connect."""
IDLE_SECONDS: Final[float] = 1.0
AFTER_SECONDS: Final[float] = 30.0
"""An engine that still runs so long after the hook returned is not being stopped."""


@dataclass(frozen=True, slots=True)
class GatewayProgress:
    """One process of a gateway, as far as this agent knows it. Times are seconds of one monotonic clock."""

    name: str
    """Name of its pod, as the gateway itself reports it, for people."""
    last_message: float
    """Time at which its stream opened, or of its last acknowledgement."""
    closed: float | None = None
    """When its last stream ended; None: it has one."""
    seq: int | None = None
    """What it acknowledged; None: nothing yet."""
    running: int | None = None
    """What it has in flight here, as it said with `seq`."""
    adapters: frozenset[str] = frozenset()
    """Those of which it has something in flight, as it said with `seq`."""


def opened(known: GatewayProgress | None, name: str, now: float) -> GatewayProgress:
    """A stream of the gateway began; `known` is what was known of it."""
    return GatewayProgress(name, now) if known is None else replace(known, last_message=now, closed=None)


def closed(known: GatewayProgress, now: float) -> GatewayProgress:
    """Its last stream ended."""
    return replace(known, closed=now)


def acked(
    known: GatewayProgress | None, name: str, seq: int, running: int, now: float, adapters: frozenset[str] = frozenset()
) -> GatewayProgress:
    """It said what it acts on. What arrives late, and is older than what it said before, shows only that it lives."""
    if known is None:
        # The gateway still uses a stream that has ended here, so it may have requests here.
        known = GatewayProgress(name, now, closed=now)
    if known.seq is None or seq >= known.seq:
        known = replace(known, seq=seq, running=running, adapters=adapters)
    return replace(known, last_message=now)


@dataclass(frozen=True, slots=True)
class EngineObservation:
    """What asking the engine once showed. None: unknown."""

    at: float
    boot: str | None
    """Its boot id; None: its process has not started."""
    listening: bool | None
    """False: nothing listens on its port."""
    running: int | None = None
    waiting: int | None = None
    active: int | None = None
    """HTTP requests that it has not answered to the end."""
    requests: int | None = None
    """HTTP requests that it has ever received."""
    stalled: bool = False

    @property
    def idle(self) -> bool:
        return self.listening is False or (
            self.running == 0 and self.waiting == 0 and self.active == 0 and self.requests is not None
        )


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """What the looks so far come to."""

    boot: str | None = None
    stalled: bool = False
    observed_at: float | None = None
    """The last look."""
    idle_since: float | None = None
    """The first of an unbroken row of looks at an idle engine that received no request in between."""
    gone_since: float | None = None
    """The first of an unbroken row of looks at a port on which nothing listens."""
    requests: int | None = None


def observe(engine: EngineProgress, observation: EngineObservation) -> EngineProgress:
    """Takes a further look."""
    same = engine.boot == observation.boot
    idle, gone = observation.idle, observation.listening is False
    # A port that opened or closed is no row of the same thing, so the counts must be equal, None among them.
    row = same and engine.requests == observation.requests
    return EngineProgress(
        boot=observation.boot,
        stalled=observation.stalled,
        observed_at=observation.at,
        idle_since=(engine.idle_since if row and engine.idle_since is not None else observation.at) if idle else None,
        gone_since=(engine.gone_since if same and engine.gone_since is not None else observation.at) if gone else None,
        requests=observation.requests,
    )


@dataclass(frozen=True, slots=True)
class DrainState:
    """One drain."""

    began: float
    barrier: int
    """`seq` of the message that said `draining`."""
    drain_seconds: float
    gateways: tuple[GatewayProgress, ...]
    engine: EngineProgress
    restarted: float | None = None
    """When the agent started, if it found an engine already started; None: it has been there all the while."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The engine is still needed."""

    reason: Literal["in-flight", "not-acknowledged", "silent", "restarted", "engine-busy", "engine-unknown"]
    message: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The engine may be stopped."""

    reason: Literal["idle", "gone", "stalled", "time-over", "restarted"]
    message: str


def decide(state: DrainState, now: float) -> Wait | Stop:
    """Whether the engine may be stopped at `now`, and why (not)."""
    engine = state.engine
    if engine.stalled:
        return Stop("stalled", "the engine makes no progress")
    if now - state.began >= state.drain_seconds:
        return Stop("time-over", f"drainSeconds ({state.drain_seconds:g}) are over")
    if (
        engine.gone_since is not None
        and engine.observed_at is not None
        and _passed(engine.gone_since, engine.observed_at)
    ):
        return Stop("gone", "nothing listens on the engine's port")
    holders = [g for g in state.gateways if not through(g, state.barrier)]
    ends = {g: claim_end(g, state.began) for g in holders}
    if waiting := [g for g in holders if now < ends[g]]:
        return _wait_for(waiting, state.barrier)
    free = max(ends.values(), default=state.began)
    if state.restarted is not None:
        free = max(free, state.restarted + RESTART_SECONDS)
        if now < free:
            return Wait("restarted", "the agent restarted beside its engine and does not know yet whose requests run")
    if engine.idle_since is None or engine.observed_at is None:
        return _wait_for_engine(engine)
    if not _passed(max(engine.idle_since, free), engine.observed_at):
        return Wait("engine-busy", "the engine has been idle for less than a second")
    return Stop("idle", "no gateway has anything in flight here, and the engine is idle")


def through(gateway: GatewayProgress, barrier: int) -> bool:
    """Whether it turned away and has nothing left here. What it said before the barrier says nothing of what it sent
    since."""
    return gateway.seq is not None and gateway.seq >= barrier and gateway.running == 0


def claim_end(gateway: GatewayProgress, began: float) -> float:
    """Until when a gateway that is not through may send requests, or have some on their way."""
    last = max(gateway.last_message, began) if gateway.closed is None else max(gateway.last_message, gateway.closed)
    return last + CLAIM_SECONDS


def over(boot: str | None, engine: EngineProgress, returned: float | None, now: float) -> bool:
    """Whether a drain that was begun for the engine's `boot` has ended: that engine is gone, or, `returned` being when
    the hook last returned, it was not stopped after all."""
    return engine.boot != boot or (returned is not None and now - returned >= AFTER_SECONDS)


def _passed(since: float, until: float) -> bool:
    return until - since >= IDLE_SECONDS


def _wait_for(gateways: Iterable[GatewayProgress], barrier: int) -> Wait:
    """The most telling of the gateways: one with requests, else one that has not answered, else one that is gone."""
    told = sorted(gateways, key=lambda g: (g.closed is not None, -(g.running or 0), g.name))
    running = sum(g.running or 0 for g in told)
    first = told[0]
    others = f" and {len(told) - 1} more" if len(told) > 1 else ""
    if first.closed is not None:
        return Wait("silent", f"the stream of {first.name}{others} ended less than {CLAIM_SECONDS:g} s ago")
    if running:
        return Wait("in-flight", f"{first.name}{others}: {running} in flight")
    return Wait("not-acknowledged", f"{first.name}{others} did not acknowledge message {barrier} yet")


def _wait_for_engine(engine: EngineProgress) -> Wait:
    if engine.observed_at is None or engine.requests is None:
        return Wait("engine-unknown", "the engine does not say what runs")
    return Wait("engine-busy", "the engine still has requests")
