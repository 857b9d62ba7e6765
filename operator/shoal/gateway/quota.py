"""A tenant's limits and budget at this gateway, and what ModelRoutes let it send: reservations for requests, and the
answers that clients get about them.

Tenants without limits and budget, and routes without limits, are not handled here. `core/quota` decides; this module
supplies clocks and prices, and `quotamessages.py` the messages.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Final, Protocol

import structlog

from shoal.core.access import KeyIdentity
from shoal.core.hold.capacity import BYTES_PER_TOKEN
from shoal.core.quota.abandoned import abandoned_tokens
from shoal.core.quota.account import Account, may_learn
from shoal.core.quota.limits import Cost, Limits, Over, limits_of, route_limits
from shoal.core.quota.month import MonthTotal
from shoal.core.quota.peerusage import GatewayPeers
from shoal.core.quota.share import ROUND_SECONDS
from shoal.core.rating.price import Rate, RateTable, cost
from shoal.core.routing.cost import PricedRequest
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.routes import DeclaredRoute
from shoal.gateway.quotamessages import MayFitSoon, header_lines_of, refusal
from shoal.gateway.tenantdemand import TenantUsageState, route_account
from shoal.metering.meter import NO_UNITS, Meter, Units
from shoal.net.asgi import HeaderLines

log = structlog.get_logger()

ASSUMED_ANSWER_TOKENS: Final = 1024
"""Reserved for an answer that the client does not bound. A longer answer is counted when the request ends."""
SHARE_WAIT_SECONDS: Final = 10.0
"""How long a request waits for this gateway's next shares of a limit that has room for it. A gateway that shares with
others gets one every 2 to 3 s."""
MOST_SHARE_WAITERS: Final = 16
"""Requests of one tenant that wait for reports of other gateways at the same time: they keep their bodies in memory. A
client that sends one request after the other needs one."""
_SHARE_POLL_SECONDS: Final = 0.05
_PEERS_SECONDS: Final = 0.05
"""How long the list of peers and their last reports is cached: an older list only makes decisions more careful."""


def assumed_bound(cap: int | None) -> int:
    """Tokens of an answer that the client does not bound, at a Model with this cap."""
    return ASSUMED_ANSWER_TOKENS if cap is None else min(cap, ASSUMED_ANSWER_TOKENS)


def reserved_tokens(size: int, answers: int, bound: int | None, cap: int | None) -> tuple[int, int]:
    """Tokens of the prompt and of all answers that are reserved for a request: a prompt of `size` bytes, and `answers`
    of at most `bound` tokens (None: not bounded) at a Model with this cap."""
    return max(1, size // BYTES_PER_TOKEN), answers * (assumed_bound(cap) if bound is None else bound)


class LedgerTotals(Protocol):
    """The ledger's totals and prices (`signals/totals.py`)."""

    @property
    def live(self) -> bool: ...
    @property
    def rate_table(self) -> RateTable | None:
        """The current price list, as last received."""
        ...

    def total(self, tenant: str) -> MonthTotal | None:
        """The tenant's total, as last received; None: never received."""
        ...


class NoLedger:
    """Used where no ledger is configured."""

    live = False
    rate_table: RateTable | None = None

    def total(self, tenant: str) -> MonthTotal | None:
        return None


class Months:
    """The current month (UTC), cached because quotas request asks for it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begins = self._ends = 0.0
        self._name = ""

    def now(self) -> str:
        now = self._clock()
        if not self._begins <= now < self._ends:
            day = datetime.fromtimestamp(now, UTC)
            first = day.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
            following = first.replace(year=day.year + day.month // 12, month=day.month % 12 + 1)
            self._begins, self._ends = first.timestamp(), following.timestamp()
            self._name = f"{day:%Y-%m}"
        return self._name


class Quotas:
    """The quotas of all tenants at this gateway. `peers` returns the other gateways."""

    def __init__(
        self,
        usage: TenantUsageState,
        *,
        peers: Callable[[], GatewayPeers] = lambda: (),
        ledger: LedgerTotals | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.usage = usage
        self.ledger = ledger or NoLedger()
        self.clock = clock
        self.months = Months(wall)
        self._read_peers = peers
        self._peers: GatewayPeers = ()
        self._peers_at = float("-inf")
        self._quotas: dict[str, Quota] = {}
        usage.opened = self._opened

    def of(self, identity: KeyIdentity) -> "Quota | None":
        """The quota of a key's tenant; None: it has neither limits nor a budget."""
        if identity.limits is None and identity.budget is None:
            return None
        found = self._quotas.get(identity.tenant)
        if found is None:
            found = self._quotas[identity.tenant] = Quota(self, identity.tenant, identity.tenant)
        found.follow(identity)
        return found

    def of_route(self, tenant: str, route: DeclaredRoute) -> "Quota":
        """What a route with limits of each tenant lets the tenant send under its names."""
        name = route_account(tenant, route.uid)
        found = self._quotas.get(name)
        if found is None:
            found = self._quotas[name] = Quota(self, tenant, name)
        found.follow_route(route)
        return found

    def retain_routes(self, uids: Collection[str]) -> None:
        """Drops what is counted of routes that are gone, but for those that requests still use."""
        for name in self.usage.retain_routes(uids):
            self._quotas.pop(name, None)

    def sweep(self) -> None:
        """Drops what is counted of routes that tenants use no more. Called every second. A request that waits for
        reports may still hold such a quota, and asks for a new one before it reserves."""
        for name in self.usage.sweep():
            self._quotas.pop(name, None)

    def totals_changed(self, tenant: str | None) -> None:
        """The ledger sent new totals of a tenant; None: of all tenants."""
        for name in self.usage.accounts if tenant is None else (tenant,):
            if (account := self.usage.accounts.get(name)) is not None:
                self._opened(name, account)

    def peers(self) -> GatewayPeers:
        now = self.clock()
        if now - self._peers_at > _PEERS_SECONDS:
            self._peers, self._peers_at = self._read_peers(), now
        return self._peers

    def _opened(self, tenant: str, account: Account) -> None:
        if (total := self.ledger.total(tenant)) is not None:
            account.apply_total(total)


class Quota:
    """One tenant's quota, or what one route lets it send. `name`: of its account."""

    __slots__ = (
        "_budget",
        "_limits",
        "_priced",
        "_quotas",
        "_share_turn",
        "_share_waiters",
        "account",
        "limits",
        "name",
        "tenant",
    )

    def __init__(self, quotas: Quotas, tenant: str, name: str) -> None:
        self.tenant = tenant
        self.name = name
        self.account = quotas.usage.of(name)
        self.limits = Limits()
        self._quotas = quotas
        self._limits: object = None
        self._budget: object = None
        self._priced = True
        self._share_turn = asyncio.Lock()
        """Held by the first of the requests that wait for reports, so that they are served in order."""
        self._share_waiters = 0

    def follow(self, identity: KeyIdentity) -> None:
        """Applies the Tenant's current limits, and checks that its budget is in the currency of the prices."""
        if identity.limits is not self._limits or identity.budget is not self._budget:
            self._limits, self._budget = identity.limits, identity.budget
            self.limits = limits_of(identity.limits, identity.budget)
            self._priced = True
            self.account.change(self.limits)
        budget = self.limits.budget
        if budget is not None and budget.unit == "money":
            rates = self._quotas.ledger.rate_table
            priced = rates is None or rates.currency == budget.currency
            if priced != self._priced:
                self._priced = priced
                limits = self.limits
                self.account.change(limits if priced else Limits(limits.requests, limits.tokens, limits.concurrent))
                if not priced:
                    log.warning("budget in another currency than the price list", tenant=self.tenant)

    def follow_route(self, route: DeclaredRoute) -> None:
        """Applies the route's current limits."""
        if route.tenant_limits is not self._limits and route.tenant_limits is not None:
            self._limits = route.tenant_limits
            self.limits = route_limits(route.key, route.tenant_limits)
            self.account.change(self.limits)

    def reserve(
        self,
        model: ServedModel,
        plan: str | None,
        size: int,
        answers: int,
        bound: int | None,
        *,
        units: Units = NO_UNITS,
        grows: bool = False,
        begun: "Reserved | None" = None,
        beside: "Quota | None" = None,
    ) -> "Reserved":
        """Reserves for a request with a body of `size` bytes and `answers` answers of at most `bound` tokens each
        (None: not bounded). `units`: what it has besides tokens. `grows`: the body is not complete yet, so the request
        is only counted; the caller reserves again later and passes the first result as `begun`. `beside`: the quota of
        the request's route, which reserves too; if either refuses, neither counts the request.

        Raises:
            ApiError: 429, a limit would be exceeded.
        """
        quotas = self._quotas
        if bound is None:
            bound = assumed_bound(model.max_output_tokens)
        prompt, answer = reserved_tokens(size, answers, bound, model.max_output_tokens)
        rate = self.rate(model, plan)
        spend = 0 if rate is None else cost(rate, prompt, 0, answer, **units._asdict())
        asked = Cost(prompt + answer, spend)
        budget = self.limits.budget
        # Only a budget needs the ledger, which takes longer to ask than all limits.
        month, live = ("", False) if budget is None else (quotas.months.now(), quotas.ledger.live)
        if not self._priced and budget is not None and budget.refuse_unknown:
            raise refusal(Over("budget", "currency", budget.most, 0, 0, 60), self.limits)
        now, account = quotas.clock(), self.account
        also = None if beside is None else beside.account
        if grows:
            over = account.begin(now, asked, quotas.peers, month=month, ledger=live, beside=also)
            asked = Cost(0)
        else:
            over = account.reserve(
                now, asked, quotas.peers, month=month, ledger=live, begun=begun is not None, beside=also
            )
        if over is not None:
            raise refusal(over, self.limits)
        quotas.usage.note(self.name)
        if beside is not None:
            quotas.usage.note(beside.name)
        return Reserved(self, asked, rate, answers, bound, beside)

    def fits(self, request: PricedRequest, plan: str | None, *, begun: bool) -> bool:
        """Whether the limits and the budget have room for a request now. `begun`: it is counted already."""
        quotas, rates = self._quotas, self._quotas.ledger.rate_table
        rate = None
        if self.limits.budget is not None and rates is not None:
            rate = rates.find(plan, request.model, request.adapter)
        spend = 0
        if rate is not None:
            spend = cost(
                rate,
                request.prompt,
                0,
                request.answer,
                documents=request.documents,
                images=request.images,
                audio_ms=request.audio_ms,
            )
        return self.account.fits(
            quotas.clock(),
            Cost(request.prompt + request.answer, spend),
            quotas.peers,
            month=quotas.months.now(),
            ledger=quotas.ledger.live,
            begun=begun,
        )

    def budget_percent(self) -> int | None:
        """How much of its budget the tenant has used this month, with what is reserved for running requests; None: it
        has none, or one in another currency than the prices."""
        quotas = self._quotas
        return self.account.budget_percent(month=quotas.months.now(), ledger=quotas.ledger.live)

    def rate(self, model: ServedModel, plan: str | None) -> Rate | None:
        """The price of a Model's tokens; None: the tenant has no budget, or there is no price."""
        if self.limits.budget is None or (rates := self._quotas.ledger.rate_table) is None:
            return None
        return rates.find(plan, model.key, None if model.adapter is None else model.adapter.key)

    async def wait_for_reports(self, refused: MayFitSoon, since: float, until: float, left: Callable[[], bool]) -> None:
        """Waits until a refused request may fit, or is refused for good. `since`: when it was refused first, by the
        clock of the quotas; `until` is in seconds of the loop; `left`: whether the client disconnected, which ends the
        wait.

        Raises:
            MayFitSoon: `refused`, if that takes too long, or too many requests wait, or the limit was used up by
                requests at other gateways at `since` indeed.
        """
        if self._share_waiters >= MOST_SHARE_WAITERS:
            raise refused
        quotas, limit, amount = self._quotas, refused.over.limit, refused.over.requested
        if refused.over.why == "elsewhere":
            until = min(until, asyncio.get_running_loop().time() + since + ROUND_SECONDS - quotas.clock())
        self._share_waiters += 1
        try:
            async with asyncio.timeout_at(until), self._share_turn:
                while True:
                    now, live = quotas.clock(), quotas.ledger.live
                    if left():
                        return
                    over = self.account.lacks(now, limit, amount, quotas.peers, ledger=live)
                    if over is None or over.why not in ("share", "elsewhere"):
                        return
                    if over.why == "elsewhere" and not may_learn(since, quotas.peers()):
                        raise refused
                    await asyncio.sleep(_SHARE_POLL_SECONDS)
        except TimeoutError:
            raise refused from None
        finally:
            self._share_waiters -= 1

    def recheck(self, asked: Cost) -> None:
        """Checks the budget again for a request that has waited. Raises ApiError if it is used up."""
        quotas = self._quotas
        over = self.account.exhausted(asked, month=quotas.months.now(), ledger=quotas.ledger.live)
        if over is not None:
            raise refusal(over, self.limits)

    def settle(
        self, asked: Cost, rate: Rate | None, meter: Meter, answers: int, bound: int, beside: "Quota | None"
    ) -> None:
        """Settles a request that has ended. The engine's counts apply, even above the reservation. If an engine took
        the request and reported nothing, its estimated prompt counts; if no engine took it, nothing does. If the client
        left before the engine reported anything, the estimate also counts towards the budget, including the answer as
        far as it may have been computed: otherwise a client that always leaves would compute for free."""
        counts = meter.tokens()
        prompt, answer = counts["inputTokens"] or 0, counts["outputTokens"] or 0
        abandoned = meter.count_source == "estimated" and meter.outcome == "cancelled"
        if abandoned and not meter.fields["stream"]:
            answer = abandoned_tokens(answers, bound, meter.seconds_at_replica)
        counted = abandoned or meter.count_source in ("final", "continuous")
        booked = prompt + answer if counted else 0
        spent = 0
        if counted and rate is not None and (rates := self._quotas.ledger.rate_table) is not None:
            cached = counts["cachedTokens"]
            unknown = prompt if cached is None else 0
            units = meter.units()._asdict()
            spent = cost(rate, prompt, cached or 0, answer, unknown, **units, unknown_cached=rates.unknown_cached)
        heard = meter.heard_tokens if counted else 0
        used = prompt + answer + heard
        if self.limits.route is not None:
            booked = 0  # the ledger knows no routes
        self.account.settle(self._quotas.clock(), asked, used, booked, spent)
        self._quotas.usage.ended(self.name)
        if beside is not None:
            beside.account.settle(self._quotas.clock(), Cost(asked.tokens), used)
            self._quotas.usage.ended(beside.name)

    def header_lines(self) -> HeaderLines:
        """OpenAI's rate limit headers."""
        quotas = self._quotas
        states = self.account.limit_states(quotas.clock(), quotas.peers)
        return b"".join(map(header_lines_of, states))


class Reserved:
    """The reservation of one request, until it is settled."""

    __slots__ = ("_answers", "_asked", "_beside", "_bound", "_quota", "_rate")

    def __init__(
        self, quota: Quota, asked: Cost, rate: Rate | None, answers: int, bound: int, beside: Quota | None
    ) -> None:
        self._answers = answers
        self._beside = beside
        self._bound = bound
        self._quota = quota
        self._asked = asked
        self._rate = rate

    def recheck(self) -> None:
        self._quota.recheck(self._asked)

    def reprice(self, model: ServedModel, plan: str | None) -> None:
        """The request goes to another Model, at whose price it is settled. What was reserved stays."""
        self._rate = self._quota.rate(model, plan)

    def settle(self, meter: Meter) -> None:
        self._quota.settle(self._asked, self._rate, meter, self._answers, self._bound, self._beside)
