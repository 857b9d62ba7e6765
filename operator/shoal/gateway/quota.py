"""A tenant's limits and budget at this gateway: what is reserved for a request, and what clients are told of it.

Tenants without limits and budget never come here. `core/quota` decides; this has the clocks and the prices, and
`quotawords.py` the words.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Protocol

import structlog

from shoal.core.access import Identity
from shoal.core.hold.room import BYTES_PER_TOKEN
from shoal.core.quota.abandoned import abandoned_tokens
from shoal.core.quota.account import Account
from shoal.core.quota.limits import Cost, Limits, Over, limits_of
from shoal.core.quota.month import Total
from shoal.core.quota.others import Crowd
from shoal.core.rating.price import Book, Rate, cost
from shoal.core.resolve import ServedModel
from shoal.gateway.meter import Meter
from shoal.gateway.quotawords import headers_of, refusal
from shoal.gateway.tenantdemand import TenantBook
from shoal.serving.asgi import Headers

log = structlog.get_logger()

ASSUMED_ANSWER_TOKENS: Final = 1024
"""Reserved for an answer whose length the client does not bound. What it is longer counts when it is there."""
_CROWD_SECONDS: Final = 0.05
"""For so long an answer to who else there is and when they were heard will do: older only makes it more careful."""


class Ledger(Protocol):
    """What the ledger says (`signals/totals.py`)."""

    @property
    def live(self) -> bool: ...
    @property
    def book(self) -> Book | None:
        """The price list in force, as it was heard last."""
        ...

    def total(self, tenant: str) -> Total | None:
        """As it was heard last; None: it never was."""
        ...


class NoLedger:
    """There is none."""

    live = False
    book: Book | None = None

    def total(self, tenant: str) -> Total | None:
        return None


class Months:
    """Which month it is (UTC), asked for once per request."""

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
    """All of this gateway. `crowd` says who else there is."""

    def __init__(
        self,
        book: TenantBook,
        *,
        crowd: Callable[[], Crowd] = lambda: (),
        ledger: Ledger | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.book = book
        self.ledger = ledger or NoLedger()
        self.clock = clock
        self.months = Months(wall)
        self._ask_crowd = crowd
        self._crowd: Crowd = ()
        self._crowd_at = float("-inf")
        self._quotas: dict[str, Quota] = {}
        book.opened = self._opened

    def of(self, identity: Identity) -> "Quota | None":
        """None: the tenant has neither limits nor a budget."""
        if identity.limits is None and identity.budget is None:
            return None
        found = self._quotas.get(identity.tenant)
        if found is None:
            found = self._quotas[identity.tenant] = Quota(self, identity.tenant)
        found.follow(identity)
        return found

    def heard(self, tenant: str | None) -> None:
        """The ledger said something of a tenant; None: of all that it knows."""
        for name in self.book.accounts if tenant is None else (tenant,):
            if (account := self.book.accounts.get(name)) is not None:
                self._opened(name, account)

    def crowd(self) -> Crowd:
        now = self.clock()
        if now - self._crowd_at > _CROWD_SECONDS:
            self._crowd, self._crowd_at = self._ask_crowd(), now
        return self._crowd

    def _opened(self, tenant: str, account: Account) -> None:
        if (total := self.ledger.total(tenant)) is not None:
            account.hear_total(total)


class Quota:
    """One tenant's."""

    __slots__ = ("_all", "_budget", "_limits", "_priced", "account", "limits", "tenant")

    def __init__(self, all: Quotas, tenant: str) -> None:
        self.tenant = tenant
        self.account = all.book.of(tenant)
        self.limits = Limits()
        self._all = all
        self._limits: object = None
        self._budget: object = None
        self._priced = True

    def follow(self, identity: Identity) -> None:
        """Takes over what the Tenant says now, and whether prices are in its currency."""
        if identity.limits is not self._limits or identity.budget is not self._budget:
            self._limits, self._budget = identity.limits, identity.budget
            self.limits = limits_of(identity.limits, identity.budget)
            self._priced = True
            self.account.change(self.limits)
        budget = self.limits.budget
        if budget is not None and budget.unit == "money":
            book = self._all.ledger.book
            priced = book is None or book.currency == budget.currency
            if priced != self._priced:
                self._priced = priced
                limits = self.limits
                self.account.change(limits if priced else Limits(limits.requests, limits.tokens, limits.concurrent))
                if not priced:
                    log.warning("budget in another currency than the price list", tenant=self.tenant)

    def reserve(
        self,
        model: ServedModel,
        plan: str | None,
        size: int,
        answers: int,
        bound: int | None,
        *,
        grows: bool = False,
        begun: "Reserved | None" = None,
    ) -> "Reserved":
        """For a request with a body of `size` bytes and so many answers of at most `bound` tokens each (None: the
        client does not say). `grows`: its body is not whole yet, so it is only counted, and asked for again with what
        that returned as `begun`.

        Raises:
            ApiError: 429, a limit would be broken.
        """
        every = self._all
        if bound is None:
            most = model.max_output_tokens
            bound = ASSUMED_ANSWER_TOKENS if most is None else min(most, ASSUMED_ANSWER_TOKENS)
        prompt = max(1, size // BYTES_PER_TOKEN)
        answer = answers * bound
        rate, spend = None, 0
        if self.limits.budget is not None and (book := every.ledger.book) is not None:
            rate = book.find(plan, model.key, None if model.adapter is None else model.adapter.key)
            spend = 0 if rate is None else cost(rate, prompt, 0, answer)
        asked = Cost(prompt + answer, spend)
        month, live = every.months.now(), every.ledger.live
        budget = self.limits.budget
        if not self._priced and budget is not None and budget.refuse_unknown:
            raise refusal(Over("budget", "currency", budget.most, 0, 0, 60), self.limits)
        now, account = every.clock(), self.account
        if grows:
            over = account.begin(now, asked, every.crowd, month=month, ledger=live)
            asked = Cost(0)
        else:
            over = account.reserve(now, asked, every.crowd, month=month, ledger=live, begun=begun is not None)
        if over is not None:
            raise refusal(over, self.limits)
        every.book.note(self.tenant)
        return Reserved(self, asked, rate, answers, bound)

    def recheck(self, asked: Cost) -> None:
        """For a request that has waited. Raises ApiError when the month's budget is used up meanwhile."""
        every = self._all
        over = self.account.exhausted(asked, month=every.months.now(), ledger=every.ledger.live)
        if over is not None:
            raise refusal(over, self.limits)

    def settle(self, asked: Cost, rate: Rate | None, meter: Meter, answers: int, bound: int) -> None:
        """A request ended. What the engine counted counts, be it more than was reserved; of an engine that took it and
        said nothing its prompt, estimated; of a request that no engine had, nothing. Where the client left before the
        engine said anything, the estimate counts towards the budget too, with the answer as far as it may have come:
        else whoever always leaves would compute for free."""
        counts = meter.tokens()
        prompt, answer = counts["inputTokens"] or 0, counts["outputTokens"] or 0
        left = meter.count_source == "estimated" and meter.outcome == "cancelled"
        if left and not meter.said["stream"]:
            answer = abandoned_tokens(answers, bound, meter.seconds_at_replica)
        booked = prompt + answer if left or meter.count_source in ("final", "continuous") else 0
        spent = 0
        if booked and rate is not None and (book := self._all.ledger.book) is not None:
            cached = counts["cachedTokens"]
            unknown = prompt if cached is None else 0
            spent = cost(rate, prompt, cached or 0, answer, unknown, unknown_cached=book.unknown_cached)
        self.account.settle(self._all.clock(), asked, prompt + answer, booked, spent)
        self._all.book.note(self.tenant)

    def headers(self) -> Headers:
        """OpenAI's headers on the limits per minute."""
        every = self._all
        found: list[tuple[bytes, bytes]] = []
        for standing in self.account.standing(every.clock(), every.crowd, ledger=every.ledger.live):
            found += headers_of(standing)
        return tuple(found)


class Reserved:
    """What is reserved for one request, until it is settled."""

    __slots__ = ("_answers", "_asked", "_bound", "_quota", "_rate")

    def __init__(self, quota: Quota, asked: Cost, rate: Rate | None, answers: int, bound: int) -> None:
        self._answers = answers
        self._bound = bound
        self._quota = quota
        self._asked = asked
        self._rate = rate

    def recheck(self) -> None:
        self._quota.recheck(self._asked)

    def settle(self, meter: Meter) -> None:
        self._quota.settle(self._asked, self._rate, meter, self._answers, self._bound)
