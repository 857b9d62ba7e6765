"""The objects of a Model besides its pods: Deployment, key Secret, PodDisruptionBudget, NetworkPolicy."""

import base64
from typing import Final

import yaml

from shoal.api import keys, names
from shoal.api.config import OperatorConfig
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.core import children
from shoal.manifests.pod import STARTUP_SECONDS, template
from shoal.manifests.shape import Shape, labels, metadata, selector

PROGRESS_SECONDS: Final = 3 * STARTUP_SECONDS
"""A rollout is called stuck after three of the longest starts."""


def deployment(
    shape: Shape, *, surge: bool, replicas: int | None = None, progress_seconds: int = PROGRESS_SECONDS
) -> JsonObject:
    """The Deployment of one variant.

    `surge`: a rollout starts the new replica first (needs a free GPU); otherwise it replaces in place. `replicas` only
    as long as no other manager owns the field: it belongs to whoever scales. `progress_seconds`: after so long without
    progress a rollout is called stuck.
    """
    model, gpu_class = shape.model, shape.gpu_class.metadata.name
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(
            model, children.deployment(model.metadata.name, gpu_class), **{names.LABEL_GPU_CLASS: gpu_class}
        ),
        "spec": {
            **({} if replicas is None else {"replicas": replicas}),
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": progress_seconds,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1 if surge else 0, "maxUnavailable": 0 if surge else 1},
            },
            "selector": {"matchLabels": selector(model) | {names.LABEL_GPU_CLASS: gpu_class}},
            "template": template(shape),
        },
    }


def keys_secret(model: Model, install_key: bytes) -> JsonObject:
    """The Secret with the keys of a Model's pods: one per install key, immutable, since SGLang reads its keys once."""
    uid = model.metadata.uid
    agent = keys.AgentKeys(
        callers={role: keys.derive(install_key, role, uid) for role in ("gateway", "operator", "ledger")},
        engine=keys.derive(install_key, "gateway", uid),
        admin=keys.derive(install_key, "agent", uid),
    )
    engine = yaml.safe_dump({"api-key": agent.engine, "admin-api-key": agent.admin})
    name = children.keys_secret(model.metadata.name, keys.fingerprint(install_key))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(model, name),
        "type": "Opaque",
        "immutable": True,
        "data": {"engine.yaml": _base64(engine), "agent.json": _base64(agent.model_dump_json())},
    }


def disruption_budget(model: Model) -> JsonObject:
    """Voluntary disruptions take one replica at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(model, children.policy(model.metadata.name)),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector(model)}},
    }


def network_policy(model: Model, config: OperatorConfig, shoal_namespace: str) -> JsonObject:
    """Who may reach the pods: the engine gateways only, the agent gateways, operators and the ledger.

    Scrapers reach both ports from the configured namespaces; where none is configured, the agent's only, since a rule
    for everybody on the engine's port would undo the first one.
    """

    def ours(component: str) -> JsonObject:
        return {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": shoal_namespace}},
            "podSelector": {"matchLabels": {names.LABEL_COMPONENT: component, names.LABEL_PART_OF: "shoal"}},
        }

    scrapers = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
        for namespace in config.pods.scraper_namespaces
    ]
    engine: JsonObject = {"ports": [_port(names.ENGINE_PORT)], "from": [ours(names.COMPONENT_GATEWAY), *scrapers]}
    agent: JsonObject = {"ports": [_port(names.AGENT_PORT)]}
    if scrapers:
        callers = (names.COMPONENT_GATEWAY, names.COMPONENT_OPERATOR, names.COMPONENT_LEDGER)
        agent["from"] = [*map(ours, callers), *scrapers]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(model, children.policy(model.metadata.name)),
        "spec": {
            "podSelector": {"matchLabels": selector(model)},
            "policyTypes": ["Ingress"],
            "ingress": [engine, agent],
        },
    }


def install_key_secret(namespace: str, key: bytes) -> JsonObject:
    """The install key, made once; gateways mount it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": names.INSTALL_KEY_SECRET,
            "namespace": namespace,
            "labels": {names.LABEL_PART_OF: "shoal", names.LABEL_MANAGED_BY: names.MANAGED_BY},
        },
        "type": "Opaque",
        "data": {"current": _base64(key.hex())},
    }


def _port(number: int) -> JsonObject:
    return {"protocol": "TCP", "port": number}


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


__all__ = [
    "deployment",
    "disruption_budget",
    "install_key_secret",
    "keys_secret",
    "labels",
    "network_policy",
]
