"""How much of a node's free GPUs the demanded sizes cannot use, and what taking some of them does to that.

Fragmentation gradient descent (Weng et al., "Beware of Fragmentation", USENIX ATC 2023): put a replica where the
expected fragmentation grows least. Here a node has whole GPUs; what a size leaves over when it fills the node is
fragmented for that size as well, which the paper counts for shared GPUs only.
"""

from collections.abc import Mapping, Sequence


def fragmentation(free: int, sizes: Mapping[int, int]) -> int:
    """GPUs of `free` on one node that a replica cannot use, summed over sizes (GPUs -> weight)."""
    return sum(weight * (free % size if free >= size else free) for size, weight in sizes.items())


def table(largest: int, sizes: Mapping[int, int]) -> list[int]:
    """`fragmentation` of 0 to `largest` free GPUs."""
    return [fragmentation(free, sizes) for free in range(largest + 1)]


def best(choices: Sequence[int], gpus: int, fragments: Sequence[int]) -> int:
    """Of nodes with so many free GPUs, each at least `gpus`, the one to take: the least growth of fragmentation, then
    the tightest fit."""
    return min(choices, key=lambda free: (fragments[free - gpus] - fragments[free], free))
