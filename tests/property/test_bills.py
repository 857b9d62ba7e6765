"""A bill is the same to the cent, in whatever order and parts its usage comes."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.api.ledger import Prices, Rate
from shoal.core.rating import money
from shoal.core.rating.bill import Bill, BilledCounts, Credit, Usage, bill
from shoal.core.rating.price import RateTable
from shoal.core.rating.schedule import InForce, Schedule
from tests.support.billing import of_cents

PLANS = (None, "gold")
MODELS = ("m/a", "m/b", "m/c")
ADAPTERS = (None, "m/x")
HOURS = 12

prices = st.integers(0, 10**15)
maybe = st.none() | prices
UNITS = ("documents", "images", "audio_ms")
rates = st.builds(
    Rate,
    plan=st.sampled_from(PLANS),
    model=st.sampled_from((*MODELS[:2], "*")),
    adapter=st.sampled_from((*ADAPTERS, "*")),
    input=prices,
    cached=prices,
    output=prices,
    documents=maybe,
    images=maybe,
    audio_ms=maybe,
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    starts = sorted(draw(st.sets(st.integers(-3, HOURS - 1), max_size=3)))
    lists: list[InForce] = []
    for place, start in enumerate(starts):
        rule = draw(st.sampled_from(("Fresh", "Cached")))
        chosen = draw(st.lists(rates, max_size=6, unique_by=lambda r: (r.plan, r.model, r.adapter)))
        found = Prices(list=f"l{place}", currency="EUR", unknown_cached=rule, rates=tuple(chosen))
        end = starts[place + 1] if place + 1 < len(starts) else None
        lists.append(InForce(start, end, found, RateTable.of(found)))
    return Schedule(tuple(lists))


@st.composite
def requests(draw: st.DrawFn) -> Usage:
    input = draw(st.integers(0, 10**7))
    known = draw(st.booleans())
    return Usage(
        start=draw(st.integers(0, HOURS - 1)),
        plan=draw(st.sampled_from(PLANS)),
        model=draw(st.sampled_from(MODELS)),
        adapter=draw(st.sampled_from(ADAPTERS)),
        counts=BilledCounts(
            requests=1,
            input=input,
            cached=draw(st.integers(0, input)) if known else 0,
            unknown_cached_input=0 if known else input,
            output=draw(st.integers(0, 10**6)),
            **{name: draw(st.integers(0, 10**5)) for name in UNITS},
        ),
    )


credits = st.builds(
    Credit,
    id=st.uuids().map(str),
    amount=st.integers(-(10**9), 10**9).map(lambda cents: of_cents(cents, "EUR")),
    currency=st.just("EUR"),
    note=st.just(""),
)


def summed(usage: list[Usage]) -> list[Usage]:
    """As the ledger sums by the hour."""
    sums: dict[tuple[object, ...], Usage] = {}
    for one in usage:
        key = (one.start, one.plan, one.model, one.adapter)
        before = sums.get(key)
        counts = one.counts if before is None else before.counts + one.counts
        sums[key] = Usage(one.start, one.plan, one.model, one.adapter, counts)
    return list(sums.values())


def made(usage: list[Usage], schedule: Schedule, entries: list[Credit]) -> Bill:
    return bill("acme", "2026-11", usage, schedule, entries)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(requests(), max_size=30), schedules(), st.lists(credits, max_size=4, unique_by=lambda c: c.id), st.data()
)
def test_order_and_parts_do_not_matter(
    usage: list[Usage], schedule: Schedule, entries: list[Credit], data: st.DataObject
) -> None:
    first = made(usage, schedule, entries)
    shuffled = data.draw(st.permutations(usage))
    assert made(shuffled, schedule, data.draw(st.permutations(entries))) == first
    assert made(summed(shuffled), schedule, entries) == first


@settings(max_examples=200, deadline=None)
@given(st.lists(requests(), max_size=30), schedules(), st.lists(credits, max_size=4, unique_by=lambda c: c.id))
def test_it_is_exact_but_for_one_rounding_of_each_line(
    usage: list[Usage], schedule: Schedule, entries: list[Credit]
) -> None:
    found = made(usage, schedule, entries)
    due = Fraction(0)
    priced = 0
    for one in usage:
        in_force = schedule.at(one.start)
        rate = None if in_force is None else in_force.book.find(one.plan, one.model, one.adapter)
        if in_force is None or rate is None:
            continue
        priced += one.counts.tokens
        counts = one.counts
        cached = counts.cached + (counts.unknown_cached_input if in_force.prices.unknown_cached == "Cached" else 0)
        million = Fraction(1, 10**6) / 10**6  # millionths of the currency, per million tokens
        due += (counts.input - cached) * rate.input * million
        due += (cached * rate.cached + counts.output * rate.output) * million
        due += (counts.documents * (rate.documents or 0) + counts.images * (rate.images or 0)) * million
        # Thousandths of the currency, per million seconds.
        due += Fraction(counts.audio_ms, 1000) * (rate.audio_ms or 0) / 10**3 / 10**6
    assert Fraction(found.exact, money.UNIT) == due
    assert abs(Fraction(found.usage_cents, 100) - due) <= Fraction(len(found.lines), 200)
    for line in found.lines:
        assert abs(Fraction(line.cents, 100) - Fraction(line.amount, money.UNIT)) <= Fraction(1, 200)
        said = {unit.count for unit in line.unpriced_units}
        for name in UNITS:
            assert (name in said) == bool(getattr(line.counts, name) and getattr(line.rate, name) is None)
    assert found.total_cents == found.usage_cents - sum(one.amount for one in found.credits) // of_cents(1, "EUR")
    # Nothing falls between the lines and what is unpriced.
    assert sum(line.counts.tokens for line in found.lines) == priced
    for name in UNITS:
        counted = [getattr(one.counts, name) for one in (*found.lines, *found.unpriced)]
        assert sum(counted) == sum(getattr(one.counts, name) for one in usage)
    assert sum(one.counts.tokens for one in found.unpriced) == sum(one.counts.tokens for one in usage) - priced


@given(st.integers(-(10**18), 10**18), st.sampled_from(["EUR", "JPY", "KWD"]))
def test_an_amount_survives_being_written(count: int, currency: str) -> None:
    amount = of_cents(count, currency)
    assert money.cents(amount, currency) == count
    if abs(amount) < 10**6 * money.UNIT:
        assert money.parse(money.cents_text(count, currency), currency) == amount
        assert money.parse(money.exact(amount), currency) == amount
