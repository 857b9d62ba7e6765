"""Tokens with which a command proves to ledger, operator or gateways that its user may ask (`api/rights.py`).

The API server authorizes the user, by whatever credentials the kubeconfig has, to get a token of a ServiceAccount whose
role grants the right. The user's own token is never shown to Shoal.
"""

import shlex
from collections.abc import Sequence
from typing import Final, NamedTuple

from shoal.api.meta import JsonObject
from shoal.api.rights import VIEWER, Right, roles_with
from shoal.kube.client import KubeClient
from shoal.kube.errors import Forbidden, KubeError, NotFound
from shoal.kube.resources import Resource

TOKEN_SECONDS: Final = 600
"""Shortest lifetime of a token that an API server issues."""
_WHO_AM_I: Final = Resource("authentication.k8s.io", "v1", "selfsubjectreviews", "SelfSubjectReview", namespaced=False)
"""Every authenticated user may create one: the role `system:basic-user`."""


class RoleAccount(NamedTuple):
    """A ServiceAccount whose role grants a right."""

    namespace: str
    name: str


class RoleTokens:
    """Gets tokens for one service, and remembers them; also which accounts were refused, for messages."""

    def __init__(self, cluster: KubeClient, namespace: str, audience: str) -> None:
        """`namespace` is Shoal's own."""
        self._cluster, self._namespace, self._audience = cluster, namespace, audience
        self._known: dict[RoleAccount, str | None] = {}
        self._denied: set[tuple[RoleAccount, Right, str | None]] = set()
        self.absent: set[RoleAccount] = set()
        """Accounts of which the user may have tokens, and which do not exist."""

    async def token(self, right: Right, viewed: str | None) -> str | None:
        """A token of the first account that the user may have one of. `viewed`: the namespace that the command is
        about, None: all. None: no account. Raises KubeError when the API server fails."""
        for account in accounts(right, self._namespace, viewed):
            if (account, right, viewed) in self._denied:
                continue
            if account not in self._known:
                self._known[account] = await self._ask(account)
            if (found := self._known[account]) is not None:
                return found
        return None

    def deny(self, token: str, right: Right, viewed: str | None) -> None:
        """The service refused this token: its account lacks the right, and the next one may have it."""
        self._denied |= {(account, right, viewed) for account, known in self._known.items() if known == token}

    def forget(self) -> None:
        """Drops the tokens, which may have expired."""
        self._known.clear()

    async def advice(self, right: Right, viewed: str | None) -> str:
        """What the user lacks, and what an administrator runs."""
        roles = roles_with(right)
        role = VIEWER if viewed is not None and VIEWER in roles else roles[0]
        where = viewed if viewed is not None and VIEWER in roles else self._namespace
        who = await user_name(self._cluster)
        account = RoleAccount(where, role)
        if account in self.absent:
            return (
                f"There is no ServiceAccount {role} in namespace {where}. An administrator adds {where} to "
                "rbac.roles.viewerNamespaces of the chart, or runs:\n"
                f"  kubectl -n {where} create serviceaccount {role}\n"
                f"  kubectl -n {where} create rolebinding {role}-account --clusterrole={role}-account "
                f"--serviceaccount={where}:{role}"
            )
        less = ""
        if viewed is None and right.narrowed == "namespace":
            less = "\nOr ask for one namespace whose shoal-viewer you are, with -n."
        several = f"one of the ClusterRoles {', '.join(roles)}" if len(roles) > 1 else f"the ClusterRole {role}"
        return (
            f"This needs {several}. An administrator runs:\n"
            f"  kubectl -n {where} create rolebinding {binding_name(role, who)} --clusterrole={role} {subject(who)}"
            f"{less}"
        )

    async def _ask(self, account: RoleAccount) -> str | None:
        try:
            return await self._cluster.token(
                account.name, account.namespace, seconds=TOKEN_SECONDS, audience=self._audience
            )
        except NotFound:  # an installation without this role
            self.absent.add(account)
            return None
        except Forbidden:
            return None


def accounts(right: Right, home: str, viewed: str | None) -> Sequence[RoleAccount]:
    """The accounts to try: first the one that sees least. `home` is Shoal's namespace."""
    roles = roles_with(right)
    narrow = [RoleAccount(viewed, VIEWER)] if viewed is not None and VIEWER in roles and viewed != home else []
    return [*narrow, *(RoleAccount(home, role) for role in roles)]


def binding_name(role: str, who: str) -> str:
    """A name for a new binding, such as shoal-billing-finance."""
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in who.lower()).strip("-")[:60].strip("-")
    return f"{role}-{plain or 'user'}"


def subject(who: str) -> str:
    """Whom kubectl is to bind."""
    return f"--user={shlex.quote(who)}" if who else "--user=USER"


async def user_name(cluster: KubeClient) -> str:
    """Name of the user of this command in the cluster; "" where the cluster does not tell it."""
    review: JsonObject = {"apiVersion": _WHO_AM_I.api_version, "kind": _WHO_AM_I.kind, "metadata": {}}
    try:
        answer = await cluster.create(_WHO_AM_I, review)
    except KubeError:
        return ""
    status: JsonObject = answer.get("status") or {}
    user: JsonObject = status.get("userInfo") or {}
    return str(user.get("username") or "")
