"""What is known of devices whose slices are gone for now: a driver that is replaced takes them away and publishes them
again, node by node."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from shoal.core.devices.facts import DeviceId
from shoal.core.devices.match import ClassDevices, Matched

Selection = tuple[str, int | None]
"""uid and generation of a class: what it selected before says nothing of what it selects now."""


@dataclass(frozen=True, slots=True)
class KnownDevices:
    """Devices of one class, and their nodes."""

    selection: Selection
    devices: Mapping[DeviceId, tuple[str, Matched]]

    @property
    def matched(self) -> Iterable[Matched]:
        return (matched for _, matched in self.devices.values())


def last_known(
    before: Mapping[str, KnownDevices],
    found: Mapping[str, ClassDevices],
    selections: Mapping[str, Selection],
    published: Collection[tuple[str, str]],
    nodes: Collection[str],
) -> dict[str, KnownDevices]:
    """Class -> its devices, with those of `before` whose (driver, pool) is not `published` and whose node is still
    there. Without them the others would speak for the class: of an 80 GB and a 24 GB GPU that a class has, the small
    one decides what fits, also while its driver is replaced."""
    known: dict[str, KnownDevices] = {}
    for name, devices in found.items():
        last = before.get(name)
        same: Mapping[DeviceId, tuple[str, Matched]] = {}
        if last is not None and last.selection == selections[name]:
            same = last.devices
        kept = {
            id_: (node, matched)
            for id_, (node, matched) in same.items()
            if (id_.driver, id_.pool) not in published and node in nodes
        }
        for node, of in devices.by_node.items():
            kept.update((matched.id, (node, matched)) for matched in of)
        known[name] = KnownDevices(selections[name], kept)
    return known
