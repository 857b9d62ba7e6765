"""Which missing adapters' files are fetched, and which loaded adapters may go.

A source that hangs must not delay other adapters. A slow fetch therefore no longer counts against the limit of parallel
fetches, and its waiters give their slots back. The fetch continues for a while after they gave up, since clients retry.
"""

from typing import Final, NamedTuple

from shoal.api.adapters import AdapterWanted
from shoal.core.lora.lifecycle.registry import GOING, Registry, RegistryEntry, State

STAGING: Final = 4
"""Adapters whose files are fetched at a time, without slow fetches."""
SLOW_SECONDS: Final = 5.0
"""A fetch that takes longer is slow."""
MOST_STAGING: Final = 16
"""Fetches at a time, slow ones included."""
KEEP_SECONDS: Final = 60.0
"""Seconds for which the files of a requested adapter are fetched and kept after its last waiter left: a gateway asks
again within seconds, and otherwise a fetch longer than one call's wait would never complete."""
_BEING_STAGED: Final = frozenset[State]({"staging", "staged"})


class MissingAdapter(NamedTuple):
    """An adapter that should be in the engine and is not."""

    adapter: AdapterWanted
    asked: bool
    """A request waits for it; else it is desired."""


def state(registry: Registry, want: MissingAdapter) -> State | None:
    """The adapter's state; None: it has no entry."""
    entry = registry.entries.get(want.adapter.name)
    return entry.state if entry is not None else None


def slow(entry: RegistryEntry | None, now: float, seconds: float = SLOW_SECONDS) -> bool:
    """Whether its files have been fetched for `seconds` or longer."""
    return entry is not None and entry.state == "staging" and now - entry.used >= seconds


def discard(registry: Registry, wants: list[MissingAdapter], now: float, out: list[str]) -> None:
    """Removes entries in staging that nothing wants any more; their names go to `out`."""
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
    """Adapters that may go, in order: those not desired, the least recently used first; with `urgent` (a request waits)
    then desired ones, but never pinned ones."""
    found: list[tuple[bool, float, str]] = []
    for name, entry in registry.entries.items():
        if entry.state != "loaded" or name in asked or name in registry.leases:
            continue
        desired = registry.desired.get(name)
        if desired is None or (urgent and not desired.pinned):
            found.append((desired is not None, entry.used, name))
    return [name for _, _, name in sorted(found)]


def stage(
    registry: Registry, wants: list[MissingAdapter], now: float, fetch: list[AdapterWanted], out: list[str]
) -> None:
    """Adapters to fetch that will have a place go to `fetch`; names that are not fetched after all go to `out`."""
    asked = {waiter.wanted.name for waiter in registry.waiters}
    base = registry.free + registry.count(GOING)
    coming = [want.asked for want in wants if state(registry, want) in _BEING_STAGED]
    free = {
        True: base + len(evictable(registry, asked, urgent=True)) - sum(coming),
        False: base + len(evictable(registry, asked, urgent=False)) - len(coming),
    }
    no_room = set[str]()
    for want in reversed(wants) if registry.listed is not None else ():
        # Fetched before the engine's adapters were listed, or before requests came.
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
        # Counted also for an adapter that is staged later: the next one needs another place.
        free[False] -= 1
        free[True] -= urgent
    registry.unplaced = frozenset(no_room)


def _has_slot(registry: Registry, now: float) -> bool:
    fetched = [entry for entry in registry.entries.values() if entry.state == "staging"]
    return len(fetched) < MOST_STAGING and sum(not slow(entry, now) for entry in fetched) < STAGING


def _full(registry: Registry) -> bool:
    """Whether the folder holds the files of all places, and one adapter more."""
    return len(registry.entries) > registry.places


def _give_way(registry: Registry, wants: list[MissingAdapter], out: list[str]) -> None:
    """Removes one staged adapter for an urgent one: a kept one that is not wanted, else one that nobody waits for."""
    wanted = {want.adapter.name for want in wants}
    kept = (name for name, e in registry.entries.items() if e.state in _BEING_STAGED and name not in wanted)
    later = (w.adapter.name for w in reversed(wants) if not w.asked and state(registry, w) in _BEING_STAGED)
    name = next(kept, None) or next(later, None)
    if name is not None:
        del registry.entries[name]
        out.append(name)
