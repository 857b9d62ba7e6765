"""The same usage and prices give the same bills as before, to the last digit."""

import random
from collections.abc import Iterator
from typing import Final

from shoal.api.ledger import Prices, Rate
from shoal.core.rating import money
from shoal.core.rating.bill import Bill, BilledCounts, Credit, Usage, bill
from shoal.core.rating.price import RateTable
from shoal.core.rating.schedule import InForce, Schedule
from tests.golden.recorded import compare
from tests.support.billing import of_cents

PLANS: Final = (None, "gold")
MODELS: Final = ("m/a", "m/b", "m/c")
ADAPTERS: Final = (None, "m/x")
HOURS: Final = 48
BILLS: Final = 60


def schedule(dice: random.Random) -> Schedule:
    starts = sorted(dice.sample(range(-9, HOURS - 1), dice.choice((0, 1, 2, 3))))
    lists: list[InForce] = []
    for place, start in enumerate(starts):
        keys = {
            (dice.choice(PLANS), dice.choice((*MODELS[:2], "*")), dice.choice((*ADAPTERS, "*")))
            for _ in range(dice.randint(2, 9))
        }
        rates = tuple(
            Rate(
                plan=plan,
                model=model,
                adapter=adapter,
                input=dice.randint(0, 10**7),
                cached=dice.randint(0, 10**6),
                output=dice.randint(0, 10**8),
            )
            for plan, model, adapter in sorted(keys, key=repr)
        )
        rule = dice.choice(("Fresh", "Cached"))
        prices = Prices(list=f"l{place}", currency="EUR", unknown_cached=rule, rates=rates)
        lists.append(
            InForce(start, starts[place + 1] if place + 1 < len(starts) else None, prices, RateTable.of(prices))
        )
    return Schedule(tuple(lists))


def usage(dice: random.Random) -> Usage:
    prompt = dice.randint(0, 10**6)
    known = dice.random() < 0.7
    return Usage(
        start=dice.randint(0, HOURS - 1),
        plan=dice.choice(PLANS),
        model=dice.choice(MODELS),
        adapter=dice.choice(ADAPTERS),
        counts=BilledCounts(
            requests=1,
            input=prompt,
            cached=dice.randint(0, prompt) if known else 0,
            unknown_cached_input=0 if known else prompt,
            output=dice.randint(0, 10**5),
        ),
    )


def lines(seed: int, found: Bill) -> Iterator[str]:
    yield (
        f"bill {seed} {found.currency} usage {found.usage_cents} credit {found.credit_cents}"
        f" total {found.total_cents} exact {money.exact(found.exact)}"
    )
    for one in found.lines:
        counts = one.counts
        yield (
            f"  {one.rate.plan} {one.rate.model} {one.rate.adapter}: {counts.requests} requests,"
            f" {counts.input} in, {counts.cached} cached, {counts.unknown_cached_input} unknown, {counts.output} out,"
            f" {one.cents} cents, {money.exact(one.amount)}"
        )
    for one in found.unpriced:
        yield f"  unpriced {one.plan} {one.model} {one.adapter}: {one.counts.tokens} tokens"


def made(seed: int) -> Iterator[str]:
    dice = random.Random(seed)  # noqa: S311 - the same each time
    credits = [
        Credit(id=f"c{n}", amount=of_cents(dice.randint(-(10**6), 10**6), "EUR"), currency="EUR", note="")
        for n in range(dice.randint(0, 3))
    ]
    yield from lines(
        seed, bill("acme", "2026-11", [usage(dice) for _ in range(dice.randint(0, 60))], schedule(dice), credits)
    )


def test_each_month_gets_the_bill_that_it_got_before() -> None:
    compare("bills.txt", "".join(f"{each}\n" for seed in range(BILLS) for each in made(seed)))
