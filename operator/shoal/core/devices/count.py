"""What each node offers of a class's devices: those without a taint that no other pod has.

A device of which several claims may have a part is no whole GPU, and never counts.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from shoal.core.devices.facts import DeviceId
from shoal.core.devices.match import ClassDevices, Matched
from shoal.core.devices.pools import DevicePool

MOST_DEVICES: Final = 4096
"""Of one class on one node: placement has tables of that size."""


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """Devices of one class on one node."""

    capacity: int
    offered: int
    """Those that Shoal's pods have or could have: without a taint, and without those that claims of others have."""
    taken: int
    """Those that claims of others have."""
    shared: int = 0
    """Devices that engine pods of the class have and that do not count, since several claims may have parts of them.
    The scheduler gives one out where the selectors of the class leave it in."""


Counters = Mapping[tuple[str, str], Decimal]


def offered(
    devices: ClassDevices,
    pools: Sequence[DevicePool],
    allocated: Set[DeviceId],
    own: Set[DeviceId],
    out: Set[str] = frozenset(),
) -> dict[str, NodeDevices]:
    """Node -> its devices of a class. `allocated`: devices that claims have; `own`: those among them that engine pods
    of this class have, which stay offered whatever taint they got; `out`: names of devices that are out of use.

    Devices of one pool may share counters, as a GPU and its partitions do: those that fit together are counted. Devices
    of which several claims may have a part are not.
    """
    shared = {(pool.driver, pool.name): pool for pool in pools if pool.counters}
    found: dict[str, NodeDevices] = {}
    for node, every in devices.by_node.items():
        of = [m for m in every if not m.device.shared]
        given = 0 if len(of) == len(every) else sum(m.device.shared and m.id in own for m in every)
        if not shared:  # nearly always: each device stands for itself
            found[node] = _each(of, allocated, own, out, given)
            continue
        used = _Counters(shared, {m.id for m in of})
        fresh = _Counters(shared, {m.id for m in of})
        used.take_all(allocated)
        have = [m for m in of if m.id in own]
        free = [m for m in of if m.id not in allocated and m.device.offered and str(m.id) not in out]
        found[node] = NodeDevices(
            capacity=min(MOST_DEVICES, fresh.fit(of)),
            offered=min(MOST_DEVICES, len(have) + used.fit(free)),
            taken=min(MOST_DEVICES, sum(m.id in allocated and m.id not in own for m in of)),
            shared=given,
        )
    return found


def _each(
    of: Sequence[Matched], allocated: Set[DeviceId], own: Set[DeviceId], out: Set[str], shared: int
) -> NodeDevices:
    free = mine = taken = 0
    for matched in of:
        if matched.id not in allocated:
            free += matched.device.offered and (not out or str(matched.id) not in out)
        elif matched.id in own:
            mine += 1
        else:
            taken += 1
    return NodeDevices(min(MOST_DEVICES, len(of)), min(MOST_DEVICES, free + mine), min(MOST_DEVICES, taken), shared)


class _Counters:
    """What is left of the counters of the pools that these devices are of."""

    def __init__(self, shared: Mapping[tuple[str, str], DevicePool], of: Iterable[DeviceId]) -> None:
        keys = {(each.driver, each.pool) for each in of}
        self._pools = {key: pool for key, pool in shared.items() if key in keys}
        self._left = {key: dict(pool.counters) for key, pool in self._pools.items()}

    def take_all(self, allocated: Set[DeviceId]) -> None:
        """Whatever class these devices are of."""
        for (driver, name), pool in self._pools.items():
            for _, device in pool.devices:
                if DeviceId(driver, name, device.name) in allocated:
                    self._take((driver, name), device.counters)

    def fit(self, devices: Iterable[Matched]) -> int:
        """How many of the devices can be had together, in their order."""
        count = 0
        for matched in devices:
            key, wanted = (matched.id.driver, matched.id.pool), matched.device.counters
            left = self._left.get(key)
            if left is not None and any(left.get(c, Decimal(0)) < amount for c, amount in wanted.items()):
                continue
            self._take(key, wanted)
            count += 1
        return count

    def _take(self, pool: tuple[str, str], wanted: Counters) -> None:
        left = self._left.get(pool)
        if left is not None:
            for counter, amount in wanted.items():
                left[counter] = left.get(counter, Decimal(0)) - amount
