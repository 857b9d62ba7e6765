"""What of a cluster says which GPUClass has which GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from shoal.api.gpuclass import GPUClass
from shoal.core.devices import ClassDevices, DeviceClass, Slice, current, match
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
    classes: list[GPUClass] = []
    async for raw in client.list(GPUCLASSES):
        try:
            classes.append(GPUClass.model_validate(raw))
        except ValidationError:
            continue  # another version's
    nodes = tuple([projections.node(raw) async for raw in client.list(NODES)][:MOST])
    if not any(each.spec.device for each in classes):
        return GPUsView(tuple(classes), nodes)
    slices = [deviceviews.resource_slice(raw) for raw in await _listed(client, RESOURCESLICES)]
    of_devices = [deviceviews.device_class(raw) for raw in await _listed(client, DEVICECLASSES)]
    return GPUsView(tuple(classes), nodes, tuple(slices), {each.name: each for each in of_devices})


async def _listed(client: KubeClient, resource: Resource) -> list[dict[str, object]]:
    try:
        return [raw async for raw in client.list(resource)][:MOST]
    except (Forbidden, NotFound):
        return []


def matched(view: GPUsView) -> Mapping[str, ClassDevices]:
    """Class -> its devices."""
    pools, incomplete = current(view.slices)
    labels = {node.name: node.labels for node in view.nodes}
    return match(view.classes, view.device_classes or {}, pools, incomplete, labels)
