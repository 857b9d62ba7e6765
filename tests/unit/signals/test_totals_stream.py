"""What a gateway hears of the month from the ledger: with a real one, and message by message."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest

from shoal.api import keys
from shoal.core.quota.month import MonthTotal
from shoal.metering.shipper import Shipper
from shoal.net.stream import ListenerIdentity, StreamBroken, StreamPeer
from shoal.signals.totals import TotalsFollower, TotalsStream
from tests.support.gateway import gateway, tenant
from tests.support.ledger import INSTALL_KEY, record, served
from tests.support.scripted_engine import ScriptedEngine
from tests.support.streams import until

NOW = datetime.now(UTC)
KEY = keys.derive(INSTALL_KEY, "gateway", keys.LEDGER)


def listening(kept: TotalsFollower) -> TotalsStream:
    """A listener that a test feeds."""
    peer = StreamPeer("ledger", "ledger", "127.0.0.1", "key")
    return TotalsStream(peer, None, ListenerIdentity(), kept)  # pyright: ignore[reportArgumentType]


def say(stream: TotalsStream, seq: int, **message: Any) -> None:
    stream.take(orjson.dumps({"boot": "b", "seq": seq, **message}))


async def test_a_ledger_is_heard_and_what_it_said_is_kept_when_it_goes(tmp_path: Path):
    async with served(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path) as ledger:
        await ledger.send(record("r1", at=NOW))
        heard: list[str | None] = []
        totals = TotalsFollower(ledger.url, lambda: [KEY], ListenerIdentity("gateway-1", "gw-1"))
        totals.changed = heard.append
        assert totals.total("acme") is None
        totals.start()
        totals.follow()
        try:
            await until(lambda: totals.live)
            month = f"{NOW:%Y-%m}"
            await until(lambda: totals.total("acme") == MonthTotal(month, 110, 0, {"gw-1": (110, 0)}))
            assert totals.total("nobody") == MonthTotal(month)
            assert totals.rate_table is None  # there is no price list
            await ledger.send(record("r2", at=NOW))
            await until(lambda: (totals.total("acme") or MonthTotal("")).tokens == 220)
            assert None in heard
            assert "acme" in heard
            ledger.process.totals.close()
            await until(lambda: not totals.live)
            assert (totals.total("acme") or MonthTotal("")).tokens == 220
        finally:
            await totals.close()


async def test_requests_are_counted_once_whether_the_ledger_has_them_or_not(tmp_path: Path):
    (folder := tmp_path / "ledger").mkdir()
    async with (
        served(f"sqlite:///{folder}/ledger.sqlite", folder) as ledger,
        gateway(tmp_path, ScriptedEngine()) as it,
    ):
        totals = TotalsFollower(ledger.url, lambda: [KEY], it.me)
        it.app.quotas.ledger = totals
        totals.changed = it.app.quotas.totals_changed
        totals.start()
        totals.follow()
        it.tenants["acme"] = tenant(budget={"tokens": 100_000, "whenUnknown": "Refuse"})
        it.changed()
        account = it.app.demand.tenants.of("acme")
        try:
            await until(lambda: totals.live)
            for n in range(1, 6):
                answer = await it.post({"model": "llama", "messages": [{"role": "user", "content": "hi"}]})
                assert answer.status == 200
                await answer.read()
                await until(lambda: account.own_use().in_flight == 0)
                assert known(it) == 10 * n  # the ledger has nothing yet
            shipper = Shipper(it.spool, ledger.url, lambda: [KEY])
            shipping = asyncio.create_task(shipper.run())
            while (totals.total("acme") or MonthTotal("")).tokens < 50:
                assert known(it) == 50
                await asyncio.sleep(0.002)
            assert known(it) == 50
            shipping.cancel()
            await asyncio.gather(shipping, return_exceptions=True)
            ledger.process.totals.close()
            await until(lambda: not totals.live)
            answer = await it.post({"model": "llama", "messages": [{"role": "user", "content": "hi"}]})
            assert answer.status == 429
            assert (await answer.json())["error"]["code"] == "insufficient_quota"
        finally:
            await totals.close()


def known(it: Any) -> int:
    account = it.app.demand.tenants.of("acme")
    return account._known(account.limits.budget)


def test_a_month_turns_with_a_full_message():
    kept = TotalsFollower("http://ledger", lambda: ())
    stream = listening(kept)
    say(stream, 0, full=True, month="2026-11", tenants={"acme": {"tokens": 5, "gateways": {"g": {"tokens": 5}}}})
    assert kept.total("acme") == MonthTotal("2026-11", 5, 0, {"g": (5, 0)})
    say(stream, 1, tenants={"acme": {"tokens": 7, "spent": 1}})
    assert kept.total("acme") == MonthTotal("2026-11", 7, 1, {})
    say(stream, 1)  # a heartbeat
    say(stream, 2, full=True, month="2026-12", tenants={})
    assert kept.total("acme") == MonthTotal("2026-12")


def test_the_price_list_is_that_of_the_last_message_that_speaks_of_it():
    kept = TotalsFollower("http://ledger", lambda: ())
    heard: list[str | None] = []
    kept.repriced = heard.append
    stream = listening(kept)
    prices = {"list": "p", "currency": "EUR", "rates": [{"model": "*", "input": 1, "cached": 1, "output": 2}]}
    say(stream, 0, full=True, month="2026-11", tenants={}, prices=prices)
    assert kept.rate_table is not None
    assert kept.rate_table.currency == "EUR"
    say(stream, 1, tenants={})
    assert kept.rate_table is not None
    say(stream, 2, tenants={}, prices=None)
    assert kept.rate_table is None
    say(stream, 3, full=True, month="2026-11", tenants={}, prices=prices)
    say(stream, 4, full=True, month="2026-11", tenants={})
    assert kept.rate_table is None
    assert heard == ["EUR", None, "EUR", None]  # as it is told on


def test_why_price_lists_are_refused_is_told_on():
    kept = TotalsFollower("http://ledger", lambda: ())
    heard: list[str | None] = []
    kept.prices_refused = heard.append
    stream = listening(kept)
    say(stream, 0, full=True, month="2026-11", tenants={}, pricesRefused="mine.yaml:2: wrong")
    say(stream, 1, tenants={})
    say(stream, 2, full=True, month="2026-11", tenants={}, pricesRefused=None)
    assert heard == ["mine.yaml:2: wrong", None]


@pytest.mark.parametrize(
    "invalid",
    [
        {"prices": {"list": "p", "currency": "EUR", "rates": [{"model": "*", "input": "much"}]}},
        {"prices": "none"},
        {"month": {"year": 2026}},
        {"pricesRefused": 7},
        {"tenants": {"acme": {"tokens": 900}, "beta": {"tokens": "many"}}},
    ],
    ids=["a price", "prices", "month", "pricesRefused", "tenants"],
)
@pytest.mark.parametrize("full", [True, False])
def test_nothing_is_taken_of_a_message_of_which_any_part_is_invalid(full: bool, invalid: dict[str, Any]):
    """Where only the prices of a message were invalid, its totals and its month counted already."""
    kept = TotalsFollower("http://ledger", lambda: ())
    heard: list[str | None] = []
    kept.repriced = kept.prices_refused = heard.append
    stream = listening(kept)
    prices = {"list": "p", "currency": "EUR", "rates": [{"model": "*", "input": 1, "cached": 1, "output": 2}]}
    say(stream, 0, full=True, month="2026-11", tenants={"acme": {"tokens": 5}}, prices=prices)
    rates, heard[:] = kept.rate_table, []
    later = {"month": "2026-12", "tenants": {"acme": {"tokens": 900}}, "prices": None, "pricesRefused": None}
    with pytest.raises(StreamBroken):
        say(stream, 1, full=full, **(later | invalid))
    stream.lose()
    assert kept.total("acme") == MonthTotal("2026-11", 5, 0, {})
    assert kept.total("beta") == MonthTotal("2026-11")
    assert kept.rate_table is rates
    assert heard == []


def test_a_message_that_is_missing_ends_the_stream():
    stream = listening(TotalsFollower("http://ledger", lambda: ()))
    say(stream, 0, full=True, month="2026-11", tenants={})
    with pytest.raises(StreamBroken):
        say(stream, 2, tenants={})


@pytest.mark.parametrize("url", ["ftp://ledger:8500", "ledger:8500", "http://"])
def test_a_url_that_is_none_of_a_ledger_is_refused(url: str):
    with pytest.raises(ValueError, match="write http://host:port"):
        TotalsFollower(url, lambda: ())


async def test_without_a_key_nobody_is_called():
    totals = TotalsFollower("http://127.0.0.1:1", lambda: ())
    totals.start()
    totals.follow()
    assert not totals.live
    await totals.close()
