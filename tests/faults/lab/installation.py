"""Faults of the installation itself: made, told by `shoal doctor`, and unmade, one after the other."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from shoal.core.layers.layer import Layer
from shoal_dev.demo.clusters import NAMESPACE
from tests.faults.lab import injections as inject
from tests.faults.lab.cluster import gpu_class
from tests.faults.lab.injections import Injection, Undo

if TYPE_CHECKING:
    from tests.faults.lab.conftest import BrokenFleet

POOLS: Final = "inferencepools.inference.networking.k8s.io"


@dataclass(frozen=True)
class LabChange:
    """What is done to an installation, and what `shoal doctor` says of it."""

    name: str
    layer: Layer
    reason: str
    do: str
    make: Injection
    message: str
    """Words of the message."""
    of_models: str | None = None
    """The reason that `shoal why` gives first of a Model that served."""


def scale(kind: str, name: str, replicas: int) -> Injection:
    def make(fleet: "BrokenFleet") -> Undo:
        def to(count: int) -> None:
            fleet.kubectl("scale", f"{kind}/{name}", "-n", NAMESPACE, f"--replicas={count}")

        to(0)
        return lambda: to(replicas)

    return make


def without(kind: str, name: str, change: Callable[[dict[str, Any]], None]) -> Injection:
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


def create(*objects: dict[str, Any]) -> Injection:
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


def _certificate(name: str, left: timedelta) -> dict[str, Any]:
    """A Secret of a certificate that is valid for so long yet."""
    then = (datetime.now(UTC) + left).strftime("%Y-%m-%dT%H:%M:%SZ")
    names = {"uri": "spiffe://x", "dns": "x", "authority": "x", "trust": [], "strict": False}
    leaf = json.dumps({"notBefore": "2026-01-01T00:00:00Z", "notAfter": then, **names})
    meta = {"name": name, "namespace": NAMESPACE, "annotations": {"shoal.dev/certificate": leaf}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta}


def _other_version(fleet: "BrokenFleet") -> Undo:
    """The ledger has the label of another version."""
    field = "app.kubernetes.io/version"

    def label(value: str) -> None:
        fleet.kubectl("label", "statefulset", "shoal-ledger", "-n", NAMESPACE, "--overwrite", f"{field}={value}")

    found = json.loads(fleet.kubectl("get", "statefulset", "shoal-ledger", "-n", NAMESPACE, "-o", "json"))
    label("0.0.9")
    return lambda: label(found["metadata"]["labels"][field])


def _no_image(fleet: "BrokenFleet") -> Undo:
    """A rollout of the gateways stops at the first: its image cannot be pulled."""
    where = ("statefulset/shoal-gateway", "-n", NAMESPACE)
    image = fleet.kubectl("get", *where, "-o", "jsonpath={.spec.template.spec.containers[0].image}")
    fleet.kubectl("set", "image", *where, "gateway=registry.example/team/none:1")

    def undo() -> None:
        fleet.kubectl("set", "image", *where, f"gateway={image}")
        # A StatefulSet waits for the broken pod until somebody deletes it.
        last = max(pod["metadata"]["name"] for pod in fleet.gateways())
        fleet.kubectl("delete", "pod", last, "-n", NAMESPACE, "--wait=false")

    return undo


def _full_spools(fleet: "BrokenFleet") -> Undo:
    """The volumes of the gateways' spools are disks without room; the gateways start anew on them."""
    undos = [fleet.small_disk(pod["spec"]["nodeName"], fleet.volume(pod, "spool"), "4k") for pod in fleet.gateways()]
    _restart_gateways(fleet)

    def undo() -> None:
        for each in undos:
            each()
        _restart_gateways(fleet)

    return undo


def _restart_gateways(fleet: "BrokenFleet") -> None:
    fleet.kubectl("delete", "pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=gateway", "--wait=false")


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
              scale("statefulset", "shoal-gateway", 2), "shoal-gateway", "GatewaysNotReady"),
    LabChange("a role without a right of the operator", Layer.CONTROL, "PermissionMissing", "chart's roles",
              without("clusterrole", "shoal-operator", _no_jobs), "jobs.batch"),
    LabChange("a kind of an older version", Layer.CONTROL, "KindTooOld", "shoal-crds",
              without("crd", "models.shoal.dev", _older), "prefetch"),
    LabChange("GPU nodes of no class", Layer.CONTROL, "GPUsWithoutClass", "Create a GPUClass", _unclassed, "spare-1"),
    LabChange("a certificate that has expired", Layer.CONTROL, "CertificateExpired", "operator's log",
              create(_certificate("old-tls", timedelta(days=-1))), "old-tls"),
    LabChange("a certificate that was not renewed", Layer.CONTROL, "CertificateExpires", "operator's log",
              create(_certificate("late-tls", timedelta(hours=3))), "late-tls"),
    LabChange("a node that is silent", Layer.HARDWARE, "NodeLeaseLate", "Check the machines", inject.silent("spare-1"),
              "spare-1"),
    LabChange("parts of two versions", Layer.CONTROL, "VersionsDiffer", "one release of the chart", _other_version,
              "0.0.9: ledger"),
    LabChange("a gateway whose new image cannot be pulled", Layer.CONTAINER, "ImageNotFound", "name or tag", _no_image,
              "shoal-gateway"),
    LabChange("gateways whose spools are full", Layer.GATEWAY, "UsageSpoolRefuses", "gateway.persistence", _full_spools,
              "not ready: spool", "UsageSpoolRefuses"),
    LabChange("InferencePools that nobody fills", Layer.GATEWAY, "InferencePoolsUnused", "gateway.extProc.enabled",
              create(POOL_KIND), "InferencePools"),
    LabChange("no operator", Layer.CONTROL, "OperatorNotLeading", "operator's pods",
              scale("deployment", "shoal-operator", 2), "Lease shoal-operator", "OperatorNotLeading"),
)  # fmt: skip
"""The operator last: without it nothing else is repaired."""
