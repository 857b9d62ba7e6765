"""A replica's prefix cache as a replay models it: beginnings of prompts by least recent use.

Each entry is the part of a prompt between two of its marks, as a child of the part before it. Whatever is used makes
all that it begins with younger, so that ends go before beginnings, as in an engine's radix tree."""

from collections import OrderedDict
from collections.abc import Sequence

from shoal.core.advice.facts import PromptMark


class ReplayedCache:
    def __init__(self) -> None:
        self._parts: OrderedDict[int, tuple[int, int | None]] = OrderedDict()
        """By key of the mark at its end: tokens of the part, and the key of the part before."""
        self.tokens = 0

    def find(self, marks: Sequence[PromptMark]) -> int:
        """Tokens of a prompt that are there."""
        parts = self._parts
        for mark in reversed(marks):
            if mark.key in parts:
                return mark.tokens
        return 0

    def keep(self, marks: Sequence[PromptMark], most: int | None = None) -> None:
        """Adds a prompt. `most`: tokens that fit; None: everything does."""
        if not marks:
            return
        parts = self._parts
        known = len(marks) - 1
        while known >= 0 and marks[known].key not in parts:
            known -= 1
        before = marks[known] if known >= 0 else None
        for mark in marks[known + 1 :]:
            size = max(0, mark.tokens - (before.tokens if before is not None else 0))
            parts[mark.key] = (size, None if before is None else before.key)
            self.tokens += size
            before = mark
        key: int | None = marks[-1].key
        while key is not None and (part := parts.get(key)) is not None:
            parts.move_to_end(key)
            key = part[1]
        if most is not None:
            self.shrink(most)

    def shrink(self, most: int) -> None:
        """Drops what was used longest ago, down to so many tokens."""
        while self.tokens > most and self._parts:
            _, (size, _) = self._parts.popitem(last=False)
            self.tokens -= size
