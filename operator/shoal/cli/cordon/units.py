"""From what a person named to the units of GPUClasses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import click
from pydantic import ValidationError

from shoal.api import names
from shoal.api.gpuclass import GPUClass
from shoal.core import candidates
from shoal.core.devices import ClassDevices, DeviceClass, Slice, current, match
from shoal.core.facts import Node
from shoal.core.health import Unit
from shoal.core.health.requests import parse
from shoal.kube import deviceviews, projections
from shoal.kube.client import KubeClient
from shoal.kube.errors import Forbidden, NotFound
from shoal.kube.resources import DEVICECLASSES, GPUCLASSES, NODES, RESOURCESLICES, Resource

MOST: Final = 20_000
"""Objects of one kind that are read."""


@dataclass(frozen=True, slots=True)
class ClassUnit:
    """A unit, and the class that counts it."""

    gpu_class: GPUClass
    unit: Unit


@dataclass(frozen=True, slots=True)
class CordonView:
    """What of the cluster says which class has which GPU."""

    classes: tuple[GPUClass, ...]
    nodes: tuple[Node, ...]
    slices: tuple[Slice, ...] = ()
    device_classes: Mapping[str, DeviceClass] | None = None


async def read(client: KubeClient) -> CordonView:
    """Raises KubeError; what only classes with devices need is read where there are such."""
    classes: list[GPUClass] = []
    async for raw in client.list(GPUCLASSES):
        try:
            classes.append(GPUClass.model_validate(raw))
        except ValidationError:
            continue  # another version's
    nodes = tuple([projections.node(raw) async for raw in client.list(NODES)][:MOST])
    if not any(each.spec.device for each in classes):
        return CordonView(tuple(classes), nodes)
    slices = [deviceviews.resource_slice(raw) for raw in await _listed(client, RESOURCESLICES)]
    of_devices = [deviceviews.device_class(raw) for raw in await _listed(client, DEVICECLASSES)]
    return CordonView(tuple(classes), nodes, tuple(slices), {each.name: each for each in of_devices})


async def _listed(client: KubeClient, resource: Resource) -> list[dict[str, object]]:
    try:
        return [raw async for raw in client.list(resource)][:MOST]
    except (Forbidden, NotFound):
        return []


def of_node(view: CordonView, node: str, wanted: str | None) -> list[ClassUnit]:
    """The GPUs of a node, of each class that has some there. Raises ClickException."""
    found = [ClassUnit(each, Unit(node)) for each in _having(view, node, wanted)]
    if not found:
        text = f"GPUClass {wanted} does not have the node {node}" if wanted else f"no GPUClass has the node {node}"
        raise click.ClickException(text)
    return found


def of_device(view: CordonView, node: str, device: str, wanted: str | None) -> ClassUnit:
    """A device by its name, or by `driver/pool/device`. Raises ClickException."""
    matched = _matched(view)
    found = [
        ClassUnit(gpu_class, Unit(node, str(each.id)))
        for gpu_class in view.classes
        if wanted in (None, gpu_class.metadata.name)
        for each in (matched[gpu_class.metadata.name].by_node.get(node, ()) if gpu_class.spec.device else ())
        if device in (str(each.id), each.id.device)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(each.unit.device for each in found)
        raise click.ClickException(f"several devices of node {node} have this name: {listed}")
    plugins = [each for each in _having(view, node, wanted) if each.spec.device is None]
    if plugins:
        raise click.ClickException(
            f"a device plugin hands out the GPUs of GPUClass {plugins[0].metadata.name}, and nobody can tell it to "
            f"leave one out: take the node's GPUs out of use with `shoal cordon node {node}`"
        )
    raise click.ClickException(f"no GPUClass has a device {device} on node {node}")


def put_back(view: CordonView, node: str, device: str | None, wanted: str | None) -> list[ClassUnit]:
    """Units of the node that are out of use, or on probation; all of them, or one device. Raises ClickException."""
    found: list[ClassUnit] = []
    for gpu_class in view.classes:
        if wanted not in (None, gpu_class.metadata.name):
            continue
        stands = gpu_class.status.quarantined if gpu_class.status is not None else ()
        units = {Unit(each.node, each.device or "") for each in stands}
        units |= {each.unit for each in parse(gpu_class.metadata.annotations.get(names.ANNOTATION_CORDON))[0]}
        found += [
            ClassUnit(gpu_class, unit)
            for unit in sorted(units)
            if unit.node == node and (device is None or device in (unit.device, unit.device.rpartition("/")[2]))
        ]
    if not found:
        what = f"device {device} of node {node}" if device else f"node {node}"
        raise click.ClickException(f"{what} is not out of use")
    return found


def _having(view: CordonView, node: str, wanted: str | None) -> Sequence[GPUClass]:
    offers = {name: {n: (len(of), len(of)) for n, of in each.by_node.items()} for name, each in _matched(view).items()}
    members = candidates.members(view.classes, view.nodes, offers)
    return [
        each
        for each in view.classes
        if wanted in (None, each.metadata.name) and any(n.name == node for n in members[each.metadata.name])
    ]


def _matched(view: CordonView) -> Mapping[str, ClassDevices]:
    pools, incomplete = current(view.slices)
    labels = {node.name: node.labels for node in view.nodes}
    return match(view.classes, view.device_classes or {}, pools, incomplete, labels)
