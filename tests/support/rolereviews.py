"""An API server that the test plays: it issues tokens of ServiceAccounts, and knows what their owners may."""

import base64
import json
import time
from typing import Any

from shoal.api import rights
from shoal.api.meta import GROUP
from shoal.kube.errors import APIServerUnavailable, Forbidden
from shoal.kube.podtokens import POD_NAME

HOME = "shoal-system"
KUBERNETES = "https://kubernetes.default.svc"
"""The audience of the API server itself."""


def user_of(account: str, namespace: str = HOME) -> str:
    return f"system:serviceaccount:{namespace}:{account}"


class RoleReviews:
    """Stands for `kube.client.KubeClient`. The accounts of the chart's roles have their rights, as the chart binds
    them; `bind` grants a role's rights to another account, everywhere or in one namespace or on one tenant."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.away = False
        self.forbids = False
        """Whether the service itself may not ask."""
        self.paths: dict[str, set[str]] = {}
        """What users may `get` as a non-resource URL."""
        self._users: dict[str, tuple[str, float, dict[str, Any]]] = {}
        self._bound: list[tuple[str, str, str, str]] = [(user_of(role), role, "", "") for role in rights.ROLES]

    def issue(
        self,
        account: str,
        namespace: str = HOME,
        *,
        audience: str = rights.LEDGER_AUDIENCE,
        seconds: float = 600,
        pod: str | None = None,
    ) -> str:
        now = time.time()
        claims = {"aud": [audience], "iat": int(now), "exp": now + seconds, "jti": len(self._users)}
        part = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
        token = f"head.{part}.signature"
        user: dict[str, Any] = {"username": user_of(account, namespace), "groups": ["system:serviceaccounts"]}
        if pod is not None:
            user["extra"] = {POD_NAME: [pod]}
        self._users[token] = audience, now + seconds, user
        return token

    def forget(self, token: str) -> None:
        """Its account was deleted."""
        del self._users[token]

    def bind(self, account: str, of: str, role: str, *, namespace: str = "", tenant: str = "") -> None:
        """`of`: the account's namespace. `namespace`: of the RoleBinding; `tenant`: its `resourceNames`."""
        self._bound.append((user_of(account, of), role, namespace, tenant))

    def unbind(self, account: str, of: str = HOME) -> None:
        self._bound = [each for each in self._bound if each[0] != user_of(account, of)]

    async def create(self, resource: Any, review: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(resource.plural)
        if self.away:
            raise APIServerUnavailable("no answer")
        if self.forbids:
            raise Forbidden("tokenreviews.authentication.k8s.io is forbidden", status=403)
        spec = review["spec"]
        if resource.plural == "tokenreviews":
            audience, expires, user = self._users.get(spec["token"], ("", 0.0, {}))
            if audience not in spec.get("audiences", [KUBERNETES]) or expires < time.time():
                return {"status": {"authenticated": False, "error": "no"}}
            return {"status": {"authenticated": True, "user": user, "audiences": [audience]}}
        if "nonResourceAttributes" in spec:
            return {"status": {"allowed": spec["nonResourceAttributes"]["path"] in self.paths.get(spec["user"], ())}}
        asked = spec["resourceAttributes"]
        assert asked["group"] == GROUP
        return {"status": {"allowed": any(self._grants(each, spec["user"], asked) for each in self._bound)}}

    @staticmethod
    def _grants(bound: tuple[str, str, str, str], user: str, asked: dict[str, str]) -> bool:
        who, role, namespace, tenant = bound
        granted = {(right.verb, right.resource) for right in rights.GRANTED[role]}
        return (
            who == user
            and (asked["verb"], asked["resource"]) in granted
            and namespace in ("", asked.get("namespace", ""))
            and tenant in ("", asked.get("name", ""))
        )
