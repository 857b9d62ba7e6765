"""One row per fault of an installation: what `shoal doctor` says of it, on which layer, and what to do."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from shoal.api.modelroute import ModelRoute
from shoal.api.schema import KINDS, custom_resource_definition
from shoal.core.doctor import checks
from shoal.core.doctor.checks import CHECKS, examine
from shoal.core.doctor.types import (
    CertificateState,
    ClockState,
    DeviceState,
    DoctorResult,
    DoctorSnapshot,
    NodeCacheSettings,
    NodeLease,
    PermissionState,
    PriceState,
    ProxySettings,
    ServiceState,
    WorkloadState,
)
from shoal.core.layers.types import OperatorLease, Unread, WhyNode
from shoal.kube import doctorviews, layerviews
from tests.faults.worlds import NOW, condition, crashed, engine, gpu_class, model, node, pod, tenant

READY = condition("Ready", "True", "ReplicasReady", "1 of 1 replicas ready")
SECOND = timedelta(seconds=1)
GI = 2**30


def workload(component: str, wanted: int = 2, ready: int = 2, version: str = "0.1.0") -> WorkloadState:
    kind = {"operator": "Deployment", "cache": "DaemonSet"}.get(component, "StatefulSet")
    name = f"shoal-{component}"
    return WorkloadState(kind, name, component, version, ("shoal:0.1.0",), name, wanted, ready, wanted)


def definition(**more: Any) -> dict[str, Any]:
    found = custom_resource_definition(ModelRoute)
    return found | {"status": {"conditions": [{"type": "Established", "status": "True"}]}} | more


KINDS_OK = tuple(
    doctorviews.kind_state(
        kind,
        custom_resource_definition(kind) | {"status": {"conditions": [{"type": "Established", "status": "True"}]}},
    )
    for kind in KINDS
)
WELL = DoctorSnapshot(
    namespace="shoal-system",
    version="0.1.0",
    workloads=(workload("operator"), workload("gateway"), workload("ledger", 1, 1), workload("cache", 1, 1)),
    pods=(layerviews.pod(pod(name="shoal-cache-1") | {"metadata": {
        "namespace": "shoal-system", "name": "shoal-cache-1", "labels": {"app.kubernetes.io/component": "cache"}}}),),
    lease=OperatorLease("shoal-operator-1", NOW - 2 * SECOND, 15),
    kinds=KINDS_OK,
    permissions=(PermissionState("list", "models.shoal.dev", None, "watch the declared resources", True),),
    certificates=(CertificateState("shoal-gateway-tls", NOW + timedelta(days=5)),),
    clock=ClockState(NOW.replace(microsecond=0), NOW, NOW + SECOND / 10),
    node_leases=(NodeLease("gpu-1", NOW - 3 * SECOND, 40),),
    services=(ServiceState("shoal-gateway", 2, 0),),
    name_service=ServiceState("kube-dns", 2, 0),
    cache=NodeCacheSettings(True, 500 * GI, {}),
    disks={"gpu-1": 2000 * GI},
    classes=(gpu_class(condition("Ready", "True", "NodesFound")),),
    nodes=(layerviews.node(node()),),
    models=(model(READY),),
    tenants=(tenant(condition("Ready", "True", "Active", "1 key, 1 models")),),
)  # fmt: skip


@dataclass(frozen=True)
class InstallationFault:
    name: str
    seen: DoctorSnapshot
    outcome: str
    layer: str
    reason: str
    message: str
    do: str


def component_pod(component: str, *containers: dict[str, Any]) -> Any:
    raw = pod(*containers, name=f"shoal-{component}-1")
    raw["metadata"] |= {"namespace": "shoal-system", "labels": {"app.kubernetes.io/component": component}}
    return layerviews.pod(raw)


def with_workload(*changed: WorkloadState, **more: Any) -> DoctorSnapshot:
    names = {each.component for each in changed}
    assert not isinstance(WELL.workloads, Unread)
    return replace(WELL, workloads=(*(w for w in WELL.workloads if w.component not in names), *changed), **more)


def of_devices(raw: dict[str, Any]) -> WhyNode:
    """A node without a device plugin and without labels: a driver publishes its GPUs."""
    raw["metadata"]["labels"] = {}
    return replace(layerviews.node(raw), capacity={}, allocatable={})


def with_devices(*nodes: dict[str, Any]) -> DoctorSnapshot:
    """A class of devices on these nodes, without a nodeSelector."""
    found = tuple(of_devices(raw) for raw in nodes)
    chosen = replace(gpu_class(condition("Ready", "True", "NodesFound")), spec={"device": {"deviceClassName": "gpu"}})
    on = {chosen.name: {each.name: 8 for each in found}}
    return replace(WELL, classes=(chosen,), nodes=found, devices=DeviceState(on))


assert not isinstance(WELL.nodes, Unread)
WELL_NODES = WELL.nodes
LOST = {"gpu-2": ("gpu.nvidia.com/gpu-2/gpu-0", "gpu.nvidia.com/gpu-2/gpu-1")}

FAULTS = [
    # --- the clock, the name service
    InstallationFault(
        "a clock that is ahead",
        replace(WELL, clock=ClockState(NOW - 90 * SECOND, NOW, NOW)),
        "error", "control", "ClockDiffers", "89 s ahead of", "NTP",
    ),
    InstallationFault(
        "a clock that is a little behind",
        replace(WELL, clock=ClockState(NOW + 20 * SECOND, NOW, NOW)),
        "warning", "control", "ClockDiffers", "20 s behind", "NTP",
    ),
    InstallationFault(
        "a node whose clock is ahead",
        replace(WELL, node_leases=(NodeLease("gpu-1", NOW + 300 * SECOND, 40),)),
        "warning", "L0", "NodeClockAhead", "gpu-1 (300 s)", "NTP",
    ),
    InstallationFault(
        "a node that is silent",
        replace(WELL, node_leases=(NodeLease("gpu-1", NOW - 300 * SECOND, 40),)),
        "warning", "L0", "NodeLeaseLate", "gpu-1 (300 s)", "Check the machines",
    ),
    InstallationFault(
        "a name service without an address",
        replace(WELL, name_service=ServiceState("kube-dns", 0, 2)),
        "error", "L2", "NameServiceDown", "no ready address", "DNS pods",
    ),
    # --- kinds, permissions, certificates
    InstallationFault(
        "a kind that is not installed",
        replace(WELL, kinds=(*KINDS_OK[1:], doctorviews.kind_state(KINDS[0], None))),
        "error", "control", "KindMissing", "gpuclasses.shoal.dev is not installed", "shoal-crds",
    ),
    InstallationFault(
        "a kind of an older version",
        replace(WELL, kinds=(doctorviews.kind_state(ModelRoute, definition(spec={"versions": [{
            "name": "v1alpha1", "served": True, "schema": {"openAPIV3Schema": {"properties": {
                "apiVersion": {}, "kind": {}, "metadata": {}, "spec": {"properties": {"servedNames": {}}}}}}}]})),)),
        "error", "control", "KindTooOld", "it has no spec.externalTargets, spec.limits, spec.rules", "shoal-crds",
    ),
    InstallationFault(
        "a kind that is not established",
        replace(WELL, kinds=(doctorviews.kind_state(ModelRoute, definition(status={})),)),
        "error", "control", "KindNotEstablished", "not served", "shoal-crds",
    ),
    InstallationFault(
        "a permission that is missing",
        replace(WELL, permissions=(PermissionState("create", "deployments.apps", "chat", "make Deployments", False),)),
        "error", "control", "PermissionMissing", "create deployments.apps in namespace chat", "chart's roles",
    ),
    InstallationFault(
        "a permission of the gateways that is missing",
        replace(WELL, permissions=(PermissionState("watch", "models.shoal.dev", None, "watch API keys and models",
                                                   False, "gateway"),)),
        "error", "control", "PermissionMissing", "gateways' account may not watch models.shoal.dev", "chart's roles",
    ),
    InstallationFault(
        "a certificate that has expired",
        replace(WELL, certificates=(CertificateState("shoal-gateway-tls", NOW - timedelta(hours=1)),)),
        "error", "control", "CertificateExpired", "shoal-gateway-tls expired on 2026-11-26 11:00", "operator's log",
    ),
    InstallationFault(
        "a certificate that was not renewed",
        replace(WELL, certificates=(CertificateState("shoal-gateway-tls", NOW + timedelta(hours=3)),)),
        "warning", "control", "CertificateExpires", "expires on", "operator's log",
    ),
    # --- processes
    InstallationFault(
        "a Lease that was lost",
        replace(WELL, lease=OperatorLease("shoal-operator-1", NOW - 600 * SECOND, 15)),
        "error", "control", "OperatorNotLeading", "600 s ago", "operator's pods",
    ),
    InstallationFault(
        "an operator that never ran",
        replace(WELL, lease=None),
        "error", "control", "OperatorNotLeading", "there is no Lease", "operator's pods",
    ),
    InstallationFault(
        "no gateway",
        replace(WELL, workloads=(workload("operator"),)),
        "error", "control", "NotInstalled", "there is no gateway", "Install the chart shoal",
    ),
    InstallationFault(
        "a gateway without peers",
        with_workload(workload("gateway", 3, 1)),
        "warning", "L5", "GatewayWithoutPeers", "1 of 3 pods ready", "quotas",
    ),
    InstallationFault(
        "gateways that are not ready",
        with_workload(workload("gateway", 3, 0)),
        "error", "L5", "GatewaysNotReady", "0 of 3 pods ready", "pods and logs",
    ),
    InstallationFault(
        "a gateway whose spool is full",
        with_workload(
            workload("gateway", 2, 1),
            pods=(replace(component_pod("gateway", engine(name="gateway", running=True)), not_ready=("spool",)),),
        ),
        "warning", "L5", "UsageSpoolRefuses", "1 of 2 pods ready: not ready: spool", "gateway.persistence",
    ),
    InstallationFault(
        "a gateway that misses its keys",
        with_workload(
            workload("gateway", 2, 0),
            pods=(replace(component_pod("gateway", engine(name="gateway", running=True)), not_ready=("installKey",)),),
        ),
        "error", "L5", "GatewaysNotReady", "not ready: installKey", "pods and logs",
    ),
    InstallationFault(
        "a ledger whose image cannot be pulled",
        with_workload(
            workload("ledger", 1, 0),
            pods=(component_pod("ledger", engine(name="ledger", waiting=("ErrImagePull", "manifest unknown"))),),
        ),
        "error", "L2", "ImageNotFound", "StatefulSet shoal-ledger: 0 of 1 pods ready", "name or tag",
    ),
    InstallationFault(
        "a ledger that is away",
        with_workload(workload("ledger", 1, 0)),
        "error", "control", "NotReady", "shoal-ledger", "describe pods",
    ),
    InstallationFault(
        "an operator that keeps ending",
        with_workload(
            workload("operator", 2, 1),
            pods=(component_pod("operator", crashed("KeyError: 'x'", name="operator")),),
        ),
        "warning", "control", "ContainerFailed", "KeyError", "log before its end",
    ),
    InstallationFault(
        "parts of two versions",
        with_workload(workload("gateway", version="0.2.0")),
        "error", "control", "VersionsDiffer", "0.2.0: gateway", "one release of the chart",
    ),
    InstallationFault(
        "a command of another version",
        replace(WELL, version="0.3.0"),
        "warning", "control", "VersionsDiffer", "this command is 0.3.0", "installation's version",
    ),
    InstallationFault(
        "a Service without an address",
        replace(WELL, services=(ServiceState("shoal-gateway", 0, 2),)),
        "error", "L5", "NoReadyAddress", "shoal-gateway has no ready address (2", "describe service",
    ),
    # --- the fleet
    InstallationFault(
        "a class that matches no node",
        replace(WELL, nodes=(), classes=(gpu_class(condition("Ready", "False", "NoNodes", "no node has the labels")),)),
        "error", "L2", "NoNodes", "h100-80gb", "nodeSelector",
    ),
    InstallationFault(
        "a class without a device plugin",
        replace(
            WELL,
            nodes=(layerviews.node(node(gpus=0)),),
            classes=(gpu_class(condition("Ready", "False", "NoNodes", "none has it: does the device plugin run?")),),
        ),
        "error", "L1", "DevicePluginMissing", "offers no nvidia.com/gpu", "device plugin",
    ),
    InstallationFault(
        "a sick node of a class that has others",
        replace(WELL, nodes=(layerviews.node(node()), layerviews.node(node(usable=6, name="gpu-2")))),
        "warning", "L0", "GPUUnhealthy", "2 of 8", "vendor's diagnosis",
    ),
    InstallationFault("no class", replace(WELL, classes=()), "error", "control", "NoClass", "no GPUClass", "Create"),
    InstallationFault(
        "GPUs that no class counts",
        replace(WELL, nodes=(layerviews.node(node() | {"metadata": {"name": "odd", "labels": {}}}),)),
        "warning", "control", "GPUsWithoutClass", "odd", "nodeSelector",
    ),
    InstallationFault(
        "a node of a class of devices whose kubelet is silent",
        with_devices(node(condition("Ready", "Unknown", "NodeStatusUnknown", "no status")), node(name="gpu-2")),
        "warning", "L0", "NodeSilent", "node gpu-1", "Check the machine",
    ),
    InstallationFault(
        "a GPU that a problem detector reports on a node of a class of devices",
        with_devices(node(condition("GPUUnhealthy", "True", "XidError", "Xid 79")), node(name="gpu-2")),
        "warning", "L0", "GPUFellOffBus", "node gpu-1", "have the GPU",
    ),
    InstallationFault(
        "a taint that a class of devices does not tolerate",
        with_devices(node(taints=[{"key": "team", "value": "ml", "effect": "NoSchedule"}]), node(name="gpu-2")),
        "warning", "L2", "TaintNotTolerated", "team=ml:NoSchedule", "Add a toleration",
    ),
    InstallationFault(
        "devices that no class selects",
        replace(WELL, nodes=(*WELL_NODES, of_devices(node(name="gpu-2"))), devices=DeviceState({}, LOST)),
        "warning", "control", "GPUsWithoutClass", "on gpu-2 that no GPUClass selects: gpu.nvidia.com", "spec.device",
    ),
    InstallationFault(
        "a cache on a full disk",
        replace(WELL, nodes=(layerviews.node(node(condition("DiskPressure", "True", "x", "full"))),)),
        "error", "L2.5", "DiskFull", "gpu-1", "cache.size",
    ),
    InstallationFault(
        "a cache that is larger than its disk",
        replace(WELL, disks={"gpu-1": 400 * GI}),
        "warning", "L2.5", "CacheLargerThanDisk", "gpu-1", "cache.hostPath",
    ),
    InstallationFault(
        "a cache that does not answer a Model",
        replace(WELL, models=(model(condition("Ready", "False", "CacheUnavailable", "no answer")),)),
        "error", "L2.5", "CacheUnavailable", "chat/llama", "shoal why model/llama -n chat",
    ),
    InstallationFault(
        "a source of signals that is away",
        replace(
            WELL,
            models=tuple(
                model(READY, condition("SignalsUnknown", "True", "SignalsStale", "prometheus"), name=name,
                      replicas={"ready": 1})
                for name in ("a", "b", "c")
            ),
        ),
        "error", "control", "SignalsAway", "chat/a, chat/b, chat/c", "Prometheus",
    ),
    InstallationFault(
        "KEDA that is away",
        replace(WELL, models=(model(READY, condition("ScalingActive", "False", "MetricsUnavailable", "no metric")),)),
        "error", "control", "MetricsUnavailable", "chat/llama", "metrics adapter",
    ),
    InstallationFault(
        "a Model that does not serve",
        replace(WELL, models=(model(condition("Ready", "False", "EngineFailed", "it ended")),)),
        "warning", "L4", "EngineFailed", "chat/llama", "shoal why model/llama -n chat",
    ),
    InstallationFault(
        "a Model whose engine names the layer below it",
        replace(WELL, models=(model(condition("Ready", "False", "EngineFailed", "no CUDA-capable device")),)),
        "warning", "L1", "DriverMissing", "chat/llama", "shoal why model/llama -n chat",
    ),
    InstallationFault(
        "a Model whose engine is killed at its memory limit",
        replace(WELL, models=(model(condition("Ready", "False", "EngineFailed", "the engine of pod chat/llama-1 ended "
                                              "with exit code 137 (5 restarts): OOMKilled")),)),
        "warning", "L2", "OutOfHostMemory", "chat/llama", "shoal why model/llama -n chat",
    ),
    InstallationFault(
        "a Model whose engine a signal ends",
        replace(WELL, models=(model(condition("Ready", "False", "EngineFailed", "the engine of pod chat/llama-1 ended "
                                              "with exit code 137 (1 restart): INFO: loading")),)),
        "warning", "L4", "EngineStopped", "chat/llama", "shoal why model/llama -n chat",
    ),
    InstallationFault(
        "a Model whose source nobody reads",
        replace(WELL, models=(model(condition("Ready", "False", "ReadingArtifact", "Job facts-1 reads the source's "
                                              "metadata: 0/3 nodes are available: 3 Insufficient cpu.")),)),
        "warning", "L2", "InsufficientCPUOrMemory", "chat/llama", "shoal why model/llama -n chat",
    ),
    # --- proxies
    InstallationFault(
        "proxies without the kind InferencePool",
        replace(WELL, proxies=ProxySettings(True, True, ("ingress",), pools=False)),
        "warning", "L5", "InferencePoolsMissing", "does not serve InferencePools", "CustomResourceDefinitions",
    ),
    InstallationFault(
        "InferencePools that no Model gets",
        replace(WELL, proxies=ProxySettings(False, True, (), pools=True)),
        "warning", "L5", "InferencePoolsUnused", "gateway.extProc is off", "gateway.extProc.enabled",
    ),
    InstallationFault(
        "proxies that prove nothing to engines",
        replace(WELL, proxies=ProxySettings(True, False, ("ingress",), pools=True)),
        "warning", "L5", "ProxiesWithoutProof", "no proof", "transport.mtls.enabled",
    ),
    InstallationFault(
        "proxies that no network policy lets in",
        replace(WELL, proxies=ProxySettings(True, True, (), pools=True)),
        "error", "L5", "NoProxyNamespace", "names no namespace", "gateway.extProc.proxyNamespaces",
    ),
    # --- price lists
    InstallationFault(
        "price lists that the ledger refuses",
        replace(WELL, prices=PriceState(("demo",), ("mine.yaml:2: begins when demo.yaml does, 2026-11-01T00:00Z",))),
        "error", "control", "PriceListsRefused", "mine.yaml:2: begins when demo.yaml does", "at the named lines",
    ),
    # --- tenants
    InstallationFault(
        "a tenant that may use nothing",
        replace(WELL, tenants=(tenant(condition("Ready", "True", "Active"), spec={}),)),
        "warning", "L6", "NothingGranted", "acme", "spec.models",
    ),
    InstallationFault(
        "a tenant without a usable key",
        replace(WELL, tenants=(tenant(condition("Ready", "False", "NoUsableKey", "expired")),)),
        "warning", "L6", "NoUsableKey", "acme", "shoal keys create",
    ),
    InstallationFault(
        "a tenant whose Models do not exist",
        replace(WELL, models=()),
        "warning", "L6", "ModelNotFound", "acme", "spec.models",
    ),
]  # fmt: skip


def bad(seen: DoctorSnapshot) -> list[DoctorResult]:
    return [each for each in examine(seen, NOW) if each.outcome != "ok"]


def test_an_installation_that_is_well_is_called_so_check_by_check() -> None:
    assert bad(WELL) == []
    assert len(examine(WELL, NOW)) >= len(CHECKS)
    assert all(each.message for each in examine(WELL, NOW))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_with_what_to_do(fault: InstallationFault) -> None:
    found = [each for each in bad(fault.seen) if each.reason == fault.reason]
    assert found, bad(fault.seen)
    (first, *_) = found
    assert (first.outcome, first.layer) == (fault.outcome, fault.layer)
    assert fault.message in first.message
    assert fault.do in first.do


def test_what_cannot_be_read_is_unknown_and_no_more() -> None:
    parts = (
        "workloads", "lease", "kinds", "permissions", "certificates", "clock", "node_leases", "services",
        "name_service", "proxies", "cache", "classes", "models", "tenants", "nodes", "devices",
    )  # fmt: skip
    for part in parts:
        found = bad(replace(WELL, **{part: Unread(part, "you may not")}))
        assert found, part
        assert {each.outcome for each in found} == {"unknown"}, part
        assert all("you may not" in each.message for each in found)


def test_a_class_of_devices_whose_nodes_are_well_is_well() -> None:
    assert bad(with_devices(node(), node(name="gpu-2"))) == []


def test_a_gpu_that_a_device_plugin_advertises_too_is_told_once() -> None:
    """A DRA driver may run beside the device plugin, whose GPUs a class counts, or none."""
    published = DeviceState({}, {"gpu-1": ("gpu.nvidia.com/gpu-1/gpu-0",)})
    assert bad(replace(WELL, devices=published)) == []
    odd = layerviews.node(node() | {"metadata": {"name": "gpu-1", "labels": {}}})
    (told,) = bad(replace(WELL, nodes=(odd,), devices=published))
    assert (told.check, told.reason) == ("GPU nodes", "GPUsWithoutClass")


def test_gpus_of_a_device_plugin_whose_node_has_devices_of_a_class_are_no_others() -> None:
    plugin = replace(of_devices(node()), capacity={"nvidia.com/gpu": 8}, allocatable={"nvidia.com/gpu": 8})
    assert bad(replace(with_devices(node()), nodes=(plugin,))) == []


def test_proxies_that_carry_requests_with_proofs_are_well() -> None:
    assert bad(replace(WELL, proxies=ProxySettings(True, True, ("ingress",), pools=True))) == []
    assert bad(replace(WELL, proxies=ProxySettings(False, False, (), pools=False))) == []


def test_price_lists_that_are_in_force_are_well_and_refused_ones_say_what_is() -> None:
    assert bad(replace(WELL, prices=PriceState(("demo",)))) == []
    assert bad(replace(WELL, prices=PriceState())) == []
    (found,) = bad(replace(WELL, prices=PriceState((), ("a.yaml:1: not UTF-8",))))
    assert "and nothing has a price: a.yaml:1: not UTF-8" in found.message


def test_the_scalers_service_needs_an_address_where_keda_drives_a_model() -> None:
    seen = replace(WELL, services=(ServiceState("shoal-gateway", 2, 0), ServiceState("shoal-scaler", 0, 0)))
    assert bad(seen) == []
    driven = model(READY, condition("ScalingActive", "True", "DrivenByKEDA"))
    assert [each.reason for each in bad(replace(seen, models=(driven,)))] == ["NoReadyAddress"]


def test_permissions_in_a_part_of_the_namespaces_are_called_so() -> None:
    allowed = PermissionState("list", "pods", "chat", "find replicas", True)
    found = examine(replace(WELL, scope=("chat", "code", "batch"), permissions=(allowed,)), NOW)
    (told,) = [each for each in found if each.check == "permissions"]
    assert told.message.endswith("in 1 of its 3 namespaces")


def test_a_certificate_whose_date_nobody_says_is_unknown() -> None:
    (found,) = bad(replace(WELL, certificates=(CertificateState("shoal-scaler-tls", None),)))
    assert (found.outcome, "shoal-scaler-tls" in found.message) == ("unknown", True)


def test_a_missing_chart_of_kinds_is_one_result_before_what_follows_from_it() -> None:
    absent = tuple(doctorviews.kind_state(kind, None) for kind in KINDS)
    unread = {part: Unread(part, "404 page not found") for part in ("classes", "models", "tenants")}
    found = bad(replace(with_workload(workload("gateway", 2, 0)), kinds=absent, **unread))
    assert [(each.check, each.reason) for each in found] == [
        ("kinds", "KindMissing"),
        ("process gateway", "GatewaysNotReady"),
    ]
    assert all(kind.name in found[0].message for kind in absent)
    assert (
        "are not installed; not checked because of this: GPU classes, signals, KEDA, Models, tenants"
        in found[0].message
    )


@pytest.mark.parametrize(
    ("lacks", "told"),
    [(("models", "tenants"), []), (("models", "spool"), ["UsageSpoolRefuses", "NoReadyAddress"])],
    ids=["kinds only", "the spool too"],
)
def test_gateways_that_wait_for_kinds_are_no_results_of_their_own(lacks: tuple[str, ...], told: list[str]) -> None:
    absent = tuple(doctorviews.kind_state(kind, None) for kind in KINDS)
    raw = {"metadata": {"namespace": "shoal-system", "name": "shoal-gateway-0", "labels": {
        "app.kubernetes.io/component": "gateway"}}}  # fmt: skip
    waits = replace(layerviews.pod(raw), not_ready=lacks)
    seen = with_workload(
        workload("gateway", 2, 0), kinds=absent, pods=(waits,), services=(ServiceState("shoal-gateway", 0, 2),)
    )
    first, *others = bad(seen)
    assert first.reason == "KindMissing"
    assert sorted(each.reason for each in others) == sorted(told)
    assert ("; not ready because of this: process gateway, services" in first.message) == (not told)


def test_what_cannot_be_read_for_another_reason_is_told_beside_a_missing_kind() -> None:
    kinds = tuple(each for each in KINDS_OK if not each.name.startswith("models."))
    absent = next(kind for kind in KINDS if kind.crd_name().startswith("models."))
    seen = replace(WELL, kinds=(*kinds, doctorviews.kind_state(absent, None)), tenants=Unread("tenants", "you may not"))
    assert [each.reason for each in bad(seen)] == ["KindMissing", "NotRead"]


def test_where_nothing_is_installed_only_that_is_told() -> None:
    gone = Unread("ConfigMap shoal-operator", 'configmaps "shoal-operator" not found')
    assert not isinstance(WELL.permissions, Unread)
    denied = tuple(replace(each, allowed=False) for each in WELL.permissions)
    seen = replace(WELL, workloads=(), pods=(), services=(), lease=None, cache=gone, proxies=gone, permissions=denied)
    (found,) = bad(seen)
    assert found.reason == "NotInstalled"
    assert found.message.startswith("there is no operator and no gateway in namespace shoal-system; not checked")


def test_errors_come_first_and_then_the_most_upstream() -> None:
    seen = replace(
        WELL,
        lease=None,
        nodes=(layerviews.node(node(usable=6)), layerviews.node(node(name="gpu-2"))),
        tenants=(tenant(condition("Ready", "True", "Active"), spec={}),),
        services=(ServiceState("shoal-gateway", 0, 0),),
    )
    assert [(each.outcome, each.layer.value) for each in bad(seen)] == [
        ("error", "L5"),
        ("error", "control"),
        ("warning", "L0"),
        ("warning", "L6"),
    ]


def test_a_check_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_seen: DoctorSnapshot, _now: datetime) -> Iterator[DoctorResult]:
        raise KeyError("x")

    monkeypatch.setattr(checks, "CHECKS", (("broken", broken), *CHECKS))
    (found,) = bad(WELL)
    assert (found.outcome, found.reason) == ("unknown", "InternalError")
