"""The real Kueue beside a test's control plane, with the integration `pod` for one namespace."""

import base64
import contextlib
import os
import subprocess
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml

from shoal.api.meta import JsonObject
from shoal.kube.resources import Resource
from shoal_dev.lab import kueue
from shoal_dev.lab.gobuild import MANIFESTS
from shoal_dev.lab.pki import LabAuthority
from tests.support.controlplane import ControlPlane, free_ports

QUEUES: Final = Resource("kueue.x-k8s.io", "v1beta1", "localqueues", "LocalQueue")
CLUSTER_QUEUES: Final = Resource("kueue.x-k8s.io", "v1beta1", "clusterqueues", "ClusterQueue", namespaced=False)
FLAVORS: Final = Resource("kueue.x-k8s.io", "v1beta1", "resourceflavors", "ResourceFlavor", namespaced=False)
PRIORITIES: Final = Resource(
    "kueue.x-k8s.io", "v1beta1", "workloadpriorityclasses", "WorkloadPriorityClass", namespaced=False
)
CHECKS: Final = Resource("kueue.x-k8s.io", "v1beta1", "admissionchecks", "AdmissionCheck", namespaced=False)
CHECK_CONFIGS: Final = Resource(
    "kueue.x-k8s.io", "v1beta1", "provisioningrequestconfigs", "ProvisioningRequestConfig", namespaced=False
)
_GPU: Final = "nvidia.com/gpu"
_KUEUE_NAMESPACE: Final = "kueue-system"
_OWN_ETC: Final = """\
mount -t tmpfs none /etc && mkdir -p /etc/kueue/metrics && cp -r "$1" /etc/kueue/metrics/certs && shift && exec "$@\""""
"""Kueue reads the certificate of its metrics page from a fixed path: it gets an /etc of its own."""


def flavor() -> JsonObject:
    return {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "ResourceFlavor", "metadata": {"name": "gpus"}}


def cluster_queue(gpus: int) -> JsonObject:
    quota = [{"name": _GPU, "nominalQuota": str(gpus)}]
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta1",
        "kind": "ClusterQueue",
        "metadata": {"name": "all"},
        "spec": {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [{"coveredResources": [_GPU], "flavors": [{"name": "gpus", "resources": quota}]}],
        },
    }


def nodes_asked_for(retries: int) -> tuple[JsonObject, JsonObject]:
    """The ProvisioningRequestConfig `nodes` and the AdmissionCheck that has it. A request that fails is repeated so
    often, a second later."""
    config: JsonObject = {
        "apiVersion": "kueue.x-k8s.io/v1beta1",
        "kind": "ProvisioningRequestConfig",
        "metadata": {"name": "nodes"},
        "spec": {
            "provisioningClassName": "queued-provisioning.example.com",
            "managedResources": [_GPU],
            "retryStrategy": {"backoffLimitCount": retries, "backoffBaseSeconds": 1, "backoffMaxSeconds": 2},
        },
    }
    check: JsonObject = {
        "apiVersion": "kueue.x-k8s.io/v1beta1",
        "kind": "AdmissionCheck",
        "metadata": {"name": "nodes"},
        "spec": {
            "controllerName": "kueue.x-k8s.io/provisioning-request",
            "parameters": {
                "apiGroup": "kueue.x-k8s.io", "kind": "ProvisioningRequestConfig", "name": "nodes"
            },
        },
    }  # fmt: skip
    return config, check


def local_queue(namespace: str, name: str = "serving") -> JsonObject:
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta1",
        "kind": "LocalQueue",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"clusterQueue": "all"},
    }


@contextlib.contextmanager
def running_kueue(plane: ControlPlane, folder: Path, namespace: str) -> Generator[Path]:
    """Kueue until the block ends; yields its log. Needs root."""
    found = kueue.find_or_build(lambda _line: None)
    manifests = found / MANIFESTS
    crds = [*(manifests / "crd" / "bases").glob("*.yaml"), *manifests.glob("*_provisioningrequests.yaml")]
    for crd in sorted(crds):
        plane.run_kubectl("apply", "--server-side", "-f", str(crd))
    plane.run_kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    plane.run_kubectl("create", "namespace", _KUEUE_NAMESPACE, check=False)
    authority = LabAuthority("kueue", datetime.now(UTC))
    pair, certificates = authority.server("kueue", ["127.0.0.1"]), folder / "certificates"
    certificates.mkdir(parents=True)
    (certificates / "tls.crt").write_bytes(pair.certificate)
    (certificates / "tls.key").write_bytes(pair.key)
    port, health = free_ports(2)
    config = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta1",
        "kind": "Configuration",
        "namespace": _KUEUE_NAMESPACE,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        # As Kueue's own defaults: resources that no quota covers do not count.
        "resources": {"excludeResourcePrefixes": ["cpu", "memory", "ephemeral-storage"]},
        "integrations": {"frameworks": ["pod"]},
    }
    (folder / "kueue.yaml").write_text(yaml.safe_dump(config))
    hooks = _webhooks(manifests / "webhook" / "manifests.yaml", port, authority.pair.certificate, namespace)
    log = folder / "kueue.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                "unshare", "--mount", "sh", "-c", _OWN_ETC, "sh", certificates, found / "kueue",
                f"--config={folder / 'kueue.yaml'}", "--feature-gates=VisibilityOnDemand=false", "--zap-log-level=2",
            ],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=os.environ | {"KUBECONFIG": str(plane.kubeconfig)},
        )  # fmt: skip
    try:
        plane.run_kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(hooks))
        yield log
    finally:
        plane.run_kubectl("delete", "-f", "-", stdin=yaml.safe_dump_all(hooks), check=False)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _webhooks(path: Path, port: int, authority: bytes, namespace: str) -> list[JsonObject]:
    """Kueue's own configurations, of its kinds and of pods in one namespace, by address instead of a Service."""
    found: list[JsonObject] = []
    for configuration in yaml.safe_load_all(path.read_text()):
        kept: list[dict[str, Any]] = []
        for hook in configuration["webhooks"]:
            target = hook["clientConfig"].pop("service")["path"]
            resources = {name for rule in hook["rules"] for name in rule["resources"]}
            if "pods" not in resources and "kueue-x-k8s-io" not in target:
                continue
            hook["clientConfig"] = {
                "url": f"https://127.0.0.1:{port}{target}",
                "caBundle": base64.b64encode(authority).decode(),
            }
            if "pods" in resources:
                labels = {"kubernetes.io/metadata.name": namespace}
                hook["namespaceSelector"] = {"matchLabels": labels}
            kept.append(hook)
        configuration["metadata"]["name"] = f"kueue-{configuration['metadata']['name']}"
        found.append(configuration | {"webhooks": kept})
    return found
