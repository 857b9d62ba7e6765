"""A Model's replicas in the order in which they are kept, and those that could be added in the order in which they are
filled."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat

from shoal.core.scaling.load import FleetLoad, live
from shoal.core.scaling.types import ModelSnapshot, Replica, ScalingVariant

ASSUMED_COLD_START = 120.0
"""Seconds, until a cold start was measured: weights on the node's disk, CUDA graphs captured anew."""
_HOPELESS = 3.0
"""Cold starts after which a replica that was never ready is no supply, while others serve."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A replica that exists or could be added."""

    gpu_class: str
    ready_in: float
    """Seconds until it serves: 0, or what is left of a cold start."""
    kv_tokens: int | None
    serves: bool = True
    """False: it is long overdue while other replicas serve."""
    load_known: bool = True
    """False: it is ready, and its load is unknown."""


@dataclass(frozen=True, slots=True)
class FleetCapacity:
    """Replicas of one Model. The last of `placed` go first: those never ready, then those of the most expensive
    class."""

    placed: tuple[Slot, ...]
    variants: tuple[ScalingVariant, ...]
    limit: int
    """Replicas at most."""
    cold_start: float
    """Seconds, of the class that is filled next."""
    kv_tokens: dict[str, int]
    """Of one replica, by class."""
    work_rates: dict[str, float]
    """Work per second of one replica at its limit, learned in earlier terms, by class."""
    least_work_rates: dict[str, float]
    """Work per second that one replica does at least, by class."""

    @property
    def ready(self) -> int:
        return sum(1 for slot in self.placed if slot.ready_in == 0)

    @property
    def next_class(self) -> str | None:
        """The class of the next replica; None: no class has capacity."""
        return next((v.gpu_class for v, count in _headrooms(self.variants, self.limit) if count > 0), None)

    @property
    def headroom(self) -> int | None:
        """Replicas that could be added now; None: unknown."""
        if any(v.headroom is None for v in self.variants):
            return None
        return sum(count for _, count in _headrooms(self.variants, self.limit))

    def slots(self) -> Iterator[Slot]:
        """Placed replicas, then those that could be added; beyond the capacity, as if the first class had more: the
        need is computed even where it cannot be met."""
        yield from self.placed
        for variant, count in _headrooms(self.variants, self.limit):
            yield from repeat(self._added(variant), count)
        if self.variants:
            yield from repeat(self._added(self.variants[0]))

    def _added(self, variant: ScalingVariant) -> Slot:
        return Slot(
            variant.gpu_class, variant.cold_start_seconds or ASSUMED_COLD_START, self.kv_tokens.get(variant.gpu_class)
        )

    def needed(self, amount: float, of: Callable[[Slot], float]) -> int:
        """The fewest replicas whose `of` sums to `amount`; `limit` if that many are not enough."""
        if amount <= 0:
            return 0
        count, total = 0, 0.0
        for slot in islice(self.slots(), self.limit):
            # Without this tolerance, rounding makes a sum that is exactly enough ask for one more.
            if total >= amount - 1e-9 * abs(amount):
                return count
            total += of(slot)
            count += 1
        return max(count, 1)


def fleet(snapshot: ModelSnapshot, load: FleetLoad, now: float) -> FleetCapacity:
    """The replicas of a Model: its pods, and those that Deployments ask for beyond the pods."""
    order = {v.gpu_class: i for i, v in enumerate(snapshot.variants)}
    kv_tokens = {v.gpu_class: v.kv_tokens for v in snapshot.variants if v.kv_tokens}
    kv_tokens |= load.kv_tokens
    if kv_tokens:
        middle = sum(kv_tokens.values()) // len(kv_tokens)
        kv_tokens |= {name: middle for name in order if name not in kv_tokens}
    cold = {v.gpu_class: v.cold_start_seconds or ASSUMED_COLD_START for v in snapshot.variants}
    existing = [r for r in snapshot.replicas if live(r)]
    load_unknown = {r.uid for r in load.load_unknown}
    serving = any(r.ready for r in existing)
    ranked: list[tuple[tuple[bool, int, float, bool, bool], Slot]] = []
    for replica in existing:
        start = cold.get(replica.gpu_class, ASSUMED_COLD_START)
        hopeless = serving and not replica.was_ready and now - replica.created > _HOPELESS * start
        slot = Slot(
            replica.gpu_class,
            _ready_in(replica, start, now),
            kv_tokens.get(replica.gpu_class),
            serves=not hopeless,
            load_known=replica.uid not in load_unknown,
        )
        never_ready = not (replica.ready or replica.was_ready)
        # The last two only decide between equals: the order in the store must not matter.
        rank = (never_ready, order.get(replica.gpu_class, len(order)), slot.ready_in, hopeless, not slot.load_known)
        ranked.append((rank, slot))
    for variant in snapshot.variants:
        missing = variant.replicas - sum(1 for r in existing if r.gpu_class == variant.gpu_class)
        start = cold[variant.gpu_class]
        slot = Slot(variant.gpu_class, start, kv_tokens.get(variant.gpu_class))
        ranked += [((True, order[variant.gpu_class], start, False, False), slot)] * max(0, missing)
    ranked.sort(key=lambda pair: pair[0])
    filled = next((v for v in snapshot.variants if v.headroom is None or v.headroom > 0), None)
    return FleetCapacity(
        placed=tuple(slot for _, slot in ranked),
        variants=snapshot.variants,
        limit=snapshot.policy.maximum,
        cold_start=cold[filled.gpu_class] if filled else max(cold.values(), default=ASSUMED_COLD_START),
        kv_tokens=kv_tokens,
        work_rates={v.gpu_class: v.work_rate for v in snapshot.variants if v.work_rate},
        least_work_rates={v.gpu_class: v.least_work_rate for v in snapshot.variants if v.least_work_rate},
    )


def _ready_in(replica: Replica, cold_start: float, now: float) -> float:
    if replica.ready:
        return 0.0
    left = cold_start - (now - replica.created)
    # Overdue, or the engine restarts: it still needs some time.
    return left if 0 < left <= cold_start else cold_start / 4 if left <= 0 else cold_start


def _headrooms(variants: Sequence[ScalingVariant], limit: int) -> Iterator[tuple[ScalingVariant, int]]:
    for variant in variants:
        headroom = limit if variant.headroom is None else max(0, variant.headroom)
        if variant.maximum is not None:
            headroom = min(headroom, max(0, variant.maximum - variant.replicas))
        yield variant, min(headroom, limit)
