"""The charts rendered by the real helm, for several sets of values."""

import copy
import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal_dev.lab import binaries

ROOT = Path(__file__).resolve().parents[2]
CHART, CRDS = ROOT / "charts" / "shoal", ROOT / "charts" / "shoal-crds"

EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry.example.com/shoal", "digest": "sha256:" + "0" * 64, "pullSecrets": ["registry"]},
    "commonLabels": {"team": "platform"},
    "operator": {
        "replicas": 3,
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "cpu", "operator": "Exists"}],
        "priorityClassName": "system-cluster-critical",
        "podLabels": {"a": "b"},
        "podAnnotations": {"c": "d"},
        "extraEnv": [{"name": "X", "value": "y"}],
        "serviceAccountAnnotations": {"e": "f"},
        "signals": {"source": "Prometheus", "prometheus": {"url": "http://prometheus.monitoring.svc:9090"}},
        "scaling": {"driver": "KEDA", "keda": {"tlsSecretName": "scaler-cert"}},
    },
    "gateway": {
        "replicas": 3,
        "requestSeconds": 1800,
        "holdSeconds": 1200,
        "maxBodyBytes": 33554432,
        "maxFormBytes": 67108864,
        "media": {"egress": True},
        "service": {"type": "LoadBalancer", "port": 443, "annotations": {"lb": "internal"}},
        "persistence": {"size": "10Gi", "storageClassName": "fast"},
        "requestLog": {
            "persistence": {"enabled": True, "size": "100Gi", "storageClassName": "slow"},
            "bucket": {"url": "s3://logs/east", "secretName": "log-bucket"},
            "encryption": {"secretName": "log-keys"},
        },
        "whenSpoolFull": "Serve",
        "tls": {"secretName": "tls"},
        "ingress": {"enabled": True, "className": "nginx", "host": "llm.example.com", "tlsSecretName": "cert"},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "gateway"}},
            }
        ],
        "affinity": {"nodeAffinity": {}},
    },
    "ledger": {
        "database": {"secretName": "ledger-db", "key": "dsn"},
        "prices": {"2026.yaml": "currency: EUR\n"},
        "retentionDays": 800,
        "hoursRetentionDays": 3650,
        "resources": {"limits": {"memory": "4Gi"}},
        "nodeSelector": {"pool": "cpu"},
        "priorityClassName": "system-cluster-critical",
        "podLabels": {"a": "b"},
        "podAnnotations": {"c": "d"},
        "extraEnv": [{"name": "X", "value": "y"}],
        "serviceAccountAnnotations": {"e": "f"},
    },
    "engines": {
        "defaultVersion": "0.5.24",
        "versions": {
            "0.5.24": {
                "image": "registry.example.com/sglang:0.5.24",
                "command": ["python", "-m", "sglang.launch_server"],
                "args": ["--device=cuda"],
                "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
            }
        },
    },
    "cache": {
        "hostPath": "/mnt/nvme/shoal",
        "size": "4Ti",
        "freePercent": 1,
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "priorityClassName": "system-node-critical",
        "seLinuxOptions": {"type": "spc_t"},
        "podLabels": {"a": "b"},
        "podAnnotations": {"c": "d"},
        "extraEnv": [{"name": "X", "value": "y"}],
        "serviceAccountAnnotations": {"e": "f"},
    },
    "pods": {"imagePullSecrets": ["registry"], "scraperNamespaces": ["monitoring"], "runAsUser": 1000},
    "proxy": {"https": "http://proxy.example.com:3128", "noProxy": ".svc"},
    "caBundle": {"configMap": "ca"},
    "hubEndpoint": "https://hub.example.com",
    "tracing": {"endpoint": "http://otel:4318", "sampler": "traceidratio", "ratio": 0.25, "engines": True},
    "transport": {"mtls": {"enabled": True, "trustDomain": "example.org", "caSecretName": "our-ca"}},
    "networkPolicy": {"apiServers": ["10.0.0.0/28"], "gatewayEgress": True},
    "admission": {"children": {"enabled": True}},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "extraObjects": [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "extra", "namespace": "{{ .Release.Namespace }}"},
        }
    ],
}
SMALL: dict[str, Any] = {
    "operator": {"replicas": 1},
    "gateway": {"replicas": 1, "persistence": {"enabled": False}},
    "ledger": {"persistence": {"enabled": False}},
    "engines": {"simulator": {"enabled": True, "args": ["--sim-speed=4"], "env": [{"name": "A", "value": "b"}]}},
    "networkPolicy": {"enabled": False},
    "podDisruptionBudget": {"enabled": False},
    "rbac": {
        "aggregate": False,
        "roles": {"viewerNamespaces": ["kube-public"], "reachGroups": ["system:authenticated"]},
    },
    "admission": {"loraPools": {"enabled": False}},
    "cache": {"enabled": False},
}
SETS: dict[str, dict[str, Any]] = {"defaults": {}, "everything": EVERYTHING, "small": SMALL}
"""With a ledger on a volume, on PostgreSQL, and without a disk of its own."""


@cache
def _helm() -> Path:
    tools = binaries.find()
    if tools is None:
        pytest.skip("helm is not there: run `shoal lab binaries`")
    return tools.helm


def helm(*args: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    extra = [] if values is None else ["-f", "-"]
    return subprocess.run(
        [_helm(), *args, *extra],
        input=None if values is None else json.dumps(values),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def rendered(values: dict[str, Any], chart: Path = CHART) -> list[dict[str, Any]]:
    """The objects, for the caller to change. helm runs once for the same values."""
    return copy.deepcopy(_rendered(json.dumps(values), chart))


@cache
def _rendered(values: str, chart: Path) -> list[dict[str, Any]]:
    done = helm("template", "shoal", str(chart), "--namespace", "shoal-system", values=json.loads(values))
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one]
