"""What a node cache gives up when it needs room: the least recently used of what no pod uses."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One model of the cache."""

    key: str
    blobs: Mapping[str, int]
    """Content -> bytes. Models may share contents."""
    last_used: float
    """Seconds of any clock."""
    pinned: bool
    """A pod uses it, or may be about to."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`short` is what would still be missing, in bytes; then nothing is evicted, because it would not help."""

    evict: tuple[str, ...]
    short: int = 0


def choose(candidates: Iterable[Candidate], missing: int) -> Choice:
    """Which models go, oldest use first, so that `missing` bytes come free."""
    if missing <= 0:
        return Choice(())
    known = sorted(candidates, key=lambda c: (c.last_used, c.key))
    held = {blob for c in known if c.pinned for blob in c.blobs}
    users = Counter(blob for c in known for blob in c.blobs)
    going: list[str] = []
    freed = 0
    for candidate in known:
        if freed >= missing:
            break
        if candidate.pinned or held.issuperset(candidate.blobs):
            continue
        going.append(candidate.key)
        for blob, size in candidate.blobs.items():
            users[blob] -= 1
            freed += size if users[blob] == 0 else 0
    return Choice(tuple(going)) if freed >= missing else Choice((), missing - freed)
