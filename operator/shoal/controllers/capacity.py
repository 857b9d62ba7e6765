"""GPU counts kept up to date event by event: no reconcile walks over all pods of a cluster."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from shoal.api.gpuclass import GPUClass
from shoal.controllers.devices import FleetDevices
from shoal.controllers.world import World
from shoal.core import candidates, facts
from shoal.core.gpus import Usage, held_by_node, usage
from shoal.core.health import Unit
from shoal.core.placement import ClassSupply
from shoal.core.sizing import GPU
from shoal.core.status.healthstatus import out_of_use

Held = dict[tuple[str, str], int]
"""(node, resource) -> GPUs."""


class FleetGPUs:
    """Which nodes each class has, what they offer, and what pods hold of it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.devices = FleetDevices(world)
        self._held: Held = {}
        self._releasing: Held = {}
        """Of `_held`: what terminating pods hold."""
        self._usage: dict[str, tuple[tuple[int, int], GPUClass, Usage]] = {}
        self._revision = 0
        self._slots: tuple[tuple[int, int], dict[tuple[str, int], int]] = ((-1, -1), {})
        self._members: tuple[tuple[int, int, int], dict[str, tuple[facts.Node, ...]]] | None = None
        self._in_use: tuple[Mapping[str, tuple[facts.Node, ...]], Mapping[str, tuple[facts.Node, ...]]] | None = None
        self.changed: list[Callable[[], None]] = []

    def members(self) -> Mapping[str, tuple[facts.Node, ...]]:
        """class -> its nodes; a node that several classes select counts for the first by name. A node whose GPUs are
        out of use takes no pods, and one of whose GPUs some are out of use offers as many fewer."""
        found = self.all_members()
        if self._in_use is None or self._in_use[0] is not found:
            accepted = self._world.accepted_classes()
            out = {name: units for name in found if (c := accepted.get(name)) and (units := out_of_use(c))}
            left = {name: _without(found[name], accepted[name], units) for name, units in out.items()}
            self._in_use = (found, {**found, **left})
        return self._in_use[1]

    def all_members(self) -> Mapping[str, tuple[facts.Node, ...]]:
        """class -> its nodes, whether or not their GPUs are out of use."""
        world = self._world
        with_devices = self.devices.used
        now = (world.nodes.revision, world.classes.revision, self._revision if with_devices else 0)
        if self._members is None or self._members[0] != now:
            given = world.accepted_classes().values(), world.nodes.values()
            if with_devices:
                found = candidates.members(*given, self.devices.offers(self._revision, self._held)[0])
            else:
                found = candidates.members(*given)
            self._members = (now, found)
        return self._members[1]

    def _all_held(self) -> Mapping[tuple[str, str], int]:
        """What pods hold, and the devices that claims of others have."""
        if not self.devices.used:
            return self._held
        others = self.devices.offers(self._revision, self._held)[1]
        return self._held | {place: amount + self._held.get(place, 0) for place, amount in others.items()}

    def overlapping(self, gpu_class: GPUClass) -> dict[str, str]:
        """Nodes that have the labels of this class and count for another one -> that class."""
        selector = gpu_class.spec.node_selector.items()
        if gpu_class.spec.device is not None:
            return {}
        with_devices = {name for name, c in self._world.accepted_classes().items() if c.spec.device is not None}
        return {
            node.name: name
            for name, nodes in self.members().items()
            if name != gpu_class.metadata.name and name not in with_devices
            for node in nodes
            if selector <= node.labels.items()
        }

    def counted_twice(self, gpu_class: GPUClass) -> dict[str, str]:
        """Nodes whose GPUs a device plugin hands out for this class, and which have devices of another class -> that
        class."""
        return candidates.counted_twice(gpu_class, self._world.accepted_classes().values(), self.members())

    def gpus(self) -> dict[str, GPU]:
        """class -> one of its GPUs."""
        return candidates.gpus_of(self._world.accepted_classes().values(), self.members(), self.devices.facts())

    def supplies(self) -> tuple[ClassSupply, ...]:
        """What the planner may give away."""
        classes = self._world.accepted_classes().values()
        return candidates.supplies(classes, self.members(), self._all_held(), self._releasing)

    def held(self, node: str, resource: str) -> int:
        """GPUs that bound pods of any owner hold on a node, terminating ones included."""
        return self._held.get((node, resource), 0)

    def slots(self, name: str, gpus: int) -> int:
        """Replicas of so many GPUs, each on one node, that the free GPUs of a class hold; 0 for a class that is not."""
        now = (self._revision, self._world.classes.revision)
        if self._slots[0] != now:
            self._slots = (now, {})
        known = self._slots[1].get((name, gpus))
        if known is None:
            custom = self._world.classes.get(name)
            found = custom.object if custom is not None and custom.metadata.deletion_timestamp is None else None
            of = [found] if found is not None else []
            supplies = candidates.supplies(of, self.members(), self._all_held())
            known = sum(max(0, node.free) // gpus for supply in supplies for node in supply.nodes)
            self._slots[1][name, gpus] = known
        return known

    def usage(self, gpu_class: GPUClass) -> Usage:
        name = gpu_class.metadata.name
        known = self._usage.get(name)
        now = (self._revision, self._world.classes.revision)
        if known is not None and known[0] == now and known[1] is gpu_class:
            return known[2]
        found = usage(gpu_class.spec, self.members().get(name, ()), self._all_held(), gpu_class.resource)
        self._usage[name] = (now, gpu_class, found)
        return found

    def on_node(self, _key: str, before: facts.Node | None, after: facts.Node | None) -> None:
        self._notify()

    def on_devices(self, _key: str, before: object, after: object) -> None:
        """A slice, a claim, a DeviceClass or a DeviceTaintRule is another one."""
        self._notify()

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        had = held_by_node([before]) if before is not None else {}
        has = held_by_node([after]) if after is not None else {}
        going = before is not None and before.deleting, after is not None and after.deleting
        if (before.devices if before else ()) != (after.devices if after else ()):
            self._notify()  # a kubelet says something else of their health
        if had == has and going[0] == going[1]:
            return
        for amounts, sign, releases in ((had, -1, going[0]), (has, 1, going[1])):
            for place, amount in amounts.items():
                _add(self._held, place, sign * amount)
                if releases:
                    _add(self._releasing, place, sign * amount)
        if had or has:
            self._notify()

    def _notify(self) -> None:
        self._revision += 1
        for listener in self.changed:
            listener()


def _without(members: tuple[facts.Node, ...], gpu_class: GPUClass, out: frozenset[Unit]) -> tuple[facts.Node, ...]:
    single: dict[str, int] = {}
    for unit in out:
        if unit.device and gpu_class.spec.device is None:  # single devices of a driver are left out where they count
            single[unit.node] = single.get(unit.node, 0) + 1
    whole = {unit.node for unit in out if not unit.device}
    return tuple(
        replace(node, unschedulable=True)
        if node.name in whole
        else _fewer(node, gpu_class.resource, single.get(node.name, 0))
        for node in members
    )


def _fewer(node: facts.Node, resource: str, single: int) -> facts.Node:
    # A device plugin that knows of an unhealthy GPU does not offer it already.
    most = max(0, node.capacity.get(resource, 0) - single)
    if not single or node.allocatable.get(resource, 0) <= most:
        return node
    return replace(node, allocatable={**node.allocatable, resource: most})


def _add(held: Held, place: tuple[str, str], amount: int) -> None:
    held[place] = held.get(place, 0) + amount
    if not held[place]:
        del held[place]
