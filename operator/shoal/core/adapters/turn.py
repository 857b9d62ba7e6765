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
from shoal.core.adapters import claims
from shoal.core.adapters.registry import GOING, PERMANENT, REMEMBER_SECONDS, Ask, Entry, Registry, State
from shoal.core.drain import Gateway

STAGING: Final = 4
"""Adapters whose files are fetched at a time."""
LIST_SECONDS: Final = 10.0
"""Between two times that an engine is asked what it has, while nothing else is asked of it."""
_BEING_STAGED: Final = frozenset[State]({"staging", "staged"})


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


class _Want(NamedTuple):
    adapter: AdapterWanted
    asked: bool


@dataclass(slots=True)
class Turn:
    """What to do."""

    grants: list[Ask] = field(default_factory=list[Ask])
    denials: list[tuple[Ask, Denial]] = field(default_factory=list[tuple[Ask, Denial]])
    stage: list[AdapterWanted] = field(default_factory=list[AdapterWanted])
    discard: list[str] = field(default_factory=list[str])
    """What is being fetched, or was, for nobody."""
    call: Load | Unload | List | None = None


def turn(
    registry: Registry, gateways: Iterable[Gateway], now: float, *, draining: bool = False, drain_seconds: float
) -> Turn:
    """Decides, and marks in the registry what has been decided."""
    out = Turn()
    registry.leases.lapse(now)
    _forget(registry, now)
    _answer(registry, now, out, draining=draining)
    if draining:
        return out
    wants = _wants(registry, now)
    _discard(registry, wants, out)
    if registry.listed is not None:
        _retire(registry, wants)
    _stage(registry, wants, now, out)
    _settle(registry, now)
    if registry.up and not registry.busy:
        out.call = _call(registry, wants, tuple(gateways), drain_seconds, now)
        registry.busy = out.call is not None
    return out


def _forget(registry: Registry, now: float) -> None:
    asked = {ask.wanted.name for ask in registry.asks}
    for name, failure in list(registry.failures.items()):
        if now - failure.at >= REMEMBER_SECONDS and name not in registry.floor and name not in asked:
            del registry.failures[name]


def _answer(registry: Registry, now: float, out: Turn, *, draining: bool) -> None:
    refusal = _refusal(registry, draining=draining)
    covered = registry.covered
    for ask in tuple(registry.asks):
        answer = refusal or _answer_one(registry, ask, covered, now)
        if answer is None:
            continue
        registry.asks.remove(ask)
        if isinstance(answer, Denial):
            out.denials.append((ask, answer))
        else:
            out.grants.append(ask)


def _refusal(registry: Registry, *, draining: bool) -> Denial | None:
    if draining:
        return Denial(503, reasons.DRAINING, "the replica drains")
    if not registry.up:
        return Denial(503, reasons.ENGINE_NOT_READY, "the engine does not serve", 2)
    if not registry.said:
        return Denial(503, reasons.ENGINE_NOT_READY, "the adapters that belong here are being loaded", 2)
    return None


def _answer_one(registry: Registry, ask: Ask, covered: set[str], now: float) -> Denial | Entry | None:
    """None: it waits."""
    name = ask.wanted.name
    entry = registry.entries.get(name)
    failure = registry.failures.get(name)
    if failure is not None and now < failure.retry_at and (entry is None or entry.state in ("unsure", "undone")):
        status = 422 if failure.reason in PERMANENT else 503
        return Denial(status, failure.reason, failure.message, None if status == 422 else 2)
    if ask.admitted is None:
        if ask.key is not None and name not in covered:
            if len(covered) >= registry.slots:
                return None
            covered.add(name)
        ask.admitted = now
    if entry is None or entry.state not in ("loaded", "retiring"):
        ask.missed = True
        return None
    # A retirement that the engine has not heard of is taken back.
    entry.state, entry.retirement, entry.used = "loaded", None, now
    if ask.key is not None:
        registry.leases.grant(name, ask.key, now)
    return entry


def _wants(registry: Registry, now: float) -> list[_Want]:
    """What should be in the engine and is not, and may be tried: what is asked for, pinned, the rest of the floor."""
    asked = {ask.wanted.name: ask.wanted for ask in registry.asks if ask.admitted is not None}
    floor = sorted((a for a in registry.floor.values() if a.name not in asked), key=lambda a: not a.pinned)
    return [
        _Want(adapter, adapter.name in asked)
        for adapter in (*asked.values(), *floor)
        if _may_try(registry, adapter.name, now)
    ]


def _may_try(registry: Registry, name: str, now: float) -> bool:
    entry, failure = registry.entries.get(name), registry.failures.get(name)
    if failure is not None and now < failure.retry_at and (entry is None or entry.state == "unsure"):
        return False
    return entry is None or entry.state in ("staging", "staged", "unsure")


def _discard(registry: Registry, wants: list[_Want], out: Turn) -> None:
    wanted = {want.adapter.name for want in wants}
    for name, entry in list(registry.entries.items()):
        if entry.state in _BEING_STAGED and name not in wanted:
            del registry.entries[name]
            out.discard.append(name)


def _retire(registry: Registry, wants: list[_Want]) -> None:
    asked = {ask.wanted.name for ask in registry.asks}
    for name, entry in registry.entries.items():
        if entry.dropped and entry.state == "loaded" and name not in asked and name not in registry.leases:
            entry.state = "retiring"
    ready = [want.asked for want in wants if _state(registry, want) == "staged"]
    for needed, urgent in ((sum(ready), True), (len(ready), False)):
        short = needed - registry.free - registry.count(GOING)
        for name in _evictable(registry, asked, urgent=urgent)[: max(short, 0)]:
            registry.entries[name].state = "retiring"
            registry.evictions += 1


def _evictable(registry: Registry, asked: set[str], *, urgent: bool) -> list[str]:
    """What may go, first what should: what the floor does not ask for, used longest ago. What it asks for goes only for
    somebody who waits, and what is pinned not at all."""
    found: list[tuple[bool, float, str]] = []
    for name, entry in registry.entries.items():
        if entry.state != "loaded" or name in asked or name in registry.leases:
            continue
        of_floor = registry.floor.get(name)
        if of_floor is None or (urgent and not of_floor.pinned):
            found.append((of_floor is not None, entry.used, name))
    return [name for _, _, name in sorted(found)]


def _stage(registry: Registry, wants: list[_Want], now: float, out: Turn) -> None:
    asked = {ask.wanted.name for ask in registry.asks}
    base = registry.free + registry.count(GOING)
    coming = [want.asked for want in wants if _state(registry, want) in _BEING_STAGED]
    room = {
        True: base + len(_evictable(registry, asked, urgent=True)) - sum(coming),
        False: base + len(_evictable(registry, asked, urgent=False)) - len(coming),
    }
    staging, no_room = registry.count(frozenset({"staging"})), set[str]()
    for want in reversed(wants) if registry.listed is not None else ():
        # Fetched before it was known how full the engine is, or before somebody asked.
        if room[False] < 0 and not want.asked and _state(registry, want) in _BEING_STAGED:
            del registry.entries[want.adapter.name]
            out.discard.append(want.adapter.name)
            no_room.add(want.adapter.name)
            room[False] += 1
    for adapter, urgent in wants:
        if adapter.name in registry.entries or adapter.name in no_room:
            continue
        if room[urgent] <= 0:
            if not urgent:
                no_room.add(adapter.name)
            continue
        if urgent and _full(registry):
            _give_way(registry, wants, out)
        if not _full(registry) and staging < STAGING:
            registry.entries[adapter.name] = Entry("staging", now)
            out.stage.append(adapter)
            staging += 1
        # Also of one that is staged later: the next one's place is another.
        room[False] -= 1
        room[True] -= urgent
    registry.no_room = frozenset(no_room)


def _full(registry: Registry) -> bool:
    """The folder has room for the files of what the engine has, and one more."""
    return len(registry.entries) > registry.places


def _give_way(registry: Registry, wants: list[_Want], out: Turn) -> None:
    """Somebody waits: what the floor was fetching is fetched later."""
    for want in reversed(wants):
        if not want.asked and _state(registry, want) in _BEING_STAGED:
            del registry.entries[want.adapter.name]
            out.discard.append(want.adapter.name)
            return


def _settle(registry: Registry, now: float) -> None:
    """Nothing is said of adapters before what belongs here was tried."""
    if registry.said or registry.listed is None or not registry.up:
        return
    registry.said = all(
        name in registry.no_room
        or name in registry.failures
        or ((entry := registry.entries.get(name)) is not None and entry.state in ("loaded", "retiring"))
        for name in registry.floor
    )


def _call(
    registry: Registry, wants: list[_Want], gateways: tuple[Gateway, ...], drain_seconds: float, now: float
) -> Load | Unload | List | None:
    if registry.listed is None:
        return List() if now >= registry.list_after else None
    loads = [want for want in wants if _state(registry, want) in ("staged", "unsure")]
    for want in (*(w for w in loads if w.asked), None, *(w for w in loads if not w.asked)):
        if want is None:
            # What frees a place comes before what only should be here.
            going = _unload(registry, {w.adapter.name for w in loads}, gateways, drain_seconds, now)
            if going is not None:
                return going
        elif registry.free > 0 or _state(registry, want) == "unsure":
            registry.entries[want.adapter.name].state = "loading"
            return Load(want.adapter.name)
    return List() if now - registry.listed >= LIST_SECONDS else None


def _unload(
    registry: Registry, wanted: set[str], gateways: tuple[Gateway, ...], drain_seconds: float, now: float
) -> Unload | None:
    if not claims.knows_all(registry.started, now, joined=registry.joined, idle_at=registry.idle_at):
        return None
    for name, entry in registry.entries.items():
        match entry.state:
            case "retiring":
                retirement = entry.retirement
                free = retirement is not None and not claims.holders(
                    retirement, gateways, now, drain_seconds=drain_seconds, idle_at=registry.idle_at
                )
            case "undone" | "unsure":
                failure = registry.failures.get(name)
                free = name not in wanted and (failure is None or now >= failure.retry_at)
            case _:
                free = False
        if free:
            entry.state, entry.retirement = "unloading", None
            registry.leases.drop(name)
            return Unload(name)
    return None


def _state(registry: Registry, want: _Want) -> State | None:
    entry = registry.entries.get(want.adapter.name)
    return entry.state if entry is not None else None
