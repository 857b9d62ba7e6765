"""vLLM's KV cache: blocks of so many tokens, whole ones shared by the hash of all tokens up to their end.

A block is free, held by running requests, or idle: cached, held by nobody, and the first to be given away when it was
used least recently. Block 0 holds nothing, so one block fewer is usable than the engine tells.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal_dev.sim.kv import BASE, Space


@dataclass(slots=True)
class Holding:
    """The blocks of one running request."""

    shared: list[int] = field(default_factory=list[int])
    """Hashes of its whole blocks that are in the cache, from the first token on."""
    own: int = 0
    """Blocks behind these that only this request has."""

    @property
    def blocks(self) -> int:
        return len(self.shared) + self.own


class BlockCache:
    """`blocks` blocks of `size` tokens."""

    def __init__(self, blocks: int, size: int, *, share: bool = True) -> None:
        self.blocks = blocks
        self.size = size
        self._share = share
        self._users: dict[int, int] = {}
        """How many requests hold a cached block, by its hash."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._own = 0

    @property
    def capacity(self) -> int:
        """Usable tokens."""
        return (self.blocks - 1) * self.size

    @property
    def used(self) -> int:
        """Tokens of the blocks that requests hold."""
        return (self._own + len(self._users) - len(self._idle)) * self.size

    @property
    def evictable(self) -> int:
        return len(self._idle) * self.size

    @property
    def free(self) -> int:
        """Tokens of blocks that hold nothing."""
        return self.capacity - self.used - self.evictable

    @property
    def available(self) -> int:
        """Blocks that a request can get."""
        return (self.free + self.evictable) // self.size

    def hashes(self, tokens: Sequence[int], space: Space) -> list[int]:
        """Of each whole block of these tokens."""
        found: list[int] = []
        last = hash(space)
        for at in range(0, len(tokens) - self.size + 1, self.size):
            last = hash((last, tuple(tokens[at : at + self.size])))
            found.append(last)
        return found

    def match(self, tokens: Sequence[int], space: Space = BASE) -> list[int]:
        """The longest cached beginning of a prompt; its last token is never part of it, since something has to be
        computed."""
        if not self._share:
            return []
        found: list[int] = []
        for key in self.hashes(tokens[:-1], space):
            if key not in self._users:
                break
            found.append(key)
        return found

    def admit(self, hits: list[int], tokens: int) -> Holding | None:
        """Blocks for a request of so many tokens that begins with `hits`. None, and nothing changes, if there are too
        few."""
        need = self._blocks(tokens) - len(hits)
        if need > self.available - sum(1 for key in hits if key in self._idle):
            return None
        for key in hits:
            self._hold(key)
        self._take(need)
        return Holding(list(hits), need)

    def grow(self, holding: Holding, tokens: int) -> bool:
        """Makes room for `tokens` tokens in all. False, and nothing changes, if there is none."""
        need = self._blocks(tokens) - holding.blocks
        if need <= 0:
            return True
        if need > self.available:
            return False
        self._take(need)
        holding.own += need
        return True

    def cache(self, holding: Holding, tokens: Sequence[int], space: Space = BASE) -> None:
        """Caches the whole blocks of `tokens`, which are computed."""
        if not self._share:
            return
        for key in self.hashes(tokens, space)[len(holding.shared) :]:
            if holding.own == 0:
                return
            holding.own -= 1
            self._own -= 1
            # Another request may have computed the same block: one of the two is free again.
            self._hold(key)
            holding.shared.append(key)

    def release(self, holding: Holding) -> None:
        """A request ends; what it cached stays until the room is needed, its end the shortest."""
        self._own -= holding.own
        for key in reversed(holding.shared):
            self._users[key] -= 1
            if self._users[key] == 0:
                self._idle[key] = None
        holding.shared, holding.own = [], 0

    def flush(self) -> None:
        """Forgets everything. Only while nothing runs."""
        self._users.clear()
        self._idle.clear()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def _hold(self, key: int) -> None:
        self._users[key] = self._users.get(key, 0) + 1
        self._idle.pop(key, None)

    def _take(self, blocks: int) -> None:
        while blocks * self.size > self.free:
            key, _ = self._idle.popitem(last=False)
            del self._users[key]
        self._own += blocks
