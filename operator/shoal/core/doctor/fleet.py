"""GPU classes, their nodes, node caches, signals, and KEDA."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Final

from shoal.api import names, reasons
from shoal.core.doctor.results import ok, result, some, unread
from shoal.core.doctor.types import DeviceState, DoctorResult, DoctorSnapshot
from shoal.core.layers import objects
from shoal.core.layers.causes import causes
from shoal.core.layers.faults import advice
from shoal.core.layers.layer import Layer
from shoal.core.layers.texts import brief, shorten
from shoal.core.layers.types import ConditionView, ObjectView, Unread, WhyNode, WhySnapshot

NO_CLASS_FOR_NODES: Final = "GPUsWithoutClass"
CACHE_TOO_LARGE: Final = "CacheLargerThanDisk"
SIGNALS_AWAY: Final = "SignalsAway"
_GPU: Final = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe")
_CACHE_FAULTS: Final = (reasons.DISK_FULL, reasons.CACHE_UNAVAILABLE)
_LARGE_PERCENT: Final = 80
_LONGEST: Final = 1500
"""Characters of a class's message: it names at most twelve GPUs."""


def classes(seen: DoctorSnapshot, now: datetime) -> Iterator[DoctorResult]:
    """Whether each GPU class has nodes, and each GPU a class."""
    check = "GPU classes"
    if isinstance(seen.classes, Unread):
        yield unread(check, Layer.CONTROL, seen.classes)
        return
    if not seen.classes:
        do = "Create a GPUClass for the GPU nodes of the cluster."
        yield result(check, "error", reasons.NO_CLASS, Layer.CONTROL, "there is no GPUClass", do)
    nodes = () if isinstance(seen.nodes, Unread) else seen.nodes
    devices: Mapping[str, Mapping[str, int]] = {} if isinstance(seen.devices, Unread) else seen.devices.of_classes
    well = 0
    for each in seen.classes:
        matching = tuple(node for node in nodes if objects.has_node(each, node, devices))
        found = causes(WhySnapshot("class", each.key, subject=each, nodes=matching, devices=devices), now).causes
        wrong = [cause for cause in found if cause.state in ("fault", "note") and cause.reason != reasons.PAUSED]
        for cause in wrong:
            outcome = "error" if cause.state == "fault" and not _usable(each) else "warning"
            message = _of_gpus(each, cause.reason) or cause.message
            yield result(check, outcome, cause.reason, cause.layer, f"{each.name}: {message}", cause.do)
        well += not wrong
    if isinstance(seen.nodes, Unread):
        yield unread("GPU nodes", Layer.CONTROL, seen.nodes)
    lost = {
        node.name
        for node in nodes
        if any(node.capacity.get(name) for name in _GPU)
        and not any(objects.has_node(each, node, devices) for each in seen.classes)
    }
    if lost:
        do = "Create a GPUClass whose nodeSelector matches them, if Shoal is to use them."
        text = f"nodes with GPUs that no GPUClass counts: {some(sorted(lost))}"
        yield result("GPU nodes", "warning", NO_CLASS_FOR_NODES, Layer.CONTROL, text, do)
    yield from _devices(seen.devices, {node.name for node in nodes if _counted(node, seen.classes)} | lost)
    if well and well == len(seen.classes):
        yield ok(check, Layer.CONTROL, f"{well} classes have nodes")


def _devices(devices: DeviceState | Unread, told: Collection[str]) -> Iterator[DoctorResult]:
    """GPUs that are devices, and that no class selects. `told`: nodes whose GPUs a device plugin advertises too."""
    check = "GPU devices"
    if isinstance(devices, Unread):
        yield unread(check, Layer.CONTROL, devices)
        return
    lost = {node: of for node, of in devices.unmatched.items() if node not in told}
    if lost:
        do = "Create a GPUClass whose spec.device selects them, if Shoal is to use them."
        found = [device for of in lost.values() for device in of]
        text = f"devices on {some(sorted(lost))} that no GPUClass selects: {some(found)}"
        yield result(check, "warning", NO_CLASS_FOR_NODES, Layer.CONTROL, text, do)


def _counted(node: WhyNode, classes: Iterable[ObjectView]) -> bool:
    """Whether a class counts the GPUs of a node by its device plugin."""
    return any(
        objects.selects(each, dict(node.labels)) and node.capacity.get(objects.resource_of(each) or "")
        for each in classes
    )


def _of_gpus(view: ObjectView, reason: str) -> str:
    """All that the operator says of GPUs that are out of use or not measured: a cause names the first only."""
    said = (c.message for c in view.conditions if c.type == reasons.GPUS_HEALTHY and c.reason == reason)
    return shorten(next(said, ""), _LONGEST)


def _usable(view: ObjectView) -> bool:
    return any(c.type == reasons.READY and c.status == "True" for c in view.conditions)


def cache(seen: DoctorSnapshot, _now: datetime) -> Iterator[DoctorResult]:
    """Whether node caches have room."""
    check, settings = "node cache", seen.cache
    if isinstance(settings, Unread):
        yield unread(check, Layer.ARTIFACT, settings)
        return
    if settings is None or not settings.enabled:
        yield ok(check, Layer.ARTIFACT, "off: each pod fetches into a volume of its own")
        return
    pods = () if isinstance(seen.pods, Unread) else seen.pods
    used = {pod.node for pod in pods if pod.component == names.COMPONENT_CACHE and pod.node is not None}
    nodes = () if isinstance(seen.nodes, Unread) else seen.nodes
    full = sorted(
        node.name
        for node in nodes
        if node.name in used and any(c.type == "DiskPressure" and c.status == "True" for c in node.conditions)
    )
    well = True
    if full:
        well = False
        do = "Lower the chart value cache.size, or free the disks of these nodes."
        text = f"nodes with a cache under disk pressure: {some(full)}"
        yield result(check, "error", reasons.DISK_FULL, Layer.ARTIFACT, text, do)
    small = sorted(
        name
        for name, size in (seen.disks or {}).items()
        if name in used and settings.size_bytes is not None and settings.size_bytes * 100 > size * _LARGE_PERCENT
    )
    if small:
        well = False
        do = "Lower the chart value cache.size, unless cache.hostPath is a disk of its own."
        text = f"the cache may take more than {_LARGE_PERCENT} % of the disk that the kubelet uses on {some(small)}"
        yield result(check, "warning", CACHE_TOO_LARGE, Layer.ARTIFACT, text, do)
    models = () if isinstance(seen.models, Unread) else seen.models
    for reason in _CACHE_FAULTS:
        hit = sorted(
            view.key for view in models if any(c.reason == reason and c.status != "True" for c in view.conditions)
        )
        if hit:
            well = False
            do = f"Run `shoal why model/{hit[0].rpartition('/')[2]} -n {hit[0].partition('/')[0]}`."
            yield result(check, "error", reason, Layer.ARTIFACT, f"{reason}: {some(hit)}", do)
    if well and isinstance(seen.pods, Unread):
        yield unread(check, Layer.ARTIFACT, seen.pods)
    elif well:
        yield ok(check, Layer.ARTIFACT, f"{len(used)} nodes have a cache, none is short of disk")


def signals(seen: DoctorSnapshot, _now: datetime) -> Iterator[DoctorResult]:
    """Whether the operator gets signals of replicas and gateways."""
    check = "signals"
    if isinstance(seen.models, Unread):
        yield unread(check, Layer.CONTROL, seen.models)
        return
    stale = sorted(
        view.key
        for view in seen.models
        if any(c.type == reasons.SIGNALS_UNKNOWN and c.status == "True" for c in view.conditions)
    )
    running = [view for view in seen.models if objects.ready_replicas(view)]
    if not stale:
        yield ok(check, Layer.CONTROL, f"fresh for {len(seen.models)} Models")
    elif len(stale) >= max(2, len(running)):
        do = "Check the way to the source of signals: Prometheus, or the network between the operator and pods."
        text = f"signals of all Models with replicas are stale: {some(stale)}; nothing scales down"
        yield result(check, "error", SIGNALS_AWAY, Layer.CONTROL, text, do)
    else:
        text = f"signals are stale for {some(stale)}: nothing scales down there"
        do = "Run `shoal why model/NAME`: it names the pods that send none."
        yield result(check, "warning", reasons.SIGNALS_STALE, Layer.CONTROL, text, do)


def keda(seen: DoctorSnapshot, _now: datetime) -> Iterator[DoctorResult]:
    """Whether KEDA drives the Models that it should drive."""
    check = "KEDA"
    if isinstance(seen.models, Unread):
        yield unread(check, Layer.CONTROL, seen.models)
        return
    driven = [(view, c) for view in seen.models for c in view.conditions if c.type == reasons.SCALING_ACTIVE]
    broken = Counter(c.reason for _, c in driven if c.status == "False")
    for reason, count in broken.items():
        hit = sorted(view.key for view, c in driven if c.reason == reason and c.status == "False")
        message = next(c.message for _, c in driven if c.reason == reason)
        row = advice(reason)
        text = f"{count} Models, {some(hit)}: {reason}: {brief(message)}"
        yield result(check, "error", reason, Layer.CONTROL, text, row.do)
    if not broken:
        yield ok(check, Layer.CONTROL, f"it drives {len(driven)} Models" if driven else "it drives no Model")


def models(seen: DoctorSnapshot, _now: datetime) -> Iterator[DoctorResult]:
    """Models that do not serve."""
    check = "Models"
    if isinstance(seen.models, Unread):
        yield unread(check, Layer.CONTROL, seen.models)
        return
    broken: list[tuple[ObjectView, ConditionView, str]] = []
    for view in seen.models:
        for c in view.conditions:
            if c.type == reasons.READY and c.status != "True":
                phrase = objects.refine(c.reason, c.message)
                reason = phrase.reason if phrase is not None else c.reason
                broken += [(view, c, reason)] if advice(reason).state == "fault" else []
    for view, condition, reason in broken[:_MOST_MODELS]:
        said = brief(condition.message)
        do = f"Run `shoal why model/{view.name} -n {view.namespace}`" + (
            ", which shows the whole message." if said.endswith(" ...") else "."
        )
        text = f"{view.key}: {condition.reason}: {said}"
        yield result(check, "warning", reason, advice(reason).layer, text, do)
    if len(broken) > _MOST_MODELS:
        text = f"{len(broken) - _MOST_MODELS} further Models do not serve"
        yield result(check, "warning", "MoreModels", Layer.CONTROL, text, "Run `shoal status -A`.")
    if not broken:
        yield ok(check, Layer.CONTROL, f"{len(seen.models)} Models, none with a fault")


_MOST_MODELS: Final = 20
