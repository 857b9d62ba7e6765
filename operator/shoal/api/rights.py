"""Rights on what ledger, operator and gateways tell people, as RBAC grants them.

The resources below are in Shoal's API group and have no objects and no path at the API server: they exist in Roles and
in SubjectAccessReviews only. A caller of a service shows a token of a ServiceAccount that the service's API server
issued for the service's audience (TokenRequest), so it is of no use anywhere else, and the service asks the API server
what that account may do. One ClusterRole per task grants both: the right, and to get a token of the account of the
same name.
"""

from dataclasses import dataclass
from typing import Final, Literal

from shoal.api import names

Narrowing = Literal["", "namespace", "tenant"]


@dataclass(frozen=True, slots=True)
class Right:
    """A verb on one of the resources. `narrowed`: a call may be about one namespace (granted by a RoleBinding in it) or
    one tenant (`resourceNames`), and then needs the right on that alone."""

    verb: Literal["get", "create", "delete"]
    resource: str
    narrowed: Narrowing = ""


USAGE: Final = Right("get", "usage", "namespace")
BILLS: Final = Right("get", "bills", "tenant")
ALL_BILLS: Final = Right("get", "bills")
"""For calls that name their tenant in the body, which is read only after the caller has proved who it is."""
CREDITS: Final = Right("get", "credits")
NEW_CREDITS: Final = Right("create", "credits")
MARGINS: Final = Right("get", "margins")
UNATTRIBUTED: Final = Right("get", "unattributed")
REQUEST_LOGS: Final = Right("get", "requestlogs", "tenant")
ALL_REQUEST_LOGS: Final = Right("get", "requestlogs")
"""For what gateways know of requests whose tenant the caller does not name."""
ERASE_REQUEST_LOGS: Final = Right("delete", "requestlogs", "tenant")
DECISIONS: Final = Right("get", "decisions", "namespace")
ADAPTER_STATS: Final = Right("get", "adapterstats", "namespace")
TRAFFIC: Final = Right("get", "traffic", "namespace")

BILLING: Final = "shoal-billing"
LOGS: Final = "shoal-logs"
VIEWER: Final = "shoal-viewer"
TENANT_ADMIN: Final = "shoal-tenant-admin"
ROLES: Final = (BILLING, LOGS, VIEWER, TENANT_ADMIN)
"""ClusterRoles for people, and ServiceAccounts of these names in Shoal's namespace. An account VIEWER in another
namespace is for people who see that namespace only."""

GRANTED: Final[dict[str, tuple[Right, ...]]] = {
    VIEWER: (DECISIONS, ADAPTER_STATS, USAGE, TRAFFIC),
    BILLING: (USAGE, BILLS, CREDITS, MARGINS, UNATTRIBUTED),
    LOGS: (REQUEST_LOGS, ERASE_REQUEST_LOGS),
    TENANT_ADMIN: (USAGE, BILLS, CREDITS, NEW_CREDITS),
}
"""What each role grants, in the order in which a command tries the roles."""

LEDGER_AUDIENCE: Final = "shoal-ledger-queries"
"""Not that of gateways' records (`names.LEDGER_AUDIENCE`): a pod's token for these is no token for queries."""
OPERATOR_AUDIENCE: Final = "shoal-operator-decisions"
GATEWAY_AUDIENCE: Final = "shoal-gateway-requestlogs"


LEDGER: Final[dict[tuple[str, str], Right]] = {
    ("GET", names.USAGE_PATH): USAGE,
    ("GET", names.BILL_PATH): BILLS,
    ("POST", names.BILL_PATH): ALL_BILLS,
    ("GET", names.FOCUS_PATH): BILLS,
    ("GET", names.CREDITS_PATH): CREDITS,
    ("POST", names.CREDITS_PATH): NEW_CREDITS,
    ("GET", names.MARGIN_PATH): MARGINS,
    ("GET", names.PRICES_PATH): MARGINS,
    ("GET", names.UNATTRIBUTED_PATH): UNATTRIBUTED,
}
"""The right that each of the ledger's calls needs. A call that is not here is for Shoal's processes only."""
OPERATOR: Final[dict[tuple[str, str], Right]] = {
    ("GET", names.DECISIONS_PATH): DECISIONS,
    ("GET", names.ADAPTERS_PATH): ADAPTER_STATS,
}
GATEWAY: Final[dict[tuple[str, str], Right]] = {
    ("GET", names.LOGS_PATH): REQUEST_LOGS,
    ("DELETE", names.LOGS_PATH): ERASE_REQUEST_LOGS,
    ("GET", names.TRAFFIC_PATH): TRAFFIC,
    ("GET", names.ROUTE_STATS_PATH): TRAFFIC,
    ("GET", names.CHOICES_PATH): ALL_REQUEST_LOGS,
}


def roles_with(right: Right) -> tuple[str, ...]:
    """The roles that grant a right."""
    asked = right.verb, right.resource
    return tuple(role for role, rights in GRANTED.items() if asked in {(each.verb, each.resource) for each in rights})
