"""What an agent does next about its adapters: a function of its registry, the gateways and the time.

In this order: answer waiters; list what is missing (requested adapters first, then desired ones); discard staged files
that are no longer wanted; retire adapters whose places others need; stage what is missing; and choose the engine's next
call, one at a time. A load pauses decoding, so nothing is loaded that could not stay.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from shoal.api import reasons
from shoal.api.adapters import AdapterWanted
from shoal.core.drain import GatewayProgress
from shoal.core.lora.lifecycle import staging, unload
from shoal.core.lora.lifecycle.registry import (
    GOING,
    PERMANENT,
    REMEMBER_SECONDS,
    AdapterWaiter,
    Failure,
    Registry,
    RegistryEntry,
)
from shoal.core.lora.lifecycle.staging import MissingAdapter, evictable, slow, state

LIST_SECONDS: Final = 10.0
"""Seconds between two listings of the engine's adapters, while there is no other call to make."""
LATE_SECONDS: Final = 15.0
"""A fetch that takes longer does not delay the first report of adapters."""


class Load(NamedTuple):
    name: str


class Unload(NamedTuple):
    name: str


class List(NamedTuple):
    """List the engine's adapters."""


@dataclass(frozen=True, slots=True)
class Denial:
    """Why a lease is denied."""

    status: int
    reason: str
    message: str
    retry_after: int | None = None


@dataclass(slots=True)
class PlanStep:
    """What the agent does next."""

    grants: list[AdapterWaiter] = field(default_factory=list[AdapterWaiter])
    denials: list[tuple[AdapterWaiter, Denial]] = field(default_factory=list[tuple[AdapterWaiter, Denial]])
    stage: list[AdapterWanted] = field(default_factory=list[AdapterWanted])
    discard: list[str] = field(default_factory=list[str])
    """Adapters whose staged or half fetched files are no longer wanted."""
    call: Load | Unload | List | None = None


def plan_step(
    registry: Registry, gateways: Iterable[GatewayProgress], now: float, *, draining: bool = False, drain_seconds: float
) -> PlanStep:
    """Decides, and records the decision in the registry."""
    out = PlanStep()
    registry.leases.lapse(now)
    _forget(registry, now)
    _answer(registry, now, out, draining=draining)
    if draining:
        return out
    wants = _wants(registry, now)
    staging.discard(registry, wants, now, out.discard)
    if registry.listed is not None:
        _retire(registry, wants)
    staging.stage(registry, wants, now, out.stage, out.discard)
    _settle(registry, now)
    if registry.up and not registry.busy:
        out.call = _call(registry, wants, tuple(gateways), drain_seconds, now)
        registry.busy = out.call is not None
    return out


def _forget(registry: Registry, now: float) -> None:
    asked = {waiter.wanted.name for waiter in registry.waiters}
    for name, failure in list(registry.failures.items()):
        if now - failure.at >= REMEMBER_SECONDS and name not in registry.desired and name not in asked:
            del registry.failures[name]


def _answer(registry: Registry, now: float, out: PlanStep, *, draining: bool) -> None:
    refusal = _refusal(registry, draining=draining)
    for waiter in registry.waiters:
        if slow(registry.entries.get(waiter.wanted.name), now):
            waiter.admitted, waiter.slow, waiter.missed = None, True, True
    covered = registry.covered
    for waiter in tuple(registry.waiters):
        answer = refusal or _answer_one(registry, waiter, covered, now)
        if answer is None:
            continue
        registry.waiters.remove(waiter)
        if isinstance(answer, Denial):
            out.denials.append((waiter, answer))
        else:
            out.grants.append(waiter)


def _refusal(registry: Registry, *, draining: bool) -> Denial | None:
    if draining:
        return Denial(503, reasons.DRAINING, "the replica drains")
    if not registry.up:
        return Denial(503, reasons.ENGINE_NOT_READY, "the engine does not serve", 2)
    if not registry.reportable:
        return Denial(503, reasons.ENGINE_NOT_READY, "the adapters that belong here are being loaded", 2)
    return None


def _answer_one(
    registry: Registry, waiter: AdapterWaiter, covered: set[str], now: float
) -> Denial | RegistryEntry | None:
    """The entry to lease, or a denial; None: the waiter keeps waiting."""
    name = waiter.wanted.name
    entry = registry.entries.get(name)
    failure = _held_back(registry, name, now)
    if failure is not None:
        status = 422 if failure.reason in PERMANENT else 503
        return Denial(status, failure.reason, failure.message, None if status == 422 else 2)
    if waiter.admitted is None:
        if slow(entry, now):
            return None
        if waiter.key is not None and name not in covered:
            if len(covered) >= registry.slots:
                return None
            covered.add(name)
        waiter.admitted, waiter.slow = now, False
    if entry is None or entry.state not in ("loaded", "retiring"):
        waiter.missed = True
        return None
    # A retirement that the engine does not know of is taken back.
    entry.state, entry.retirement, entry.used = "loaded", None, now
    if waiter.key is not None:
        waiter.grant = registry.leases.grant(name, waiter.key, now)
    return entry


def _wants(registry: Registry, now: float) -> list[MissingAdapter]:
    """Adapters missing in the engine that may be tried: requested ones, then pinned ones, then other desired ones."""
    asked = {
        waiter.wanted.name: waiter.wanted for waiter in registry.waiters if waiter.admitted is not None or waiter.slow
    }
    desired = sorted((a for a in registry.desired.values() if a.name not in asked), key=lambda a: not a.pinned)
    return [
        MissingAdapter(adapter, adapter.name in asked)
        for adapter in (*asked.values(), *desired)
        if _may_try(registry, adapter.name, now)
    ]


def _held_back(registry: Registry, name: str, now: float) -> Failure | None:
    """The failure after which the adapter is not tried yet."""
    entry, failure = registry.entries.get(name), registry.failures.get(name)
    if failure is None or now >= failure.retry_at:
        return None
    if entry is None or entry.state in ("load_unknown", "unload_pending"):
        return failure
    # Its files are there, or on their way: they did not end the engine, the load did.
    return failure if failure.reason == reasons.LOAD_ENDED_ENGINE and entry.state in ("staging", "staged") else None


def _may_try(registry: Registry, name: str, now: float) -> bool:
    if _held_back(registry, name, now) is not None:
        return False
    entry = registry.entries.get(name)
    return entry is None or entry.state in ("staging", "staged", "load_unknown")


def _retire(registry: Registry, wants: list[MissingAdapter]) -> None:
    asked = {waiter.wanted.name for waiter in registry.waiters}
    for name, entry in registry.entries.items():
        if entry.dropped and entry.state == "loaded" and name not in asked and name not in registry.leases:
            entry.state = "retiring"
    ready = [want.asked for want in wants if state(registry, want) == "staged"]
    for needed, urgent in ((sum(ready), True), (len(ready), False)):
        short = needed - registry.free - registry.count(GOING)
        for name in evictable(registry, asked, urgent=urgent)[: max(short, 0)]:
            registry.entries[name].state = "retiring"
            registry.evictions += 1


def _settle(registry: Registry, now: float) -> None:
    """Makes adapters reportable once all desired ones were tried."""
    if registry.reportable or registry.listed is None or not registry.up:
        return
    registry.reportable = all(
        name in registry.unplaced
        or name in registry.failures
        or ((entry := registry.entries.get(name)) is not None and entry.state in ("loaded", "retiring"))
        or slow(entry, now, LATE_SECONDS)
        for name in registry.desired
    )


def _call(
    registry: Registry,
    wants: list[MissingAdapter],
    gateways: tuple[GatewayProgress, ...],
    drain_seconds: float,
    now: float,
) -> Load | Unload | List | None:
    if registry.listed is None:
        return List() if now >= registry.list_after else None
    loads = [want for want in wants if state(registry, want) in ("staged", "load_unknown")]
    for want in (*(w for w in loads if w.asked), None, *(w for w in loads if not w.asked)):
        if want is None:
            # An unload that frees a place comes before loads that nobody waits for.
            going = _unload(registry, {w.adapter.name for w in loads}, gateways, drain_seconds, now)
            if going is not None:
                return going
        elif registry.free > 0 or state(registry, want) == "load_unknown":
            registry.entries[want.adapter.name].state = "loading"
            return Load(want.adapter.name)
    return List() if now - registry.listed >= LIST_SECONDS else None


def _unload(
    registry: Registry, wanted: set[str], gateways: tuple[GatewayProgress, ...], drain_seconds: float, now: float
) -> Unload | None:
    if not unload.knows_all(registry.started, now, joined=registry.joined, idle_at=registry.idle_at):
        return None
    for name, entry in registry.entries.items():
        match entry.state:
            case "retiring":
                retirement = entry.retirement
                free = retirement is not None and not unload.holders(
                    retirement, gateways, now, drain_seconds=drain_seconds, idle_at=registry.idle_at
                )
            case "unload_pending" | "load_unknown":
                failure = registry.failures.get(name)
                free = name not in wanted and (failure is None or now >= failure.retry_at)
            case _:
                free = False
        if free:
            entry.state, entry.retirement = "unloading", None
            registry.leases.drop(name)
            return Unload(name)
    return None
