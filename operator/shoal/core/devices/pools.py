"""The devices that count: of each pool the newest generation of which every slice is there.

A driver that replaces what it publishes writes the slices of a new generation one by one. Until the last one is there,
the generation before counts, as long as it is complete itself. The scheduler allocates nothing of the pool meanwhile.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal

from shoal.core.devices.facts import Device, Slice


@dataclass(frozen=True, slots=True)
class DevicePool:
    """A pool of one driver, complete."""

    driver: str
    name: str
    slices: tuple[Slice, ...]
    updating: bool = False
    """A newer generation is being published."""

    @property
    def devices(self) -> tuple[tuple[Slice, Device], ...]:
        return tuple((each, device) for each in self.slices for device in each.devices)

    @property
    def counters(self) -> Mapping[tuple[str, str], Decimal]:
        """What devices of the pool share."""
        return {key: amount for each in self.slices for key, amount in each.counters.items()}


def current(slices: Iterable[Slice]) -> tuple[tuple[DevicePool, ...], tuple[tuple[str, str], ...]]:
    """The pools that count, and (driver, pool) of those of which no generation is complete, or two devices have one
    name. Both are ordered."""
    grouped: dict[tuple[str, str], dict[int, list[Slice]]] = {}
    for each in slices:
        grouped.setdefault((each.driver, each.pool), {}).setdefault(each.generation, []).append(each)
    pools: list[DevicePool] = []
    incomplete: list[tuple[str, str]] = []
    for (driver, name), generations in sorted(grouped.items()):
        newest = max(generations)
        whole = [g for g, of in generations.items() if len(of) == of[0].slices_of_pool]
        chosen = generations[max(whole)] if whole else []
        names = [device.name for each in chosen for device in each.devices]
        if not chosen or len(set(names)) != len(names):
            incomplete.append((driver, name))
            continue
        ordered = tuple(sorted(chosen, key=lambda each: each.name))
        pools.append(DevicePool(driver, name, ordered, updating=ordered[0].generation != newest))
    return tuple(pools), tuple(incomplete)
