"""What nodes show: their conditions, their devices, their events."""

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final

from shoal.api.gpuclass import Toleration
from shoal.core.gpus import tolerates
from shoal.core.layers import faults, texts
from shoal.core.layers.candidates import Candidate, Level, age
from shoal.core.layers.types import ConditionView, EventView, Evidence, WhyNode

EVENT_SECONDS: Final = 3600
"""Older events do not count: nobody says when what they report ended."""
_BAD: Final = {
    # of the kubelet and of cloud providers
    "DiskPressure": ("True", faults.DISK_PRESSURE),
    "MemoryPressure": ("True", faults.MEMORY_PRESSURE),
    "PIDPressure": ("True", faults.PID_PRESSURE),
    "NetworkUnavailable": ("True", faults.NETWORK_UNAVAILABLE),
    # of node problem detectors
    "KernelDeadlock": ("True", faults.KERNEL_FAULT),
    "ReadonlyFilesystem": ("True", faults.NODE_DISK_FAULT),
    "FilesystemCorruptionProblem": ("True", faults.NODE_DISK_FAULT),
    "KubeletProblem": ("True", faults.NODE_NOT_READY),
    "ContainerRuntimeProblem": ("True", faults.RUNTIME_FAULT),
    "GPUMissing": ("True", faults.GPU_LOST),
    "NVLinkStatusInactive": ("True", faults.NVLINK_FAULT),
    "FrequentContainerdRestart": ("True", faults.RUNTIME_FAULT),
    "FrequentDockerRestart": ("True", faults.RUNTIME_FAULT),
    "FrequentKubeletRestart": ("True", faults.NODE_NOT_READY),
    "FrequentUnregisterNetDevice": ("True", faults.KERNEL_FAULT),
    "VMEventScheduled": ("True", faults.NODE_LEAVES),
    "UnhealthyNvidiaDCGMServices": ("True", faults.GPU_MONITOR),
    "XIDErrors": ("True", faults.GPU_UNHEALTHY),
    "IBLinkFlapping": ("True", faults.RDMA_DEVICE_LOST),
    "UnhealthyNvidiaDevicePlugin": ("True", faults.DEVICE_PLUGIN_MISSING),
    # of monitoring agents that report health
    "AcceleratedHardwareReady": ("False", faults.GPU_UNHEALTHY),
    "ContainerRuntimeReady": ("False", faults.RUNTIME_FAULT),
    "KernelReady": ("False", faults.KERNEL_FAULT),
    "NetworkingReady": ("False", faults.NETWORK_UNAVAILABLE),
    "StorageReady": ("False", faults.NODE_DISK_FAULT),
}
"""Type of a condition -> the status that is bad, and what it means."""
_KUBERNETES: Final = "node.kubernetes.io/"
_SICK: Final = re.compile(r"unhealthy|sick|\bxid|\becc|degraded", re.IGNORECASE)
"""In a taint that a health agent sets."""
_ACCELERATOR: Final = re.compile(r"gpu|xid|ecc|nvlink|accelerat", re.IGNORECASE)
_FABRIC: Final = re.compile(r"rdma|infiniband|iblink|roce", re.IGNORECASE)
_GOOD: Final = re.compile(
    r"(?<!Not)(Ready|Healthy|OK|Passed|Present|Available|Installed|Configured|Validated|Enabled|Supported|Initialized"
    r"|Succeeded|Complete|Active|Loaded|Running|Online|Operational|Functional|Connected|Registered|Reachable|Good|Normal"
    r"|Valid|Verified|Licensed|LinkUp|PortUp)$"
)
"""Ends the type of a condition that is true where all is well."""
_CARD: Final = re.compile(r"NIC(?![a-z])")
"""A network card, in the type of a condition that tells of a problem."""
_GPU_RESOURCE: Final = re.compile(r"(^|[./-])(gpu|mig-)", re.IGNORECASE)
_PROBLEM: Final = re.compile(
    r"problem|fault|fail|error|unhealthy|deadlock|corrupt|^frequent|degraded|lost|missing|throttl|overheat"
    r"|not(running|ready)|down$|inactive|unavailable|mismatch|stuck|hung",
    re.IGNORECASE,
)
"""In the type of a condition that a monitor writes and that this program does not know."""
_NOTED: Final = {
    "Rebooted": faults.NODE_REBOOTED,
    "EvictionThresholdMet": faults.DISK_PRESSURE,
    "FreeDiskSpaceFailed": faults.DISK_PRESSURE,
    "ImageGCFailed": faults.DISK_PRESSURE,
}
"""Events of a kubelet about its node -> what they mean."""
_AWAY: Final = re.compile(
    r"maintenance|terminat|preempt|retire|eventscheduled|interrupt|rebalance|^scaledown$", re.IGNORECASE
)
_KILLS: Final = ("SystemOOM", "OOMKilling")
_KILL_SECONDS: Final = 600
"""A kill of the kernel's counts for an engine that ended so shortly before."""
_MIG_RESOURCE: Final = re.compile(r"/mig-")
_KINDS: Final = (
    ("ecc|rowremap|doublebit", faults.GPU_ECC_ERROR),
    # In SysLogsXIDError, an s is before the name of another message.
    ("fabric|nvlink|nvswitch|(?-i:S)xid", faults.NVLINK_FAULT),
    ("missing|fall|lost|count|bus$", faults.GPU_LOST),
    ("dcgm", faults.GPU_MONITOR),
    ("driver|gsp", faults.DRIVER_FAULT),
)
"""In the type of a condition about GPUs, or in its reason."""
_RDMA_RESOURCE: Final = re.compile(r"rdma|infiniband|/hca|/ib\b|roce", re.IGNORECASE)


def candidates(
    node: WhyNode,
    events: Iterable[EventView],
    now: datetime,
    *,
    pods: frozenset[str],
    resource: str | None,
    tolerations: Sequence[Toleration] | None = None,
    everywhere: bool = False,
    killed: frozenset[str] = frozenset(),
    unready: bool = True,
) -> Iterator[Candidate]:
    """What is wrong with a node. `pods`: pods that it affects; `resource`: the GPUs that a class expects on it;
    `killed`: those of its pods whose engine was killed and says nothing; `unready`: one of its pods is not ready;
    `tolerations`: of that class, None where no class selects the node. A node that takes no pods is a fault where there
    is no other (`everywhere`), else a note."""
    if node.gone:
        seen = Evidence("there is no such node", f"node {node.name}", None)
        yield Candidate(faults.NODE_GONE, f"node {node.name} does not exist any more", Level.NODE, (seen,), pods)
        return
    yield from _conditions(node, now, pods, everywhere=everywhere, unready=unready)
    yield from _devices(node, pods, resource, everywhere)
    for event in events:
        seconds = age(now, event.at)
        if event.kind == "Node" and event.name == node.name and seconds is not None and seconds <= EVENT_SECONDS:
            yield from _event(node, event, seconds, pods, killed, everywhere=everywhere, unready=unready)
    if node.cordoned:
        yield Candidate(
            faults.NODE_CORDONED,
            f"node {node.name} takes no new pods: it is cordoned",
            Level.NODE,
            (Evidence("spec.unschedulable", f"node {node.name}", None),),
            reached="fault" if everywhere else None,
            everywhere=everywhere,
        )
    if tolerations is not None:
        yield from _taints(node, tolerations, everywhere=everywhere)


def _conditions(
    node: WhyNode, now: datetime, pods: frozenset[str], *, everywhere: bool, unready: bool
) -> Iterator[Candidate]:
    for condition in node.conditions:
        if (reason := reason_of(condition)) is not None:
            text = texts.shorten(condition.message or condition.reason)
            if (said := texts.xid(f"{condition.reason}: {condition.message}")) is not None:
                text += f" ({said.meaning})"
            yield Candidate(
                reason,
                f"node {node.name}: {condition.type} is {condition.status}: {text}",
                Level.NODE,
                (Evidence(f"{condition.type}={condition.status} ({condition.reason})", f"node {node.name}",
                          age(now, condition.since)),),
                pods,
                everywhere=everywhere,
                # What an unknown report means is unknown too: it is a fault beside what fails, and explains nothing.
                aside=reason in (faults.NODE_PROBLEM, faults.NODE_LEAVES),
                reached="note"
                if reason == faults.NODE_LEAVES or (reason == faults.NODE_PROBLEM and not unready)
                else None,  # a maintenance is announced before it begins
            )  # fmt: skip


def _event(
    node: WhyNode,
    event: EventView,
    seconds: int,
    pods: frozenset[str],
    killed: frozenset[str],
    *,
    everywhere: bool,
    unready: bool,
) -> Iterator[Candidate]:
    """`seconds`: how long ago it was."""
    if event.reason in _KILLS and killed and seconds <= _KILL_SECONDS:
        said = texts.shorten(event.message)
        yield Candidate(
            faults.MEMORY_PRESSURE,
            f"node {node.name} ran out of memory, and its kernel ended a process: {said}",
            Level.NODE,
            (Evidence(said, f"event {event.reason} of node {node.name}", seconds),),
            killed,
        )
    if _AWAY.search(event.reason):
        said = texts.shorten(event.message)
        yield Candidate(
            faults.NODE_LEAVES,
            f"node {node.name} is being taken away: {said}",
            Level.NODE,
            (Evidence(said, f"event {event.reason} of node {node.name}", seconds),),
            killed,
            reached=None if killed else "note",  # it is announced before it happens
            aside=not killed,
        )
    if (noted := _NOTED.get(event.reason)) is not None:
        said = texts.shorten(event.message)
        short = texts.evicted(event.message) if noted == faults.DISK_PRESSURE else None
        yield Candidate(
            short.reason if short is not None else noted,
            f"node {node.name}: {said}",
            Level.NODE,
            (Evidence(said, f"event {event.reason} of node {node.name}", seconds),),
            pods,
            reached="note",  # it may be over; where it is not, a condition or the end of a pod says so
            aside=True,
        )
    text = f"{event.reason}: {event.message}"
    known = texts.gpu(text) or texts.node(text)
    told = known is not None or event.type != "Warning" or event.reason in _NOTED or _AWAY.search(event.reason)
    if (phrase := known if told else texts.of_machine(text)) is not None:
        yield Candidate(
            phrase.reason,
            f"node {node.name}: {phrase.explained}",
            # An engine's own fault shows on its GPU too: what the engine says of it is more precise.
            Level.OBJECT if phrase.reason == faults.CUDA_ERROR else Level.NODE,
            (Evidence(phrase.quote, f"event {event.reason} of node {node.name}", seconds),),
            pods,
            everywhere=everywhere,
            reached=None if told or unready else "note",
        )


def _taints(node: WhyNode, tolerations: Sequence[Toleration], *, everywhere: bool) -> Iterator[Candidate]:
    for taint in node.taints:
        # Those of Kubernetes follow from a condition or the cordon, which come before them.
        if taint.key.startswith(_KUBERNETES) or any(tolerates(t, taint) for t in tolerations):
            continue
        shown = f"{taint.key}={taint.value}:{taint.effect}" if taint.value else f"{taint.key}:{taint.effect}"
        said = texts.gpu(f"{taint.key}: {taint.value}")
        sick = said.reason if said else faults.GPU_UNHEALTHY if _SICK.search(shown) else None
        named = texts.taint(shown)
        yield Candidate(
            sick or (named.reason if named else faults.TAINT),
            f"node {node.name} has the taint {shown}, which its GPU class does not tolerate",
            Level.NODE,
            (Evidence(f"taint {shown}", f"node {node.name}", None),),
            reached="fault" if everywhere or sick else "note",
            everywhere=everywhere,
        )


def reason_of(condition: ConditionView) -> str | None:
    """The reason of a node's condition; None: it reports nothing bad."""
    kind, status = condition.type, condition.status
    if kind == "Ready":
        # The kubelet itself writes False. Unknown is what the control plane writes when the kubelet is silent.
        return faults.NODE_SILENT if status == "Unknown" else _kubelet(condition) if status == "False" else None
    said = texts.gpu(f"{condition.reason}: {condition.message}")
    if kind in _BAD:
        bad, reason = _BAD[kind]
        if status != bad:
            return None
        if said is not None:
            return said.reason
        return _said(condition) if reason == faults.GPU_UNHEALTHY else reason
    accelerator, fabric = _ACCELERATOR.search(kind), _FABRIC.search(kind)
    if not accelerator and not fabric:
        if status == "True" and _AWAY.search(kind):
            return faults.NODE_LEAVES
        if status != "True" or not _PROBLEM.search(kind):
            return None
        said = said or texts.node(f"{condition.reason}: {condition.message}")
        if said is not None:
            return said.reason
        return faults.RDMA_DEVICE_LOST if _CARD.search(kind) else faults.NODE_PROBLEM
    if status != ("False" if _GOOD.search(kind) else "True"):
        return None
    if said is not None:
        return said.reason
    return faults.RDMA_DEVICE_LOST if fabric else _gpu(kind) or _said(condition)


def _kubelet(condition: ConditionView) -> str:
    """Why a kubelet calls its node not ready."""
    if re.search(r"network ?plugin|cni plugin", condition.message, re.IGNORECASE):
        return faults.NETWORK_UNAVAILABLE
    runtime = re.search(r"container ?runtime|pleg is not healthy|containerd|cri-o", condition.message, re.IGNORECASE)
    return faults.RUNTIME_FAULT if runtime else faults.NODE_NOT_READY


def _gpu(kind: str) -> str | None:
    return next((reason for words, reason in _KINDS if re.search(words, kind, re.IGNORECASE)), None)


def _said(condition: ConditionView) -> str:
    """What the reason of a condition about GPUs says. DCGM in it tells who found the fault, not that DCGM has one."""
    found = _gpu(condition.reason)
    return faults.GPU_UNHEALTHY if found in (None, faults.GPU_MONITOR) else found


def _devices(node: WhyNode, pods: frozenset[str], resource: str | None, everywhere: bool) -> Iterator[Candidate]:
    where = f"node {node.name}"
    slices = sorted(name for name, count in node.allocatable.items() if count and _MIG_RESOURCE.search(name))
    if resource is not None and not node.allocatable.get(resource) and slices and resource not in slices:
        seen = Evidence(f"no {resource} and {', '.join(f'{node.allocatable[s]} {s}' for s in slices)}", where, None)
        text = f"{where} offers MIG slices ({', '.join(slices)}) in place of {resource}, which its GPU class counts"
        yield Candidate(faults.GPUS_PARTITIONED, text, Level.NODE, (seen,), pods, everywhere=everywhere)
    elif resource is not None and not node.capacity.get(resource):
        seen = Evidence(f"capacity has no {resource}", where, None)
        text = f"{where} has the labels of its GPU class and offers no {resource}"
        yield Candidate(faults.DEVICE_PLUGIN_MISSING, text, Level.NODE, (seen,), pods, everywhere=everywhere)
    for name, capacity in sorted(node.capacity.items()):
        usable = node.allocatable.get(name, 0)
        if usable >= capacity:
            continue
        seen = Evidence(f"{usable} of {capacity} {name} are allocatable", where, None)
        text = f"{where}: {capacity - usable} of {capacity} {name} cannot be used"
        if _RDMA_RESOURCE.search(name):
            yield Candidate(faults.RDMA_DEVICE_LOST, text, Level.NODE, (seen,), pods, everywhere=everywhere)
        elif name == resource or _GPU_RESOURCE.search(name):
            reason = faults.GPU_UNHEALTHY if usable else faults.DEVICE_PLUGIN_MISSING
            yield Candidate(reason, text, Level.NODE, (seen,), pods, everywhere=everywhere)
