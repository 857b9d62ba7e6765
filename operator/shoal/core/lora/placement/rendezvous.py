"""Rendezvous hashing: all processes that know the same replicas choose the same one, without communication.

Each pair of an adapter and a replica has a score; an adapter belongs to the replica with the highest score. When a
replica goes, only its own adapters move, each to its second choice; a new replica takes its share and moves nothing
else (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998).
"""

import hashlib
from collections.abc import Collection
from functools import lru_cache

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15
_OTHER_ODD = 0xD6E8FEB86659FD93


@lru_cache(maxsize=1 << 16)
def digest(name: str) -> int:
    """64 bits of a name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def score(adapter: int, replica: int) -> int:
    """The score of an adapter at a replica, from their digests."""
    mixed = ((adapter ^ replica) * _ODD) & _MASK
    return ((mixed ^ (mixed >> 32)) * _OTHER_ODD) & _MASK


def best(key: str, replicas: Collection[str]) -> str | None:
    """The replica (uid of its pod) to which the adapter `namespace/name` belongs; None: there is no replica."""
    adapter = digest(key)
    return max(replicas, key=lambda uid: (score(adapter, digest(uid)), uid), default=None)
