"""The month's budget over gateways and ledger: whatever order they speak in, each request counts exactly once."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.api.demand import TenantUse
from shoal.core.quota.account import Account
from shoal.core.quota.limits import Cost, Limits
from shoal.core.quota.month import Booked, MonthlyQuota, MonthTotal

MONTHS = ("2026-11", "2026-12", "2027-01")
BUDGET = MonthlyQuota("tokens", 10**9)


@dataclass
class GatewayAccount:
    """What one gateway settled, in order: the month of each request and its tokens."""

    boot: str
    account: Account
    settled: list[tuple[int, int]] = field(default_factory=list)
    shipped: int = 0


class World:
    def __init__(self, gateways: int) -> None:
        self.books: list[GatewayAccount] = []
        self.month = 0
        self.now = 1000.0
        for _ in range(gateways):
            self.start()

    def start(self) -> None:
        boot = f"boot-{len(self.books)}"
        account = Account(boot)
        account.change(Limits(budget=BUDGET))
        for book in self.books:
            account.peer_usage.update(book.boot, book.account.own_use(), self.now, unknown_before=True)
        self.books.append(GatewayAccount(boot, account))
        account.apply_total(self.total())

    def serve(self, number: int, tokens: int) -> None:
        book = self.books[number % len(self.books)]
        cost = Cost(2 * tokens)
        assert book.account.reserve(self.now, cost, lambda: (), month=MONTHS[self.month], ledger=True) is None
        book.account.settle(self.now, cost, tokens, tokens)
        book.settled.append((self.month, tokens))

    def ship(self, number: int, count: int) -> None:
        book = self.books[number % len(self.books)]
        book.shipped = min(len(book.settled), book.shipped + count)

    def gossip(self) -> None:
        for book in self.books:
            for other in self.books:
                if other is not book:
                    book.account.peer_usage.update(other.boot, other.account.own_use(), self.now)

    def total(self) -> MonthTotal:
        """The ledger's: of this month, and of each gateway's boot whatever the month."""
        of_month = sum(n for b in self.books for month, n in b.settled[: b.shipped] if month == self.month)
        gateways = {b.boot: (sum(n for _, n in b.settled[: b.shipped]), 0) for b in self.books if b.shipped}
        return MonthTotal(MONTHS[self.month], of_month, 0, gateways)

    def tell(self) -> None:
        total = self.total()
        for book in self.books:
            book.account.apply_total(total)

    def known(self, book: GatewayAccount) -> int:
        return book.account._known(BUDGET)  # pyright: ignore[reportPrivateUsage]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["serve"] * 8 + ["ship"] * 4 + ["gossip"] * 2 + ["tell"] * 2 + ["start", "turn"]),
        st.integers(0, 5),
        st.integers(1, 50),
    ),
    max_size=60,
)


def play(gateways: int, steps: list[tuple[str, int, int]]) -> None:
    world = World(gateways)
    turned_with: set[str] = set()
    for what, number, amount in steps:
        world.now += 0.5
        if what == "serve":
            world.serve(number, amount)
        elif what == "ship":
            world.ship(number, amount)
        elif what == "gossip":
            world.gossip()
        elif what == "tell":
            world.tell()
        elif what == "start" and len(world.books) < 5:
            # What runs has been heard and booked: else a new gateway cannot know what is on its way.
            for book in world.books:
                world.ship(world.books.index(book), len(book.settled))
            world.start()
        elif what == "turn" and world.month < 2:
            world.month += 1
            turned_with = {book.boot for book in world.books if book.shipped < len(book.settled)}
            world.tell()
        if what in ("gossip", "tell") and not turned_with:
            world.gossip()
            world.tell()
            truth = sum(n for b in world.books for month, n in b.settled if month == world.month)
            # The ledger may lag as it likes: what it lacks is at the gateways.
            assert {world.known(book) for book in world.books} == {truth}
        if turned_with and all(book.shipped == len(book.settled) for book in world.books):
            turned_with = set()
    # What was on its way when the month turned is of the old one as soon as the ledger has it.
    for number, book in enumerate(world.books):
        world.ship(number, len(book.settled))
    world.gossip()
    world.tell()
    truth = sum(n for b in world.books for month, n in b.settled if month == world.month)
    assert {world.known(book) for book in world.books} == {truth}


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), STEPS)
def test_each_request_counts_once(gateways: int, steps: list[tuple[str, int, int]]) -> None:
    play(gateways, steps)


STORY = [("serve", 0, 10), ("serve", 1, 5), ("gossip", 0, 1), ("ship", 0, 1), ("tell", 0, 1), ("serve", 0, 3)]


def test_if_what_the_ledger_has_were_not_taken_off_it_would_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    play(2, STORY)
    monkeypatch.setattr(Booked, "set_listed", lambda *_: None)
    with pytest.raises(AssertionError):
        play(2, STORY)


def a_month_without_the_ledger() -> None:
    account = Account("me")
    account.change(Limits(budget=BUDGET))
    for month in MONTHS:
        account.reserve(1.0, Cost(50), lambda: (), month=month)
        account.settle(1.0, Cost(50), 40, 40)
        account.peer_usage.update("other", TenantUse(booked=30 * (MONTHS.index(month) + 1)), 1.0)
        assert account._known(BUDGET) == 70  # pyright: ignore[reportPrivateUsage]


def test_if_the_month_did_not_turn_the_last_one_would_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    a_month_without_the_ledger()
    monkeypatch.setattr(Booked, "close_month", lambda *_: None)
    with pytest.raises(AssertionError):
        a_month_without_the_ledger()
