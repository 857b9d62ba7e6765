"""From one plan to the next: how much each adapter is asked for. What is not heard keeps its last value."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.lora.placement.types import GatewayTraffic, PoolMemory, PoolSnapshot, Traffic

LOAD_SECONDS = 10.0
"""Time constant of the load that asks for more copies."""
LASTING_SECONDS = 120.0
"""Time constant of the load that copies are kept and spread for."""
HALF_LIFE = 300.0
"""Seconds after which a request counts half in an adapter's popularity."""
KEPT_SECONDS = 1800.0
"""How long after its last request an adapter on demand keeps its place on a floor."""
_LEAST_SERVICE = 0.5
"""Seconds that a request runs at least, on average: short ones are seldom seen in flight."""


@dataclass(frozen=True, slots=True)
class PoolTraffic:
    """What is known of all adapters' requests."""

    traffic: Mapping[str, Traffic]
    reports: Mapping[str, GatewayTraffic]
    stale: tuple[str, ...]


def learn(snapshot: PoolSnapshot, memory: PoolMemory | None, now: float) -> PoolTraffic:
    """What came since the last plan. O(adapters that gateways name); others are not touched."""
    known = dict(memory.traffic) if memory else {}
    before: Mapping[str, GatewayTraffic] = memory.reports if memory else {}
    heard: dict[str, GatewayTraffic] = {}
    came: dict[str, int] = {}
    busy: dict[str, int] = {}
    unheard = [] if snapshot.sources is not None else ["the gateways"]
    for voice in snapshot.sources or ():
        last = before.get(voice.name)
        if voice.demand is None:
            unheard.append(voice.name)
            if last is not None:
                heard[voice.name] = last
        else:
            counters = {uid: d.arrivals for uid, d in voice.demand.items()}
            running = {uid: d.in_flight + d.held for uid, d in voice.demand.items() if d.in_flight or d.held}
            heard[voice.name] = GatewayTraffic(voice.boot, counters, running)
            _count(counters, last, voice.boot, first=memory is None, came=came)
        for uid, number in heard[voice.name].busy.items() if voice.name in heard else ():
            busy[uid] = busy.get(uid, 0) + number
    if snapshot.sources is None:
        heard = dict(before)
        busy = {uid: t.now for uid, t in known.items() if t.now}
    for uid in known.keys() - snapshot.adapters.keys():
        del known[uid]
    changed = came.keys() | busy.keys() | {uid for uid, t in known.items() if t.now}
    for uid in changed & snapshot.adapters.keys():
        known[uid] = _later(known.get(uid), now, came.get(uid, 0), busy.get(uid, 0), first=memory is None)
    for uid in (memory.switching if memory else frozenset[str]()) - known.keys():
        # What has just been loaded is not unloaded again at once because nobody has come for it yet.
        if uid in snapshot.adapters and snapshot.adapters[uid].next is None:
            known[uid] = Traffic(at=now, used=now)
    if memory is None:
        # What is loaded was asked for, and it is not known when: a new leader must not take it for forgotten.
        for uid in _loaded(snapshot) - known.keys():
            known[uid] = Traffic(at=now, used=now)
    if not unheard:
        for uid in [uid for uid, t in known.items() if not t.now and now - t.used >= KEPT_SECONDS]:
            del known[uid]
    return PoolTraffic(known, heard, tuple(unheard))


def _count(
    counters: Mapping[str, int], last: GatewayTraffic | None, boot: str | None, *, first: bool, came: dict[str, int]
) -> None:
    """Adds what arrived since `last`. Counters of a gateway that is heard for the first time in this term tell nothing
    of when; those of one that started meanwhile began at zero."""
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
    """Requests, each counting half after `HALF_LIFE`."""
    return traffic.uses * 0.5 ** (max(0.0, now - traffic.at) / HALF_LIFE)


def load(traffic: Traffic, now: float) -> float:
    """Requests in flight or held, of the last seconds."""
    smoothed = _faded(traffic.load, traffic.now, now - traffic.at, LOAD_SECONDS)
    return max(smoothed, _from_rate(traffic, now))


def lasting(traffic: Traffic, now: float) -> float:
    """Requests in flight or held, of the last minutes."""
    smoothed = _faded(traffic.lasting, traffic.now, now - traffic.at, LASTING_SECONDS)
    return max(smoothed, _from_rate(traffic, now))


def _from_rate(traffic: Traffic, now: float) -> float:
    """Little's law, with the shortest service that is assumed."""
    return _LEAST_SERVICE * uses(traffic, now) * math.log(2) / HALF_LIFE
