"""GPUs that a device plugin advertises several times (time-slicing, MPS): what nodes say of it, in their labels.

A part of a shared GPU has no memory of its own: an engine, which takes nearly all memory of its GPU, would end the
others. So such a resource never counts as GPUs. Devices of a DRA driver that several claims may share do not either:
see `core.devices.count`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from shoal.core.facts import Node

STRATEGIES: Final = ("time-slicing", "mps")
"""Values of the label `<resource>.sharing-strategy`, as GPU feature discovery writes it; `none`: whole GPUs."""
_SHARED: Final = re.compile(r"\.shared$")
_PROFILE_RESOURCE: Final = re.compile(r"/mig-([0-9]{1,2}g\.[0-9]{1,4}gb(?:\.[a-z0-9.]{1,32})?)$")
_PROFILE_PRODUCT: Final = re.compile(r"-MIG-([0-9]{1,2}g\.[0-9]{1,4}gb)", re.IGNORECASE)
_SUFFIX: Final = "-SHARED"
"""Of the product's label, where the device plugin shares a GPU under its own resource name."""
_MOST: Final = 3
_DIGITS: Final = 6


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the GPUs of a node are shared."""

    node: str
    strategy: str
    """time-slicing, mps, or shared where the labels do not say how."""
    replicas: int | None
    """Parts of one GPU, each advertised as a GPU; None: not said."""


def strategy_label(resource: str) -> str:
    """The node label that says how a resource is shared: nvidia.com/gpu.sharing-strategy, and
    nvidia.com/mig-3g.40gb.sharing-strategy for a MIG profile."""
    return f"{_SHARED.sub('', resource)}.sharing-strategy"


def sharing(node: Node, resource: str) -> Sharing | None:
    """How a node shares the GPUs of an extended resource; None: each is a whole GPU, or a partition of its own."""
    base = _SHARED.sub("", resource)
    strategy = node.labels.get(strategy_label(resource), "")
    text = node.labels.get(f"{base}.replicas", "")
    replicas = int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS else None
    said = strategy in STRATEGIES and replicas != 1
    if said or (replicas or 0) > 1 or resource != base or node.labels.get(f"{base}.product", "").endswith(_SUFFIX):
        return Sharing(node.name, strategy if strategy in STRATEGIES else "shared", replicas)
    return None


def without_shared(node: Node, resource: str) -> Node:
    """The node, without GPUs if they are shared."""
    if not node.capacity.get(resource) or sharing(node, resource) is None:
        return node
    return replace(node, capacity={**node.capacity, resource: 0}, allocatable={**node.allocatable, resource: 0})


def describe(nodes: Iterable[Node], resource: str) -> str:
    """Which nodes share GPUs; empty: none does."""
    found = [each for node in nodes if (each := sharing(node, resource)) is not None]
    found.sort(key=lambda each: each.node)
    if not found:
        return ""
    parts = [
        f"{s.node} ({s.strategy}{f', {s.replicas} parts of each GPU' if s.replicas and s.replicas > 1 else ''})"
        for s in found[:_MOST]
    ]
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    why = "a part of a GPU has no memory of its own, so none of them counts"
    return f"shared {resource} on {', '.join(parts)}{more}: {why}"


def partition(nodes: Iterable[Node], resource: str) -> str | None:
    """The MIG profile whose partitions a resource counts, such as 3g.40gb; None: it counts whole GPUs.

    With the device plugin's strategy `mixed` the resource is named after the profile, with `single` the product.
    """
    if found := _PROFILE_RESOURCE.search(resource):
        return found[1]
    for node in nodes:
        if found := _PROFILE_PRODUCT.search(node.labels.get(f"{resource}.product", "")):
            return found[1].lower()
    return None
