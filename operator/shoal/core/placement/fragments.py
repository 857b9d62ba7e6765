"""Fragmentation: how many of a node's free GPUs the demanded sizes cannot use, and how taking some of them changes it.

Fragmentation gradient descent (Weng et al., "Beware of Fragmentation", USENIX ATC 2023): put a replica where the
expected fragmentation grows least. Amounts are thousandths of a GPU, so that shared GPUs can be compared as well;
Shoal's own replicas take whole ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

WHOLE: Final = 1000
"""Thousandths of one GPU."""
SAME: Final = 20
"""Thousandths of a GPU: growths that differ by less count as equal, and the tightest fit decides. Smaller differences
of an expectation are noise: comparing them allocates 0.3 % fewer GPUs on the trace of `bench_packing`."""


@dataclass(frozen=True, slots=True)
class Size:
    """What one replica takes of a node: `gpus` GPUs, `share` thousandths of each."""

    gpus: int
    share: int = WHOLE


def lost(free: Sequence[int], size: Size) -> int:
    """Thousandths of the free GPUs (one entry each) that replicas of one size cannot use.

    All where the size does not fit; else, as in the paper, what is free on GPUs that have less than `share` left.
    Unlike the paper also what is left once the node is filled with this size: whole GPUs too few for one more replica,
    or the rest of a shared GPU.
    """
    usable = [amount for amount in free if amount >= size.share]
    if len(usable) < size.gpus or not size.gpus:
        return sum(free)
    over = size.share * (len(usable) % size.gpus)
    if size.share < WHOLE:
        over = sum(amount % size.share for amount in usable)
    return sum(free) - sum(usable) + over


def fragmentation(free: Sequence[int], sizes: Mapping[Size, float]) -> float:
    """Thousandths of a node's free GPUs that are lost, weighted over all sizes."""
    return sum(weight * lost(free, size) for size, weight in sizes.items())


def growth(before: float, after: float) -> int:
    """How much fragmentation grows, in steps of SAME. Weights of both arguments sum to one."""
    return round((after - before) / SAME)


def table(largest: int, sizes: Mapping[int, int]) -> list[float]:
    """`fragmentation` of a node with 0 to `largest` free whole GPUs; `sizes`: GPUs of a replica -> replicas wanted."""
    total = sum(sizes.values()) or 1
    mix = {Size(gpus): count / total for gpus, count in sizes.items()}
    return [fragmentation([WHOLE] * free, mix) for free in range(largest + 1)]


def best(choices: Sequence[int], gpus: int, fragments: Sequence[float]) -> int:
    """The node to take, of nodes with `choices` free GPUs, each at least `gpus`: least growth of fragmentation, then
    the tightest fit."""
    return min(choices, key=lambda free: (growth(fragments[free], fragments[free - gpus]), free))
