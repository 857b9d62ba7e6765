"""A page of the port for operations of which each gateway has a part. Another gateway gets this one's part, a person
gets all of them."""

import asyncio
from dataclasses import dataclass
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError

from shoal.api import names
from shoal.api.keys import Role
from shoal.api.rights import Right
from shoal.core import facts
from shoal.kube.callers import Callers
from shoal.net.asgi import unproved
from shoal.net.errors import Problem
from shoal.net.gatewaycalls import GatewayCalls, GatewayKeys, GatewayPods, NoAnswer
from shoal.net.hub import Caller
from shoal.net.rights import PERSON, RightGuard
from shoal.net.roles import given_key, role_of
from shoal.net.shell import ShellRequest
from shoal.net.tls import TLSCredentials

M = TypeVar("M", bound=BaseModel)

_ROLES: Final[tuple[Role, ...]] = ("gateway", "logs")
_PLACES: Final = ("authorization", names.HEADER_KEY)


@dataclass(frozen=True, slots=True)
class MissingPart:
    """A gateway whose part is not there."""

    gateway: str
    reason: str

    def __str__(self) -> str:
        return f"{self.gateway}: {self.reason}"


class GatheredPage:
    """Who may read the page, and the other gateways' parts of it."""

    def __init__(
        self,
        path: str,
        right: Right,
        keys: GatewayKeys,
        peers: GatewayPods,
        port: int,
        credentials: TLSCredentials | None,
        callers: Callers | None,
    ) -> None:
        """`right`: what a person's token needs. `callers` knows people by their tokens; None: keys only."""
        self._path = path
        self._keys = keys
        self._calls = GatewayCalls(keys, peers, port, credentials)
        self._credentials = credentials
        self._person = None if callers is None else RightGuard(callers, right)
        self._hint = "" if callers is None else f". A person's token is for {callers.audience}"

    async def close(self) -> None:
        await self._calls.close()

    async def guard(self, request: ShellRequest) -> None:
        """Sets the request's caller. Raises Problem for one who may not read the page."""
        secret = given_key(request.headers, _PLACES)
        role = role_of(secret, _ROLES, self._keys.demand_keys)
        person = self._person
        if role is None and (person is None or not person.understands(secret)):
            why = f"a key for logs, or of a gateway, is needed{self._hint}"
            raise Problem(401, why, {"www-authenticate": "Bearer"})
        if (why := unproved(self._credentials, request.scope, role or PERSON.role)) is not None:
            raise Problem(403, why)
        if role is not None:
            request.caller = Caller(role)
        elif person is not None:
            await person.check(request, secret)

    @staticmethod
    def for_gateway(request: ShellRequest) -> bool:
        """Whether another gateway asks, which gathers itself."""
        return request.caller.role == "gateway"

    def peers(self) -> tuple[list[facts.Pod], list[MissingPart]]:
        """The gateways that can be asked, and those that cannot."""
        pods, unreachable = self._calls.reachable()
        return pods, [MissingPart(each["gateway"], each["reason"]) for each in unreachable]

    async def gather(
        self,
        pods: list[facts.Pod],
        query: dict[str, str | None],
        kind: type[M],
        *,
        seconds: float,
        most_bytes: int | None = None,
    ) -> list[M | MissingPart]:
        """The parts of these gateways, in their order. `seconds` and `most_bytes` bound each."""
        return await asyncio.gather(*(self._ask(pod, query, kind, seconds, most_bytes) for pod in pods))

    async def _ask(
        self, pod: facts.Pod, query: dict[str, str | None], kind: type[M], seconds: float, most_bytes: int | None
    ) -> M | MissingPart:
        answer = await self._calls.call("GET", pod, self._path, query, seconds=seconds, most_bytes=most_bytes)
        if isinstance(answer, NoAnswer):
            return MissingPart(pod.name, answer.reason)
        try:
            return kind.model_validate_json(answer)
        except ValidationError:
            return MissingPart(pod.name, "its answer is not understood")
