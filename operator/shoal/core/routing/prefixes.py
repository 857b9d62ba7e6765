"""Which beginnings of prompts each replica has in its prefix cache, by what the gateways sent there.

A prompt is known by its marks (core/advice/marks.py): checksums of its beginnings, of Model, adapter and the tenant's
space. A gateway records the marks of what it sends to a replica, and of what the other gateways say that they sent
(api/prefixes.py). The longest mark that a replica has is what it need not compute again.

Engines forget what was used longest ago, and so does the index: the marks of a replica cover as many tokens as its KV
cache has. The prompts that run there are among them, and several requests use the space of a common beginning once. No
engine is asked: where an engine forgot sooner, its `cached_tokens` lower the trust in this knowledge (reuse.py).

A full cache evicts something for each prompt that it does not have. The index knows what that costs later: it remembers
what a replica evicted after it had been used again, and how much of that was sent there once more.
"""

import sys
from array import array
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shoal.api.traffic import AFTER_ANSWER
from shoal.core.hold.capacity import BYTES_PER_TOKEN

CACHE_SHARE: Final = 0.8
"""Of the KV cache. The index does not see all that engines keep, such as answers that run, and the end of an answer
that nobody continues."""
PRIOR_TOKENS: Final = 100_000
"""What a replica is believed to keep while its report does not say it."""
MOST_MARKS: Final = 8192
"""Of one replica."""
MOST_OF_ALL: Final = 1 << 17
"""Of all replicas: 45 MiB."""
MOST_EVICTED: Final = 512
"""Marks that are remembered as evicted, of one replica."""
MOST_EVICTED_OF_ALL: Final = 1 << 14
"""Of all replicas: 2 MiB."""
MOST_RETURNED: Final = 0.8
"""What is computed again evicts in its turn, of which a part comes back, and so on. That series grows without bound
as the share that comes back nears 1; no more of it than this is believed."""
LEAST_EVICTED: Final = 0.1
"""Of a replica's cache: until it has evicted so much that had been used again, little is known of what comes back."""

Points = Sequence[int]
"""Marks of one prompt in the order of their lengths, as numbers of 64 bits: the lower half is the checksum, the upper
half the characters, with `AFTER_ANSWER`."""
_AFTER: Final = AFTER_ANSWER << 32
_NOTHING: Final[Mapping[int, int]] = {}


def points_of(marks: bytes | None) -> Points:
    """The marks of a prompt (`core/advice/marks.py`) as points."""
    if not marks:
        return ()
    if sys.byteorder == "big":
        halves = array("I", marks)
        return [halves[at] | halves[at + 1] << 32 for at in range(0, len(halves), 2)]
    return array("Q", marks)


def marks_of(points: Points) -> bytes:
    """The other way round."""
    if sys.byteorder == "big":
        return array("I", [half for point in points for half in (point & 0xFFFFFFFF, point >> 32)]).tobytes()
    return array("Q", points).tobytes()


def tokens_of(point: int) -> int:
    """Up to the point, estimated from characters."""
    return (point >> 32 & AFTER_ANSWER - 1) // BYTES_PER_TOKEN


@dataclass(slots=True)
class _Evicted:
    """What one replica evicted although it had been used again, as far back as one cache full. Tokens."""

    points: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])
    tokens: int = 0
    """Of the points."""
    total: float = 0.0
    """Evicted lately."""
    returned: float = 0.0
    """Of these: sent to the replica again, so that they had to be computed again."""

    def put(self, point: int, size: int, most: int) -> None:
        self.points[point] = size
        self.tokens += size
        self.total += size
        if self.total > 2 * most:
            self.total /= 2
            self.returned /= 2

    def take(self, point: int) -> bool:
        """Whether the point had been evicted."""
        size = self.points.pop(point, None)
        if size is None:
            return False
        self.tokens -= size
        self.returned += size
        return True

    def drop_oldest(self) -> None:
        self.tokens -= self.points.popitem(last=False)[1]

    def cost(self, most: int) -> float:
        """Tokens that will be computed again for each token that is evicted."""
        share = min(MOST_RETURNED, self.returned / max(self.total, LEAST_EVICTED * most, 1.0))
        return share / (1.0 - share)


class PrefixIndex:
    """By uid of a replica's pod."""

    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[int, int]] = {}
        """Points, and the tokens since the point before, negative of a point that was used again; the one used longest
        ago comes first."""
        self._tokens: dict[str, int] = {}
        self._most: dict[str, int] = {}
        """Tokens that a replica keeps."""
        self._places: dict[int, dict[str, None]] = {}
        """Replicas by point."""
        self._count = 0
        self._evicted: dict[str, _Evicted] = {}
        self._evicted_count = 0

    def reported(self, uid: str, kv_total: int) -> None:
        """The replica's agent said how many tokens the KV cache has; here as they are estimated from characters."""
        self._most[uid] = int(CACHE_SHARE * kv_total)
        if uid in self._held:
            self._shrink(uid)

    def sent(self, uid: str, points: Points) -> None:
        """A prompt with these points was sent to the replica."""
        if not points:
            return
        held = self._held.get(uid)
        if held is None:
            held = self._held[uid] = OrderedDict()
            self._tokens[uid] = 0
        places, added, last, before = self._places, 0, len(points) - 1, self._count
        evicted = self._evicted.get(uid)
        # The beginning is the youngest: engines forget the end of a prompt first.
        for at in range(last, -1, -1):
            point = points[at]
            if point in held:
                held.move_to_end(point)
                if (size := held[point]) > 0:
                    held[point] = -size
                continue
            size = max(0, tokens_of(point) - (tokens_of(points[at - 1]) if at else 0))
            if evicted is not None and evicted.take(point):
                self._evicted_count -= 1
                held[point] = -size
            else:
                held[point] = size
            added += size
            self._count += 1
            there = places.get(point)
            if there is None:
                places[point] = {uid: None}
            else:
                there[uid] = None
        if self._count == before:
            return  # the replica has the prompt already
        self._tokens[uid] += added
        self._shrink(uid)

    def held(self, points: Points) -> dict[str, int]:
        """How many tokens of a prompt each replica has, by uid. Of a replica that is absent nothing is known."""
        found: dict[str, int] = {}
        places, behind = self._places, 0
        for at in range(len(points) - 1, -1, -1):
            point = points[at]
            there = places.get(point)
            if there is not None:
                tokens = behind or tokens_of(point)
                for uid in there:
                    if uid not in found:
                        found[uid] = tokens
            # The replica that has the prompt of an answer has the answer too, although no request had its checksum yet.
            behind = tokens_of(point) if point & _AFTER else 0
        return found

    def held_by(self, uid: str, points: Points) -> int:
        """How many tokens of a prompt one replica has."""
        held, behind = self._held.get(uid, _NOTHING), 0
        for at in range(len(points) - 1, -1, -1):
            if points[at] in held:
                return behind or tokens_of(points[at])
            behind = tokens_of(points[at]) if points[at] & _AFTER else 0
        return 0

    def forget(self, uid: str) -> None:
        """The replica's cache is empty, or the replica is gone."""
        held = self._held.pop(uid, None)
        self._tokens.pop(uid, None)
        self._most.pop(uid, None)
        if (evicted := self._evicted.pop(uid, None)) is not None:
            self._evicted_count -= len(evicted.points)
        for point in held or ():
            self._leave(uid, point)

    def keep(self, uids: Container[str]) -> None:
        """Forgets replicas that are gone."""
        for uid in [uid for uid in {*self._held, *self._most} if uid not in uids]:
            self.forget(uid)

    def eviction_cost(self, uid: str) -> float | None:
        """Tokens that the replica will have to compute again for each token that it computes now, because something
        else is evicted for it. None: it has not evicted anything that had been used again."""
        evicted = self._evicted.get(uid)
        return None if evicted is None else evicted.cost(self._most.get(uid, PRIOR_TOKENS))

    def tokens(self, uid: str) -> int:
        """Tokens that the points of a replica cover."""
        return self._tokens.get(uid, 0)

    def __len__(self) -> int:
        return self._count

    def _shrink(self, uid: str) -> None:
        held, most = self._held[uid], self._most.get(uid, PRIOR_TOKENS)
        while held and self._tokens[uid] > most:
            point, size = self._drop_oldest(uid)
            if size < 0:
                self._remember(uid, point, -size)
        while len(held) > MOST_MARKS:
            self._drop_oldest(uid)
        while self._count > MOST_OF_ALL:
            share = len(held) * len(self._held) >= self._count
            self._drop_oldest(uid if share else max(self._held, key=lambda each: len(self._held[each])))

    def _drop_oldest(self, uid: str) -> tuple[int, int]:
        point, size = self._held[uid].popitem(last=False)
        self._tokens[uid] -= abs(size)
        self._leave(uid, point)
        return point, size

    def _remember(self, uid: str, point: int, size: int) -> None:
        """The replica evicts a point that was used again."""
        evicted, most = self._evicted.get(uid), self._most.get(uid, PRIOR_TOKENS)
        if evicted is None:
            evicted = self._evicted[uid] = _Evicted()
        evicted.put(point, size, most)
        self._evicted_count += 1
        while evicted.points and (
            evicted.tokens > most or len(evicted.points) > MOST_EVICTED or self._evicted_count > MOST_EVICTED_OF_ALL
        ):
            evicted.drop_oldest()
            self._evicted_count -= 1

    def _leave(self, uid: str, point: int) -> None:
        self._count -= 1
        there = self._places[point]
        del there[uid]
        if not there:
            del self._places[point]
