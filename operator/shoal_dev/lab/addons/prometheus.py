"""The real Prometheus (Debian's package) in a lab, as Prometheus Operator would run it.

It listens on the nodes' address and is reached as `prometheus.monitoring.svc:9090`. Debian builds it without Kubernetes
discovery, so `scraping` keeps its targets and rules.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from shoal_dev.lab import network
from shoal_dev.lab.addons import monitors
from shoal_dev.lab.kubeapi import Api
from shoal_dev.lab.state import LabForward

NAMESPACE: Final = "monitoring"
SERVICE: Final = "prometheus"
PORT: Final = 9090
ADDRESS: Final = f"http://{network.HOST}:{PORT}"
ACCOUNT: Final = "prometheus"
"""ServiceAccount whose token it shows to those whom it scrapes."""
FORWARD: Final = LabForward(namespace=NAMESPACE, service=SERVICE, port=PORT)
PACKAGES: Final = {"prometheus": "prometheus"}
PROCESSES: Final = ("prometheus", "prometheus-targets")
_KINDS: Final = {"ServiceMonitor": "servicemonitors", "PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"}

Object = dict[str, Any]


def commands(folder: Path, kubeconfig: Path) -> Mapping[str, Sequence[str]]:
    """Process name -> argv; `folder` is Prometheus' own."""
    server, targets = PROCESSES
    return {
        server: [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={network.HOST}:{PORT}",
            "--web.enable-lifecycle",
            "--log.level=warn",
        ],
        targets: [
            sys.executable,
            "-m",
            "shoal_dev.lab.addons.scraping",
            f"--folder={folder}",
            f"--kubeconfig={kubeconfig}",
            f"--prometheus={ADDRESS}",
            f"--account={NAMESPACE}/{ACCOUNT}",
        ],
    }


def prepare(folder: Path) -> None:
    """The folder and a configuration without any target, so that the server can start."""
    for each in (folder, folder / "targets", folder / "rules"):
        each.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_bytes(orjson.dumps(monitors.configuration((), folder)))


def definitions() -> list[Object]:
    """Prometheus Operator's kinds that `monitors` reads; without their schemas."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return [
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{plural}.{monitors.GROUP}"},
            "spec": {
                "group": monitors.GROUP,
                "scope": "Namespaced",
                "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
                "versions": [
                    {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
                ],
            },
        }
        for kind, plural in _KINDS.items()
    ]  # fmt: skip


def values(interval: str = "1s") -> Object:
    """Of Shoal's chart, for an installation that this Prometheus scrapes."""
    monitor = {"enabled": True, "interval": interval}
    return {
        "serviceMonitor": monitor,
        "podMonitor": monitor,
        "metrics": {"auth": {"readers": [{"name": ACCOUNT, "namespace": NAMESPACE}]}},
        "pods": {"scraperNamespaces": [NAMESPACE]},
    }


def service() -> list[Object]:
    """Namespace, ServiceAccount, Service, and the EndpointSlice that leads to the process."""
    metadata = {"name": SERVICE, "namespace": NAMESPACE}
    port = {"name": "web", "port": PORT, "protocol": "TCP"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT, "namespace": NAMESPACE}},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [port]}},
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": metadata | {"labels": {"kubernetes.io/service-name": SERVICE}},
            "addressType": "IPv4",
            "ports": [port],
            "endpoints": [{"addresses": [network.HOST], "conditions": {"ready": True}}],
        },
    ]


async def apply(api: Api) -> None:
    """Puts kinds and Service into a new API server. Raises ApiError."""
    for each in definitions():
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{each['metadata']['name']}"
        await api.apply(path, each)
    space, account, front, slice_ = service()
    await api.apply(f"/api/v1/namespaces/{NAMESPACE}", space)
    await api.apply(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}", account)
    await api.apply(f"/api/v1/namespaces/{NAMESPACE}/services/{SERVICE}", front)
    await api.apply(f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices/{SERVICE}", slice_)
