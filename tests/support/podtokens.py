"""Tokens of pods, and an API server that the test plays and that knows them."""

import asyncio
import base64
import json
import time
from typing import Any

from shoal.api import names
from shoal.kube.errors import APIServerUnavailable, Forbidden
from shoal.kube.podtokens import POD_NAME

NAMESPACE = "shoal-system"
ACCOUNT = "shoal-gateway"


class PodTokenReviews:
    """Stands for `kube.client.Client`. `issue` makes tokens as a kubelet gets them."""

    def __init__(self) -> None:
        self.asked = 0
        self.away = False
        self.forbids = False
        """Whether the ledger itself may not ask."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.knows_audiences = True
        self._users: dict[str, tuple[str, dict[str, Any]]] = {}

    def issue(
        self,
        pod: str | None = "shoal-gateway-0",
        *,
        account: str = ACCOUNT,
        namespace: str = NAMESPACE,
        audience: str = names.LEDGER_AUDIENCE,
        made: float | None = None,
        seconds: float = 3600,
    ) -> str:
        """`pod` None: bound to none."""
        begins = time.time() if made is None else made
        claims = {"iat": int(begins), "exp": int(begins + seconds), "jti": len(self._users)}
        part = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
        token = f"head.{part}.signature"
        user: dict[str, Any] = {"username": f"system:serviceaccount:{namespace}:{account}"}
        if pod is not None:
            user["extra"] = {POD_NAME: [pod]}
        self._users[token] = audience, user
        return token

    def forget(self, token: str) -> None:
        """It has expired, or its pod is gone."""
        del self._users[token]

    async def create(self, resource: Any, review: dict[str, Any]) -> dict[str, Any]:
        assert resource.plural == "tokenreviews"
        self.asked += 1
        await self.gate.wait()
        if self.away:
            raise APIServerUnavailable("no answer")
        if self.forbids:
            raise Forbidden("tokenreviews.authentication.k8s.io is forbidden", status=403)
        spec = review["spec"]
        audience, user = self._users.get(spec["token"], ("", {}))
        if not self.knows_audiences:
            return {"status": {"authenticated": bool(user), "user": user}}
        if audience not in spec["audiences"]:
            return {"status": {"authenticated": False, "error": "no"}}
        return {"status": {"authenticated": True, "user": user, "audiences": [audience]}}
