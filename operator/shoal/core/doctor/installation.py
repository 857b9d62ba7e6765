"""Shoal's processes: whether they are ready, of one version, led by one, and reachable."""

from collections.abc import Iterator
from datetime import datetime
from typing import Final

from shoal.api import names, reasons
from shoal.core.doctor.results import ok, result, some, unread
from shoal.core.doctor.types import DoctorResult, DoctorSnapshot, WorkloadState
from shoal.core.layers import faults
from shoal.core.layers.candidates import age
from shoal.core.layers.causes import SPOOL, causes
from shoal.core.layers.layer import Layer
from shoal.core.layers.types import Unread, WhyPod, WhySnapshot

_LAYERS: Final = {names.COMPONENT_GATEWAY: Layer.GATEWAY, names.COMPONENT_CACHE: Layer.ARTIFACT}
_NEEDED: Final = (names.COMPONENT_OPERATOR, names.COMPONENT_GATEWAY)
NO_ADDRESS: Final = "NoReadyAddress"
VERSIONS_DIFFER: Final = "VersionsDiffer"
NOT_INSTALLED: Final = "NotInstalled"
NOT_READY: Final = "NotReady"
NO_NAME_SERVICE: Final = "NameServiceDown"
NO_VERSION: Final = "NoVersion"


def nothing(seen: DoctorSnapshot) -> bool:
    """Whether it is known that neither operator nor gateway is installed."""
    return not isinstance(seen.workloads, Unread) and not any(w.component in _NEEDED for w in seen.workloads)


def processes(seen: DoctorSnapshot, _now: datetime) -> Iterator[DoctorResult]:
    """Whether each process of Shoal is ready; if not, why its pods are not."""
    check = "processes"
    if isinstance(seen.workloads, Unread):
        yield unread(check, Layer.CONTROL, seen.workloads)
        return
    there = {workload.component for workload in seen.workloads}
    if lacking := [component for component in _NEEDED if component not in there]:
        yield result(
            check, "error", NOT_INSTALLED, Layer.CONTROL,
            f"there is no {' and no '.join(lacking)} in namespace {seen.namespace}",
            "Install the chart shoal, or name Shoal's namespace with --operator-namespace.",
        )  # fmt: skip
    for workload in seen.workloads:
        yield _process(seen, workload, _now)


def _process(seen: DoctorSnapshot, workload: WorkloadState, now: datetime) -> DoctorResult:
    check, layer = f"process {workload.component or workload.name}", _LAYERS.get(workload.component, Layer.CONTROL)
    count = f"{workload.kind} {workload.name}: {workload.ready} of {workload.wanted} pods ready"
    if workload.ready >= workload.wanted:
        if not workload.wanted:
            do = f"Scale {workload.name} up."
            return result(check, "warning", NOT_READY, layer, f"{count}: it is scaled to 0", do)
        return ok(check, layer, count)
    pods = () if isinstance(seen.pods, Unread) else seen.pods
    mine = tuple(pod for pod in pods if pod.component == workload.component and not pod.deleting)
    why = _why(seen, mine, now)
    if why is not None:
        reason, where, text, do = why
        outcome = "warning" if workload.ready else "error"
        return result(check, outcome, reason, where, f"{count}: {text}", do)
    gateway = workload.component == names.COMPONENT_GATEWAY
    if missed := sorted({part for pod in mine for part in pod.not_ready}):
        reason = faults.SPOOL_FULL if SPOOL in missed else faults.GATEWAYS_NOT_READY
        row = faults.FAULTS[reason]
        text = f"{count}: not ready: {', '.join(missed)}"
        return result(check, "warning" if workload.ready else "error", reason, row.layer, text, row.do)
    if gateway and workload.ready == 1:
        row = faults.FAULTS[faults.GATEWAY_ALONE]
        return result(check, "warning", faults.GATEWAY_ALONE, row.layer, count, row.do)
    if gateway and not workload.ready:
        row = faults.FAULTS[faults.GATEWAYS_NOT_READY]
        return result(check, "error", faults.GATEWAYS_NOT_READY, row.layer, count, row.do)
    do = f"Look at the pods: kubectl -n {seen.namespace} describe pods -l {names.LABEL_COMPONENT}={workload.component}"
    return result(check, "warning" if workload.ready else "error", NOT_READY, layer, count, do)


def _why(seen: DoctorSnapshot, pods: tuple[WhyPod, ...], now: datetime) -> tuple[str, Layer, str, str] | None:
    """(reason, layer, message, what to do) of why pods are not ready."""
    nodes = () if isinstance(seen.nodes, Unread) else seen.nodes
    used = {pod.node for pod in pods}
    events = () if isinstance(seen.events, Unread) else seen.events
    kept = tuple(node for node in nodes if node.name in used)
    found = causes(WhySnapshot("pod", seen.namespace, pods=pods, nodes=kept, events=events), now)
    first = next((cause for cause in found.causes if cause.state == "fault"), None)
    return None if first is None else (first.reason, first.layer, first.message, first.do)


def leader(seen: DoctorSnapshot, now: datetime) -> Iterator[DoctorResult]:
    """Whether an operator leads."""
    check, row = "leader", faults.FAULTS[faults.OPERATOR_AWAY]
    lease = seen.lease
    if isinstance(lease, Unread):
        yield unread(check, Layer.CONTROL, lease)
        return
    if lease is None or not lease.holder:
        text = "there is no Lease shoal-operator" if lease is None else "nobody holds the Lease shoal-operator"
        yield result(check, "error", faults.OPERATOR_AWAY, row.layer, text, row.do)
        return
    late = age(now, lease.renewed)
    if late is None or late > 2 * lease.seconds:
        when = "at no known time" if late is None else f"{late} s ago"
        text = f"{lease.holder} renewed the Lease shoal-operator {when}; it lasts {lease.seconds} s"
        yield result(check, "error", faults.OPERATOR_AWAY, row.layer, text, row.do)
        return
    yield ok(check, Layer.CONTROL, f"{lease.holder} leads")


def versions(seen: DoctorSnapshot, _now: datetime) -> Iterator[DoctorResult]:
    """Whether all processes are of one version, and this command too."""
    check = "versions"
    if isinstance(seen.workloads, Unread):
        yield unread(check, Layer.CONTROL, seen.workloads)
        return
    found: dict[str, list[str]] = {}
    for workload in seen.workloads:
        if workload.version:
            found.setdefault(workload.version, []).append(workload.component or workload.name)
    rolling = [w.name for w in seen.workloads if w.updated < w.wanted]
    if len(found) > 1:
        text = "; ".join(f"{version}: {some(sorted(parts))}" for version, parts in sorted(found.items()))
        do = "Upgrade all parts with one release of the chart."
        yield result(check, "error", VERSIONS_DIFFER, Layer.CONTROL, text, do)
    elif rolling:
        text = f"an upgrade is under way: {some(sorted(rolling))}"
        yield result(check, "warning", VERSIONS_DIFFER, Layer.CONTROL, text, "Wait until all pods are of one version.")
    elif found and seen.version not in found:
        installed = next(iter(found))
        text = f"the installation is {installed}, this command is {seen.version}"
        do = "Use a command of the installation's version."
        yield result(check, "warning", VERSIONS_DIFFER, Layer.CONTROL, text, do)
    elif found:
        yield ok(check, Layer.CONTROL, f"everything is {seen.version}")
    else:
        do = "Install Shoal with its chart, which sets the label app.kubernetes.io/version."
        yield result(check, "unknown", NO_VERSION, Layer.CONTROL, "no workload names its version", do)


def addresses(seen: DoctorSnapshot, _now: datetime) -> Iterator[DoctorResult]:
    """Whether every Service of Shoal has a ready address."""
    check = "services"
    if isinstance(seen.services, Unread):
        yield unread(check, Layer.CONTROL, seen.services)
        return
    # The operator publishes the external scaler's address where KEDA drives a Model.
    models = () if isinstance(seen.models, Unread) else seen.models
    driven = any(c.type == reasons.SCALING_ACTIVE for view in models for c in view.conditions)
    empty = [each for each in seen.services if not each.ready and (each.name != names.SCALER_SERVICE or driven)]
    for service in empty:
        layer = Layer.GATEWAY if "gateway" in service.name else Layer.CONTROL
        text = f"Service {service.name} has no ready address"
        text += f" ({service.not_ready} that are not ready)" if service.not_ready else ""
        do = f"Compare its selector with the pods: kubectl -n {seen.namespace} describe service {service.name}"
        yield result(check, "error", NO_ADDRESS, layer, text, do)
    if not empty:
        yield ok(check, Layer.CONTROL, f"all of {len(seen.services)} Services that are in use have ready addresses")


def name_service(seen: DoctorSnapshot, _now: datetime) -> Iterator[DoctorResult]:
    """Whether the cluster's DNS has a ready address."""
    check, service = "name service", seen.name_service
    if isinstance(service, Unread):
        yield unread(check, Layer.CONTAINER, service)
    elif service is None:
        do = "Check by hand that pods resolve names of Services."
        text = "no Service has the label k8s-app=kube-dns"
        yield result(check, "unknown", "NotFound", Layer.CONTAINER, text, do)
    elif not service.ready:
        do = "Look at the DNS pods in kube-system: without them no process finds another."
        text = f"Service {service.name} in kube-system has no ready address"
        yield result(check, "error", NO_NAME_SERVICE, Layer.CONTAINER, text, do)
    else:
        yield ok(check, Layer.CONTAINER, f"{service.name} has {service.ready} ready addresses")
