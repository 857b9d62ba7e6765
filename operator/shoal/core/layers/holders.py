"""Pods that are not Shoal's and hold GPUs of a class."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from shoal.api.gpuclass import devices_of
from shoal.core.layers import faults, objects
from shoal.core.layers.candidates import Candidate, Level
from shoal.core.layers.types import Evidence, GPUHolder, ObjectView, WhyNode

_SHOWN: Final = 4


def candidates(
    classes: Iterable[ObjectView],
    nodes: Iterable[WhyNode],
    holders: Iterable[GPUHolder],
    devices: Mapping[str, Mapping[str, int]],
    *,
    short: bool,
) -> Iterator[Candidate]:
    """Who else holds GPUs. It is a fault where GPUs are `short` and others hold half of a class's or more. `devices`:
    class -> node -> its GPUs there that are devices."""
    known, held = tuple(nodes), tuple(holders)
    for view in classes:
        resource = objects.resource_of(view)
        if resource is None:
            resource, text, mine = devices_of(view.name), "devices", held
            usable = sum(devices.get(view.name, {}).values())
        else:
            its = {node.name: node for node in known if objects.selects(view, dict(node.labels))}
            text, mine = resource, tuple(each for each in held if each.node in its)
            usable = sum(node.allocatable.get(resource, 0) for node in its.values())
        found = sorted((-each.amounts.get(resource, 0), each.pod, each.node) for each in mine)
        taken = [(-count, pod, node) for count, pod, node in found if count]
        total = sum(count for count, *_ in taken)
        if not total:
            continue
        listed = ", ".join(f"{pod} ({count} on {node})" for count, pod, node in taken[:_SHOWN])
        more = f", and {len(taken) - _SHOWN} more" if len(taken) > _SHOWN else ""
        yield Candidate(
            faults.GPUS_HELD,
            f"{total} of {usable} {text} of {view.text} are held by pods that are not Shoal's: {listed}{more}",
            Level.NODE,
            tuple(Evidence(f"{count} {text}", f"pod {pod} on node {node}", None) for count, pod, node in taken),
            reached="fault" if short and 2 * total >= usable else None,
        )
