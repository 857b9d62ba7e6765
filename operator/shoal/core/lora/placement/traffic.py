"""Requests per adapter, learned from one plan to the next. Stale gateways keep their last values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.lora.placement.types import GatewayTraffic, PoolMemory, PoolSnapshot, Traffic

LOAD_SECONDS = 10.0
"""Time constant of the load for which copies are added."""
LASTING_SECONDS = 120.0
"""Time constant of the load for which copies are kept and spread."""
HALF_LIFE = 300.0
"""Seconds after which a request counts half in an adapter's use."""
KEPT_SECONDS = 1800.0
"""Seconds for which an adapter on demand stays planned after its last request."""
_LEAST_SERVICE = 0.5
"""Assumed seconds of a request at least, on average: short ones are seldom seen in flight."""


@dataclass(frozen=True, slots=True)
class PoolTraffic:
    """What is known of the requests of all adapters."""

    traffic: Mapping[str, Traffic]
    reports: Mapping[str, GatewayTraffic]
    stale: tuple[str, ...]


def learn(snapshot: PoolSnapshot, memory: PoolMemory | None, now: float) -> PoolTraffic:
    """Takes what came since the last plan. O(adapters named by gateways)."""
    known = dict(memory.traffic) if memory else {}
    before: Mapping[str, GatewayTraffic] = memory.reports if memory else {}
    reports: dict[str, GatewayTraffic] = {}
    came: dict[str, int] = {}
    busy: dict[str, int] = {}
    stale = [] if snapshot.sources is not None else ["the gateways"]
    for source in snapshot.sources or ():
        last = before.get(source.name)
        if source.demand is None:
            stale.append(source.name)
            if last is not None:
                reports[source.name] = last
        else:
            counters = {uid: d.arrivals for uid, d in source.demand.items()}
            running = {uid: d.in_flight + d.held for uid, d in source.demand.items() if d.in_flight or d.held}
            reports[source.name] = GatewayTraffic(source.boot, counters, running)
            _count(counters, last, source.boot, first=memory is None, came=came)
        for uid, number in reports[source.name].busy.items() if source.name in reports else ():
            busy[uid] = busy.get(uid, 0) + number
    if snapshot.sources is None:
        reports = dict(before)
        busy = {uid: t.now for uid, t in known.items() if t.now}
    for uid in known.keys() - snapshot.adapters.keys():
        del known[uid]
    changed = came.keys() | busy.keys() | {uid for uid, t in known.items() if t.now}
    for uid in changed & snapshot.adapters.keys():
        known[uid] = _later(known.get(uid), now, came.get(uid, 0), busy.get(uid, 0), first=memory is None)
    for uid in (memory.switching if memory else frozenset[str]()) - known.keys():
        # A new revision was just loaded: it is not unloaded at once for lack of requests.
        if uid in snapshot.adapters and snapshot.adapters[uid].next is None:
            known[uid] = Traffic(at=now, used=now)
    if memory is None:
        # Loaded adapters had requests at an unknown time: a new leader must not drop them.
        for uid in _loaded(snapshot) - known.keys():
            known[uid] = Traffic(at=now, used=now)
    if not stale:
        for uid in [uid for uid, t in known.items() if not t.now and now - t.used >= KEPT_SECONDS]:
            del known[uid]
    return PoolTraffic(known, reports, tuple(stale))


def _count(
    counters: Mapping[str, int], last: GatewayTraffic | None, boot: str | None, *, first: bool, came: dict[str, int]
) -> None:
    """Adds arrivals since `last` to `came`. In a new term (`first`) the counters of a gateway seen for the first time
    are skipped, since their time is unknown; a gateway that started later began at zero."""
    if last is None and first:
        return
    then: Mapping[str, int] = last.arrivals if last is not None and last.boot == boot else {}
    for uid, number in counters.items():
        more = number - then.get(uid, 0)
        if more > 0:
            came[uid] = came.get(uid, 0) + more


def _loaded(snapshot: PoolSnapshot) -> set[str]:
    loaded = {name for r in snapshot.replicas for name in r.resident or ()}
    return (
        {uid for uid, a in snapshot.adapters.items() if any(r.name in loaded for r in a.revisions)} if loaded else set()
    )


def _later(was: Traffic | None, now: float, came: int, busy: int, *, first: bool) -> Traffic:
    if was is None:
        was = Traffic(at=now, used=now, load=busy if first else 0.0, lasting=busy if first else 0.0)
    return Traffic(
        at=now,
        load=_faded(was.load, was.now, now - was.at, LOAD_SECONDS),
        lasting=_faded(was.lasting, was.now, now - was.at, LASTING_SECONDS),
        uses=uses(was, now) + came,
        used=now if came or busy or was.now else was.used,
        now=busy,
    )


def _faded(value: float, towards: float, passed: float, constant: float) -> float:
    return towards + (value - towards) * math.exp(-max(0.0, passed) / constant)


def uses(traffic: Traffic, now: float) -> float:
    """Number of requests, each counting half after `HALF_LIFE`."""
    return traffic.uses * 0.5 ** (max(0.0, now - traffic.at) / HALF_LIFE)


def load(traffic: Traffic, now: float) -> float:
    """Requests in flight or held, over the last seconds."""
    smoothed = _faded(traffic.load, traffic.now, now - traffic.at, LOAD_SECONDS)
    return max(smoothed, _from_rate(traffic, now))


def lasting(traffic: Traffic, now: float) -> float:
    """Requests in flight or held, over the last minutes."""
    smoothed = _faded(traffic.lasting, traffic.now, now - traffic.at, LASTING_SECONDS)
    return max(smoothed, _from_rate(traffic, now))


def _from_rate(traffic: Traffic, now: float) -> float:
    """Requests in flight by Little's law, with the shortest assumed service time."""
    return _LEAST_SERVICE * uses(traffic, now) * math.log(2) / HALF_LIFE
