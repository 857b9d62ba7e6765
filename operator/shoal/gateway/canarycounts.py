"""How requests to canaries ended at this gateway: a part of the demand stream's messages (`api/demand.py`,
CanaryCount)."""

from collections.abc import Callable, Collection, Iterable

import orjson

from shoal.core.routing.canary import CanaryCounts


class CanaryCountState:
    """Counts by revision of the canary, since this process started. `due` is called when there is something for the
    next message."""

    def __init__(self, due: Callable[[], None] = lambda: None) -> None:
        self._due = due
        self._counts: dict[str, CanaryCounts] = {}
        self._changed: set[str] = set()

    def put(self, revision: str, counts: CanaryCounts) -> None:
        """A request to the canary has ended."""
        self._counts[revision] = counts
        self._note(revision)

    def retain(self, revisions: Collection[str]) -> None:
        """Drops the canaries that are not among these."""
        for revision in [at for at in self._counts if at not in revisions]:
            del self._counts[revision]
            self._note(revision)

    def take(self) -> bytes | None:
        """What changed since the last call, as JSON; None when nothing did."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, set()
        return self._encode(changed)

    def full(self) -> bytes | None:
        """Everything, as JSON; None when there is nothing."""
        return self._encode(self._counts) if self._counts else None

    def _note(self, revision: str) -> None:
        if revision not in self._changed:
            self._changed.add(revision)
            self._due()

    def _encode(self, revisions: Iterable[str]) -> bytes:
        counts = self._counts
        return orjson.dumps({at: counts[at]._asdict() if at in counts else None for at in revisions})
