"""What the operator knows of the cluster: one table per kind, fed by watches, lists and its own writes' answers.

Three sources can overtake each other, and resourceVersions are opaque. So every table counts its own changes: the
result of a list or a write is used unless the table got a change of that object after the call began. A deleted
object's uid never returns.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import structlog

from shoal.api.meta import JsonObject
from shoal.kube.resync import object_key

log = structlog.get_logger()

T = TypeVar("T")
Listener = Callable[[str, T | None, T | None], None]
"""(key, before, after); None is absent."""

_REMEMBERED_DEATHS: Final = 20_000


@dataclass(slots=True)
class _Entry(Generic[T]):
    value: T | None
    """None: known, but of no interest."""
    uid: str
    version: str
    generation: int
    sequence: int


class Table(Generic[T]):
    """All objects of one kind, projected. Values are immutable; a reader takes what it needs without awaiting."""

    def __init__(
        self, project: Callable[[JsonObject], T | None], *, indexes: Mapping[str, Callable[[T], Iterable[str]]] = {}
    ):
        self._project = project
        self._entries: dict[str, _Entry[T]] = {}
        self._dead: OrderedDict[str, None] = OrderedDict()
        self._sequence = 0
        self._indexers = dict(indexes)
        self._indexes: dict[str, dict[str, dict[str, T]]] = {name: {} for name in indexes}
        self.listeners: list[Listener[T]] = []
        self.revision = 0
        """Grows with every change of a value."""

    # --- reading ----------------------------------------------------------------------------------------------------

    def get(self, key: str) -> T | None:
        entry = self._entries.get(key)
        return entry.value if entry else None

    def values(self) -> Iterator[T]:
        return (e.value for e in self._entries.values() if e.value is not None)

    def items(self) -> Iterator[tuple[str, T]]:
        return ((k, e.value) for k, e in self._entries.items() if e.value is not None)

    def known_keys(self) -> list[str]:
        return [key for key, _ in self.items()]

    def by(self, index: str, value: str) -> tuple[T, ...]:
        """Values that the index lists under this word."""
        return tuple(self._indexes[index].get(value, {}).values())

    def __len__(self) -> int:
        return sum(1 for _ in self.values())

    # --- feeding ----------------------------------------------------------------------------------------------------

    def mark(self) -> int:
        """Take it before a call; hand it in with what the call brought."""
        return self._sequence

    def upsert(self, raw: JsonObject, *, since: int | None = None) -> None:
        """Stores an object from a watch, or (with `since`) from a call that began then."""
        key, metadata = object_key(raw), raw["metadata"]
        uid, version = str(metadata.get("uid", "")), str(metadata.get("resourceVersion", ""))
        generation = int(metadata.get("generation") or 0)
        if uid in self._dead:
            return
        entry = self._entries.get(key)
        if entry is not None and entry.uid == uid:
            if entry.version == version:
                return
            if since is not None and entry.sequence > since:
                return
            if generation < entry.generation:  # a watch that runs behind our own write's answer
                return
        elif entry is not None:
            if since is not None and entry.sequence > since:
                return
            self._bury(entry.uid)
        try:
            value = self._project(raw)
        except Exception as error:
            # One object that cannot be read must not blind us to the others.
            log.warning("object cannot be read", key=key, kind=raw.get("kind"), error=str(error))
            value = None
        self._sequence += 1
        before = entry.value if entry else None
        self._entries[key] = _Entry(value, uid, version, generation, self._sequence)
        self._changed(key, before, value)

    def amend(self, key: str, uid: str, change: Callable[[T], T]) -> None:
        """What is known of an object is something else, though the object has not changed."""
        entry = self._entries.get(key)
        if entry is None or entry.uid != uid or entry.value is None:
            return
        before, entry.value = entry.value, change(entry.value)
        self._sequence += 1
        entry.sequence = self._sequence
        self._changed(key, before, entry.value)

    def remove(self, key: str, uid: str | None = None) -> None:
        """An object that is gone. With a uid: only if it is still that one."""
        entry = self._entries.get(key)
        if uid:
            self._bury(uid)
        if entry is None or (uid and entry.uid != uid):
            return
        self._bury(entry.uid)
        self._sequence += 1
        del self._entries[key]
        self._changed(key, entry.value, None)

    def absent(self, seen: set[str], *, since: int) -> int:
        """After a complete list that began at `since`: removes what it did not have. Returns how many."""
        gone = [key for key, entry in self._entries.items() if key not in seen and entry.sequence <= since]
        for key in gone:
            self.remove(key)
        return len(gone)

    def _bury(self, uid: str) -> None:
        if uid:
            self._dead[uid] = None
            while len(self._dead) > _REMEMBERED_DEATHS:
                self._dead.popitem(last=False)

    def _changed(self, key: str, before: T | None, after: T | None) -> None:
        if before == after:
            return
        self.revision += 1
        for name, indexer in self._indexers.items():
            index = self._indexes[name]
            for word in _index_values(indexer, before, key, name):
                listed = index.get(word, {})
                listed.pop(key, None)
                if not listed:
                    index.pop(word, None)
            for word in _index_values(indexer, after, key, name):
                index.setdefault(word, {})[key] = after  # pyright: ignore[reportArgumentType]
        for listener in self.listeners:
            try:
                listener(key, before, after)
            except Exception:
                # A listener that fails must not keep the change, or the rest of a list, from the others.
                log.exception("a listener failed on a change", key=key)


def _index_values(indexer: Callable[[T], Iterable[str]], value: T | None, key: str, index: str) -> tuple[str, ...]:
    try:
        return tuple(indexer(value)) if value is not None else ()
    except Exception:
        log.exception("object is not listed in an index", key=key, index=index)
        return ()


AnyTable = Table[Any]
