"""What `GET /v1/totals` tells."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from shoal.api.ledger import Prices, Rate
from shoal.ledger import schema
from shoal.ledger.maintenance import GatewayLiveness, close_once
from shoal.ledger.monthly import Rated
from shoal.ledger.totals import TenantTotals
from tests.support.ledger import Rig, record, served, server, store, until, url

__all__ = ["server", "url"]

_LIST = Prices(list="first", currency="EUR", rates=(Rate(model="*", input=3, cached=1, output=10),))
_DEAR = Prices(list="second", currency="EUR", rates=(Rate(model="*", input=30, cached=10, output=100),))
_COST = 60 * 3 + 40 * 1 + 10 * 10


class _Lists:
    """`second` is in force from `since` on."""

    def __init__(self, now: Any, since: datetime | None = None) -> None:
        self._now = now
        self.since = since

    def current(self) -> Prices | None:
        return self.at(int(self._now() * 1000))

    def at(self, moment: int) -> Prices | None:
        return _DEAR if self.since is not None and moment >= self.since.timestamp() * 1000 else _LIST


class _Clock:
    def __init__(self, at: datetime) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at.timestamp()


async def _totals(rig: Rig, clock: _Clock, prices: Any = None) -> TenantTotals:
    totals = TenantTotals(rig.store, prices, clock)
    rig.store.committed = totals.add
    rig.store.cost = Rated(totals.prices).cost
    await totals.read()
    return totals


def _now() -> datetime:
    return datetime.now(UTC)


async def test_a_change_is_told_and_the_first_message_is_full(url: str, tmp_path: Path) -> None:
    async with served(url, tmp_path) as ledger:
        await ledger.send(record("r1", at=_now()))
        await until(lambda: not ledger.process.totals._dirty)
        async with ledger.totals() as message:
            first = await message()
            assert first["full"]
            assert first["month"] == f"{_now():%Y-%m}"
            assert first["prices"] is None
            assert first["tenants"]["acme"] == {
                "requests": 1,
                "tokens": 110,
                "spent": 0,
                "gateways": {"gw-1": {"tokens": 110, "spent": 0}},
            }
            await ledger.send(record("r2", at=_now(), tenant="globex", gateway="gw-2"), record("r1", at=_now()))
            change = await message()
            assert change["seq"] == first["seq"] + 1
            assert "full" not in change
            assert list(change["tenants"]) == ["globex"], "only who changed"
            assert change["tenants"]["globex"]["gateways"] == {"gw-2": {"tokens": 110, "spent": 0}}


async def test_a_restarted_ledger_tells_the_same(url: str, tmp_path: Path) -> None:
    async with served(url, tmp_path) as ledger:
        for n in range(5):
            await ledger.send(record(f"r{n}", at=_now(), tenant=f"t{n % 2}", gateway=f"g{n % 3}"))
        async with ledger.totals() as message:
            before = (await message())["tenants"]
    async with served(url, tmp_path) as ledger, ledger.totals() as message:
        assert (await message())["tenants"] == before


async def test_money_is_exact_and_what_is_not_billed_is_not_in_it(url: str) -> None:
    clock = _Clock(_now())
    async with store(url) as rig:
        totals = await _totals(rig, clock, _Lists(clock))
        await rig.take(
            record("r1", at=clock.at),
            record("r1", "attempt:1", at=clock.at),
            record("r2", at=clock.at, countSource="estimated"),
            record("r3", "checkpoint:1", at=clock.at),
        )
        await until(lambda: totals.total("acme") and totals.total("acme").requests)  # type: ignore[union-attr]
        total = totals.total("acme")
        assert total is not None
        assert (total.requests, total.tokens, total.spent) == (1, 110, _COST)
        assert total.gateways["gw-1"].spent == _COST
        again = await _totals(rig, clock, _Lists(clock))
        assert again.total("acme") == total, "read from the tables it is the same"


async def test_money_beyond_64_bits_stops_at_the_bound_and_keeps_no_record_out(url: str) -> None:
    class Dear:
        """A million of the currency per token."""

        def current(self) -> Prices | None:
            return self.at(0)

        def at(self, moment: int) -> Prices | None:
            del moment
            return Prices(list="", currency="IDR", rates=(Rate(model="*", input=10**18, cached=10**18, output=10**18),))

    clock = _Clock(_now())
    async with store(url) as rig:
        totals = await _totals(rig, clock, Dear())
        for n in range(4):
            assert await rig.take(record(f"r{n}", at=clock.at, inputTokens=4, outputTokens=1)) == (1, 0, 0)
        await until(lambda: (t := totals.total("acme")) is not None and t.requests == 4)
        again = await _totals(rig, clock, Dear())
        for each in (totals, again):
            total = each.total("acme")
            assert total is not None
            assert total.spent == total.gateways["gw-1"].spent == 2**63 - 1
            assert b"9223372036854775807" in each._full()
        await rig.balanced()


async def test_each_hour_has_the_price_of_its_hour(url: str) -> None:
    clock = _Clock(datetime(2026, 11, 20, 12, 30, tzinfo=UTC))
    since = datetime(2026, 11, 20, 12, tzinfo=UTC)
    async with store(url) as rig:
        totals = await _totals(rig, clock, _Lists(clock, since))
        await rig.take(record("r1", at=since - timedelta(minutes=1)), record("r2", at=since))
        await until(lambda: (t := totals.total("acme")) is not None and t.requests == 2)
        assert totals.total("acme").spent == _COST * 11  # type: ignore[union-attr]
        again = await _totals(rig, clock, _Lists(clock, since))
        assert again.total("acme") == totals.total("acme")


async def test_credits_are_taken_off(url: str) -> None:
    clock = _Clock(datetime(2026, 11, 20, 12, 30, tzinfo=UTC))
    async with store(url) as rig:
        await rig.take(record("r1", at=clock.at))
        for name, month, currency in (("a", "2026-11", "EUR"), ("b", "2026-10", "EUR"), ("c", "2026-11", "USD")):
            values = {"id": name, "tenant": "acme", "month": month, "amount": 100, "currency": currency}
            values |= {"note": "", "made_at": 0, "made_by": "somebody"}
            await rig.store.write(lambda c, values=values: c.execute(schema.credits.insert().values(values)).rowcount)
        totals = await _totals(rig, clock, _Lists(clock))
        assert totals.total("acme").spent == _COST - 100  # type: ignore[union-attr]


async def test_a_months_turn_under_load(url: str) -> None:
    turn = datetime(2026, 12, 1, tzinfo=UTC)
    clock = _Clock(turn - timedelta(seconds=1))
    async with store(url) as rig:
        totals = await _totals(rig, clock)
        with totals.hub.reader() as reader:
            await reader.next(5)
            # Gateways' clocks are not the ledger's: of the new month some come early, of the old one some come late.
            await rig.take(*(record(f"old{n}", at=turn - timedelta(milliseconds=1)) for n in range(3)))
            await rig.take(record("early", at=turn))
            await until(lambda: (t := totals.total("acme")) is not None and t.requests == 3)
            clock.at = turn
            totals.publish()
            full = await _last(reader)
            assert full["full"]
            assert full["month"] == "2026-12"
            assert full["tenants"]["acme"]["requests"] == 1, "the early one, and none of the old month"
            # The gateway's counters do not begin anew, so neither does what is counted of them.
            assert full["tenants"]["acme"]["gateways"]["gw-1"]["tokens"] == 4 * 110
            await rig.take(record("late", at=turn - timedelta(seconds=9)), record("new", at=turn))
            await until(lambda: (t := totals.total("acme")) is not None and t.requests == 2)
            totals.publish()
            change = await _last(reader)
            assert change["tenants"]["acme"]["gateways"]["gw-1"]["tokens"] == 6 * 110
        again = (await _totals(rig, clock)).total("acme")
        assert again is not None
        assert (again.requests, again.tokens) == (2, 220)
        await rig.balanced()


async def test_a_clock_that_went_into_the_next_month_and_back_leaves_the_month_as_it_was(url: str) -> None:
    turn = datetime(2026, 12, 1, tzinfo=UTC)
    clock = _Clock(turn - timedelta(hours=1))
    async with store(url) as rig:
        totals = await _totals(rig, clock)
        running = asyncio.create_task(totals.run())
        with totals.hub.reader() as reader:
            await rig.take(record("r1", at=clock.at))
            await until(lambda: (t := totals.total("acme")) is not None and t.requests == 1)
            clock.at = turn + timedelta(hours=1)
            await until(lambda: totals._month == "2026-12")
            clock.at = turn - timedelta(hours=1)
            await until(lambda: totals._month == "2026-11")
            full = await _last(reader)
            assert (full["full"], full["month"]) == (True, "2026-11")
            assert full["tenants"]["acme"]["requests"] == 1, "budgets of November count it as before"
            await rig.take(record("r2", at=clock.at))
            await until(lambda: totals.total("acme").requests == 2)  # type: ignore[union-attr]
        running.cancel()


async def test_a_cut_that_is_put_right_moves_the_totals_by_the_difference(url: str) -> None:
    clock = _Clock(_now())
    async with store(url) as rig:
        totals = await _totals(rig, clock)
        await rig.take(record("r1", "checkpoint:1", at=clock.at, outputTokens=1))
        await close_once(rig.store, GatewayLiveness(0.0), totals.add)
        assert totals.total("acme").tokens == 101  # type: ignore[union-attr]
        await rig.take(record("r1", at=clock.at))
        await until(lambda: totals.total("acme").tokens == 110)  # type: ignore[union-attr]
        assert totals.total("acme").requests == 1  # type: ignore[union-attr]


async def test_a_gateway_is_told_while_it_listens_and_a_day_after_it_spoke(url: str) -> None:
    clock = _Clock(_now())
    async with store(url) as rig:
        totals = await _totals(rig, clock)
        await rig.take(record("r1", at=clock.at, gateway="old"), record("r2", at=clock.at, gateway="listens"))
        await until(lambda: (t := totals.total("acme")) is not None and t.requests == 2)
        from shoal.net.hub import Caller

        with totals.hub.reader(Caller("gateway", "pod", "listens")):
            clock.at += timedelta(days=2)
            assert set(totals.total("acme").gateways) == {"listens"}  # type: ignore[union-attr]


async def test_prices_are_told_when_they_change(tmp_path: Path) -> None:
    prices = tmp_path / "prices"
    prices.mkdir()
    async with served(f"sqlite:///{tmp_path}/l.sqlite", tmp_path) as ledger, ledger.totals() as message:
        assert (await message())["prices"] is None
        (prices / "list.yaml").write_text(
            "currency: EUR\neffectiveFrom: 2026-01-01\nprices:\n- {model: '*', input: '3', cached: '1', output: '10'}\n"
        )
        await ledger.process.prices.refresh()
        ledger.process.totals.reload()
        full = await message()
        assert ledger.process.prices.error is None, ledger.process.prices.error
        assert full["full"]
        assert full["prices"]["currency"] == "EUR"


async def _last(reader: Any) -> dict[str, Any]:
    import orjson

    found: bytes = b""
    while True:
        try:
            found = await reader.next(0.05)
        except TimeoutError:
            return orjson.loads(found.removeprefix(b"data: "))
