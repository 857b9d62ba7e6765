"""One tenant at one gateway, or what it sends under one ModelRoute with limits: its own use, the known use of other
gateways, and whether one more request fits."""

from collections.abc import Callable, Iterable
from heapq import merge
from math import ceil
from typing import Final

from shoal.api.demand import TenantUse
from shoal.core.quota.limits import RETRY_AFTER_MAX_SECONDS, Cost, Limit, Limits, LimitState, Over, Why
from shoal.core.quota.month import Booked, MonthlyQuota, MonthTotal, Unit
from shoal.core.quota.peerusage import GatewayPeers, PeerUsage
from shoal.core.quota.recent import Recent, recent_use
from shoal.core.quota.share import PUBLISH_SECONDS, ROUND_SECONDS, WIRE_SECONDS, Share
from shoal.core.quota.window import Window

RUNNING_RETRY_SECONDS: Final = 1
"""Retry-After at the limit of concurrent requests: a slot is free when a request ends, which may be at any time."""
RESERVED_RETRY_SECONDS: Final = 5
"""Retry-After where reservations of running requests fill the tokens per minute, or the rest of the budget."""
PER_MINUTE: Final[tuple[Limit, ...]] = ("requests", "tokens")
BEGUN: Final[tuple[Limit, ...]] = ("requests", "concurrent")
"""Limits that apply to a request as soon as it arrives, whatever its size."""


COUNTS: Final = (
    "epoch",
    "requests",
    "tokens",
    "booked",
    "reserved_tokens",
    "in_flight",
    "spent",
    "reserved_spend",
)
"""Fields of `TenantUse`."""


def reports_cover(moment: float, peers: GatewayPeers) -> bool:
    """Whether the last report of each live gateway includes what it had used at a moment."""
    after = moment + PUBLISH_SECONDS + WIRE_SECONDS
    return all(peer.reported_at is None or peer.reported_at >= after for peer in peers)


def may_learn(moment: float, peers: GatewayPeers) -> bool:
    """Whether a report may still come that shows that less was used at a moment than is believed."""
    return not reports_cover(moment, peers) or any(peer.expected for peer in peers)


class Account:
    """Times are monotonic seconds; months such as 2026-11; `boot` is this gateway's boot id, `epoch` as in
    `TenantUse`."""

    __slots__ = (
        "_booked",
        "_epoch",
        "_in_flight",
        "_n_requests",
        "_n_tokens",
        "_reported",
        "_requests",
        "_reserved_spend",
        "_reserved_tokens",
        "_shares",
        "_tokens",
        "limits",
        "peer_usage",
    )

    def __init__(self, boot: str = "", epoch: int = 0) -> None:
        self.limits = Limits()
        self._epoch = epoch
        self._n_requests = self._n_tokens = self._in_flight = self._reserved_tokens = self._reserved_spend = 0
        self._reported = 0
        """Concurrent requests, as last reported to the other gateways."""
        self._requests, self._tokens = Window(), Window()
        self._booked = Booked()
        self._shares: dict[Limit, Share] = {}
        self.peer_usage = PeerUsage(boot, self._booked)

    # --- requests -----------------------------------------------------------------------------------------------------

    def reserve(
        self,
        now: float,
        cost: Cost,
        peers: Callable[[], GatewayPeers],
        *,
        month: str = "",
        ledger: bool = False,
        begun: bool = False,
        beside: "Account | None" = None,
    ) -> Over | None:
        """Reserves what a request may use; or returns why it is refused, and reserves nothing.

        `ledger`: the ledger's totals are fresh. `peers` is called only where a share must be renewed. `begun`: `begin`
        counted the request already. `beside`: the account of a ModelRoute with limits, whose tokens are reserved too;
        if either refuses the request, neither counts it.
        """
        asked = self._amounts(cost)
        if begun:
            asked = [each for each in asked if each[0] not in BEGUN]
        over = self._refused(now, asked, peers, month, ledger=ledger)
        if over is None and beside is not None:
            over = beside.reserve(now, Cost(cost.tokens), peers, begun=begun)
        if over is not None:
            return over
        for limit, _ in asked:
            self._shares[limit].taken = True
        if not begun:
            self._count(now)
        self._reserved_tokens += cost.tokens
        self._reserved_spend += cost.spend
        return None

    def fits(
        self,
        now: float,
        cost: Cost,
        peers: Callable[[], GatewayPeers],
        *,
        month: str = "",
        ledger: bool = False,
        begun: bool = False,
    ) -> bool:
        """Whether `reserve` would take the request now. Reserves nothing, and does not ask for another share."""
        asked = self._amounts(cost)
        if begun:
            asked = [each for each in asked if each[0] not in BEGUN]
        if self._unknown(month, ledger=ledger):
            return False
        return self._lacking(now, asked, peers, ledger=ledger) is None

    def begin(
        self,
        now: float,
        cost: Cost,
        peers: Callable[[], GatewayPeers],
        *,
        month: str = "",
        ledger: bool = False,
        beside: "Account | None" = None,
    ) -> Over | None:
        """Counts a request whose full cost is not known yet; `cost` is a lower bound. It must fit, but is reserved only
        by `reserve`. It is settled like any request, with a cost of zero until then."""
        asked = self._amounts(cost)
        over = self._refused(now, asked, peers, month, ledger=ledger)
        if over is None and beside is not None:
            over = beside.begin(now, Cost(cost.tokens), peers)
        if over is not None:
            return over
        for limit, _ in asked:
            if limit in BEGUN:
                self._shares[limit].taken = True
        self._count(now)
        return None

    def settle(self, now: float, cost: Cost, tokens: int, booked: int = 0, spent: int = 0) -> None:
        """A request has ended: its reservation is returned, and its use counts, even where it exceeds the reservation.

        `tokens` count per minute from now on; `booked`: those of them that the engine counted, `spent`: their price.
        The ledger will have these two.
        """
        self._in_flight -= 1
        self._reserved_tokens -= cost.tokens
        self._reserved_spend -= cost.spend
        self._n_tokens += tokens
        if tokens:
            self._tokens.add(now, tokens)
        self._booked.tokens += booked
        self._booked.spent += spent

    def lacks(
        self, now: float, limit: Limit, amount: int, peers: Callable[[], GatewayPeers], *, ledger: bool
    ) -> Over | None:
        """Why `amount` does not fit one of the limits now; None: it does."""
        share, own = self._renewed(limit, now, amount, peers, ledger=ledger)
        return None if share.fits(own, amount) else self._over(limit, now, amount, peers())

    def exhausted(self, cost: Cost, *, month: str, ledger: bool) -> Over | None:
        """For a request that has waited: why it is refused now, if other requests used up the month's budget meanwhile.
        Its own reservation does not count against it."""
        if (budget := self.limits.budget) is None:
            return None
        self._enter_month(month, ledger=ledger)
        own = cost.tokens if budget.unit == "tokens" else cost.spend
        if (known := self._known(budget)) - own < budget.most:
            return None
        return Over("budget", "over", budget.most, known, own, RETRY_AFTER_MAX_SECONDS)

    def budget_percent(self, *, month: str, ledger: bool) -> int | None:
        """Share of the month's budget that is used or reserved, in whole percent. Of a budget of 0 all is used. None:
        there is no budget."""
        if (budget := self.limits.budget) is None:
            return None
        self._enter_month(month, ledger=ledger)
        return self._known(budget) * 100 // budget.most if budget.most else 100

    def limit_states(self, now: float, peers: Callable[[], GatewayPeers]) -> list[LimitState]:
        """What is left of the limits per minute, for which the ledger does not matter."""
        found: list[LimitState] = []
        # Every answer of a tenant with limits comes through here.
        limits, shares, alone = self.limits, self._shares, not self.peer_usage
        for limit in PER_MINUTE:
            if limit == "requests":
                most, window, reserved = limits.requests, self._requests, 0
            else:
                most, window, reserved = limits.tokens, self._tokens, self._reserved_tokens
            if most is None:
                continue
            share, own = shares.get(limit), window.sum(now) + reserved
            if share is None or now - share.since >= PUBLISH_SECONDS or own + 1 > share.cap:
                share, own = self._renewed(limit, now, 1, peers, ledger=False)
            left = most - own - share.peer_use
            ends = window.ends
            if not alone:
                ends = max(ends, *(each.ends for each in self.peer_usage.windows(limit)))
            found.append(LimitState(limit, most, left if left > 0 else 0, ends - now if ends > now else 0.0))
        return found

    def apply_total(self, total: MonthTotal) -> None:
        """Takes the ledger's total of the month."""
        if self.peer_usage.apply_total(total):
            self._shares.pop("budget", None)

    @property
    def frees_place(self) -> bool:
        """Whether fewer requests run here than was last reported, when by that report the limit on concurrent ones was
        used up. Then the other gateways may be refusing requests for which there is room."""
        share, most = self._shares.get("concurrent"), self.limits.concurrent
        return (
            share is not None
            and most is not None
            and self._in_flight < self._reported
            and self._reported + share.peer_use >= most
        )

    def report(self, now: float) -> TenantUse:
        """This gateway's use, for a message to all other gateways (`note_reported`)."""
        self.note_reported(now)
        return self.own_use()

    def note_reported(self, now: float) -> None:
        """All other gateways are sent this gateway's use. What they learn to be free is theirs as well."""
        if self.frees_place:
            self._shares["concurrent"].release(now, self._in_flight, self._most("concurrent"))
        self._reported = self._in_flight

    def own_use(self) -> TenantUse:
        """This gateway's use, as published to the other gateways."""
        return TenantUse(**dict(zip(COUNTS, self.counts(), strict=True)))

    def counts(self) -> tuple[int, ...]:
        """The values of `own_use`, in the order of `COUNTS`. Messages of very many accounts are made of these: a
        `TenantUse` costs ten times as much."""
        booked = self._booked
        return (
            self._epoch,
            self._n_requests,
            self._n_tokens,
            booked.tokens,
            self._reserved_tokens,
            self._in_flight,
            booked.spent,
            self._reserved_spend,
        )

    def used_recently(self, now: float) -> bool:
        """Whether anything counts per minute here, but for reservations."""
        return bool(self._requests.sum(now) or self._tokens.sum(now))

    def recent(self, now: float, most: int) -> Recent:
        """This gateway's use of the last minute, in at most `most` entries."""
        return recent_use(self._requests, self._tokens, now, most)

    @property
    def busy(self) -> bool:
        """Whether requests run here."""
        return self._in_flight > 0

    @property
    def counted(self) -> bool:
        """Whether anything was counted here since the start, or since `restart`."""
        return self._n_requests > 0 or self._in_flight > 0

    def idle(self, now: float) -> bool:
        """Whether no limit but the budget needs what was counted here."""
        return not (
            self._in_flight
            or self._reserved_tokens
            or self._reserved_spend
            or self._requests.sum(now)
            or self._tokens.sum(now)
        )

    def restart(self, epoch: int) -> None:
        """Its counters begin at zero again, which the message of that moment says to the other gateways, and `epoch` to
        those that miss it. For idle accounts without a budget."""
        self._epoch = epoch
        self._n_requests = self._n_tokens = 0

    def unused(self, now: float) -> bool:
        """Whether it is as a new one, also in what is known of the other gateways."""
        self.peer_usage.tidy(now)
        return not self.counted and not self.peer_usage

    def change(self, limits: Limits) -> None:
        """Applies new limits."""
        if limits != self.limits:
            self.limits = limits
            self._shares.clear()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _refused(
        self,
        now: float,
        amounts: Iterable[tuple[Limit, int]],
        peers: Callable[[], GatewayPeers],
        month: str,
        *,
        ledger: bool,
    ) -> Over | None:
        """Why the amounts do not fit; None: they do."""
        if self._unknown(month, ledger=ledger):
            return self._refuse("budget", "unknown", now, 0, (), RETRY_AFTER_MAX_SECONDS)
        if (lacking := self._lacking(now, amounts, peers, ledger=ledger)) is None:
            return None
        limit, amount = lacking
        self._shares[limit].full(now)
        return self._over(limit, now, amount, peers())

    def _unknown(self, month: str, *, ledger: bool) -> bool:
        """Whether nothing is served because the ledger's total of the month is not known."""
        if (budget := self.limits.budget) is None:
            return False
        self._enter_month(month, ledger=ledger)
        return budget.refuse_unknown and not ledger

    def _lacking(
        self, now: float, amounts: Iterable[tuple[Limit, int]], peers: Callable[[], GatewayPeers], *, ledger: bool
    ) -> tuple[Limit, int] | None:
        """The first of the amounts that does not fit this gateway's share of its limit; None: they all fit."""
        for limit, amount in amounts:
            share = self._shares.get(limit)
            if (
                share is not None
                and now - share.since < PUBLISH_SECONDS
                and self._own(limit, now) + amount <= share.cap
            ):
                continue  # almost all requests, each with four limits: there is nothing to renew or to refuse
            share, own = self._renewed(limit, now, amount, peers, ledger=ledger)
            if not share.fits(own, amount):
                return limit, amount
        return None

    def _count(self, now: float) -> None:
        self._n_requests += 1
        self._requests.add(now, 1)
        self._in_flight += 1

    def _amounts(self, cost: Cost) -> list[tuple[Limit, int]]:
        limits = self.limits
        asked: list[tuple[Limit, int]] = []
        if (budget := limits.budget) is not None:
            asked.append(("budget", cost.tokens if budget.unit == "tokens" else cost.spend))
        if limits.concurrent is not None:
            asked.append(("concurrent", 1))
        if limits.requests is not None:
            asked.append(("requests", 1))
        if limits.tokens is not None:
            asked.append(("tokens", cost.tokens))
        return asked

    def _most(self, limit: Limit) -> int:
        limits = self.limits
        if limit == "requests":
            return limits.requests or 0
        if limit == "tokens":
            return limits.tokens or 0
        if limit == "concurrent":
            return limits.concurrent or 0
        return limits.budget.most if limits.budget is not None else 0

    def _own(self, limit: Limit, now: float) -> int:
        """This gateway's use. For the budget: its counter, whether or not the ledger has it too."""
        if limit == "requests":
            return self._requests.sum(now)
        if limit == "tokens":
            return self._tokens.sum(now) + self._reserved_tokens
        if limit == "concurrent":
            return self._in_flight
        if self.limits.budget is not None and self.limits.budget.unit == "money":
            return self._booked.spent + self._reserved_spend
        return self._booked.tokens + self._reserved_tokens

    def _renewed(
        self, limit: Limit, now: float, amount: int, peers: Callable[[], GatewayPeers], *, ledger: bool
    ) -> tuple[Share, int]:
        """The share of a limit, renewed where that is due and the other gateways have reported; and this gateway's
        use."""
        share = self._shares.get(limit)
        if share is None:
            share = self._shares[limit] = Share(least=1 if limit == "concurrent" else 0)
        own = self._own(limit, now)
        if now - share.since < PUBLISH_SECONDS and share.fits(own, amount):
            return share, own
        others = peers()
        if not self._may_renew(share, limit, others, ledger=ledger):
            return share, own
        used, sharers = self._peer_use(limit, now, others)
        share.renew(now, own, used, self._left(limit, now, used), sharers)
        return share, own

    def _may_renew(self, share: Share, limit: Limit, peers: GatewayPeers, *, ledger: bool) -> bool:
        if limit == "concurrent" and not share.remaining:
            return True  # it got nothing, so the reports cover its last share already
        if (
            limit == "budget"
            and not ledger
            and share.since > float("-inf")
            and any(p.reported_at is None for p in peers)
        ):
            # A month does not end soon, and neither the gateway nor the ledger reports what was used.
            return False
        return reports_cover(share.reports_after, peers)

    def _peer_use(self, limit: Limit, now: float, peers: GatewayPeers) -> tuple[int, int]:
        """The known use of the other gateways, and the number of gateways that share the rest."""
        if (budget := self.limits.budget) is not None and limit == "budget":
            return self.peer_usage.booked(budget.unit), 1 + len(peers)
        return self.peer_usage.used(limit, self._most(limit), now, peers)

    def _left(self, limit: Limit, now: float, peer_use: int) -> int:
        budget = self.limits.budget
        own = self._open(budget) if limit == "budget" and budget is not None else self._own(limit, now)
        return self._most(limit) - own - peer_use

    def _open(self, budget: MonthlyQuota) -> int:
        """Use of the budget that only this gateway has counted."""
        return self._booked.open(budget.unit) + self._reserved(budget.unit)

    def _reserved(self, unit: Limit | Unit) -> int:
        """What requests that run here may still use."""
        return self._reserved_spend if unit == "money" else self._reserved_tokens

    def _known(self, budget: MonthlyQuota) -> int:
        """All known use of the month's budget."""
        return self._open(budget) + self.peer_usage.booked(budget.unit)

    def _enter_month(self, month: str, *, ledger: bool) -> None:
        if self.peer_usage.enter_month(month, ledger=ledger):
            self._shares.pop("budget", None)

    def _windows(self, limit: Limit) -> Iterable[Window]:
        if limit == "requests":
            return (self._requests, *self.peer_usage.windows(limit))
        return (self._tokens, *self.peer_usage.windows(limit))

    # --- refusing -----------------------------------------------------------------------------------------------------

    def _over(self, limit: Limit, now: float, amount: int, peers: GatewayPeers) -> Over:
        most = self._most(limit)
        if amount > most:
            return self._refuse(limit, "never", now, amount, peers, RETRY_AFTER_MAX_SECONDS)
        others, _ = self._peer_use(limit, now, peers)
        missing = amount - self._left(limit, now, others)
        if missing <= 0:
            return self._refuse(limit, "share", now, amount, peers, ROUND_SECONDS)
        budget = self.limits.budget
        unit = budget.unit if limit == "budget" and budget is not None else limit
        missing_without_peers = missing - self.peer_usage.may_have_ended(unit, peers)
        if limit != "budget":
            missing_without_peers -= self.peer_usage.assumed(limit, most, now, peers)
        why: Why = "elsewhere" if missing_without_peers <= 0 else "over"
        if limit == "budget":
            if why == "over" and missing_without_peers <= self._reserved(unit):
                why = "reserved"
            after = RETRY_AFTER_MAX_SECONDS if why == "over" else RESERVED_RETRY_SECONDS
        else:
            after = RUNNING_RETRY_SECONDS if limit == "concurrent" else self._frees(limit, now, missing)
        return self._refuse(limit, why, now, amount, peers, after)

    def _frees(self, limit: Limit, now: float, missing: int) -> int:
        """Seconds until `missing` has left the window."""
        for when, amount in merge(*(window.leaving() for window in self._windows(limit))):
            missing -= amount
            if missing <= 0:
                return max(1, min(RETRY_AFTER_MAX_SECONDS, ceil(when - now)))
        return RESERVED_RETRY_SECONDS

    def _refuse(self, limit: Limit, why: Why, now: float, amount: int, peers: GatewayPeers, after: int) -> Over:
        others, _ = self._peer_use(limit, now, peers)
        most = self._most(limit)
        return Over(limit, why, most, most - self._left(limit, now, others), amount, after, self.limits.route)
