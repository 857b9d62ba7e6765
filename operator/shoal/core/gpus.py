"""How many GPUs of a class there are, who holds them, and what still fits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.api.gpuclass import DEVICES_PREFIX, GPUClassSpec, GPUCounts, Toleration
from shoal.core.facts import Node, Pod, Taint


@dataclass(frozen=True, slots=True)
class Usage:
    """The GPUs of one class over its nodes."""

    nodes: int
    capacity: int
    allocatable: int
    allocated: int
    unhealthy: int
    """GPUs that the device plugin does not offer, on nodes that take pods."""
    free: tuple[int, ...]
    """Free GPUs of each node that takes new pods, largest first; full nodes left out."""

    @property
    def largest(self) -> int:
        return self.free[0] if self.free else 0

    def counts(self) -> GPUCounts:
        return GPUCounts(
            capacity=self.capacity,
            allocatable=self.allocatable,
            allocated=self.allocated,
            free=sum(self.free),
            largest_free_on_one_node=self.largest,
        )


def held_by_node(pods: Iterable[Pod]) -> dict[tuple[str, str], int]:
    """(node, resource) -> how much bound pods hold. Terminating pods hold theirs until they are gone. Devices count for
    proven engine pods only: their number is an annotation, which anybody can write."""
    held: dict[tuple[str, str], int] = {}
    for pod in pods:
        if pod.node is not None and not pod.finished:
            for resource, amount in pod.requests.items():
                if resource.startswith(DEVICES_PREFIX) and pod.model_uid is None:
                    continue
                held[pod.node, resource] = held.get((pod.node, resource), 0) + amount
    return held


def usage(
    spec: GPUClassSpec, nodes: Iterable[Node], held: Mapping[tuple[str, str], int], resource: str | None = None
) -> Usage:
    """Counts a class, by the extended resource of its spec or by `resource`; of the nodes only those with its labels. A
    node that is cordoned, not Ready or has a taint that the class does not tolerate offers nothing, while what its pods
    hold still counts as allocated."""
    matching = [n for n in nodes if spec.node_selector.items() <= n.labels.items()]
    resource = resource or spec.extended_resource or ""
    allocatable = allocated = unhealthy = 0
    free: list[int] = []
    for node in matching:
        in_use = held.get((node.name, resource), 0)
        allocated += in_use
        if takes_pods(node, spec.tolerations):
            offered = node.allocatable.get(resource, 0)
            allocatable += offered
            unhealthy += max(0, node.capacity.get(resource, 0) - offered)
            if offered > in_use:
                free.append(offered - in_use)
    return Usage(
        nodes=len(matching),
        capacity=sum(n.capacity.get(resource, 0) for n in matching),
        allocatable=allocatable,
        allocated=allocated,
        unhealthy=unhealthy,
        free=tuple(sorted(free, reverse=True)),
    )


def takes_pods(node: Node, tolerations: Iterable[Toleration]) -> bool:
    """Whether the scheduler would put a pod with these tolerations there."""
    if not node.ready or node.unschedulable:
        return False
    known = tuple(tolerations)
    return all(
        taint.effect == "PreferNoSchedule" or any(tolerates(toleration, taint) for toleration in known)
        for taint in node.taints
    )


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    """As the scheduler compares them: an absent effect or (with Exists) key matches all."""
    if toleration.effect is not None and toleration.effect != taint.effect:
        return False
    if toleration.key is not None and toleration.key != taint.key:
        return False
    if toleration.operator == "Exists":
        return True
    return toleration.key is not None and (toleration.value or "") == taint.value
