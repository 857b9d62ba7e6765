"""On which GPU classes a Model runs, and how many replicas on each.

What runs stays: a variant is left only when its class is gone or no longer listed. The rest fills the candidates in
order, as far as GPUs are free: the classes as listed, or, where none is listed, all of them, cheapest first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from shoal.api import reasons
from shoal.api.gpuclass import GPUClass
from shoal.core import quantity
from shoal.core.gpus import Usage
from shoal.core.placement.types import Excluded, Placement, VariantPlan


@dataclass(frozen=True, slots=True)
class Offer:
    """One class as a placement sees it."""

    name: str
    hourly_cost: Decimal | None
    """Of one GPU."""
    usage: Usage
    promised: int = 0
    """GPUs promised to replicas of other Models that no node holds yet."""

    def fits(self, gpus: int) -> int:
        """Replicas that still fit beside what was promised. Which nodes the promised ones take is not known yet, so
        the promise counts against whole replicas."""
        promised_replicas = -(-self.promised // gpus)
        return max(0, min(self.usage.fits(gpus) - promised_replicas, (sum(self.usage.free) - self.promised) // gpus))


def offer(gpu_class: GPUClass, usage: Usage, promised: int = 0) -> Offer:
    cost = gpu_class.spec.hourly_cost
    return Offer(gpu_class.metadata.name, quantity.parse(cost.amount) if cost else None, usage, promised)


def place(
    *,
    wanted: int,
    gpus: int,
    listed: Sequence[str],
    offers: Mapping[str, Offer],
    current: Mapping[str, int],
) -> Placement:
    """Places `wanted` replicas of `gpus` GPUs each.

    `listed` are the Model's own classes (empty: all), `current` is what stands in the cluster now: class -> replicas.
    Classes that are listed but not offered are left out; whether that is an error is not decided here.
    """
    order = [c for c in listed if c in offers] if listed else _cheapest(offers, gpus)
    if not order:
        return Placement((), (), wanted, reasons.NO_CLASS, "there is no GPUClass: create one for your GPU nodes")

    replicas: dict[str, int] = {}
    left = wanted
    for name in order:
        keep = min(current.get(name, 0), left)
        replicas[name] = keep
        left -= keep
    for name in order:
        more = min(offers[name].fits(gpus), left)
        replicas[name] += more
        left -= more

    # A listed class keeps its (empty) Deployment, so that a later replica there is a matter of a number.
    variants = tuple(
        VariantPlan(name, replicas[name], gpus, _cost(offers[name], replicas[name] * gpus))
        for name in order
        if replicas[name] or (listed and name in current)
    )
    used = {v.gpu_class for v in variants}
    full = [name for name in order if name not in used]
    excluded = tuple(Excluded(name, _room(offers[name], gpus)) for name in full) if left or listed else ()
    placed = ", ".join(f"{v.replicas} on {v.gpu_class}" for v in variants if v.replicas)
    if not left:
        return Placement(variants, excluded, 0, reasons.PLACED_ON, f"{placed}, {_gpus(gpus)} each")
    where = "; ".join(f"{name}: {_room(offers[name], gpus)}" for name in order)
    missing = f"no room for {left} of {wanted} replicas" if placed else "no room for a replica"
    message = f"{missing} of {_gpus(gpus)}: {where}" + (f"; placed: {placed}" if placed else "")
    return Placement(variants, excluded, left, reasons.NO_CAPACITY, message)


def _cheapest(offers: Mapping[str, Offer], gpus: int) -> list[str]:
    """Known prices first, the lowest first; then by name, so that the answer never depends on the order of events."""

    def price(name: str) -> tuple[bool, Decimal, str]:
        cost = offers[name].hourly_cost
        return (cost is None, (cost or Decimal(0)) * gpus, name)

    return sorted(offers, key=price)


def _cost(offer: Offer, gpus: int) -> str | None:
    return None if offer.hourly_cost is None else quantity.money(offer.hourly_cost * gpus)


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _room(offer: Offer, gpus: int) -> str:
    usage = offer.usage
    if not usage.nodes:
        return "no node has the class's labels"
    if not usage.capacity:
        return f"its {usage.nodes} node(s) have none of the resource"
    free = sum(usage.free)
    text = f"{free} of {usage.capacity} GPUs free"
    if free and usage.largest < gpus:
        text += f", at most {usage.largest} on one node"
    if offer.promised:
        text += f", {offer.promised} promised to replicas that are starting"
    if usage.allocatable < usage.capacity:
        text += f", {usage.capacity - usage.allocatable} on nodes that take no pods"
    return text
