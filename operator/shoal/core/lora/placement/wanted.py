"""How many copies each adapter should have, and which one goes first where places are short."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.lora.placement import traffic
from shoal.core.lora.placement.traffic import PoolTraffic
from shoal.core.lora.placement.types import Adapter, PoolSnapshot, Traffic

LEAST_LOAD = 4.0
"""Requests in flight that one copy is good for, however little the others have to do."""
_FEWER = 0.75
"""A copy goes only where those that stay would have less than this share of what one is good for."""
FEWER_SECONDS = 60.0
"""How long fewer copies must have been enough."""
_RANK = 0.002
"""What a unit of rank adds to a decoding step that has the adapter in its batch, as a share of the step; about the
0.02, 0.035 and 0.06 for ranks 8, 16 and 32 of the digital twin of LoRA serving (arXiv:2508.08343, as BLIS has it)."""
_IDLE = 0.05
"""What a copy without requests counts, in requests in flight: idle ones are spread as well."""
_STICKY = 1.5
"""An adapter takes another one's place only where it is asked for so many times as often."""


@dataclass(slots=True)
class CopyDemand:
    """One adapter that belongs on floors."""

    adapter: Adapter
    guaranteed: int
    """Copies that its residency asks for."""
    asked: int
    """Copies that its requests ask for, or a newer revision that is to be proven; of any kind."""
    copies: int
    """The larger of the two."""
    cost: float
    """Of one copy: its share of the load, in requests in flight weighed by what its rank makes of them."""
    weight: float
    """How much it is asked for."""
    known: bool
    """Somebody asked for it lately."""
    fewer_since: float | None = None


@dataclass(frozen=True, slots=True)
class CopyDemands:
    """Those that belong on floors. Pinned ones first, then warm ones, then the others: each in order of precedence."""

    wants: tuple[CopyDemand, ...]
    fades_at: float | None
    """When another plan could want less, if nobody says anything new."""


def wanted(
    snapshot: PoolSnapshot,
    asked: PoolTraffic,
    before: Mapping[str, int],
    fewer: Mapping[str, float],
    replicas: int,
    now: float,
) -> CopyDemands:
    """Copies of every adapter that was asked for, or should be held anyway, on so many replicas; `before` has those of
    the last plan, `fewer` says since when less would have done. O(adapters)."""
    recent = asked.traffic
    loads = {uid: traffic.load(t, now) for uid, t in recent.items()}
    share = max(LEAST_LOAD, sum(loads.values()) / max(1, replicas))
    wants: list[CopyDemand] = []
    for uid, adapter in snapshot.adapters.items():
        if adapter.current is None and adapter.next is None:
            continue
        told = recent.get(uid)
        had = before.get(uid, 0)
        sure = 0 if adapter.residency == "OnDemand" else min(adapter.min_copies, replicas)
        if not sure and told is None and adapter.next is None and not (had and asked.stale):
            continue
        want = _want(adapter, sure, told, loads.get(uid, 0.0), share, had, fewer.get(uid), now)
        if asked.stale:
            want.asked, want.fewer_since = max(want.asked, had if had > sure else 0), None
        want.asked = min(want.asked, replicas)
        want.copies = max(sure, want.asked)
        wants.append(want)
    wants.sort(key=lambda w: (_CLASS[w.adapter.residency], -w.weight, w.adapter.uid))
    return CopyDemands(tuple(wants), _fades_at(asked, wants, loads, now))


_CLASS = {"Pinned": 0, "Warm": 1, "OnDemand": 2}


def _want(
    adapter: Adapter,
    sure: int,
    told: Traffic | None,
    load: float,
    share: float,
    had: int,
    fewer_since: float | None,
    now: float,
) -> CopyDemand:
    revision = adapter.revisions[-1]
    lasting = traffic.lasting(told, now) if told else 0.0
    copies = max(math.ceil(load / share - 1e-9), 1)
    keep = max(sure, copies, math.ceil(max(load, lasting) / (_FEWER * share) - 1e-9))
    since = None
    if keep < had:
        since = now if fewer_since is None else fewer_since
    enough = since is not None and now - since >= FEWER_SECONDS
    if copies < had:
        copies = keep if enough else had
    if told is None and adapter.next is None:
        copies = 0
    weight = (traffic.uses(told, now) + lasting) if told else 0.0
    cost = (lasting / max(1, sure, copies) + _IDLE) * (1 + _RANK * revision.rank)
    return CopyDemand(
        adapter, sure, copies, max(sure, copies), cost, weight * (_STICKY if had else 1.0), told is not None, since
    )


def _fades_at(asked: PoolTraffic, wants: list[CopyDemand], loads: Mapping[str, float], now: float) -> float | None:
    times = [t.used + traffic.KEPT_SECONDS for t in asked.traffic.values() if not t.now]
    times += [w.fewer_since + FEWER_SECONDS for w in wants if w.fewer_since is not None]
    if any(abs(loads[uid] - t.now) > 0.1 * LEAST_LOAD for uid, t in asked.traffic.items()):
        times.append(now + traffic.LOAD_SECONDS)
    return min(times, default=None)
