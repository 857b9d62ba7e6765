"""The GPU slots of adapters: which can run in one batch, and what copying them there costs.

A slot is taken when a batch needs the adapter, and given to another, the least recently used first, when a batch needs
that one. The base model takes a slot as well. No clock, no I/O.
"""

from collections import OrderedDict
from collections.abc import Set
from typing import Final

COPY_BYTES_PER_SECOND: Final = 25e9
"""From host memory to a GPU: PCIe 4 with 16 lanes, as measured on it, not as printed on it."""


class Slots:
    """`total` slots and what is in them; adapters are named by the id of their load, the base by None."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._sizes: dict[str, int] = {}
        self._pinned: set[str] = set()
        self._resident: OrderedDict[str | None, None] = OrderedDict()

    @property
    def pinned(self) -> int:
        return len(self._pinned)

    def resident(self) -> frozenset[str | None]:
        """What is in a slot."""
        return frozenset(self._resident)

    def add(self, adapter: str, size: int, *, pinned: bool) -> None:
        """An adapter of `size` bytes was loaded into host memory."""
        self._sizes[adapter] = size
        if pinned:
            self._pinned.add(adapter)

    def remove(self, adapter: str) -> None:
        self._sizes.pop(adapter, None)
        self._pinned.discard(adapter)
        self._resident.pop(adapter, None)

    def fit(self, batch: Set[str | None]) -> bool:
        """Whether these can run in one batch: pinned adapters keep their slots when they are not in it."""
        if len(batch) > self.total:
            return False
        return len(batch - self._pinned) <= self.total - len(self._pinned) or not self._pinned

    def prepare(self, batch: Set[str | None]) -> float:
        """Puts a batch's adapters into slots; seconds of copying."""
        seconds = 0.0
        for adapter in sorted(batch, key=lambda a: (a is not None, a or "")):
            if adapter not in self._resident:
                if len(self._resident) >= self.total:
                    self._evict(batch)
                seconds += self._sizes.get(adapter, 0) / COPY_BYTES_PER_SECOND if adapter is not None else 0.0
                self._resident[adapter] = None
            self._resident.move_to_end(adapter)
        return seconds

    def _evict(self, batch: Set[str | None]) -> None:
        candidates = [a for a in self._resident if a not in batch and a not in self._pinned]
        # The base goes last, whenever it was used.
        victim = next((a for a in candidates if a is not None), None)
        if candidates:
            del self._resident[victim]
