"""Why recent requests went to their replicas, or were refused: a bounded memory, and the path of the operations port
that reads it.

The memory is of this process only. It has ids, names and figures, no text of a prompt or an answer.
"""

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final, NamedTuple, Protocol

from pydantic import ValidationError
from starlette.responses import Response

from shoal.api import names
from shoal.api.choices import ChoiceRecord, RefusalRecord, ReplicaCost, RequestChoices
from shoal.api.keys import Role
from shoal.api.rights import ALL_REQUEST_LOGS
from shoal.core.routing.replica import Replica
from shoal.core.routing.score import Pick, Terms
from shoal.kube.callers import Callers
from shoal.net.asgi import unproved
from shoal.net.errors import ApiError, Problem
from shoal.net.gatewaycalls import GatewayCalls, GatewayPods, NoAnswer
from shoal.net.hub import Caller
from shoal.net.rights import PERSON, RightGuard
from shoal.net.roles import given_key, role_of
from shoal.net.shell import ShellRequest
from shoal.net.tls import TLSCredentials

MOST_REQUESTS: Final = 4096
"""Requests that are remembered. One takes about 1 KiB."""
MOST_ATTEMPTS: Final = 10
PEER_SECONDS: Final = 5.0
_ROLES: Final[tuple[Role, ...]] = ("gateway", "logs")
_PLACES: Final = ("authorization", names.HEADER_KEY)
_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class _Choice(NamedTuple):
    at: float
    """Seconds since 1970."""
    replica: Replica
    pick: Pick | None


class _Refusal(NamedTuple):
    at: float
    """Seconds since 1970."""
    status: int
    code: str | None
    param: str | None


class ChoiceMemory:
    """The choices and the errors of the last requests, by request id. Errors have a place of their own: callers without
    a key cannot drive choices out."""

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self._most = most
        self._known: OrderedDict[str, tuple[_Choice, ...]] = OrderedDict()
        self._refused: OrderedDict[str, _Refusal] = OrderedDict()

    def add(self, request: str, replica: Replica, pick: Pick | None) -> None:
        """A request goes to a replica. Every request comes through here."""
        before = self._known.get(request, ())
        if not before and len(self._known) >= self._most:
            self._known.popitem(last=False)
        if len(before) < MOST_ATTEMPTS:
            self._known[request] = (*before, _Choice(time.time(), replica, pick))

    def refuse(self, request: str, error: ApiError) -> None:
        """A request is answered with an error; the last one counts. The error's message may quote the request, and is
        not kept."""
        if request not in self._refused and len(self._refused) >= self._most:
            self._refused.popitem(last=False)
        self._refused[request] = _Refusal(time.time(), error.status, error.code, error.param)

    def refusals(self, request: str, gateway: str) -> tuple[RefusalRecord, ...]:
        """The error of one request; empty: it is not remembered, or had none."""
        found = self._refused.get(request)
        if found is None:
            return ()
        when = datetime.fromtimestamp(found.at, UTC)
        return (RefusalRecord(time=when, gateway=gateway, status=found.status, code=found.code, param=found.param),)

    def records(self, request: str, gateway: str) -> tuple[ChoiceRecord, ...]:
        """The choices of one request; empty: it is not remembered."""
        found = enumerate(self._known.get(request, ()), 1)
        return tuple(_record(choice, gateway, attempt) for attempt, choice in found)

    def __len__(self) -> int:
        return len(self._known.keys() | self._refused.keys())


class ChoiceKeys(Protocol):
    def demand_keys(self, role: Role) -> Iterable[str]: ...


class ChoicesApi:
    """Serves `names.CHOICES_PATH`: from this gateway's memory to other gateways; to people, who need the right to all
    request logs or the key of the role `logs`, from all gateways' memories."""

    def __init__(
        self,
        memory: ChoiceMemory,
        gateway: str,
        keys: ChoiceKeys,
        peers: GatewayPods = lambda: (),
        port: int = names.OPS_PORT,
        *,
        credentials: TLSCredentials | None = None,
        callers: Callers | None = None,
    ) -> None:
        self._memory = memory
        self._gateway = gateway
        self._keys = keys
        self._calls = GatewayCalls(keys, peers, port, credentials)
        self._credentials = credentials
        self._person = None if callers is None else RightGuard(callers, ALL_REQUEST_LOGS)

    async def close(self) -> None:
        await self._calls.close()

    async def guard(self, request: ShellRequest) -> None:
        """Raises Problem for a caller who may not read choices."""
        secret = given_key(request.headers, _PLACES)
        role = role_of(secret, _ROLES, self._keys.demand_keys)
        person = self._person
        if role is None and (person is None or not person.understands(secret)):
            raise Problem(401, "a key for logs, or of a gateway, is needed", {"www-authenticate": "Bearer"})
        if (why := unproved(self._credentials, request.scope, role or PERSON.role)) is not None:
            raise Problem(403, why)
        if role is not None:
            request.caller = Caller(role)
        elif person is not None:
            await person.check(request, secret)

    async def answer(self, request: ShellRequest) -> Response:
        wanted = request.one("request") or ""
        if not _ID.fullmatch(wanted):
            raise Problem(400, "`request` must be the id of a request, as answers have it in x-shoal-request-id")
        found = RequestChoices(
            request=wanted,
            choices=self._memory.records(wanted, self._gateway),
            refusals=self._memory.refusals(wanted, self._gateway),
            remembered=len(self._memory),
        )
        if request.caller.role != "gateway" and not found.choices and not found.refusals:
            found = await self._everywhere(found)
        return Response(found.model_dump_json(by_alias=True), media_type="application/json")

    async def _everywhere(self, own: RequestChoices) -> RequestChoices:
        pods, unreachable = self._calls.reachable()
        missing = [f"{each['gateway']}: {each['reason']}" for each in unreachable]
        asked = {"request": own.request}
        answers = await asyncio.gather(
            *(self._calls.call("GET", pod, names.CHOICES_PATH, asked, seconds=PEER_SECONDS) for pod in pods)
        )
        choices, refusals, remembered = list(own.choices), list(own.refusals), own.remembered
        for pod, answer in zip(pods, answers, strict=True):
            if isinstance(answer, NoAnswer):
                missing.append(f"{pod.name}: {answer.reason}")
                continue
            try:
                found = RequestChoices.model_validate_json(answer)
            except ValidationError:
                missing.append(f"{pod.name}: its answer is not understood")
                continue
            choices += found.choices
            refusals += found.refusals
            remembered += found.remembered
        choices.sort(key=lambda choice: choice.time)
        return own.model_copy(
            update={
                "choices": tuple(choices),
                "refusals": tuple(refusals),
                "remembered": remembered,
                "missing": tuple(sorted(missing)),
            }
        )


def _record(choice: _Choice, gateway: str, attempt: int) -> ChoiceRecord:
    at, replica, pick = choice
    record = ChoiceRecord(
        time=datetime.fromtimestamp(at, UTC),
        gateway=gateway,
        model=replica.model,
        attempt=attempt,
        replica=replica.key,
        message=f"{replica.name}: not chosen by predicted seconds (one replica could take it, or no load was known)",
    )
    if pick is None:
        return record
    runner_up = pick.runner_up_terms
    return record.model_copy(
        update={
            "message": pick.message,
            "chosen": _cost(replica.key, pick.terms),
            "runner_up": None if runner_up is None else _cost(f"{replica.namespace}/{pick.runner_up}", runner_up),
            "prompt_tokens": pick.prompt.tokens,
            "cached_tokens": round(pick.expected.tokens, 1),
        }
    )


def _cost(replica: str, terms: Terms | None) -> ReplicaCost | None:
    if terms is None:
        return None
    known = {name: round(value, 6) for name, value in zip(terms._fields, terms, strict=True)}
    return ReplicaCost(replica=replica, seconds=round(terms.total, 6), terms=known)
