"""The objects of a Model besides its pods: Deployment, key Secret, PodDisruptionBudget, NetworkPolicy."""

from typing import Final

import yaml

from shoal.api import keys, names
from shoal.api.config import OperatorConfig
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.core import children
from shoal.core.artifacts import identity
from shoal.manifests import egress
from shoal.manifests.pod import STARTUP_SECONDS, template
from shoal.manifests.secrets import encoded, own_secret
from shoal.manifests.shape import VariantShape, labels, metadata, selector

PROGRESS_SECONDS: Final = 3 * STARTUP_SECONDS
"""A rollout is called stuck after three of the longest starts."""
_FETCHING: Final = (names.COMPONENT_ENGINE, names.COMPONENT_FACTS, names.COMPONENT_ADAPTER_FACTS)


def deployment(
    shape: VariantShape, *, surge: bool, replicas: int | None = None, progress_seconds: int = PROGRESS_SECONDS
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


def keys_secret(model: Model, install_key: keys.InstallKey) -> JsonObject:
    """The Secret with the keys of a Model's pods: one per install key, immutable, since SGLang reads its keys once."""
    uid = model.metadata.uid
    agent = keys.AgentKeys(
        callers={role: install_key.bearer_for(role, uid) for role in ("gateway", "operator", "ledger")},
        engine=install_key.bearer_for("gateway", uid),
        admin=install_key.bearer_for("admin", uid),
    )
    engine = yaml.safe_dump({"api-key": agent.engine, "admin-api-key": agent.admin})
    name = children.keys_secret(model.metadata.name, install_key.fingerprint)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(model, name),
        "type": "Opaque",
        "immutable": True,
        "data": encoded({"engine.yaml": engine, "agent.json": agent.model_dump_json()}),
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
    """What the pods may reach (`egress`), and who may reach them: the engine gateways only, the agent gateways,
    operators and the ledger.

    Scrapers reach both ports from the configured namespaces: neither page asks for a key.
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
    callers = (names.COMPONENT_GATEWAY, names.COMPONENT_OPERATOR, names.COMPONENT_LEDGER)
    # The ports of both kinds of pods, whether mutual TLS is on or off: until the last pod from before is replaced,
    # there are both, and nobody listens at the port of the other kind.
    engine: JsonObject = {
        "ports": [_port(names.ENGINE_PORT), _port(names.ENGINE_TLS_PORT)],
        "from": [ours(names.COMPONENT_GATEWAY), *scrapers],
    }
    agent: JsonObject = {
        "ports": [_port(names.AGENT_PORT), _port(names.AGENT_TLS_PORT)],
        "from": [*map(ours, callers), *scrapers],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(model, children.policy(model.metadata.name)),
        "spec": {
            # The Jobs that read what is known of its source and of its adapters fetch like the pods themselves.
            "podSelector": {
                "matchLabels": {names.LABEL_MODEL: model.metadata.name, names.LABEL_MANAGED_BY: names.MANAGED_BY},
                "matchExpressions": [{"key": names.LABEL_COMPONENT, "operator": "In", "values": list(_FETCHING)}],
            },
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                engine,
                agent,
                *([{"ports": [_port(names.ENGINE_PROBE_PORT)], "from": scrapers}] if scrapers else []),
            ],
            "egress": egress.rules(config, identity=identity(model) is not None),
        },
    }


def root_key_secret(namespace: str, key: bytes) -> JsonObject:
    """The install key, made once; only the operator reads it."""
    return own_secret(namespace, names.ROOT_KEY_SECRET, {"current": key.hex()})


def role_secret(namespace: str, role: keys.Role, current: bytes, previous: bytes | None) -> JsonObject:
    """What a role has of the install keys: processes a bundle of each, people the one key that they call with."""
    name = names.key_secret(role)
    if role in keys.PEOPLE:
        return own_secret(namespace, name, {"key": keys.derive(current, role, keys.PEOPLE[role])})
    known = {"current": current} | ({"previous": previous} if previous else {})
    return own_secret(namespace, name, {each: keys.bundle(key, role).model_dump_json() for each, key in known.items()})


def _port(number: int) -> JsonObject:
    return {"protocol": "TCP", "port": number}


__all__ = [
    "deployment",
    "disruption_budget",
    "keys_secret",
    "labels",
    "network_policy",
    "role_secret",
    "root_key_secret",
]
