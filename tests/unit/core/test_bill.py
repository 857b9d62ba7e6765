"""What stands on a bill."""

import re

import pytest

from shoal.api.ledger import Prices, Rate
from shoal.core.rating import money
from shoal.core.rating.bill import BilledCounts, Credit, Usage, bill
from shoal.core.rating.price import RateTable
from shoal.core.rating.schedule import InForce, Schedule

A = Rate(model="m/a", input=3_000_000, cached=300_000, output=15_000_000)
GOLD = Rate(plan="gold", model="m/a", input=2_000_000, cached=200_000, output=10_000_000)


def in_force(start: int, end: int | None, *rates: Rate, name: str = "list") -> InForce:
    prices = Prices(list=name, currency="EUR", rates=rates)
    return InForce(start, end, prices, RateTable.of(prices))


def used(
    start: int = 0, *, plan: str | None = None, model: str = "m/a", adapter: str | None = None, **counts: int
) -> Usage:
    return Usage(start, plan, model, adapter, BilledCounts(**counts))


def test_a_line_per_model_plan_and_price() -> None:
    schedule = Schedule((in_force(0, None, A, GOLD),))
    found = bill(
        "acme",
        "2026-11",
        [
            used(requests=2, input=1_000_000, cached=400_000, output=100_000),
            used(plan="gold", requests=1, input=1_000_000, output=0),
            used(5, requests=1, output=100_000),
        ],
        schedule,
    )
    plain, gold = found.lines
    assert (plain.plan, plain.counts.requests, plain.counts.tokens) == (None, 3, 1_200_000)
    assert plain.cents == 180 + 12 + 300  # 0.6 M x 3, 0.4 M x 0.30, 0.2 M x 15
    assert (gold.plan, gold.cents) == ("gold", 200)
    assert (found.usage_cents, found.total_cents, found.unpriced) == (692, 692, ())


def test_a_price_that_changes_within_the_month_makes_a_line_of_its_own() -> None:
    dearer = Rate(model="m/a", input=4_000_000, cached=300_000, output=15_000_000)
    schedule = Schedule((in_force(0, 10, A, name="one"), in_force(10, None, dearer, name="two")))
    found = bill("acme", "2026-11", [used(9, input=10**6), used(10, input=10**6)], schedule)
    assert [(line.lists, line.cents) for line in found.lines] == [(("one",), 300), (("two",), 400)]


def test_a_new_list_that_leaves_a_price_as_it_was_makes_no_second_line() -> None:
    schedule = Schedule((in_force(0, 10, A, name="one"), in_force(10, None, A, name="two")))
    (line,) = bill("acme", "2026-11", [used(9, input=1), used(10, input=1)], schedule).lines
    assert line.lists == ("one", "two")


def test_usage_without_a_price_is_shown_as_such_and_costs_nothing_known() -> None:
    schedule = Schedule((in_force(10, None, A),))
    found = bill(
        "acme",
        "2026-11",
        [
            used(9, requests=1, input=7),  # before the first list
            used(10, model="m/new", requests=1, input=5, output=1),
            used(10, adapter="m/x", requests=1, input=3),  # a model's price is not its adapters'
            used(10, model="m/new", requests=4),  # refused: no engine had them
            used(10, model="m/gone", requests=4),
            used(10, input=10**6),
        ],
        schedule,
    )
    assert [(one.model, one.adapter, one.counts.tokens) for one in found.unpriced] == [
        ("m/a", None, 7),
        ("m/a", "m/x", 3),
        ("m/new", None, 6),
    ]
    assert found.total_cents == 300


def test_a_price_of_zero_is_a_price() -> None:
    free = Rate(model="*", input=0, cached=0, output=0)
    found = bill("acme", "2026-11", [used(input=5)], Schedule((in_force(0, None, free),)))
    assert (len(found.lines), found.unpriced, found.total_cents) == (1, (), 0)


def test_without_price_lists_everything_is_unpriced() -> None:
    found = bill("acme", "2026-11", [used(input=5)], Schedule())
    assert (found.currency, found.lines, found.unpriced[0].counts.tokens) == (None, (), 5)


def test_tokens_that_nobody_knows_are_told() -> None:
    found = bill("acme", "2026-11", [used(model="m/new", requests=1, unknown_requests=1)], Schedule())
    assert found.unpriced[0].counts.unknown_requests == 1


def test_credits_are_entries_of_their_own() -> None:
    credits = [
        Credit("b", money.parse("1.50", "EUR"), "EUR", "outage"),
        Credit("a", money.parse("-0.25", "EUR"), "EUR", "a credit taken back"),
        Credit("c", money.parse("9", "USD"), "USD", "another currency"),
    ]
    found = bill("acme", "2026-11", [used(input=10**6)], Schedule((in_force(0, None, A),)), credits)
    assert [one.id for one in found.credits] == ["a", "b"]
    assert [one.id for one in found.foreign_credits] == ["c"]
    assert (found.usage_cents, found.credit_cents, found.total_cents) == (300, 125, 175)


def test_more_credit_than_usage_is_the_tenants() -> None:
    credit = Credit("a", money.parse("5", "EUR"), "EUR", "")
    assert bill("acme", "2026-11", [], Schedule((in_force(0, None, A),)), [credit]).total_cents == -500


@pytest.mark.parametrize(
    ("amount", "currency", "cents"),
    [
        (5 * 10**9, "EUR", 1),  # half a cent counts as one
        (5 * 10**9 - 1, "EUR", 0),
        (-5 * 10**9, "EUR", -1),
        (5 * 10**11, "JPY", 1),
        (5 * 10**8, "KWD", 1),
    ],
)
def test_a_line_is_rounded_half_up(amount: int, currency: str, cents: int) -> None:
    assert money.cents(amount, currency) == cents


@pytest.mark.parametrize(
    ("count", "currency", "text"),
    [(0, "EUR", "0.00"), (5, "EUR", "0.05"), (-1230, "EUR", "-12.30"), (1230, "JPY", "1230"), (1, "KWD", "0.001")],
)
def test_amounts_are_written_with_the_decimals_of_their_currency(count: int, currency: str, text: str) -> None:
    assert money.cents_text(count, currency) == text


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0"), (1, "0.000000000001"), (-1_500_000_000_000, "-1.5"), (10**12, "1")]
)
def test_exact_amounts_have_all_their_decimals(amount: int, text: str) -> None:
    assert money.exact(amount) == text


@pytest.mark.parametrize(
    ("text", "currency", "message"),
    [
        ("12,50", "EUR", "'12,50' is not an amount"),
        ("1e3", "EUR", "is not an amount"),
        ("1000000", "EUR", "below a million"),
        ("0.001", "EUR", "0.001 has more decimals than EUR has (2)"),
        ("0.5", "JPY", "has more decimals than JPY has (0)"),
    ],
)
def test_what_is_no_amount_is_refused(text: str, currency: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        money.parse(text, currency)


def test_prices_are_written_as_people_write_them() -> None:
    assert [money.price(rate) for rate in (250_000, 1, 15_000_000)] == ["0.25", "0.000001", "15.00"]
