"""Whose files are fetched, of the adapters that should be in an engine, and which of those that are in it may go.

A source that hangs must not keep anybody else waiting. So a fetch that takes long leaves its turn to others, and those
who wait for it have no slot meanwhile; but it goes on, also for a while after they gave up, since they come again.
"""

from typing import Final, NamedTuple

from shoal.api.adapters import AdapterWanted
from shoal.core.lora.lifecycle.registry import GOING, Registry, RegistryEntry, State

STAGING: Final = 4
"""Adapters whose files are fetched at a time."""
SLOW_SECONDS: Final = 5.0
"""A fetch that takes longer does not count among these,"""
MOST_STAGING: Final = 16
"""as long as there are not so many of them, all together."""
KEEP_SECONDS: Final = 60.0
"""How long what somebody asked for is fetched and kept after the last caller has left: a gateway asks again within
seconds, and what takes longer to come than one call waits would otherwise never be here."""
_BEING_STAGED: Final = frozenset[State]({"staging", "staged"})


class MissingAdapter(NamedTuple):
    """An adapter that should be in the engine and is not."""

    adapter: AdapterWanted
    asked: bool
    """Somebody waits for it; else the floor has it."""


def state(registry: Registry, want: MissingAdapter) -> State | None:
    """None: it is not here at all."""
    entry = registry.entries.get(want.adapter.name)
    return entry.state if entry is not None else None


def slow(entry: RegistryEntry | None, now: float, seconds: float = SLOW_SECONDS) -> bool:
    """Whether its files have been on their way for so long."""
    return entry is not None and entry.state == "staging" and now - entry.used >= seconds


def discard(registry: Registry, wants: list[MissingAdapter], now: float, out: list[str]) -> None:
    """What is being fetched, or was, for nobody."""
    wanted = {want.adapter.name: want.asked for want in wants}
    for name, entry in list(registry.entries.items()):
        if entry.state not in _BEING_STAGED:
            continue
        if wanted.get(name):
            entry.keep_until = now + KEEP_SECONDS
        elif name not in wanted and now >= entry.keep_until:
            del registry.entries[name]
            out.append(name)


def evictable(registry: Registry, asked: set[str], *, urgent: bool) -> list[str]:
    """What may go, first what should: what the floor does not ask for, used longest ago. What it asks for goes only for
    somebody who waits, and what is pinned not at all."""
    found: list[tuple[bool, float, str]] = []
    for name, entry in registry.entries.items():
        if entry.state != "loaded" or name in asked or name in registry.leases:
            continue
        of_floor = registry.desired.get(name)
        if of_floor is None or (urgent and not of_floor.pinned):
            found.append((of_floor is not None, entry.used, name))
    return [name for _, _, name in sorted(found)]


def stage(
    registry: Registry, wants: list[MissingAdapter], now: float, fetch: list[AdapterWanted], out: list[str]
) -> None:
    """What to fetch, into `fetch`, as far as it will have a place; what is not fetched after all, into `out`."""
    asked = {ask.wanted.name for ask in registry.waiters}
    base = registry.free + registry.count(GOING)
    coming = [want.asked for want in wants if state(registry, want) in _BEING_STAGED]
    free = {
        True: base + len(evictable(registry, asked, urgent=True)) - sum(coming),
        False: base + len(evictable(registry, asked, urgent=False)) - len(coming),
    }
    no_room = set[str]()
    for want in reversed(wants) if registry.listed is not None else ():
        # Fetched before it was known how full the engine is, or before somebody asked.
        if free[False] < 0 and not want.asked and state(registry, want) in _BEING_STAGED:
            del registry.entries[want.adapter.name]
            out.append(want.adapter.name)
            no_room.add(want.adapter.name)
            free[False] += 1
    for adapter, urgent in wants:
        if adapter.name in registry.entries or adapter.name in no_room:
            continue
        if free[urgent] <= 0:
            if not urgent:
                no_room.add(adapter.name)
            continue
        if urgent and _full(registry):
            _give_way(registry, wants, out)
        if not _full(registry) and _has_slot(registry, now):
            registry.entries[adapter.name] = RegistryEntry(
                "staging", now, keep_until=now + KEEP_SECONDS if urgent else now
            )
            fetch.append(adapter)
        # Also of one that is staged later: the next one's place is another.
        free[False] -= 1
        free[True] -= urgent
    registry.unplaced = frozenset(no_room)


def _has_slot(registry: Registry, now: float) -> bool:
    fetched = [entry for entry in registry.entries.values() if entry.state == "staging"]
    return len(fetched) < MOST_STAGING and sum(not slow(entry, now) for entry in fetched) < STAGING


def _full(registry: Registry) -> bool:
    """The folder has room for the files of what the engine has, and one more."""
    return len(registry.entries) > registry.places


def _give_way(registry: Registry, wants: list[MissingAdapter], out: list[str]) -> None:
    """Somebody waits: what was only kept goes, or what the floor was fetching, which is fetched later."""
    wanted = {want.adapter.name for want in wants}
    kept = (name for name, e in registry.entries.items() if e.state in _BEING_STAGED and name not in wanted)
    later = (w.adapter.name for w in reversed(wants) if not w.asked and state(registry, w) in _BEING_STAGED)
    name = next(kept, None) or next(later, None)
    if name is not None:
        del registry.entries[name]
        out.append(name)
