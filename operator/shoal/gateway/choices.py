"""Why recent requests went to their replicas, or were refused: a bounded memory, and the path of the operations port
that reads it.

The memory is of this process only. It has ids, names and figures, no text of a prompt or an answer.
"""

import re
import time
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Final, NamedTuple

from starlette.responses import Response

from shoal.api import names
from shoal.api.choices import ChoiceRecord, FallbackRecord, RefusalRecord, ReplicaCost, RequestChoices, StayRecord
from shoal.api.rights import ALL_REQUEST_LOGS
from shoal.core.routing.basis import Basis, describe_basis
from shoal.core.routing.replica import Replica
from shoal.core.routing.score import Pick, Terms
from shoal.kube.callers import Callers
from shoal.net.errors import ApiError, Problem
from shoal.net.gatewaycalls import GatewayKeys, GatewayPods
from shoal.net.gatheredpage import GatheredPage, MissingPart
from shoal.net.shell import ShellRequest
from shoal.net.tls import TLSCredentials

MOST_REQUESTS: Final = 4096
"""Requests that are remembered. One takes about 1 KiB."""
MOST_ATTEMPTS: Final = 10
CLIENT_LEFT: Final = 499
"""Status of a request whose client left, as proxies write it into their logs. Nobody is answered with it."""
PEER_SECONDS: Final = 5.0
_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class _Choice(NamedTuple):
    at: float
    """Seconds since 1970."""
    replica: Replica
    pick: Pick | None
    basis: Basis | None
    """Why, where no score decided."""
    failure: str | None = None


class _Refusal(NamedTuple):
    at: float
    """Seconds since 1970."""
    status: int
    code: str | None
    param: str | None
    limit: str | None
    model: str | None
    outcome: str | None = None
    seconds: float | None = None
    subject: str | None = None


class _Left(NamedTuple):
    at: float
    """Seconds since 1970."""
    left: str
    target: str
    why: str


class _Stayed(NamedTuple):
    at: float
    """Seconds since 1970."""
    target: str
    why: str


class ChoiceMemory:
    """The choices, the fallbacks and the errors of the last requests, by request id. Errors have a place of their own:
    callers without a key cannot drive choices out."""

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self._most = most
        self._known: OrderedDict[str, tuple[_Choice, ...]] = OrderedDict()
        self._left: OrderedDict[str, tuple[_Left, ...]] = OrderedDict()
        self._stayed: OrderedDict[str, _Stayed] = OrderedDict()
        self._refused: OrderedDict[str, _Refusal] = OrderedDict()

    def add(self, request: str, replica: Replica, pick: Pick | None, basis: Basis | None = None) -> None:
        """A request goes to a replica, which was chosen by its score, or for another reason. Every request comes
        through here."""
        before = self._known.get(request, ())
        if not before and len(self._known) >= self._most:
            self._known.popitem(last=False)
        if len(before) < MOST_ATTEMPTS:
            self._known[request] = (*before, _Choice(time.time(), replica, pick, basis))

    def fail(self, request: str, replica: Replica, failure: str) -> None:
        """The request's attempt at the replica failed, and another one may be tried."""
        known = self._known.get(request)
        # Only the first attempts are remembered: the last of these may be an earlier one.
        if known and known[-1].replica is replica and known[-1].failure is None:
            self._known[request] = (*known[:-1], known[-1]._replace(failure=failure))

    def leave(self, request: str, left: str, target: str, why: str) -> None:
        """A request leaves a target of its route for a fallback; both by their keys."""
        before = self._left.get(request, ())
        if not before and len(self._left) >= self._most:
            self._left.popitem(last=False)
        if len(before) < MOST_ATTEMPTS:
            self._left[request] = (*before, _Left(time.time(), left, target, why))

    def stay(self, request: str, target: str, why: str) -> None:
        """A request stays with its target, by its key, although its route has cheaper fallbacks."""
        if request not in self._stayed and len(self._stayed) >= self._most:
            self._stayed.popitem(last=False)
        self._stayed[request] = _Stayed(time.time(), target, why)

    def stays(self, request: str, gateway: str) -> tuple[StayRecord, ...]:
        """Why one request stayed with its target; empty: it is not remembered, or there was no reason to leave it."""
        found = self._stayed.get(request)
        if found is None:
            return ()
        when = datetime.fromtimestamp(found.at, UTC)
        return (StayRecord(time=when, gateway=gateway, target=found.target, message=f"stayed: {found.why}"),)

    def fallbacks(self, request: str, gateway: str) -> tuple[FallbackRecord, ...]:
        """The targets that one request left, the first one first."""
        return tuple(
            FallbackRecord(
                time=datetime.fromtimestamp(each.at, UTC),
                gateway=gateway,
                left=each.left,
                target=each.target,
                message=f"went on to {each.target}: {each.why}",
            )
            for each in self._left.get(request, ())
        )

    def refuse(self, request: str, error: ApiError, model: str | None = None) -> None:
        """A request, for this Model, is answered with an error; the last one counts. The error's message may quote the
        request, and is not kept."""
        if request not in self._refused and len(self._refused) >= self._most:
            self._refused.popitem(last=False)
        self._refused[request] = _Refusal(
            time.time(),
            error.status,
            error.code,
            error.param,
            error.limit,
            model,
            error.outcome,
            subject=error.subject,
        )

    def client_left(self, request: str, code: str, seconds: float, model: str | None = None) -> None:
        """The client of a request, for this Model, left after so long, before its answer had ended."""
        if request not in self._refused and len(self._refused) >= self._most:
            self._refused.popitem(last=False)
        self._refused[request] = _Refusal(time.time(), CLIENT_LEFT, code, None, None, model, seconds=seconds)

    def refusals(self, request: str, gateway: str) -> tuple[RefusalRecord, ...]:
        """The error of one request; empty: it is not remembered, or had none."""
        found = self._refused.get(request)
        if found is None:
            return ()
        when = datetime.fromtimestamp(found.at, UTC)
        return (
            RefusalRecord(
                time=when,
                gateway=gateway,
                status=found.status,
                code=found.code,
                param=found.param,
                limit=found.limit,
                model=found.model,
                subject=found.subject,
                outcome=found.outcome,
                seconds=found.seconds,
            ),
        )

    def records(self, request: str, gateway: str) -> tuple[ChoiceRecord, ...]:
        """The choices of one request; empty: it is not remembered."""
        found = enumerate(self._known.get(request, ()), 1)
        return tuple(_record(choice, gateway, attempt) for attempt, choice in found)

    def __len__(self) -> int:
        return len(self._known.keys() | self._left.keys() | self._stayed.keys() | self._refused.keys())


class ChoicesApi:
    """Serves `names.CHOICES_PATH`: from this gateway's memory to other gateways; to people, who need the right to all
    request logs or the key of the role `logs`, from all gateways' memories."""

    def __init__(
        self,
        memory: ChoiceMemory,
        gateway: str,
        keys: GatewayKeys,
        peers: GatewayPods = lambda: (),
        port: int = names.OPS_PORT,
        *,
        credentials: TLSCredentials | None = None,
        callers: Callers | None = None,
    ) -> None:
        self._memory = memory
        self._gateway = gateway
        self.page = GatheredPage(names.CHOICES_PATH, ALL_REQUEST_LOGS, keys, peers, port, credentials, callers)

    async def answer(self, request: ShellRequest) -> Response:
        wanted = request.one("request") or ""
        if not _ID.fullmatch(wanted):
            raise Problem(400, "`request` must be the id of a request, as answers have it in x-shoal-request-id")
        found = RequestChoices(
            request=wanted,
            choices=self._memory.records(wanted, self._gateway),
            fallbacks=self._memory.fallbacks(wanted, self._gateway),
            stays=self._memory.stays(wanted, self._gateway),
            refusals=self._memory.refusals(wanted, self._gateway),
            remembered=len(self._memory),
        )
        known = found.choices or found.fallbacks or found.stays or found.refusals
        if not self.page.for_gateway(request) and not known:
            found = await self._everywhere(found)
        return Response(found.model_dump_json(by_alias=True), media_type="application/json")

    async def _everywhere(self, own: RequestChoices) -> RequestChoices:
        pods, missing = self.page.peers()
        parts = await self.page.gather(pods, {"request": own.request}, RequestChoices, seconds=PEER_SECONDS)
        choices, fallbacks, refusals = list(own.choices), list(own.fallbacks), list(own.refusals)
        stays = list(own.stays)
        remembered = own.remembered
        for found in parts:
            if isinstance(found, MissingPart):
                missing.append(found)
                continue
            choices += found.choices
            fallbacks += found.fallbacks
            stays += found.stays
            refusals += found.refusals
            remembered += found.remembered
        choices.sort(key=lambda choice: choice.time)
        return own.model_copy(
            update={
                "choices": tuple(choices),
                "fallbacks": tuple(fallbacks),
                "stays": tuple(stays),
                "refusals": tuple(refusals),
                "remembered": remembered,
                "missing": tuple(sorted(map(str, missing))),
            }
        )


def _record(choice: _Choice, gateway: str, attempt: int) -> ChoiceRecord:
    at, replica, pick, basis, failure = choice
    record = ChoiceRecord(
        time=datetime.fromtimestamp(at, UTC),
        gateway=gateway,
        model=replica.model,
        attempt=attempt,
        replica=replica.key,
        message=f"{replica.name}: {describe_basis(basis)}",
        failure=failure,
    )
    if pick is None:
        return record
    runner_up = pick.runner_up_terms
    return record.model_copy(
        update={
            "message": pick.message if basis is None else record.message,
            "chosen": _cost(replica.key, pick.terms),
            "runner_up": None if runner_up is None else _cost(f"{replica.namespace}/{pick.runner_up}", runner_up),
            "prompt_tokens": pick.prompt.tokens,
            "cached_tokens": round(pick.expected.tokens, 1),
        }
    )


def _cost(replica: str, terms: Terms) -> ReplicaCost:
    known = {name: round(value, 6) for name, value in zip(terms._fields, terms, strict=True)}
    return ReplicaCost(replica=replica, seconds=round(terms.total, 6), terms=known)
