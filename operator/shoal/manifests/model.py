"""The objects of a Model besides its pods: Deployments, key Secret, PodDisruptionBudget, NetworkPolicy."""

from typing import Final
from urllib.parse import urlsplit

import yaml

from shoal.api import keys, names
from shoal.api.config import OperatorConfig
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.core import children
from shoal.core.artifacts import identity
from shoal.engine.kinds import kind_of
from shoal.engine.port import STARTUP_SECONDS
from shoal.manifests.pod import template
from shoal.manifests.secrets import encoded, own_secret
from shoal.manifests.shape import VariantShape, labels, metadata, selector

PROGRESS_SECONDS: Final = 3 * STARTUP_SECONDS
"""progressDeadlineSeconds: three times the longest start."""
_FETCHING: Final = (
    names.COMPONENT_ENGINE,
    names.COMPONENT_FACTS,
    names.COMPONENT_ADAPTER_FACTS,
    names.COMPONENT_PREFETCH,
)


def deployment(
    shape: VariantShape, *, surge: bool, replicas: int | None = None, progress_seconds: int = PROGRESS_SECONDS
) -> JsonObject:
    """The Deployment of one variant.

    `surge`: a rollout starts the new replica first, which needs a free GPU; otherwise it replaces in place. `replicas`
    is set only while no other manager owns the field: it belongs to the scaler. `progress_seconds`: a rollout without
    progress for this long counts as stuck.
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
    """The Secret with the keys of a Model's pods: one per install key and engine kind, immutable, since engines read
    their keys only once."""
    uid = model.metadata.uid
    agent = keys.AgentKeys(
        callers={role: install_key.bearer_for(role, uid) for role in ("gateway", "operator", "ledger")},
        engine=install_key.bearer_for("gateway", uid),
        admin=install_key.bearer_for("admin", uid),
    )
    kind = kind_of(model).pod
    engine = yaml.safe_dump(dict(kind.keys_file(agent.engine, agent.admin)))
    name = children.keys_secret(model.metadata.name, install_key.fingerprint, kind.keys_suffix)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(model, name),
        "type": "Opaque",
        "immutable": True,
        "data": encoded({"engine.yaml": engine, "agent.json": agent.model_dump_json()}),
    }


def disruption_budget(model: Model, min_available: int = 0, *, waits: bool = False) -> JsonObject:
    """Voluntary disruptions evict one replica at a time (`core/disruption.py`). `waits`: the only one that serves is
    not evicted before another one is ready."""
    named = metadata(model, children.policy(model.metadata.name))
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": named | {"annotations": {names.ANNOTATION_MIN_AVAILABLE: str(min_available)}},
        "spec": {
            "minAvailable": max(min_available, 1) if waits else min_available,
            "selector": {"matchLabels": selector(model)},
        },
    }


def ready_min_available(budget: JsonObject) -> int | None:
    """`minAvailable` of a budget that stands in the cluster, by the replicas that have become ready. None: it says
    nothing that can be read."""
    annotations: dict[str, str] = budget["metadata"].get("annotations") or {}
    told = annotations.get(names.ANNOTATION_MIN_AVAILABLE, "")
    if told.isdecimal() and len(told) <= 9:
        return int(told)
    least = budget["spec"].get("minAvailable")
    return least if isinstance(least, int) else None


def network_policy(model: Model, config: OperatorConfig, shoal_namespace: str) -> JsonObject:
    """The NetworkPolicy of a Model's pods. Egress: `egress_rules`. Ingress: the engine accepts gateways; the agent
    accepts gateways, operators and the ledger.

    The configured scraper namespaces reach both ports: neither metrics page requires a key.
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
    # The ports with and without mutual TLS: both kinds of pods exist until the last old pod is replaced, and nothing
    # listens on the port of the other kind.
    engine: JsonObject = {
        "ports": [_port(names.ENGINE_PORT), _port(names.ENGINE_TLS_PORT)],
        "from": [ours(names.COMPONENT_GATEWAY), *scrapers],
    }
    proxies = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
        for namespace in config.ext_proc.proxy_namespaces
    ]
    # Without mutual TLS the engine itself listens, and its key is what proves the admission.
    proxied = [_port(names.ENGINE_PROXY_PORT if config.transport.mtls.enabled else names.ENGINE_PORT)]
    agent: JsonObject = {
        "ports": [_port(names.AGENT_PORT), _port(names.AGENT_TLS_PORT)],
        "from": [*map(ours, callers), *scrapers],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(model, children.policy(model.metadata.name)),
        "spec": {
            # Includes the Jobs that read metadata of the source and of adapters: they fetch like engine pods.
            "podSelector": {
                "matchLabels": {names.LABEL_MODEL: model.metadata.name, names.LABEL_MANAGED_BY: names.MANAGED_BY},
                "matchExpressions": [{"key": names.LABEL_COMPONENT, "operator": "In", "values": list(_FETCHING)}],
            },
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                engine,
                agent,
                *([{"ports": proxied, "from": proxies}] if config.ext_proc.enabled and proxies else []),
                *([{"ports": [_port(names.ENGINE_PROBE_PORT)], "from": scrapers}] if scrapers else []),
            ],
            "egress": egress_rules(config, identity=identity(model) is not None),
        },
    }


def root_key_secret(namespace: str, key: bytes) -> JsonObject:
    """The Secret with the install key, created once and read by the operator only."""
    return own_secret(namespace, names.ROOT_KEY_SECRET, {"current": key.hex()})


def role_secret(namespace: str, role: keys.Role, current: bytes, previous: bytes | None) -> JsonObject:
    """The Secret with a role's keys: for processes a bundle per install key, for people the one key that they call
    with."""
    name = names.key_secret(role)
    if role in keys.PEOPLE:
        return own_secret(namespace, name, {"key": keys.derive(current, role, keys.PEOPLE[role])})
    known = {"current": current} | ({"previous": previous} if previous else {})
    return own_secret(namespace, name, {each: keys.bundle(key, role).model_dump_json() for each, key in known.items()})


NEVER: Final = {
    "0.0.0.0/0": ("169.254.0.0/16", "168.63.129.16/32", "100.100.100.200/32", "192.0.0.192/32"),
    "::/0": ("fe80::/10", "fd00:ec2::/64", "fd20:ce::/64"),
}
"""Networks, each with its excluded ranges: link-local addresses and metadata servers of clouds."""
_IDENTITY: Final = (
    ("169.254.170.23/32", 80),  # AWS: EKS Pod Identity
    ("fd00:ec2::23/128", 80),
    ("169.254.169.254/32", 80),  # Google Cloud: GKE's metadata server, by its address and behind it
    ("169.254.169.252/32", 988),
)
_PORTS: Final = {"http": 80, "https": 443}


def egress_rules(config: OperatorConfig, *, identity: bool) -> list[JsonObject]:
    """Egress rules of a Model's pods. `identity`: they get their cloud identity from the node."""
    found: list[JsonObject] = [
        {"ports": [_port(53, "UDP"), _port(53, "TCP")]},
        {
            "ports": [_port(number) for number in _source_ports(config)],
            "to": [
                *({"ipBlock": {"cidr": network, "except": list(never)}} for network, never in NEVER.items()),
                # For clusters whose CNI does not match pods by address; a Service leads to pods.
                {"namespaceSelector": {}},
            ],
        },
    ]
    if identity:
        found += [{"ports": [_port(number)], "to": [{"ipBlock": {"cidr": address}}]} for address, number in _IDENTITY]
    return found


def _source_ports(config: OperatorConfig) -> list[int]:
    """TCP ports of sources, of the hub's mirror, of proxies, and of the trace collector."""
    named = [config.hub_endpoint, config.proxy.http, config.proxy.https]
    named += [config.tracing.endpoint] if config.tracing.engines else []
    return sorted({*config.sources.ports, *(number for url in named if (number := _port_of(url)))})


def _port_of(url: str) -> int | None:
    try:
        parts = urlsplit(url)
        return parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None


def _port(number: int, protocol: str = "TCP") -> JsonObject:
    return {"protocol": protocol, "port": number}


__all__ = [
    "deployment",
    "disruption_budget",
    "keys_secret",
    "labels",
    "network_policy",
    "role_secret",
    "root_key_secret",
]
