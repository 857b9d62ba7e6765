"""What an agent does next about its adapters: a function of its registry, the gateways and the time.

In this order: answer those who ask; see what should be here (what is asked for, then the floor); let go what nobody
wants; retire what others need the place of; stage what is missing; and give the engine its next call, of which there is
one at a time. A load stops everybody's tokens, so nothing is loaded that cannot stay.
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
    Registry,
    RegistryEntry,
)
from shoal.core.lora.lifecycle.staging import MissingAdapter, evictable, slow, state

LIST_SECONDS: Final = 10.0
"""Between two times that an engine is asked what it has, while nothing else is asked of it."""
LATE_SECONDS: Final = 15.0
"""A fetch that takes longer is not waited for before anything is said of adapters."""


class Load(NamedTuple):
    name: str


class Unload(NamedTuple):
    name: str


class List(NamedTuple):
    """Ask the engine what it has."""


@dataclass(frozen=True, slots=True)
class Denial:
    """Why there is no lease."""

    status: int
    reason: str
    message: str
    retry_after: int | None = None


@dataclass(slots=True)
class PlanStep:
    """What to do."""

    grants: list[AdapterWaiter] = field(default_factory=list[AdapterWaiter])
    denials: list[tuple[AdapterWaiter, Denial]] = field(default_factory=list[tuple[AdapterWaiter, Denial]])
    stage: list[AdapterWanted] = field(default_factory=list[AdapterWanted])
    discard: list[str] = field(default_factory=list[str])
    """What is being fetched, or was, for nobody."""
    call: Load | Unload | List | None = None


def plan_step(
    registry: Registry, gateways: Iterable[GatewayProgress], now: float, *, draining: bool = False, drain_seconds: float
) -> PlanStep:
    """Decides, and marks in the registry what has been decided."""
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
    asked = {ask.wanted.name for ask in registry.waiters}
    for name, failure in list(registry.failures.items()):
        if now - failure.at >= REMEMBER_SECONDS and name not in registry.desired and name not in asked:
            del registry.failures[name]


def _answer(registry: Registry, now: float, out: PlanStep, *, draining: bool) -> None:
    refusal = _refusal(registry, draining=draining)
    for ask in registry.waiters:
        if slow(registry.entries.get(ask.wanted.name), now):
            ask.admitted, ask.slow, ask.missed = None, True, True
    covered = registry.covered
    for ask in tuple(registry.waiters):
        answer = refusal or _answer_one(registry, ask, covered, now)
        if answer is None:
            continue
        registry.waiters.remove(ask)
        if isinstance(answer, Denial):
            out.denials.append((ask, answer))
        else:
            out.grants.append(ask)


def _refusal(registry: Registry, *, draining: bool) -> Denial | None:
    if draining:
        return Denial(503, reasons.DRAINING, "the replica drains")
    if not registry.up:
        return Denial(503, reasons.ENGINE_NOT_READY, "the engine does not serve", 2)
    if not registry.reportable:
        return Denial(503, reasons.ENGINE_NOT_READY, "the adapters that belong here are being loaded", 2)
    return None


def _answer_one(registry: Registry, ask: AdapterWaiter, covered: set[str], now: float) -> Denial | RegistryEntry | None:
    """None: it waits."""
    name = ask.wanted.name
    entry = registry.entries.get(name)
    failure = registry.failures.get(name)
    if (
        failure is not None
        and now < failure.retry_at
        and (entry is None or entry.state in ("load_unknown", "unload_pending"))
    ):
        status = 422 if failure.reason in PERMANENT else 503
        return Denial(status, failure.reason, failure.message, None if status == 422 else 2)
    if ask.admitted is None:
        if slow(entry, now):
            return None
        if ask.key is not None and name not in covered:
            if len(covered) >= registry.slots:
                return None
            covered.add(name)
        ask.admitted, ask.slow = now, False
    if entry is None or entry.state not in ("loaded", "retiring"):
        ask.missed = True
        return None
    # A retirement that the engine has not heard of is taken back.
    entry.state, entry.retirement, entry.used = "loaded", None, now
    if ask.key is not None:
        registry.leases.grant(name, ask.key, now)
    return entry


def _wants(registry: Registry, now: float) -> list[MissingAdapter]:
    """What should be in the engine and is not, and may be tried: what is asked for, pinned, the rest of the floor."""
    asked = {ask.wanted.name: ask.wanted for ask in registry.waiters if ask.admitted is not None or ask.slow}
    floor = sorted((a for a in registry.desired.values() if a.name not in asked), key=lambda a: not a.pinned)
    return [
        MissingAdapter(adapter, adapter.name in asked)
        for adapter in (*asked.values(), *floor)
        if _may_try(registry, adapter.name, now)
    ]


def _may_try(registry: Registry, name: str, now: float) -> bool:
    entry, failure = registry.entries.get(name), registry.failures.get(name)
    if failure is not None and now < failure.retry_at and (entry is None or entry.state == "load_unknown"):
        return False
    return entry is None or entry.state in ("staging", "staged", "load_unknown")


def _retire(registry: Registry, wants: list[MissingAdapter]) -> None:
    asked = {ask.wanted.name for ask in registry.waiters}
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
    """Nothing is said of adapters before what belongs here was tried."""
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
            # What frees a place comes before what only should be here.
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
