"""From records to a bill: what gateways send, in whatever order and how often, is billed once and exactly."""

import random
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from shoal.core.rating import money
from shoal.ledger.queries import bills
from tests.support.ledger import record, server, store, url
from tests.support.queryapi import MID_NOVEMBER, OCTOBER, ms, price_folder

__all__ = ["server", "url"]

START = datetime(2026, 10, 31, 22, tzinfo=UTC)
MIDDLE = datetime(2026, 11, 15, tzinfo=UTC)
PRICES = {None: (3, Fraction(3, 10), 15), "gold": (2, Fraction(2, 10), 10)}


def made(seed: int, count: int) -> list[dict[str, Any]]:
    """Requests from two hours before a month to two hours after it, most at its two turns and around a new price."""
    chance = random.Random(seed)  # noqa: S311 - the same every time
    found: list[dict[str, Any]] = []
    for number in range(count):
        around = chance.choice((START, MIDDLE - timedelta(hours=2), datetime(2026, 11, 30, 22, tzinfo=UTC)))
        at = around + timedelta(seconds=chance.randrange(4 * 3600))
        tokens = chance.randrange(5_000)
        known = chance.random() < 0.8
        end = chance.choice(("final", "final", "final", "attempt:1"))
        found.append(
            record(
                f"r{number}",
                end,
                at=at,
                tenant=chance.choice(("acme", "globex")),
                plan=chance.choice((None, "gold")),
                model="chat/llama",
                adapter=None,
                inputTokens=tokens,
                cachedTokens=chance.randrange(tokens + 1) if known else None,
                outputTokens=chance.randrange(1_000),
                countSource=chance.choice(("final", "continuous", "estimated")),
            )
        )
    return found


def due(records: list[dict[str, Any]], tenant: str) -> Fraction:
    """By the words of docs/billing.md, in millionths."""
    total = Fraction(0)
    for one in records:
        said = one["data"]
        at = datetime.fromisoformat(said["admittedAt"])
        if said["tenant"] != tenant or (at.year, at.month) != (2026, 11):
            continue
        if said["kind"] != "final" or said["countSource"] == "estimated":
            continue
        fresh, cheap, out = PRICES[said["plan"]]
        if said["plan"] is None and at >= MIDDLE:
            fresh = 6
        cached = said["cachedTokens"] or 0
        total += (said["inputTokens"] - cached) * fresh + cached * cheap + said["outputTokens"] * out
    return total


async def test_the_bill_is_what_the_requests_of_the_month_cost(url: str, tmp_path: Path) -> None:
    prices = price_folder(tmp_path / "prices", october=OCTOBER, november=MID_NOVEMBER).schedule
    records = made(7, 400)
    chance = random.Random(8)  # noqa: S311
    async with store(url) as rig:
        sent = [*records, *chance.sample(records, 150)]
        chance.shuffle(sent)
        for at in range(0, len(sent), 40):
            await rig.take(*sent[at : at + 40])
        now = ms("2026-12-05")
        for tenant in ("acme", "globex"):
            found = await rig.store.read(lambda c, t=tenant: bills.statement(c, t, "2026-11", prices, now))
            exact = sum(Fraction(line.exact) for line in found.lines)
            assert exact == due(records, tenant) / 10**6 > 0
            assert not found.unpriced
            assert len(found.lines) == 3  # gold, and two prices without a plan
            shown = sum(money.parse(line.amount, "EUR") for line in found.lines)
            assert money.text(shown, "EUR") == found.total
            assert abs(Fraction(found.total or 0) - exact) <= Fraction(3, 200)
        again = await rig.store.read(lambda c: bills.statement(c, "globex", "2026-11", prices, now))
        await rig.take(*sent[:40])  # a batch that comes once more, years later
        assert again == await rig.store.read(lambda c: bills.statement(c, "globex", "2026-11", prices, now))
