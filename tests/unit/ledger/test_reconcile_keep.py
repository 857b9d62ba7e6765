"""Engines' counters and GPU time, booked exactly once whatever restarts."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pytest

from shoal.core.reconcile import HOUR_MS, CounterReading, Held, Price, by_hour, gpu_cost, price
from shoal.ledger.reconcile.keep import FORGET_MS, KeptReadings, forget, keep_gpu_time, keep_readings, knows_gpu_time
from shoal.ledger.schema import engine_hours, engines, gpu_pods
from tests.support.ledger import server, url
from tests.support.ledgertables import LedgerTables

__all__ = ["server", "url"]

TEN = 1_000 * 24 * HOUR_MS + 10 * HOUR_MS  # ten o'clock of some day
MINUTE = 60_000
H100 = price(Decimal("3.6"), "USD")
PRICES: dict[str, Price | None] = {"h100": H100, "l4": None}


@pytest.fixture
def tables(url: str) -> LedgerTables:
    return LedgerTables(url)


def reading(prompt: int | None, generation: int | None, **changes: Any) -> CounterReading:
    fields: dict[str, Any] = {
        "boot": "e1",
        "model": "chat/llama",
        "gpu_class": "h100",
        "replica": "chat/llama-1",
        "node": "n1",
        "read_at": TEN,
        **changes,
    }
    return CounterReading(prompt=prompt, generation=generation, **fields)


def keep(tables: LedgerTables, *readings: CounterReading) -> KeptReadings:
    with tables.begin() as connection:
        return keep_readings(connection, readings, PRICES)


def hours_of(tables: LedgerTables) -> dict[int, tuple[int, int]]:
    return {
        (row["hour"] - TEN) // HOUR_MS + 10: (row["prompt_tokens"], row["generation_tokens"])
        for row in tables.rows(engine_hours)
    }


def test_counters_begin_at_zero_and_grow(tables: LedgerTables):
    keep(tables, reading(100, 20))  # what was before anybody listened counts
    keep(tables, reading(130, 25, read_at=TEN + MINUTE))
    assert hours_of(tables) == {10: (130, 25)}
    (engine,) = tables.rows(engines)
    assert (engine["first_heard"], engine["last_heard"]) == (TEN, TEN + MINUTE)
    assert (engine["prompt_tokens"], engine["generation_tokens"]) == (130, 25)


def test_a_ledger_that_restarts_counts_nothing_twice_and_loses_nothing(tables: LedgerTables):
    keep(tables, reading(100, 20))
    keep(tables, reading(100, 20))  # the full state of the new stream
    assert hours_of(tables) == {10: (100, 20)}
    # Two hours without a ledger: what grew meanwhile is in the hour of the reading.
    keep(tables, reading(700, 90, read_at=TEN + 2 * HOUR_MS + 5))
    assert hours_of(tables) == {10: (100, 20), 12: (600, 70)}


def test_an_engine_that_restarts_begins_again(tables: LedgerTables):
    keep(tables, reading(100, 20))
    keep(tables, reading(15, 8, boot="e2"))
    assert hours_of(tables) == {10: (115, 28)}
    assert [row["boot"] for row in tables.rows(engines)] == ["e1", "e2"]


def test_a_killed_engine_keeps_its_last_reading(tables: LedgerTables):
    keep(tables, reading(100, 20))
    keep(tables, reading(None, None, read_at=TEN + MINUTE))  # not told any more is not zero
    assert hours_of(tables) == {10: (100, 20)}
    assert tables.rows(engines)[0]["prompt_tokens"] == 100


def test_one_boot_under_another_pods_name_is_one_engine(tables: LedgerTables):
    keep(tables, reading(100, 20))
    keep(tables, reading(110, 20, replica="chat/llama-2", node="n2"))
    assert hours_of(tables) == {10: (110, 20)}
    (engine,) = tables.rows(engines)
    assert (engine["replica"], engine["node"]) == ("chat/llama-2", "n2")


def test_a_lower_counter_of_the_same_boot_is_told_and_not_counted(tables: LedgerTables):
    keep(tables, reading(100, 20))
    kept = keep(tables, reading(40, 30))
    assert kept == KeptReadings(10, ("e1",))
    keep(tables, reading(105, 30))
    assert hours_of(tables) == {10: (105, 30)}


def test_an_older_reading_of_a_ledger_that_stood_by_changes_nothing(tables: LedgerTables):
    keep(tables, reading(100, 20, read_at=TEN + MINUTE))
    assert keep(tables, reading(90, 20)) == KeptReadings(0, ())
    (engine,) = tables.rows(engines)
    assert (engine["prompt_tokens"], engine["last_heard"]) == (100, TEN + MINUTE)


def test_a_counter_that_cannot_be_is_told_and_not_counted(tables: LedgerTables):
    keep(tables, reading(100, 20))
    assert keep(tables, reading(2**62, 20)) == KeptReadings(0, ("e1",))
    keep(tables, reading(101, 20))
    assert hours_of(tables) == {10: (101, 20)}


def test_many_engines_in_one_go(tables: LedgerTables):
    keep(tables, *[reading(3, 1, boot=f"e{n}") for n in range(1_200)])
    keep(tables, *[reading(4, 1, boot=f"e{n}") for n in range(1_200)])
    assert hours_of(tables) == {10: (4_800, 1_200)}


def test_an_engine_that_counted_nothing_was_heard(tables: LedgerTables):
    keep(tables, reading(None, None))
    assert hours_of(tables) == {10: (0, 0)}


def test_tokens_and_costs_of_a_class_share_a_row(tables: LedgerTables):
    keep(tables, reading(100, 20), reading(1, 1, boot="e2", gpu_class="l4"), reading(2, 2, boot="e3", gpu_class="gone"))
    assert {(row["gpu_class"], row["currency"]) for row in tables.rows(engine_hours)} == {
        ("h100", "USD"),
        ("l4", ""),
        ("gone", ""),
    }


# --- GPU time -------------------------------------------------------------------------------------------------------


def held(**changes: Any) -> Held:
    fields: dict[str, Any] = {
        "pod": "p1",
        "model": "chat/llama",
        "gpu_class": "h100",
        "gpus": 2,
        "since": TEN + 30 * MINUTE,
        **changes,
    }
    return Held(**fields)


def count(
    tables: LedgerTables, now: int, *pods: Held, first_look: int = TEN, prices: Mapping[str, Price | None] = PRICES
) -> int:
    with tables.begin() as connection:
        return keep_gpu_time(connection, pods, prices, now, first_look)


def gpu_hours(tables: LedgerTables) -> dict[int, tuple[float, int]]:
    return {(row["hour"] - TEN) // HOUR_MS + 10: (row["gpu_seconds"], row["cost"]) for row in tables.rows(engine_hours)}


def test_gpu_time_is_split_at_the_hour_and_counted_once(tables: LedgerTables):
    count(tables, TEN + 40 * MINUTE, held())
    count(tables, TEN + 70 * MINUTE, held())
    count(tables, TEN + 70 * MINUTE, held())
    # 2 GPUs at 3.60 an hour: 30 minutes of the first hour, 10 of the second.
    assert gpu_hours(tables) == {
        10: (3600.0, 3_600_000_000),
        11: (1200.0, 1_200_000_000),
    }


def test_a_restarted_ledger_goes_on_where_it_was(tables: LedgerTables):
    count(tables, TEN + 40 * MINUTE, held())
    with tables.begin() as connection:
        assert knows_gpu_time(connection)
    # The pod that came while nobody looked counts from when it was put on its node.
    count(tables, TEN + 60 * MINUTE, held(), held(pod="p2", since=TEN + 50 * MINUTE), first_look=0)
    assert gpu_hours(tables)[10][0] == 2 * 30 * 60 + 2 * 10 * 60


def test_a_fleet_that_is_older_than_its_ledger_is_not_counted_back(tables: LedgerTables):
    with tables.begin() as connection:
        assert not knows_gpu_time(connection)
    count(tables, TEN + 40 * MINUTE, held(since=TEN - 300 * HOUR_MS), first_look=TEN + 40 * MINUTE)
    count(tables, TEN + 41 * MINUTE, held(since=TEN - 300 * HOUR_MS), first_look=TEN + 40 * MINUTE)
    assert gpu_hours(tables) == {10: (120.0, 120_000_000)}


def test_a_pod_that_gave_its_gpus_back_costs_no_more(tables: LedgerTables):
    count(tables, TEN + 40 * MINUTE, held())
    for _ in range(2):
        count(tables, TEN + 55 * MINUTE, held(until=TEN + 45 * MINUTE))
    assert gpu_hours(tables)[10][0] == 2 * 15 * 60


def test_a_new_price_counts_from_when_it_is_seen(tables: LedgerTables):
    count(tables, TEN + 40 * MINUTE, held())
    count(tables, TEN + 50 * MINUTE, held(), prices={"h100": price(Decimal("7.2"), "USD")})
    assert gpu_hours(tables)[10] == (2400.0, 1_200_000_000 + 2_400_000_000)


def test_a_class_without_a_price_has_time_and_no_currency(tables: LedgerTables):
    count(tables, TEN + 40 * MINUTE, held(gpu_class="l4"))
    (row,) = tables.rows(engine_hours)
    assert (row["gpu_seconds"], row["cost"], row["currency"]) == (1200.0, 0, "")


def test_a_price_that_was_mistyped_spoils_no_more_than_its_hour(tables: LedgerTables):
    mistyped = {"h100": price(Decimal("1e15"), "USD")}
    for minute in (31, 45, 59):
        count(tables, TEN + minute * MINUTE, held(), prices=mistyped)
    count(tables, TEN + 61 * MINUTE, held())
    assert gpu_hours(tables) == {10: (3600.0, 2**62 - 1), 11: (120.0, 120_000_000)}


def test_a_clock_that_was_set_back_counts_nothing_twice(tables: LedgerTables):
    count(tables, TEN + 50 * MINUTE, held())
    assert count(tables, TEN + 35 * MINUTE, held()) == 0
    count(tables, TEN + 60 * MINUTE, held())
    assert gpu_hours(tables)[10][0] == 2 * 30 * 60


def test_what_is_long_gone_is_forgotten_and_its_sums_stay(tables: LedgerTables):
    keep(tables, reading(100, 20))
    count(tables, TEN + 40 * MINUTE, held())
    with tables.begin() as connection:
        forget(connection, TEN + FORGET_MS)
    assert len(tables.rows(engines)) == len(tables.rows(gpu_pods)) == 1
    with tables.begin() as connection:
        forget(connection, TEN + FORGET_MS + HOUR_MS)
    assert tables.rows(engines) == tables.rows(gpu_pods) == []
    assert hours_of(tables)[10] == (100, 20)


def test_spans_and_costs():
    assert list(by_hour(TEN + 5, TEN + 5)) == []
    assert list(by_hour(TEN + 5, TEN)) == []
    assert list(by_hour(TEN - 1, TEN + HOUR_MS + 1)) == [(TEN - HOUR_MS, 1), (TEN, HOUR_MS), (TEN + HOUR_MS, 1)]
    assert gpu_cost(HOUR_MS, H100.hourly) == 3_600_000_000
    assert gpu_cost(1, 1) == 0
