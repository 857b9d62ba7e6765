"""What people and programs may write into a file, an object or a message: values made of good ones, and worse than any
that somebody would write on purpose. The same seed makes the same."""

import json
import random
from collections.abc import Sequence
from typing import Any

NUMBERS: Sequence[Any] = (
    0, -1, 1, 2, 7, -(2**31), 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**18, 10**30, 10**400, -(10**400),
    20_000_000_000, 1e308, -1e308, 1e-308, 5e-324, 0.1, -0.0, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
"""As JSON of Python has them: NaN and Infinity are no JSON, and readers take them."""
TEXTS: Sequence[str] = (
    "", " ", "\0", "a" * 300, "b" * 70_000, "9" * 4_000, "1e999999", "-1", "nan", "Infinity", "0x10", "1_000", "٣",
    "=1+1", "\ud800", "\u202e", "../../etc/passwd", "null", "{}", "[[[[", "1e1000000Ei", "true", "\r\n", "🎉" * 50,
    "2026-13-45T99:99:99Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "*", "a/b", "x" * 64,
)  # fmt: skip


def nested(depth: int, of: Any = 0) -> Any:
    value = of
    for _ in range(depth):
        value = [value]
    return value


def deep(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


class Mutants:
    """Values of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - the same seed makes the same

    def value(self) -> Any:
        """Anything."""
        pick = self.random.randrange(12)
        if pick < 5:
            return self.random.choice(NUMBERS)
        if pick < 8:
            return self.random.choice(TEXTS)
        return self.random.choice(
            [None, True, False, [], {}, [self.random.choice(NUMBERS)] * self.random.choice([1, 3, 2000]),
             {self.random.choice(TEXTS): self.random.choice(NUMBERS)}, nested(40), nested(400), deep(40), deep(400)]
        )  # fmt: skip

    def of(self, good: Any, changes: int | None = None) -> Any:
        """A copy in which one place or a few are another thing, gone, or there twice."""
        copy = json.loads(json.dumps(good))
        for _ in range(changes if changes is not None else self.random.choice([1, 1, 1, 2, 4])):
            copy = self._change(copy)
        return copy

    def _change(self, root: Any) -> Any:
        places = list(self._places(root))
        if not places or self.random.random() < 0.01:
            return self.value()
        holder, key = self.random.choice(places)
        if isinstance(holder, dict) and self.random.random() < 0.12:
            del holder[key]
        elif isinstance(holder, dict) and self.random.random() < 0.08:
            holder[self.random.choice(TEXTS)] = self.value()
        elif isinstance(holder, list) and len(holder) < 2_000 and self.random.random() < 0.12:
            holder[:] = holder * self.random.choice([0, 2, 50])
        else:
            holder[key] = self.value()
        return root

    def _places(self, node: Any) -> list[tuple[Any, Any]]:
        found: list[tuple[Any, Any]] = []
        waiting = [node]
        while waiting and len(found) < 2_000:
            here = waiting.pop()
            entries = here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list) else ()
            for key, child in entries:
                found.append((here, key))
                if isinstance(child, dict | list):
                    waiting.append(child)
        return found

    def bytes_of(self, good: bytes) -> bytes:
        """A copy with bytes flipped, cut or put in."""
        copy = bytearray(good)
        for _ in range(self.random.choice([1, 1, 2, 8])):
            at = self.random.randrange(len(copy) + 1)
            match self.random.randrange(4):
                case 0 if copy and at < len(copy):
                    copy[at] ^= 1 << self.random.randrange(8)
                case 1:
                    del copy[at:]
                case 2:
                    copy[at:at] = bytes(self.random.randrange(256) for _ in range(self.random.choice([1, 4, 64])))
                case _:
                    copy[at:at] = copy[max(0, at - 32) : at] * self.random.choice([1, 100])
        return bytes(copy)
