"""What Shoal's processes may do at the API server: the chart's roles are generated from here.

One row per use, with its reason. A verb that nothing uses is a finding in a security review; one that is missing is
a 403 in production: change the row together with the call.
"""

from dataclasses import dataclass, replace
from typing import Final

from shoal.api import names
from shoal.api.meta import GROUP

FOLLOW: Final = ("list", "watch")
"""What a reflector does."""
KEEP: Final = ("get", "list", "watch", "create", "patch", "delete")
"""What a controller does with its children; server-side apply of a new object asks for `create` too."""
READ: Final = ("get", "list", "watch")
WRITE: Final = ("create", "update", "patch", "delete", "deletecollection")


@dataclass(frozen=True, slots=True)
class Permission:
    """Verbs on resources of one API group, and why."""

    why: str
    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    resource_names: tuple[str, ...] = ()


OPERATOR: Final = (
    Permission("what is declared", GROUP, ("gpuclasses", "loraadapters", "lorapools", "models", "tenants"), FOLLOW),
    Permission(
        "what was found and decided",
        GROUP,
        ("gpuclasses/status", "loraadapters/status", "lorapools/status", "models/status", "tenants/status"),
        ("patch",),
    ),
    Permission(
        "children are owned by their Model (asked for where OwnerReferencesPermissionEnforcement is on)",
        GROUP,
        ("models/finalizers",),
        ("update",),
    ),
    Permission("free GPUs, and why a replica does not start", "", ("nodes", "pods"), FOLLOW),
    Permission("which namespaces' adapters a LoRAPool allows", "", ("namespaces",), FOLLOW),
    Permission("whether an engine pod belongs to its Model", "apps", ("replicasets",), FOLLOW),
    Permission("which of a variant's pods goes first", "", ("pods",), ("patch",)),
    Permission("one Deployment per variant of a Model", "apps", ("deployments",), KEEP),
    Permission("replicas, through a field manager of their own", "apps", ("deployments/scale",), ("patch",)),
    Permission(
        "Jobs that read a source's metadata; they end, and their time to live takes them away",
        "batch",
        ("jobs",),
        ("list", "watch", "create", "patch"),
    ),
    Permission(
        "a namespace's share in the node cache: a volume and its claim",
        "",
        ("persistentvolumes", "persistentvolumeclaims"),
        ("list", "watch", "create", "patch", "delete"),
    ),
    Permission(
        "children of a Model; garbage collection takes them away", "policy", ("poddisruptionbudgets",), KEEP[:-1]
    ),
    Permission("children of a Model, unless switched off", "networking.k8s.io", ("networkpolicies",), KEEP),
    # No `list` and no `watch`: a Secret is read by a name that somebody gave, and of all but Shoal's own only the
    # metadata, which RBAC cannot tell from the content. What bounds this is `scope.namespaces`.
    Permission(
        "the install key, the key Secrets of Models, and whether a source's Secret is there",
        "",
        ("secrets",),
        ("get", "create", "patch", "delete"),
    ),
    Permission(
        "one ScaledObject per variant of a Model whose driver is KEDA, and how KEDA knows the operator",
        "keda.sh",
        ("scaledobjects", "triggerauthentications"),
        KEEP,
    ),
    Permission("the CA of the external scaler, for KEDA", "", ("configmaps",), ("get", "create", "patch", "delete")),
    Permission("who else scales a Model's Deployments", "autoscaling", ("horizontalpodautoscalers",), FOLLOW),
    Permission("what happened, for people", "events.k8s.io", ("events",), ("get", "create", "patch")),
)
"""The operator, in all namespaces."""

OPERATOR_OWN_NAMESPACE: Final = (
    Permission("who leads", "coordination.k8s.io", ("leases",), ("create",)),
    Permission("who leads", "coordination.k8s.io", ("leases",), ("get", "update"), (names.LEASE_NAME,)),
    Permission("where KEDA finds the one that leads", "discovery.k8s.io", ("endpointslices",), ("create",)),
    Permission(
        "where KEDA finds the one that leads",
        "discovery.k8s.io",
        ("endpointslices",),
        ("get", "patch"),
        (names.SCALER_SERVICE,),
    ),
)
"""The operator, in its own namespace."""

GATEWAY: Final = (
    Permission("whose keys, and which models", GROUP, ("loraadapters", "lorapools", "models", "tenants"), FOLLOW),
    Permission("replicas, and the other gateways", "", ("pods",), FOLLOW),
    Permission("whether an engine pod belongs to its Model", "apps", ("deployments", "replicasets"), FOLLOW),
)
"""The gateway, in all namespaces. No Secrets: its keys are mounted."""

LEDGER: Final = (
    Permission("engines, whose own counters it compares with what was billed", "", ("pods",), FOLLOW),
    Permission("whether an engine pod belongs to its Model", "apps", ("deployments", "replicasets"), FOLLOW),
    Permission("what a GPU of a class costs, and which Models there are", GROUP, ("gpuclasses", "models"), FOLLOW),
)
"""The ledger, in all namespaces. No Secrets: its keys are mounted."""

CACHE: Final = (Permission("which namespaces have a share in the cache", "", ("persistentvolumes",), FOLLOW),)
"""The node cache, in the whole cluster. No Secrets: credentials come with each request."""

VIEWERS: Final = (Permission("reading", GROUP, ("gpuclasses", "loraadapters", "lorapools", "models", "tenants"), READ),)
EDITORS: Final = (
    Permission(
        "Models of their namespace, and adapters", GROUP, ("loraadapters", "lorapools", "models"), (*READ, *WRITE)
    ),
)
PLATFORM: Final = (Permission("the fleet and its tenants", GROUP, ("gpuclasses", "tenants"), (*READ, *WRITE)),)
"""For those who run the fleet: bound by hand, never aggregated."""
ACCESS: Final = (
    Permission("whose token a caller of /metrics has", "authentication.k8s.io", ("tokenreviews",), ("create",)),
    Permission("whether that may read it", "authorization.k8s.io", ("subjectaccessreviews",), ("create",)),
)
"""Operator, gateway, ledger and node cache, in the whole cluster, unless `metrics.auth` is off."""
SENDERS: Final = (
    Permission("from which pod usage records come", "authentication.k8s.io", ("tokenreviews",), ("create",)),
)
"""The ledger, in the whole cluster, unless `ledger.gatewayTokens` is off."""
DECISIONS: Final = (
    Permission(
        "what the operator is shown for it",
        "",
        ("serviceaccounts/token",),
        ("create",),
        (names.DECISIONS_ACCOUNT,),
    ),
    Permission("which pod of the operator leads", "coordination.k8s.io", ("leases",), ("get",), (names.LEASE_NAME,)),
    Permission("`kubectl shoal why` and `top` ask it through the API server", "", ("pods/proxy",), ("get",)),
)
"""For those who may see load and decisions of all Models, in Shoal's namespace: bound by hand."""


def _key(role: str) -> Permission:
    return Permission(
        "the key of such a person, which opens nothing else", "", ("secrets",), ("get",), (names.key_secret(role),)
    )


BILLING: Final = (
    _key("billing"),
    Permission("where the ledger is", "", ("pods",), ("list",)),
    Permission(
        "`kubectl shoal usage` and `bill` ask it through the API server", "", ("pods/proxy",), ("get", "create")
    ),
)
"""For those who see what tenants used and paid, in Shoal's namespace: bound by hand."""
LOGS: Final = (
    _key("logs"),
    Permission("where the gateways are", "", ("pods",), ("list",)),
    Permission("which gateways were scaled away and left their volume", "", ("persistentvolumeclaims",), ("list",)),
    Permission("`kubectl shoal logs` asks them through the API server", "", ("pods/proxy",), ("get", "delete")),
)
"""For those who may read and delete tenants' request logs, in Shoal's namespace: bound by hand."""


CLUSTER_SCOPED: Final = frozenset(
    {"gpuclasses", "tenants", "nodes", "namespaces", "persistentvolumes", "tokenreviews", "subjectaccessreviews"}
)
"""Of the resources above, those that no Role can grant."""


def in_cluster(permissions: tuple[Permission, ...], *, scoped: bool) -> tuple[Permission, ...]:
    """The rows for a ClusterRole where `scope.namespaces` is set (`scoped`: what is in no namespace), or the rest, for
    a Role in each of them."""
    found: list[Permission] = []
    for row in permissions:
        kept = tuple(r for r in row.resources if (r.partition("/")[0] in CLUSTER_SCOPED) == scoped)
        if kept:
            found.append(replace(row, resources=kept))
    return tuple(found)


def rules(permissions: tuple[Permission, ...]) -> list[dict[str, list[str]]]:
    """The rows as `rules` of a Role."""
    return [
        {"apiGroups": [p.group], "resources": list(p.resources)}
        | ({"resourceNames": list(p.resource_names)} if p.resource_names else {})
        | {"verbs": list(p.verbs)}
        for p in permissions
    ]
