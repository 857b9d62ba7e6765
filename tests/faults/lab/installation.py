"""Faults of the installation itself: made, told by `shoal doctor`, and unmade, one after the other."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from shoal.core.layers.layer import Layer
from shoal_dev.demo.clusters import NAMESPACE
from tests.faults.lab.cluster import gpu_class

if TYPE_CHECKING:
    from tests.faults.lab.conftest import BrokenFleet

Undo = Callable[[], object]
POOLS: Final = "inferencepools.inference.networking.k8s.io"


@dataclass(frozen=True)
class LabChange:
    """What is done to an installation, and what `shoal doctor` says of it."""

    name: str
    layer: Layer
    reason: str
    do: str
    make: Callable[["BrokenFleet"], Undo]
    """Makes the fault; what it returns unmakes it."""
    message: str
    """Words of the message."""


def scale(kind: str, name: str, replicas: int) -> Callable[["BrokenFleet"], Undo]:
    def make(fleet: "BrokenFleet") -> Undo:
        def to(count: int) -> None:
            fleet.kubectl("scale", f"{kind}/{name}", "-n", NAMESPACE, f"--replicas={count}")

        to(0)
        return lambda: to(replicas)

    return make


def without(kind: str, name: str, change: Callable[[dict[str, Any]], None]) -> Callable[["BrokenFleet"], Undo]:
    """An object of the cluster, changed by somebody."""

    def make(fleet: "BrokenFleet") -> Undo:
        def write(found: dict[str, Any]) -> None:
            for field in ("resourceVersion", "uid", "managedFields"):
                found["metadata"].pop(field, None)
            fleet.kubectl("replace", "-f", "-", stdin=json.dumps(found))

        text = fleet.kubectl("get", kind, name, "-o", "json")
        changed = json.loads(text)
        change(changed)
        write(changed)
        return lambda: write(json.loads(text))

    return make


def create(*objects: dict[str, Any]) -> Callable[["BrokenFleet"], Undo]:
    def make(fleet: "BrokenFleet") -> Undo:
        fleet.apply(*objects)
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        return lambda: fleet.kubectl("delete", "-f", "-", stdin=text)

    return make


def _no_jobs(role: dict[str, Any]) -> None:
    role["rules"] = [rule for rule in role["rules"] if "jobs" not in (rule.get("resources") or ())]


def _older(crd: dict[str, Any]) -> None:
    for version in crd["spec"]["versions"]:
        del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["prefetch"]


def _unclassed(fleet: "BrokenFleet") -> Undo:
    fleet.kubectl("delete", "gpuclass", "spare")
    return lambda: fleet.apply(gpu_class("spare"))


def _expired() -> dict[str, Any]:
    then = (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    names = {"uri": "spiffe://x", "dns": "x", "authority": "x", "trust": [], "strict": False}
    leaf = json.dumps({"notBefore": "2026-01-01T00:00:00Z", "notAfter": then, **names})
    metadata = {"name": "old-tls", "namespace": NAMESPACE, "annotations": {"shoal.dev/certificate": leaf}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}


POOL_KIND: Final[dict[str, Any]] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    # The group is protected: what is no release of Kubernetes' own says so.
    "metadata": {"name": POOLS, "annotations": {"api-approved.kubernetes.io": "unapproved, a stand-in"}},
    "spec": {
        "group": "inference.networking.k8s.io",
        "names": {"kind": "InferencePool", "plural": "inferencepools", "singular": "inferencepool"},
        "scope": "Namespaced",
        "versions": [
            {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {
                "type": "object", "x-kubernetes-preserve-unknown-fields": True}}}
        ],
    },
}  # fmt: skip

INSTALLATION: Final = (
    LabChange("no ledger", Layer.CONTROL, "NotReady", "Scale shoal-ledger up", scale("statefulset", "shoal-ledger", 1),
              "scaled to 0"),
    LabChange("no gateways", Layer.GATEWAY, "NoReadyAddress", "Compare its selector",
              scale("statefulset", "shoal-gateway", 2), "shoal-gateway"),
    LabChange("a role without a right of the operator", Layer.CONTROL, "PermissionMissing", "chart's roles",
              without("clusterrole", "shoal-operator", _no_jobs), "jobs.batch"),
    LabChange("a kind of an older version", Layer.CONTROL, "KindTooOld", "shoal-crds",
              without("crd", "models.shoal.dev", _older), "prefetch"),
    LabChange("GPU nodes of no class", Layer.CONTROL, "GPUsWithoutClass", "Create a GPUClass", _unclassed, "spare-1"),
    LabChange("a certificate that has expired", Layer.CONTROL, "CertificateExpired", "operator's log",
              create(_expired()), "old-tls"),
    LabChange("InferencePools that nobody fills", Layer.GATEWAY, "InferencePoolsUnused", "gateway.extProc.enabled",
              create(POOL_KIND), "InferencePools"),
    LabChange("no operator", Layer.CONTROL, "OperatorNotLeading", "operator's pods",
              scale("deployment", "shoal-operator", 2), "Lease shoal-operator"),
)  # fmt: skip
"""The operator last: without it nothing else is repaired."""
