"""Lets people and programs through whose Kubernetes token has a right (`api/rights.py`), beside the keys of roles."""

from shoal.api.rights import Right
from shoal.kube.callers import Callers
from shoal.net.errors import Problem
from shoal.net.hub import Caller
from shoal.net.shell import ShellRequest

PERSON: Caller = Caller("person")
"""The role of a caller with a token: no process of Shoal, and with no certificate of one."""


class RightGuard:
    """Checks a caller's token for one right; the query's `namespace` or `tenant` narrows what it needs."""

    def __init__(self, callers: Callers, right: Right) -> None:
        self._callers = callers
        self._right = right

    def understands(self, given: str) -> bool:
        """Whether this is a token that this guard decides on, and no key."""
        return self._callers.understands(given)

    async def check(self, request: ShellRequest, token: str) -> None:
        """Sets the request's caller. Raises Problem."""
        namespace = request.one("namespace") if self._right.narrowed == "namespace" else None
        tenant = request.one("tenant") if self._right.narrowed == "tenant" else None
        verdict = await self._callers.may(token, self._right, namespace=namespace, tenant=tenant)
        if not verdict.allowed:
            raise Problem(verdict.status, verdict.message, verdict.headers)
        request.caller = Caller(PERSON.role, verdict.user)
