"""What NVIDIA's DCGM exporter measures of GPUs, as a Prometheus has it -> signals.

Which Xid messages mean that the GPU needs a reset, a restart or a repair is NVIDIA's word, not Shoal's: the recovery
actions of https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html. Others come from applications (13, 31,
43, 45), are contained in one (94), or only inform (63: a row was remapped; 92; 154). The errors of NVLink 5 (144 to
150) are fatal or not by a code that no metric has; those that are fatal come with 48.

A GPU of which nothing is measured is unknown: neither healthy nor sick.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from shoal.core.health.types import DCGM, HealthSignal, Unit
from shoal.core.layers import faults, texts, xids

LAST_XID: Final = "DCGM_FI_DEV_XID_ERRORS"
"""Number of the last Xid message. It is in the exporter's default list, so a GPU that has it is measured."""
XID_COUNT: Final = "DCGM_EXP_XID_ERRORS_COUNT"
"""Messages of the number `xid` in the exporter's window of some minutes. Engines that end write Xid 45 right after the
first one, which the last number then hides."""
DOUBLE_BIT: Final = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
"""Uncorrectable memory errors since the driver was loaded or the GPU was reset."""
REMAP_FAILED: Final = "DCGM_FI_DEV_ROW_REMAP_FAILURE"
CLOCK_EVENTS: Final = ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS")
"""Bits of why clocks are held down: the new and the old name."""

NEEDS_RESET: Final[Mapping[int, str]] = {
    number: xids.XIDS[number].reason
    for number in (46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158, 171, 172)
}
"""Xid -> reason. 171 and 172 say more about a 48."""
_HELD_DOWN: Final = {
    0x8: "hardware slowdown",
    0x20: "too hot (driver)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that a healthy GPU under load does not have. The power cap (0x4) is normal."""
_BLANK: Final = 0x7FFFFFF0
"""From here on DCGM's numbers mean: not supported, not found, no permission (dcgm_structs.h)."""
_HOST_LABELS: Final = ("node", "kubernetes_node", "Hostname", "hostname")
_POD_LABELS: Final = (("namespace", "pod"), ("exported_namespace", "exported_pod"))
"""Of the pod that holds the GPU, or of the exporter's. Both are on the GPU's node."""
MOST_GPUS: Final = 65_536
MOST_SICK: Final = 1024
_LONGEST_LABEL: Final = 256


class DCGMSample(NamedTuple):
    """One fresh sample of one of these metrics."""

    metric: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class MeasuredGPU:
    """One GPU, as its labels name it."""

    uuid: str
    index: str
    hosts: tuple[str, ...]
    """What its labels call its node."""
    pods: tuple[str, ...]
    """namespace/name of pods on its node."""
    sick: tuple[tuple[str, str], ...] = ()
    """(reason, text)."""
    held_down: str = ""
    """Why its clocks are held down; "": they are not, or nobody says so."""

    @property
    def name(self) -> str:
        return " ".join(part for part in (f"GPU {self.index}" if self.index else "a GPU", self.uuid) if part)


@dataclass(frozen=True, slots=True)
class DCGMReading:
    """One answer of Prometheus."""

    by_host: Mapping[str, frozenset[str]]
    """What labels call a node -> GPUs that are measured there, by UUID or index."""
    by_uuid: Mapping[str, MeasuredGPU]
    sick: tuple[MeasuredGPU, ...]

    def held_down(self, uuid: str) -> str:
        """Why the clocks of a GPU are held down; "": they are not, or nobody says so."""
        found = self.by_uuid.get(uuid)
        return found.held_down if found is not None else ""


def reading(samples: Iterable[DCGMSample]) -> DCGMReading:
    """Samples of one GPU have the same UUID; labels beside it may differ (partitions, pods)."""
    gpus: dict[tuple[str, ...], MeasuredGPU] = {}
    for metric, labels, value in samples:
        if math.isnan(value) or not 0 <= value < _BLANK:
            continue
        hosts = tuple(dict.fromkeys(text for name in _HOST_LABELS if (text := _label(labels, name))))
        uuid, index = _label(labels, "UUID"), _label(labels, "gpu")
        if not uuid and not (hosts and index):
            continue
        # Who has another GPU's UUID on another node is another GPU: one of both is wrong, and which is not known.
        key = (uuid, *hosts) if uuid else (index, *hosts)
        known = gpus.get(key)
        if known is None:
            if len(gpus) >= MOST_GPUS:
                continue
            known = gpus[key] = MeasuredGPU(uuid, index, hosts, ())
        gpus[key] = _with(known, metric, labels, value)
    by_host: dict[str, set[str]] = {}
    by_uuid: dict[str, MeasuredGPU] = {}
    twice: set[str] = set()
    for each in gpus.values():
        for host in each.hosts:
            by_host.setdefault(host, set()).add(each.uuid or each.index)
        if each.uuid:
            twice.update({each.uuid} & by_uuid.keys())
            by_uuid[each.uuid] = each
    sick = [each for each in gpus.values() if each.sick and each.uuid not in twice]
    return DCGMReading(
        {host: frozenset(of) for host, of in by_host.items()},
        {uuid: each for uuid, each in by_uuid.items() if uuid not in twice},
        tuple(sorted(sick, key=lambda each: (each.hosts, each.uuid, each.index))[:MOST_SICK]),
    )


def of_nodes(
    read: DCGMReading, hosts: Mapping[str, str], pod_node: Callable[[str], str | None]
) -> Iterator[HealthSignal]:
    """Signals of a class whose GPUs a device plugin hands out. It cannot leave one out, so they are about the node, as
    a node's condition is. `hosts`: what a label may call a node of the class -> its name."""
    for each in read.sick:
        node = _node(each, hosts, pod_node)
        if node is not None:
            for reason, text in each.sick:
                yield HealthSignal(Unit(node), reason, f"DCGM: {each.name}: {text}", monitor=DCGM)


def of_devices(
    read: DCGMReading, hosts: Mapping[str, str], devices: Mapping[str, Iterable[Unit]]
) -> Iterator[HealthSignal]:
    """Signals of a class of devices. `devices`: UUID of a GPU -> it, or its partitions."""
    for each in read.sick:
        named = {hosts[host] for host in each.hosts if host in hosts}
        for unit in devices.get(each.uuid, ()):
            if named <= {unit.node}:  # labels that name another node contradict the driver
                for reason, text in each.sick:
                    yield HealthSignal(unit, reason, f"DCGM: {each.name}: {text}", monitor=DCGM)


def measured(read: DCGMReading, names: Iterable[str], gpus: int) -> bool:
    """Whether all GPUs of a node are measured. `names`: what a label may call it; `gpus`: how many it has."""
    return len(frozenset[str]().union(*(read.by_host.get(name, ()) for name in names))) >= max(1, gpus)


def _with(known: MeasuredGPU, metric: str, labels: Mapping[str, str], value: float) -> MeasuredGPU:
    fault = _fault(metric, labels, value)
    if fault is None and metric not in CLOCK_EVENTS:
        return known
    pods = dict.fromkeys(known.pods)
    for space, pod in _POD_LABELS:
        if (name := _label(labels, pod)) and len(pods) < 2 * len(_POD_LABELS):
            pods[f"{_label(labels, space)}/{name}"] = None
    held_down = known.held_down
    if metric in CLOCK_EVENTS:
        held_down = ", ".join(text for bit, text in _HELD_DOWN.items() if int(value) & bit)
    sick = dict(known.sick)
    if fault is not None:
        sick.setdefault(*fault)
    return MeasuredGPU(known.uuid, known.index, known.hosts, tuple(pods), tuple(sorted(sick.items())), held_down)


def _fault(metric: str, labels: Mapping[str, str], value: float) -> tuple[str, str] | None:
    if not value:
        return None
    if metric == DOUBLE_BIT:
        return faults.GPU_ECC_ERROR, f"{value:.0f} uncorrectable memory errors since its driver was loaded"
    if metric == REMAP_FAILED:
        return faults.GPU_ECC_ERROR, "a broken row of its memory could not be remapped"
    text = _label(labels, "xid") if metric == XID_COUNT else f"{value:.0f}" if metric == LAST_XID else ""
    xid = int(text) if text.isascii() and text.isdigit() and len(text) <= 4 else None
    reason = NEEDS_RESET.get(xid) if xid is not None else None
    return (reason, f"Xid {xid} ({xids.XIDS[xid].meaning})") if reason is not None and xid is not None else None


def _node(gpu: MeasuredGPU, hosts: Mapping[str, str], pod_node: Callable[[str], str | None]) -> str | None:
    """The GPU's node; None: it is not of the class, or its labels name several."""
    named = {hosts[host] for host in gpu.hosts if host in hosts}
    holding = {node for pod in gpu.pods if (node := pod_node(pod)) is not None}
    places = named or {hosts[node] for node in holding if node in hosts}
    return next(iter(places)) if len(places) == 1 and (not holding or places & holding) else None


def _label(labels: Mapping[str, str], name: str) -> str:
    text = labels.get(name, "")
    if len(text) <= _LONGEST_LABEL and text.isprintable():
        return text
    return texts.shorten(text[: 2 * _LONGEST_LABEL], _LONGEST_LABEL)
