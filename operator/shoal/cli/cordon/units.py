"""From what a person named to the units of GPUClasses."""

from collections.abc import Sequence
from dataclasses import dataclass

import click

from shoal.api import names
from shoal.api.gpuclass import GPUClass
from shoal.cli import gpus
from shoal.cli.gpus import GPUsView
from shoal.core import candidates
from shoal.core.health import Unit
from shoal.core.health.requests import parse


@dataclass(frozen=True, slots=True)
class ClassUnit:
    """A unit, and the class that counts it."""

    gpu_class: GPUClass
    unit: Unit


def of_node(view: GPUsView, node: str, wanted: str | None) -> list[ClassUnit]:
    """The GPUs of a node, of each class that has some there. Raises ClickException."""
    found = [ClassUnit(each, Unit(node)) for each in _having(view, node, wanted)]
    if not found:
        text = f"GPUClass {wanted} does not have the node {node}" if wanted else f"no GPUClass has the node {node}"
        raise click.ClickException(text)
    return found


def of_device(view: GPUsView, node: str, device: str, wanted: str | None) -> ClassUnit:
    """A device by its name, or by `driver/pool/device`. Raises ClickException."""
    matched = gpus.matched(view)
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


def put_back(view: GPUsView, node: str, device: str | None, wanted: str | None) -> list[ClassUnit]:
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


def _having(view: GPUsView, node: str, wanted: str | None) -> Sequence[GPUClass]:
    offers = {
        name: {n: (len(of), len(of)) for n, of in each.by_node.items()} for name, each in gpus.matched(view).items()
    }
    members = candidates.members(view.classes, view.nodes, offers)
    return [
        each
        for each in view.classes
        if wanted in (None, each.metadata.name) and any(n.name == node for n in members[each.metadata.name])
    ]
