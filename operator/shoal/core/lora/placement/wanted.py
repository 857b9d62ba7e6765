"""How many copies each adapter should have, and the order of precedence where places are short."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.lora.placement import traffic
from shoal.core.lora.placement.traffic import PoolTraffic
from shoal.core.lora.placement.types import Adapter, PoolSnapshot, Traffic

LEAST_LOAD = 4.0
"""Requests in flight that one copy takes, even if the other replicas have less load."""
_FEWER = 0.75
"""A copy goes only where the remaining ones would have less than this share of the load that one copy takes."""
FEWER_SECONDS = 60.0
"""Seconds for which fewer copies must have been enough."""
_RANK = 0.002
"""Increase of a decode step per unit of rank, as a share of the step, when the adapter is in the batch; close to the
0.02, 0.035 and 0.06 for ranks 8, 16 and 32 of the digital twin of LoRA serving (arXiv:2508.08343, as BLIS has it)."""
_IDLE = 0.05
"""Load of a copy without requests, in requests in flight: idle copies are spread too."""
_STICKY = 1.5
"""An adapter displaces another one only if its requests outweigh the other's by this factor."""


@dataclass(slots=True)
class CopyDemand:
    """The copies that one adapter should have."""

    adapter: Adapter
    guaranteed: int
    """Copies for its residency."""
    asked: int
    """Copies for its requests, or for a next revision that replicas should load; of any residency."""
    copies: int
    """The larger of `guaranteed` and `asked`."""
    cost: float
    """Of one copy: its share of the load, in requests in flight, weighted by rank."""
    weight: float
    """Requests of the last minutes, as the order of precedence."""
    known: bool
    """It had requests lately."""
    fewer_since: float | None = None


@dataclass(frozen=True, slots=True)
class CopyDemands:
    """The copies of all adapters that should be planned: pinned, then warm, then others, each in order of
    precedence."""

    wants: tuple[CopyDemand, ...]
    fades_at: float | None
    """When a plan could need fewer copies without new input; None: never."""


def wanted(
    snapshot: PoolSnapshot,
    asked: PoolTraffic,
    before: Mapping[str, int],
    fewer: Mapping[str, float],
    replicas: int,
    now: float,
) -> CopyDemands:
    """Copies of every adapter with requests, or to be held anyway, on `replicas` replicas. `before`: copies of the last
    plan; `fewer`: since when fewer would have been enough. O(adapters)."""
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
