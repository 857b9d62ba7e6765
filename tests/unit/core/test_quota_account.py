"""One tenant at one gateway: what fits, when to come back, and what the month has used."""

from typing import Literal

import pytest

from shoal.api.demand import TenantUse
from shoal.api.tenant import TenantBudget, TenantLimits
from shoal.core.quota.account import Account, reports_cover
from shoal.core.quota.limits import Cost, Limits, Over, limits_of, route_limits
from shoal.core.quota.month import PICO, MonthlyQuota, MonthTotal
from shoal.core.quota.peerusage import FORGET_SECONDS, UNKNOWN_PEERS, GatewayPeer, GatewayPeers
from shoal.core.quota.window import Window

NOVEMBER, DECEMBER = "2026-11", "2026-12"


def account(**limits: int | MonthlyQuota | None) -> Account:
    it = Account("me")
    it.change(Limits(**limits))  # pyright: ignore[reportArgumentType]
    return it


def ask(
    it: Account,
    now: float,
    tokens: int = 1,
    peers: GatewayPeers = (),
    spend: int = 0,
    month: str = NOVEMBER,
    ledger: bool = True,
) -> Over | None:
    return it.reserve(now, Cost(tokens, spend), lambda: peers, month=month, ledger=ledger)


def test_an_amount_counts_for_sixty_seconds_and_less_than_sixty_one():
    window = Window()
    window.add(100.9, 5)
    assert window.sum(160.95) == 5
    assert window.sum(161.0) == 0
    window.add(200.0, 1)
    window.add(200.5, 1)
    window.add(230.0, 1)
    assert list(window.leaving()) == [(261.0, 2), (291.0, 1)]
    assert window.ends == 291.0


def test_the_moment_to_come_back_is_exact():
    it = account(requests=3)
    for now in (100.2, 105.0, 130.0):
        assert ask(it, now) is None
    over = ask(it, 140.5)
    assert over is not None
    assert over == Over("requests", "over", 3, 3, 1, 21)
    assert ask(it, 160.9) is not None
    assert ask(it, 140.5 + over.retry_after) is None
    assert ask(it, 161.9) == Over("requests", "over", 3, 3, 1, 5)


def test_tokens_come_back_as_they_leave_the_window():
    it = account(tokens=100)
    for now, tokens in ((100.0, 40), (110.0, 40)):
        assert ask(it, now, tokens) is None
        it.settle(now, Cost(tokens), tokens)
    assert ask(it, 120.0, 21) == Over("tokens", "over", 100, 80, 21, 41)
    assert ask(it, 120.0, 61) == Over("tokens", "over", 100, 80, 61, 51)
    assert ask(it, 161.0, 60) is None


def test_what_is_reserved_is_given_back_and_what_was_used_counts_were_it_more():
    it = account(tokens=100)
    assert ask(it, 1.0, 90) is None
    assert ask(it, 2.0, 20) == Over("tokens", "over", 100, 90, 20, 5)  # a request that runs: nobody knows until when
    it.settle(3.0, Cost(90), 10)
    assert ask(it, 4.0, 20) is None
    it.settle(5.0, Cost(20), 130)
    assert ask(it, 6.0, 1) == Over("tokens", "over", 100, 140, 1, 60)


def test_a_request_larger_than_the_limit_never_fits():
    assert ask(account(tokens=100), 1.0, 101) == Over("tokens", "never", 100, 0, 101, 60)
    assert ask(account(budget=MonthlyQuota("tokens", 100)), 1.0, 101) == Over("budget", "never", 100, 0, 101, 60)


def test_requests_at_a_time():
    it = account(concurrent=2)
    assert ask(it, 1.0) is None
    assert ask(it, 1.0) is None
    assert ask(it, 1.5) == Over("concurrent", "over", 2, 2, 1, 1)
    it.settle(2.0, Cost(1), 0)
    assert ask(it, 2.0) is None


def test_a_refused_request_takes_nothing_of_the_limits_that_it_would_have_kept():
    it = account(requests=10, concurrent=1)
    assert ask(it, 1.0) is None
    assert ask(it, 1.0) is not None
    assert it.own_use() == TenantUse(requests=1, in_flight=1, reserved_tokens=1)


def test_a_share_is_an_equal_part_until_the_others_were_heard():
    it = account(requests=40)
    others = [GatewayPeer(f"g{n}", 99.9) for n in range(3)]
    assert sum(ask(it, 100.0, peers=others) is None for _ in range(20)) == 10
    assert ask(it, 100.5, peers=others) == Over("requests", "share", 40, 10, 1, 3)
    assert (
        ask(it, 101.0, peers=[GatewayPeer(p.boot, 101.0) for p in others]) is not None
    )  # too soon to know what they used
    it.peer_usage.update("g0", TenantUse(requests=6), 101.6)
    late = [GatewayPeer(p.boot, 101.6) for p in others]
    assert sum(ask(it, 101.7, peers=late) is None for _ in range(20)) == 6  # (40 - 10 - 6) / 4
    assert ask(it, 101.9, peers=[*late[:2], GatewayPeer("g2", 101.7)]) is not None


def at(moment: float, gateways: int = 3) -> list[GatewayPeer]:
    """Other gateways that reported then."""
    return [GatewayPeer(f"g{n}", moment) for n in range(gateways)]


def test_one_request_after_the_other_uses_the_same_place_again():
    it = account(concurrent=1)
    for now in (100.0, 100.1, 100.9, 101.0, 101.4, 130.0):
        assert ask(it, now, peers=at(99.9)) is None, "one of four gateways has one place, however little is left"
        assert ask(it, now, peers=at(99.9)) == Over("concurrent", "over", 1, 1, 1, 1)
        it.settle(now, Cost(1), 0)


def test_what_other_gateways_reported_may_have_ended():
    it = account(concurrent=2)
    it.peer_usage.update("g0", TenantUse(in_flight=1), 99.0)
    it.peer_usage.update("g1", TenantUse(in_flight=1), 99.0)
    assert ask(it, 100.0, peers=at(99.5)) == Over("concurrent", "elsewhere", 2, 2, 1, 1)
    it.peer_usage.update("g1", TenantUse(), 100.1)
    assert ask(it, 100.1, peers=at(100.1)) is None, "it got nothing before, so it waits for no further reports"
    assert ask(it, 100.1, peers=at(100.1)) == Over("concurrent", "elsewhere", 2, 2, 1, 1)
    it.peer_usage.update("g0", TenantUse(), 100.2)
    assert ask(it, 100.2, peers=at(100.2)) == Over("concurrent", "share", 2, 1, 1, 3), "but now it does"
    assert ask(it, 101.8, peers=at(101.7)) is None
    assert ask(it, 101.8, peers=at(101.7)) == Over("concurrent", "over", 2, 2, 1, 1), "they are all here"


def test_what_is_taken_for_used_at_a_silent_gateway_does_not_end():
    it = account(concurrent=3)
    it.peer_usage.update("g0", TenantUse(in_flight=3), 99.0)
    assert ask(it, 100.0, peers=[GatewayPeer("g0", None)]) == Over("concurrent", "over", 3, 3, 1, 1)


def test_reports_cover_what_was_published_and_sent_before_them():
    assert reports_cover(100.0, at(101.5))
    assert not reports_cover(100.0, [*at(101.5), GatewayPeer("late", 101.4)])
    assert reports_cover(100.0, [GatewayPeer("silent", None)])


def test_places_are_free_for_others_only_where_they_were_told_that_none_are():
    it = account(concurrent=4)
    for _ in range(3):
        assert ask(it, 100.0) is None
    assert it.report(100.1).in_flight == 3
    it.settle(100.2, Cost(1), 0)
    assert not it.frees_place, "there was one left"
    assert ask(it, 100.3) is None
    assert ask(it, 100.3) is None
    assert it.report(100.4).in_flight == 4
    assert not it.frees_place
    it.settle(100.5, Cost(1), 0)
    assert it.frees_place
    assert it.report(100.5).in_flight == 3
    assert not it.frees_place, "they know"
    it.change(Limits(requests=5))
    it.settle(100.6, Cost(1), 0)
    assert not it.frees_place


def test_a_gateway_keeps_a_share_of_what_it_reports_as_free():
    it = account(concurrent=8)
    for now in (100.0, 103.0, 106.0, 109.0, 112.0, 115.0, 118.0):
        while ask(it, now, peers=at(now - 1, 1)) is None:
            pass
    assert it.report(118.0).in_flight == 8
    for _ in range(8):
        it.settle(118.1, Cost(1), 0)
    assert it.report(118.2).in_flight == 0
    assert sum(ask(it, 118.3, peers=at(118.25, 1)) is None for _ in range(8)) == 4
    assert ask(it, 119.6, peers=at(119.6, 1)) == Over("concurrent", "share", 8, 4, 1, 3)
    assert ask(it, 121.2, peers=at(121.2, 1)) is None


def test_a_request_larger_than_the_share_passes_if_it_fits_what_is_left():
    it = account(tokens=100)
    others = [GatewayPeer(f"g{n}", 99.0) for n in range(3)]
    assert ask(it, 100.0, 60, others) is None
    assert ask(it, 100.0, 30, others) == Over("tokens", "share", 100, 60, 30, 3)


def test_whether_a_request_fits_is_answered_without_a_trace():
    it, asked = account(tokens=100, concurrent=1), Cost(60)
    assert it.fits(100.0, asked, tuple)
    assert it.fits(100.0, asked, tuple), "nothing was reserved"
    assert ask(it, 100.0, 60) is None
    assert not it.fits(100.0, Cost(30), tuple), "one at a time"
    assert it.fits(100.0, Cost(30), tuple, begun=True), "it is the one"
    assert not it.fits(100.0, Cost(50), tuple, begun=True)

    # Of a share that a question alone found used up, the next one comes as soon as the others have reported again.
    for questions in (0, 1):
        one = account(tokens=100)
        assert ask(one, 200.0, 50, peers=(GatewayPeer("b", 199.9),)) is None
        for _ in range(questions):
            assert not one.fits(201.0, Cost(20), lambda: (GatewayPeer("b", 200.9),))
        assert ask(one, 201.6, 20, peers=(GatewayPeer("b", 201.55),)) is None


def test_a_silent_gateway_counts_as_its_equal_share():
    it = account(requests=40)
    silent = [GatewayPeer("g1", None), GatewayPeer(None, None), GatewayPeer("g3", 99.0)]
    assert (
        sum(ask(it, 100.0, peers=silent) is None for _ in range(50)) == 10
    )  # what it and g3 have between them, halved
    it = account(requests=40)
    assert sum(ask(it, 100.0, peers=[GatewayPeer("g1", None)]) is None for _ in range(50)) == 20
    assert sum(ask(it, 150.0, peers=[GatewayPeer("g1", None)]) is None for _ in range(50)) == 0


def test_while_the_others_are_unknown_there_is_one_more():
    it = account(requests=40)
    assert sum(ask(it, 100.0, peers=UNKNOWN_PEERS) is None for _ in range(50)) == 20


def test_one_that_ran_before_it_was_heard_counts_as_its_equal_share_for_a_minute():
    it = account(requests=40)
    it.peer_usage.update("g1", TenantUse(requests=1000, tokens=5000), 99.0, unknown_before=True)
    assert sum(ask(it, 100.0, peers=[GatewayPeer("g1", 99.0)]) is None for _ in range(50)) == 10
    it = account(requests=40)
    it.peer_usage.update("g1", TenantUse(requests=1000), 30.0, unknown_before=True)
    assert sum(ask(it, 100.0, peers=[GatewayPeer("g1", 99.0)]) is None for _ in range(50)) == 20


def test_other_limits_hold_at_once():
    it = account(requests=1)
    assert ask(it, 1.0) is None
    assert ask(it, 1.0) is not None
    it.change(Limits(requests=2))
    assert ask(it, 1.0) is None
    it.change(Limits(concurrent=1))
    assert ask(it, 1.0) is not None


# --- the month --------------------------------------------------------------------------------------------------------


def booked(it: Account, now: float, tokens: int, spent: int = 0, **more: str | bool) -> None:
    assert ask(it, now, tokens, spend=spent, **more) is None  # pyright: ignore[reportArgumentType]
    it.settle(now, Cost(tokens, spent), tokens, tokens, spent)


def left(it: Account, now: float = 500.0, month: str = NOVEMBER, ledger: bool = True, most: int = 1000) -> int:
    """Found by asking for too much."""
    over = ask(it, now, most + 1, spend=most + 1, month=month, ledger=ledger)
    assert over is not None
    return over.most - over.used


def test_the_month_is_the_ledgers_total_and_what_it_does_not_have_of_each_gateway():
    it = account(budget=MonthlyQuota("tokens", 1000))
    booked(it, 1.0, 30)
    it.peer_usage.update("g1", TenantUse(booked=200, tokens=200, requests=3, reserved_tokens=7), 2.0)
    assert left(it) == 1000 - 30 - 207
    it.apply_total(MonthTotal(NOVEMBER, tokens=500, gateways={"me": (30, 0), "g1": (150, 0), "gone": (320, 0)}))
    assert left(it) == 1000 - 500 - 50 - 7
    booked(it, 3.0, 10)
    assert left(it) == 1000 - 500 - 50 - 7 - 10
    it.apply_total(MonthTotal(NOVEMBER, tokens=560, gateways={"me": (40, 0), "g1": (200, 0)}))
    assert left(it) == 1000 - 560 - 7


def test_the_share_of_a_budget_in_whole_percent():
    used = account(budget=MonthlyQuota("tokens", 300))
    booked(used, 0.0, 100)
    assert used.budget_percent(month=NOVEMBER, ledger=False) == 33
    none = account(budget=limits_of(TenantLimits(), TenantBudget(amount="0", currency="USD")).budget)
    assert none.budget_percent(month=NOVEMBER, ledger=False) == 100, "of nothing, all is used"
    assert account().budget_percent(month=NOVEMBER, ledger=False) is None


def test_money_is_what_the_ledger_says_once_it_has_all_tokens():
    """A new price list, or cached tokens: what this gateway thought that they cost is forgotten."""
    it = account(budget=MonthlyQuota("money", 1000))
    booked(it, 1.0, 30, 300)
    it.apply_total(MonthTotal(NOVEMBER, tokens=20, spent=100, gateways={"me": (20, 100)}))
    assert left(it) == 1000 - 100 - 200
    it.apply_total(MonthTotal(NOVEMBER, tokens=30, spent=150, gateways={"me": (30, 150)}))
    assert left(it) == 1000 - 150
    booked(it, 2.0, 10, 40)
    assert left(it) == 1000 - 150 - 40


def test_a_gateway_that_the_ledger_does_not_name_any_more_is_not_counted_again():
    it = account(budget=MonthlyQuota("tokens", 1000))
    booked(it, 1.0, 30)
    it.apply_total(MonthTotal(NOVEMBER, tokens=30, gateways={"me": (30, 0)}))
    it.apply_total(MonthTotal(NOVEMBER, tokens=30, gateways={}))
    assert left(it) == 970
    it.peer_usage.update(
        "old", TenantUse(booked=400), 2.0, unknown_before=True
    )  # it ran before this one, and the ledger has it
    assert left(it) == 970


def test_the_month_turns_with_the_ledger():
    it = account(budget=MonthlyQuota("tokens", 1000))
    booked(it, 1.0, 900)
    it.apply_total(MonthTotal(NOVEMBER, tokens=880, gateways={"me": (880, 0)}))
    assert left(it) == 100
    assert left(it, month=DECEMBER) == 100  # the ledger is heard, and it is not December there yet
    it.apply_total(MonthTotal(DECEMBER, tokens=0, gateways={"me": (880, 0)}))
    assert left(it, month=DECEMBER) == 1000 - 20  # not shipped yet, so it is not known which month it is of
    it.apply_total(MonthTotal(DECEMBER, tokens=0, gateways={"me": (900, 0)}))
    assert left(it, month=DECEMBER) == 1000


def test_the_month_turns_with_the_clock_while_the_ledger_is_away():
    it = account(budget=MonthlyQuota("tokens", 1000))
    it.apply_total(MonthTotal(NOVEMBER, tokens=700, gateways={}))
    booked(it, 1.0, 200)
    it.peer_usage.update("g1", TenantUse(booked=60), 1.0)
    assert left(it, ledger=False) == 40
    assert left(it, month=DECEMBER, ledger=False) == 1000
    booked(it, 2.0, 5, month=DECEMBER, ledger=False)
    it.peer_usage.update("g1", TenantUse(booked=70), 3.0)
    assert left(it, month=DECEMBER, ledger=False) == 985
    assert left(it, month=NOVEMBER, ledger=False) == 985  # a clock that steps back begins no month anew
    it.apply_total(MonthTotal(DECEMBER, tokens=3, gateways={"me": (203, 0), "g1": (70, 0)}))
    assert left(it, month=DECEMBER) == 1000 - 3 - 2


def test_without_the_ledger_it_serves_and_counts_or_refuses():
    serve, refuse = account(budget=MonthlyQuota("tokens", 100)), account(budget=MonthlyQuota("tokens", 100, None, True))
    booked(serve, 1.0, 60, ledger=False)
    assert ask(serve, 2.0, 50, ledger=False) == Over("budget", "over", 100, 60, 50, 60)
    assert ask(refuse, 1.0, 1, ledger=False) == Over("budget", "unknown", 100, 0, 0, 60)
    assert ask(refuse, 1.0, 1, ledger=True) is None


def test_alone_with_silent_others_and_no_ledger_it_has_its_share_and_no_more():
    it = account(budget=MonthlyQuota("tokens", 100))
    silent = [GatewayPeer("g1", None)]
    taken = sum(ask(it, 1.0 + n, 5, silent, ledger=False) is None for n in range(40))
    assert taken == 10
    it.apply_total(MonthTotal(NOVEMBER))
    assert ask(it, 50.0, 5, silent, ledger=True) is None  # the ledger says what they used


@pytest.mark.parametrize("unit", ["tokens", "money"])
def test_a_budget_that_requests_of_a_silent_gateway_fill_is_used_up_and_of_another_one_perhaps_not(
    unit: Literal["tokens", "money"],
):
    it = account(budget=MonthlyQuota(unit, 100))
    use = TenantUse(reserved_tokens=90) if unit == "tokens" else TenantUse(reserved_spend=90)
    it.peer_usage.update("g1", use, 1.0)
    said: list[str] = []
    for reported_at in (1.0, None):
        peers = [GatewayPeer("g1", reported_at)]
        said.extend(over.why for over in [ask(it, 1.0, 20, peers, spend=20)] if over is not None)
    assert said == ["elsewhere", "over"]


@pytest.mark.parametrize("unit", ["tokens", "money"])
def test_a_budget_that_running_requests_have_reserved_is_not_used_up(unit: Literal["tokens", "money"]):
    it = account(budget=MonthlyQuota(unit, 100))
    booked(it, 1.0, 30, 30)
    assert ask(it, 2.0, 60, spend=60) is None
    assert ask(it, 3.0, 20, spend=20) == Over("budget", "reserved", 100, 90, 20, 5)
    assert ask(it, 3.0, 71, spend=71) == Over("budget", "over", 100, 90, 71, 60), "too much even if nothing ran"


def test_one_that_waited_is_refused_if_others_used_up_the_budget():
    it = account(budget=MonthlyQuota("tokens", 100))
    cost = Cost(40)
    assert ask(it, 1.0, 40) is None
    assert it.exhausted(cost, month=NOVEMBER, ledger=True) is None
    it.apply_total(MonthTotal(NOVEMBER, tokens=100))
    assert it.exhausted(cost, month=NOVEMBER, ledger=True) == Over("budget", "over", 100, 140, 40, 60)


def test_a_gateway_that_is_gone_counts_until_the_ledger_has_what_it_used():
    it = account(budget=MonthlyQuota("tokens", 1000), tokens=1000)
    it.peer_usage.update("g1", TenantUse(booked=100, tokens=100, reserved_tokens=20), 1.0)
    it.peer_usage.mark_gone("g1", 2.0)
    assert left(it, now=3.0) == 900
    it.peer_usage.tidy(70.0)
    assert left(it, now=70.0) == 900
    it.apply_total(MonthTotal(NOVEMBER, tokens=100, gateways={"g1": (100, 0)}))
    assert left(it, now=70.0) == 900
    it.peer_usage.tidy(2.0 + FORGET_SECONDS)
    assert left(it) == 900


@pytest.mark.parametrize(
    ("said", "most"),
    [("500", 500 * PICO), ("0.5", PICO // 2), ("0.000000000001", 1), ("2k", 2000 * PICO), ("500m", PICO // 2)],
)
def test_amounts_are_exact(said: str, most: int):
    budget = TenantBudget(amount=said, currency="USD", when_unknown="Refuse")
    assert limits_of(None, budget) == Limits(budget=MonthlyQuota("money", most, "USD", True))


def test_limits_as_a_tenant_says_them():
    said = TenantLimits(requests_per_minute=1, tokens_per_minute=2, concurrent_requests=3)
    assert limits_of(said, TenantBudget(tokens=4)) == Limits(1, 2, 3, MonthlyQuota("tokens", 4))


def test_a_request_that_grows_is_counted_once_and_asked_for_when_it_is_whole():
    it = account(requests=2, concurrent=2, tokens=100, budget=MonthlyQuota("tokens", 200, None, refuse_unknown=False))
    assert it.begin(0.0, Cost(10), lambda: (), month=NOVEMBER, ledger=True) is None
    assert (it.own_use().requests, it.own_use().in_flight, it.own_use().reserved_tokens) == (1, 1, 0)
    assert it.reserve(0.5, Cost(90), lambda: (), month=NOVEMBER, ledger=True, begun=True) is None
    assert (it.own_use().requests, it.own_use().in_flight, it.own_use().reserved_tokens) == (1, 1, 90)
    it.settle(1.0, Cost(90), 90, 90)
    # What is over in the end was counted, and takes nothing else.
    assert it.begin(2.0, Cost(10), lambda: (), month=NOVEMBER, ledger=True) is None
    over = it.reserve(2.5, Cost(50), lambda: (), month=NOVEMBER, ledger=True, begun=True)
    assert over is not None
    assert over.limit == "tokens"
    it.settle(3.0, Cost(0), 0)
    assert (it.own_use().requests, it.own_use().in_flight, it.own_use().reserved_tokens) == (2, 0, 0)
    # What is over from the beginning is refused there.
    assert (over := it.begin(4.0, Cost(1), lambda: (), month=NOVEMBER, ledger=True)) is not None
    assert over.limit == "requests"
    assert (over := it.begin(62.0, Cost(150), lambda: (), month=NOVEMBER, ledger=True)) is not None
    assert over.limit == "budget"
    assert it.own_use().requests == 2


def test_what_grows_may_take_as_much_of_a_share_as_what_comes_whole():
    """It took none of the tokens when it began: else a request larger than a share would never fit."""
    peers = (GatewayPeer("b", 0.0),)
    for grows in (False, True):
        it = account(tokens=100)
        if grows:
            assert it.begin(100.0, Cost(1), lambda: peers) is None
        assert it.reserve(100.0, Cost(90), lambda: peers, begun=grows) is None


# --- a route's limits beside the tenant's ----------------------------------------------------------------------------


def of_route(**limits: int) -> Account:
    it = Account("me")
    it.change(route_limits("chat/front", TenantLimits(**limits)))  # pyright: ignore[reportArgumentType]
    return it


@pytest.mark.parametrize("grows", [False, True])
def test_a_request_that_the_tenant_or_the_route_refuses_counts_for_neither(grows: bool):
    def ask_both(tenant: Account, route: Account, tokens: int = 10) -> Over | None:
        if grows:
            return tenant.begin(0.0, Cost(tokens, 7), lambda: (), month=NOVEMBER, beside=route)
        return tenant.reserve(0.0, Cost(tokens, 7), lambda: (), month=NOVEMBER, beside=route)

    for tenant, route, limit, whose in (
        (account(requests=9), of_route(requests_per_minute=1), "requests", "chat/front"),
        (account(requests=1), of_route(requests_per_minute=9), "requests", None),
        (account(requests=9), of_route(concurrent_requests=1), "concurrent", "chat/front"),
        (account(concurrent=1), of_route(tokens_per_minute=99), "concurrent", None),
    ):
        assert ask_both(tenant, route) is None
        before = tenant.own_use(), route.own_use()
        assert [use.requests for use in before] == [1, 1]
        over = ask_both(tenant, route)
        assert over is not None
        assert (over.limit, over.why, over.route) == (limit, "over", whose)
        assert (tenant.own_use(), route.own_use()) == before
    tenant, route = account(tokens=99), of_route(tokens_per_minute=20)
    over = ask_both(tenant, route, 30)
    assert over is not None
    assert (over.why, over.most, over.route) == ("never", 20, "chat/front")
    assert not tenant.own_use().requests + route.own_use().requests


def test_a_request_that_grows_is_reserved_for_at_both_when_it_is_whole():
    tenant, route = account(tokens=100), of_route(tokens_per_minute=50)
    assert tenant.begin(0.0, Cost(10), lambda: (), beside=route) is None
    assert tenant.reserve(1.0, Cost(40, 7), lambda: (), begun=True, beside=route) is None
    for it, spend in ((tenant, 7), (route, 0)):
        assert it.own_use() == TenantUse(requests=1, reserved_tokens=40, in_flight=1, reserved_spend=spend)
    assert not tenant.fits(2.0, Cost(61), lambda: ())
    assert not route.fits(2.0, Cost(11), lambda: ())
    route.settle(3.0, Cost(40), 5)
    assert route.fits(4.0, Cost(45), lambda: ())
