"""What of a cluster says which GPUClass has which GPU."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from shoal.api.gpuclass import GPUClass
from shoal.api.meta import JsonObject
from shoal.core.devices import ClassDevices, DeviceClass, Slice, current, match, without_class
from shoal.core.facts import Node
from shoal.kube import deviceviews, projections
from shoal.kube.client import KubeClient
from shoal.kube.errors import Forbidden, NotFound
from shoal.kube.resources import DEVICECLASSES, GPUCLASSES, NODES, RESOURCESLICES, Resource

MOST: Final = 20_000
"""Objects of one kind that are read."""


@dataclass(frozen=True, slots=True)
class GPUsView:
    """Classes, nodes, and what drivers publish."""

    classes: tuple[GPUClass, ...]
    nodes: tuple[Node, ...]
    slices: tuple[Slice, ...] = ()
    device_classes: Mapping[str, DeviceClass] | None = None


async def read(client: KubeClient) -> GPUsView:
    """Raises KubeError; what only classes with devices need is read where there are such."""
    classes = [raw async for raw in client.list(GPUCLASSES)]
    nodes = [raw async for raw in client.list(NODES)][:MOST]
    found = view(classes, nodes)
    if not any(each.spec.device for each in found.classes):
        return found
    return view(classes, nodes, await _listed(client, RESOURCESLICES), await _listed(client, DEVICECLASSES))


def view(
    classes: Iterable[JsonObject],
    nodes: Iterable[JsonObject],
    slices: Iterable[JsonObject] = (),
    device_classes: Iterable[JsonObject] = (),
) -> GPUsView:
    """From raw objects. GPUClasses of another version are left out."""
    known: list[GPUClass] = []
    for raw in classes:
        try:
            known.append(GPUClass.model_validate(raw))
        except ValidationError:
            continue
    return GPUsView(
        tuple(known),
        tuple(projections.node(raw) for raw in nodes),
        tuple(deviceviews.resource_slice(raw) for raw in slices),
        {each.name: each for each in map(deviceviews.device_class, device_classes)},
    )


async def _listed(client: KubeClient, resource: Resource) -> list[JsonObject]:
    try:
        return [raw async for raw in client.list(resource)][:MOST]
    except (Forbidden, NotFound):
        return []


def matched(view: GPUsView) -> Mapping[str, ClassDevices]:
    """Class -> its devices."""
    pools, incomplete = current(view.slices)
    labels = {node.name: node.labels for node in view.nodes}
    return match(view.classes, view.device_classes or {}, pools, incomplete, labels)


def unmatched(view: GPUsView, of_classes: Mapping[str, ClassDevices]) -> Mapping[str, tuple[str, ...]]:
    """Node -> GPUs that no class has, as driver/pool/device. `of_classes`: as `matched` returns it."""
    pools, _ = current(view.slices)
    found = without_class(pools, of_classes, {node.name for node in view.nodes})
    return {node: tuple(map(str, ids)) for node, ids in found.items()}


def counts(of_classes: Mapping[str, ClassDevices]) -> Mapping[str, Mapping[str, int]]:
    """Class -> node that has devices of it -> how many of them count: those that several claims may share do not."""
    return {
        name: {node: sum(not matched.device.shared for matched in of) for node, of in each.by_node.items()}
        for name, each in of_classes.items()
    }
