"""Permissions of Shoal's processes at the API server. The chart's roles are generated from this file.

One row per use, with its purpose. A verb that nothing uses is a finding in a security review; a missing verb is a 403
in production: change the row together with the call.
"""

from dataclasses import dataclass, replace
from typing import Final

from shoal.api import names, rights
from shoal.api.meta import GROUP

FOLLOW: Final = ("list", "watch")
"""Verbs of a reflector."""
KEEP: Final = ("get", "list", "watch", "create", "patch", "delete")
"""Verbs of a controller on its children. Server-side apply of a new object requires `create`."""
READ: Final = ("get", "list", "watch")
WRITE: Final = ("create", "update", "patch", "delete", "deletecollection")


@dataclass(frozen=True, slots=True)
class Permission:
    """Verbs on resources of one API group, and their purpose."""

    why: str
    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    resource_names: tuple[str, ...] = ()


OPERATOR: Final = (
    Permission(
        "watch the declared resources",
        GROUP,
        ("gpuclasses", "loraadapters", "lorapools", "modelroutes", "models", "tenants"),
        FOLLOW,
    ),
    Permission(
        "write status",
        GROUP,
        (
            "gpuclasses/status",
            "loraadapters/status",
            "lorapools/status",
            "modelroutes/status",
            "models/status",
            "tenants/status",
        ),
        ("patch",),
    ),
    Permission(
        "own children (required where OwnerReferencesPermissionEnforcement is on)",
        GROUP,
        ("models/finalizers",),
        ("update",),
    ),
    Permission("count free GPUs, and find out why a replica does not start", "", ("nodes", "pods"), FOLLOW),
    Permission("label nodes whose GPUs are out of use (quarantine.shoal.dev/CLASS)", "", ("nodes",), ("patch",)),
    Permission(
        "count devices of GPU classes that have a `device` (DRA)",
        "resource.k8s.io",
        ("resourceslices", "devicetaintrules", "deviceclasses", "resourceclaims"),
        FOLLOW,
    ),
    Permission(
        "one ResourceClaimTemplate per variant of a Model on such a class",
        "resource.k8s.io",
        ("resourceclaimtemplates",),
        KEEP,
    ),
    Permission("match the namespaces that a LoRAPool allows", "", ("namespaces",), FOLLOW),
    Permission("verify that an engine pod belongs to its Model", "apps", ("replicasets",), FOLLOW),
    Permission("choose which pod of a variant is deleted first", "", ("pods",), ("patch",)),
    Permission("one Deployment per variant of a Model", "apps", ("deployments",), KEEP),
    Permission("scale, with a separate field manager", "apps", ("deployments/scale",), ("patch",)),
    Permission(
        "Jobs that read a source's metadata; their TTL deletes them",
        "batch",
        ("jobs",),
        ("list", "watch", "create", "patch"),
    ),
    Permission(
        "a namespace's folder of the node cache: a volume and its claim",
        "",
        ("persistentvolumes", "persistentvolumeclaims"),
        ("list", "watch", "create", "patch", "delete"),
    ),
    Permission("children of a Model, deleted by garbage collection", "policy", ("poddisruptionbudgets",), KEEP[:-1]),
    Permission("children of a Model, unless turned off", "networking.k8s.io", ("networkpolicies",), KEEP),
    # No `list` and no `watch`: Secrets are read by a name given in a resource. For Secrets that are not Shoal's own
    # only the metadata is read, but RBAC cannot separate it from the content. `scope.namespaces` limits the access.
    Permission(
        "manage the install key and the key Secrets of Models, and check that a source's Secret exists",
        "",
        ("secrets",),
        ("get", "create", "patch", "delete"),
    ),
    Permission(
        "one ScaledObject per variant of a Model whose driver is KEDA, and its TriggerAuthentication",
        "keda.sh",
        ("scaledobjects", "triggerauthentications"),
        KEEP,
    ),
    Permission(
        "the CA of the external scaler, for KEDA, and the CA of gateways and ledger, for their callers",
        "",
        ("configmaps",),
        ("get", "create", "patch", "delete"),
    ),
    Permission("find other autoscalers of a Model's Deployments", "autoscaling", ("horizontalpodautoscalers",), FOLLOW),
    Permission("learn why an autoscaler adds no node for a pending replica", "events.k8s.io", ("events",), ("list",)),
    Permission("learn why Kueue does not admit a replica", "kueue.x-k8s.io", ("workloads",), ("list",)),
    Permission(
        "learn what became of nodes that Kueue asked for", "autoscaling.x-k8s.io", ("provisioningrequests",), ("list",)
    ),
    Permission("record events", "events.k8s.io", ("events",), ("get", "create", "patch")),
)
"""The operator, in all namespaces."""

OPERATOR_PROXIES: Final = (
    Permission("one InferencePool per Model", "inference.networking.k8s.io", ("inferencepools",), KEEP[:-1]),
    Permission("its way to the gateways", "", ("services",), KEEP[:-1]),
    Permission("its way to the gateways", "discovery.k8s.io", ("endpointslices",), KEEP[:-1]),
)
"""The operator, in all namespaces, where `gateway.extProc` is on."""

OPERATOR_OWN_NAMESPACE: Final = (
    Permission("leader election", "coordination.k8s.io", ("leases",), ("create",)),
    Permission("leader election", "coordination.k8s.io", ("leases",), ("get", "update"), (names.LEASE_NAME,)),
    Permission("publish the leader's address for KEDA", "discovery.k8s.io", ("endpointslices",), ("create",)),
    Permission(
        "publish the leader's address for KEDA",
        "discovery.k8s.io",
        ("endpointslices",),
        ("get", "patch"),
        (names.SCALER_SERVICE,),
    ),
)
"""The operator, in its own namespace."""

GATEWAY: Final = (
    Permission(
        "watch API keys and models", GROUP, ("loraadapters", "lorapools", "modelroutes", "models", "tenants"), FOLLOW
    ),
    Permission("find replicas and the other gateways", "", ("pods",), FOLLOW),
    Permission("verify that an engine pod belongs to its Model", "apps", ("deployments", "replicasets"), FOLLOW),
)
"""The gateway, in all namespaces. No Secrets: its keys are mounted."""

LEDGER: Final = (
    Permission("find engines, whose counters are compared with billed usage", "", ("pods",), FOLLOW),
    Permission("verify that an engine pod belongs to its Model", "apps", ("deployments", "replicasets"), FOLLOW),
    Permission("read the cost of GPU classes, and find Models", GROUP, ("gpuclasses", "models"), FOLLOW),
)
"""The ledger, in all namespaces. No Secrets: its keys are mounted."""

CACHE: Final = (Permission("find the namespaces that have a folder in the cache", "", ("persistentvolumes",), FOLLOW),)
"""The node cache, in the whole cluster. No Secrets: credentials come with each request."""

VIEWERS: Final = (
    Permission(
        "read all kinds", GROUP, ("gpuclasses", "loraadapters", "lorapools", "modelroutes", "models", "tenants"), READ
    ),
)
EDITORS: Final = (
    Permission(
        "edit Models, pools, adapters and routes of a namespace",
        GROUP,
        ("loraadapters", "lorapools", "modelroutes", "models"),
        (*READ, *WRITE),
    ),
    Permission("kubectl scale", GROUP, ("models/scale",), ("get", "patch", "update")),
)
PLATFORM: Final = (Permission("edit GPU classes and tenants", GROUP, ("gpuclasses", "tenants"), (*READ, *WRITE)),)
"""For platform administrators. Bound by hand, never aggregated."""
ACCESS: Final = (
    Permission("authenticate callers of /metrics", "authentication.k8s.io", ("tokenreviews",), ("create",)),
    Permission("authorize callers of /metrics", "authorization.k8s.io", ("subjectaccessreviews",), ("create",)),
)
"""The operator, in the whole cluster, and, unless `metrics.auth` is off, gateway, ledger and node cache."""
SENDERS: Final = (
    Permission("verify which pod sends usage records", "authentication.k8s.io", ("tokenreviews",), ("create",)),
)
"""The ledger, in the whole cluster, unless `ledger.gatewayTokens` is off."""
DECISIONS: Final = (
    Permission(
        "get a token that the operator accepts",
        "",
        ("serviceaccounts/token",),
        ("create",),
        (names.DECISIONS_ACCOUNT,),
    ),
    Permission("find the leading operator", "coordination.k8s.io", ("leases",), ("get",), (names.LEASE_NAME,)),
    Permission(
        "`kubectl shoal why` and `top` call the operator through the API server's proxy", "", ("pods/proxy",), ("get",)
    ),
)
"""For people who may see load and decisions of all Models, in Shoal's namespace. Bound by hand."""


def _key(role: str) -> Permission:
    return Permission("read the key of this role", "", ("secrets",), ("get",), (names.key_secret(role),))


_CA: Final = Permission(
    "verify gateways and ledger at --gateway-url and --ledger-url",
    "",
    ("configmaps",),
    ("get",),
    (names.AUTHORITY_CONFIG_MAP,),
)

BILLING: Final = (
    _key("billing"),
    _CA,
    Permission("find the ledger", "", ("pods",), ("list",)),
    Permission(
        "`kubectl shoal usage` and `bill` call it through the API server's proxy",
        "",
        ("pods/proxy",),
        ("get", "create"),
    ),
)
"""For people who may see usage and bills of tenants, in Shoal's namespace. Bound by hand."""
LOGS: Final = (
    _key("logs"),
    _CA,
    Permission("find the gateways", "", ("pods",), ("list",)),
    Permission("find gateways that were scaled down and left their volume", "", ("persistentvolumeclaims",), ("list",)),
    Permission(
        "`kubectl shoal logs` calls them through the API server's proxy", "", ("pods/proxy",), ("get", "delete")
    ),
)
"""For people who may read and delete tenants' request logs, in Shoal's namespace. Bound by hand."""


REVIEWS: Final = (
    Permission("authenticate people by their tokens", "authentication.k8s.io", ("tokenreviews",), ("create",)),
    Permission("authorize them", "authorization.k8s.io", ("subjectaccessreviews",), ("create",)),
)
"""Operator, gateway and ledger, in the whole cluster, unless `rbac.roles` is off."""


def _token(role: str) -> Permission:
    return Permission("get a token of the account of this role", "", ("serviceaccounts/token",), ("create",), (role,))


def _reach(service: str, ports: tuple[int, int | None], verbs: tuple[str, ...]) -> tuple[Permission, Permission]:
    """Through the API server's proxy, which RBAC names by scheme, Service and port."""
    plain, tls = ports
    proxied = (f"{service}:{plain}", *([] if tls is None else [f"https:{service}:{tls}"]))
    return (
        Permission(f"find out whether {service} speaks TLS", "", ("services",), ("get",), (service,)),
        Permission(f"call {service} through the API server's proxy", "", ("services/proxy",), verbs, proxied),
    )


_LEDGER: Final = (names.LEDGER_SERVICE, (names.LEDGER_PORT, names.LEDGER_TLS_PORT))
_OPERATOR: Final = (names.OPERATOR_SERVICE, (names.OPS_PORT, None))
_GATEWAYS: Final = (names.GATEWAY_OPS_SERVICE, (names.OPS_PORT, names.OPS_TLS_PORT))

ROLES: Final[dict[str, tuple[Permission, ...]]] = {
    rights.BILLING: (
        _token(rights.BILLING),
        *_reach(*_LEDGER, ("get", "create")),
        _CA,
        Permission("read the price lists in force", "", ("configmaps",), ("get",), (names.PRICES_CONFIG_MAP,)),
    ),
    rights.LOGS: (
        _token(rights.LOGS),
        *_reach(*_GATEWAYS, ("get", "delete")),
        _CA,
        Permission(
            "find gateways that were scaled down and left their volume",
            "",
            ("pods", "persistentvolumeclaims"),
            ("list",),
        ),
    ),
    rights.VIEWER: (
        _token(rights.VIEWER),
        *VIEWERS,
        Permission("see what `why` and `status` read of replicas", "", ("pods",), ("get", "list")),
        Permission("see what `why` reads of their events", "events.k8s.io", ("events",), ("list",)),
        Permission("see which replica has which device", "resource.k8s.io", ("resourceclaims",), ("list",)),
        *_reach(*_OPERATOR, ("get",)),
        *_reach(*_LEDGER, ("get",)),
        *_reach(*_GATEWAYS, ("get",)),
        _CA,
    ),
    rights.TENANT_ADMIN: (
        _token(rights.TENANT_ADMIN),
        Permission("edit Tenants and their API keys", GROUP, ("tenants",), (*READ, *WRITE)),
        *_reach(*_LEDGER, ("get", "create")),
        _CA,
    ),
}
"""For people, one ClusterRole per task. Bound by hand, never aggregated (docs/roles.md)."""
ACCOUNTS: Final[dict[str, tuple[Permission, ...]]] = {
    role: tuple(
        Permission("what a token of this account may ask", GROUP, (right.resource,), (right.verb,)) for right in granted
    )
    for role, granted in rights.GRANTED.items()
}
"""For the ServiceAccounts of these roles, and for programs with a token of their own: what ledger, operator and
gateways answer them. Nothing at the API server, so a token of such an account is of no use there."""
REACH: Final = (
    *_reach(*_OPERATOR, ("get",)),
    *_reach(*_LEDGER, ("get",)),
    *_reach(*_GATEWAYS, ("get",)),
    _CA,
)
"""For people with the role of a viewer in some namespace, in Shoal's namespace: they call what answers them."""


CLUSTER_SCOPED: Final = frozenset(
    {
        "deviceclasses",
        "devicetaintrules",
        "gpuclasses",
        "namespaces",
        "nodes",
        "persistentvolumes",
        "resourceslices",
        "subjectaccessreviews",
        "tenants",
        "tokenreviews",
    }
)
"""Resources above that only a ClusterRole can grant."""


def in_cluster(permissions: tuple[Permission, ...], *, scoped: bool) -> tuple[Permission, ...]:
    """Rows of cluster-scoped resources, for a ClusterRole, where `scope.namespaces` is set (`scoped`), or all other
    rows, for a Role in each of these namespaces."""
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
