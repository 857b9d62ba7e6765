"""What the ledger does with records, on SQLite and on a real PostgreSQL."""

import asyncio
import random
from datetime import timedelta
from typing import Any

import orjson
import pytest

from shoal.ledger import ingest, schema
from shoal.ledger.maintenance import GatewayLiveness, close_once
from shoal.ledger.store import DatabaseUnavailable
from tests.support.ledger import NOON, record, server, store, url

__all__ = ["server", "url"]


async def test_a_request_from_its_first_row_to_its_last(url: str) -> None:
    async with store(url) as rig:
        assert await rig.take(record("r1", "open")) == (1, 0, 0)
        row = await rig.usage("r1")
        assert (row["ended"], row["input_tokens"], row["outcome"]) == (False, None, None)
        assert await rig.count(schema.hours) == 0

        assert await rig.take(record("r1", "checkpoint:3", outputTokens=4)) == (1, 0, 0)
        assert (await rig.usage("r1"))["output_tokens"] == 4
        assert await rig.count(schema.hours) == 0

        assert await rig.take(record("r1", "final")) == (1, 0, 0)
        row = await rig.usage("r1")
        assert (row["ended"], row["output_tokens"], row["outcome"]) == (True, 10, "answered")
        (hour,) = await rig.rows(schema.hours)
        assert hour["hour"] == int(NOON.replace(minute=0).timestamp() * 1000)
        assert (hour["tenant"], hour["external_id"], hour["model"], hour["gpu_class"]) == (
            "acme",
            "cus-1",
            "demo/chat",
            "l4",
        )
        assert (hour["requests"], hour["input_tokens"], hour["cached_tokens"]) == (1, 100, 40)
        assert (hour["output_tokens"], hour["reasoning_tokens"], hour["unknown_cached_input"]) == (10, 2, 0)
        assert hour["billed"]
        await rig.balanced()


async def test_the_raw_record_keeps_fields_that_this_version_does_not_know(url: str) -> None:
    async with store(url) as rig:
        assert await rig.take(record("r1", "final", fromTheFuture={"x": 1})) == (1, 0, 0)
        (raw,) = await rig.rows(schema.records)
        assert orjson.loads(raw["body"])["data"]["fromTheFuture"] == {"x": 1}


async def test_a_batch_again_changes_nothing(url: str) -> None:
    batch = [record(f"r{n}", kind) for n in range(20) for kind in ("open", "checkpoint:1", "final", "attempt:1")]
    async with store(url) as rig:
        assert await rig.take(*batch) == (80, 0, 0)
        hours = await rig.rows(schema.hours)
        assert await rig.take(*batch) == (0, 80, 0)
        assert await rig.take(*batch[:7], *batch[:7]) == (0, 14, 0)
        assert await rig.rows(schema.hours) == hours
        assert sum(hour["requests"] for hour in hours) == 20
        await rig.balanced()


async def test_the_same_record_twice_in_one_batch_counts_once(url: str) -> None:
    async with store(url) as rig:
        assert await rig.take(record("r1"), record("r1"), record("r1", "open"), record("r1", "open")) == (2, 2, 0)
        (hour,) = await rig.rows(schema.hours)
        assert hour["requests"] == 1


async def test_rows_in_any_order_end_the_same(url: str) -> None:
    kinds = ["open", "checkpoint:1", "checkpoint:2", "checkpoint:10", "final"]
    dice = random.Random(7)  # noqa: S311
    async with store(url) as rig:
        for n in range(12):
            order = [*kinds, *dice.sample(kinds, 2)]
            dice.shuffle(order)
            for kind in order:
                tokens = int(kind.partition(":")[2] or 0) if kind != "final" else 10
                said: dict[str, Any] = {} if kind == "open" else {"outputTokens": tokens}
                await rig.take(record(f"r{n}", kind, **said))
            row = await rig.usage(f"r{n}")
            assert (row["ended"], row["output_tokens"], row["count_source"]) == (True, 10, "final"), order
        await rig.balanced()


async def test_a_late_checkpoint_does_not_turn_the_clock_back(url: str) -> None:
    async with store(url) as rig:
        await rig.take(record("r1", "checkpoint:10", outputTokens=90))
        assert await rig.take(record("r1", "checkpoint:9", outputTokens=80)) == (0, 1, 0)
        assert (await rig.usage("r1"))["output_tokens"] == 90
        await rig.take(record("r1", "final", outputTokens=95))
        assert await rig.take(record("r1", "checkpoint:11", outputTokens=99), record("r1", "open")) == (0, 2, 0)
        assert (await rig.usage("r1"))["output_tokens"] == 95
        await rig.balanced()


async def test_batches_of_many_gateways_at_once(url: str) -> None:
    async def ship(gateway: int, rig: Any) -> list[tuple[int, int, int]]:
        own = [
            record(f"g{gateway}-{n}", kind, gateway=f"gw-{gateway}")
            for n in range(30)
            for kind in ("open", "checkpoint:1", "final")
        ]
        shared = [record(f"shared-{n}") for n in range(10)]
        return [await rig.take(*own[at : at + 9], *shared) for at in range(0, len(own), 9)]

    async with store(url) as rig:
        answers = [a for per in await asyncio.gather(*(ship(g, rig) for g in range(8))) for a in per]
        assert sum(new for new, _, _ in answers) == 8 * 90 + 10
        assert sum(hour["requests"] for hour in await rig.rows(schema.hours)) == 8 * 30 + 10
        assert rig.store.stats.commits < len(answers), "batches that came together were committed together"
        await rig.balanced()


async def test_attempts_and_estimates_are_counted_apart_and_not_billed(url: str) -> None:
    async with store(url) as rig:
        await rig.take(
            record("r1", "attempt:1"),
            record("r1", "attempt:2"),
            record("r1", "final"),
            record("r2", "final", countSource="estimated", outcome="failed", inputTokens=50, outputTokens=None),
        )
        hours = {hour["billed"]: hour for hour in await rig.rows(schema.hours) if hour["gpu_class"] == "l4"}
        assert (hours[True]["requests"], hours[True]["input_tokens"]) == (1, 100)
        assert (hours[False]["requests"], hours[False]["input_tokens"]) == (1, 50), "the estimate is a request"
        assert (hours[True]["estimated_input"], hours[False]["estimated_input"]) == (0, 50)
        (tries,) = [hour for hour in await rig.rows(schema.hours) if hour["gpu_class"] == ""]
        assert tries["estimated_input"] == 0
        assert (tries["billed"], tries["requests"], tries["input_tokens"], tries["output_tokens"]) == (False, 0, 14, 6)
        assert sum(hour["requests"] for hour in await rig.rows(schema.hours)) == 2
        assert [g["tokens"] for g in await rig.rows(schema.gateways)] == [110]
        await rig.balanced()


async def test_unknown_is_not_zero(url: str) -> None:
    async with store(url) as rig:
        await rig.take(
            record("cut", "final", outcome="cancelled", countSource="continuous", cachedTokens=None),
            record("zero", "final", cachedTokens=0, inputTokens=7),
            record("none", "final", outcome="failed", countSource="none", inputTokens=None, cachedTokens=None,
                   outputTokens=None, reasoningTokens=None),
            record("nobody", "final", outcome="refused", status=503, attempts=0, countSource="none", inputTokens=None,
                   cachedTokens=None, outputTokens=None, reasoningTokens=None),
        )  # fmt: skip
        (hour,) = await rig.rows(schema.hours)
        assert hour["requests"] == 4
        assert hour["unknown_cached_input"] == 100, "of the cut stream only: an explicit 0 is known"
        assert hour["unknown_requests"] == 1, "an engine had it; the refused one no engine had"
        assert (await rig.usage("none"))["input_tokens"] is None


async def test_an_engine_that_says_more_was_cached_than_there_was(url: str) -> None:
    async with store(url) as rig:
        await rig.take(record("r1", inputTokens=10, cachedTokens=12))
        (hour,) = await rig.rows(schema.hours)
        assert (hour["input_tokens"], hour["cached_tokens"]) == (10, 10)
        assert (await rig.usage("r1"))["cached_tokens"] == 12, "what it said is kept"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"id": "x"}, "source: Field required"),
        (["not", "a", "record"], "should be an object"),
        (record("r1", "final", inputTokens=-1), "data.inputTokens: -1 is not between"),
        (record("r1", "final", outputTokens=2**70), "data.outputTokens"),
        (record("r1", "final", outcome=None), "a final record says how the request ended"),
        (record("r1", "final", outcome="vanished"), "data.outcome"),
        (record("r1", "attempt:0"), "which try it was"),
        (record("r1", "final", tenant="a\0b"), "character 0"),
        (record("r1", "final", model="m" * 5000), "longer than 4096"),
        (record("r1", "final", status=2**40), "not a status of HTTP"),
        (record("r1", "final", admittedAt="2026-11-20T12:00:00"), "no time zone"),
        ({**record("r1"), "type": "com.example.other"}, "type: com.example.other is not dev.shoal.usage.v1"),
        ({**record("r1"), "source": ""}, "must not be empty"),
    ],
)
async def test_what_does_not_validate_is_kept_aside_with_its_reason(url: str, wrong: Any, reason: str) -> None:
    async with store(url) as rig:
        assert await rig.take(record("good"), wrong) == (1, 0, 1)
        assert await rig.take(wrong) == (0, 0, 1)
        (aside,) = await rig.rows(schema.aside)
        assert reason in aside["reason"]
        assert orjson.loads(aside["body"]) == wrong
        assert await rig.count(schema.usage) == 1


async def test_a_record_that_only_the_database_refuses_does_not_keep_others_out(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ingest.write

    def write(connection: Any, batches: Any, *rest: Any) -> Any:
        if any(getattr(each, "id", "") == "bad:final" for batch in batches for each in batch):
            connection.exec_driver_sql("INSERT INTO hours (hour) VALUES (1)")  # NOT NULL is violated
        return real(connection, batches, *rest)

    monkeypatch.setattr(ingest, "write", write)
    async with store(url) as rig:
        assert await rig.take(record("a"), record("bad"), record("b")) == (2, 0, 1)
        (aside,) = await rig.rows(schema.aside)
        assert aside["reason"].startswith("the database does not take it")
        assert rig.store.error is None
        await rig.balanced()


async def test_a_gateway_that_falls_silent_is_closed_and_its_real_end_counts_later(url: str) -> None:
    now = 0.0
    heard = GatewayLiveness(60.0, lambda: now)
    async with store(url) as rig:
        await rig.take(
            record("open", "open", gateway="dead"),
            record("streams", "checkpoint:4", gateway="dead", outputTokens=4),
            record("other", "checkpoint:1", gateway="alive"),
        )
        heard.at(["dead", "alive"])
        now = 59.0
        assert await close_once(rig.store, heard, rig.changes.append) == (0, 3)
        heard.at(["alive"])
        now = 60.0
        assert await close_once(rig.store, heard, rig.changes.append) == (2, 1)
        assert await close_once(rig.store, heard, rig.changes.append) == (0, 1)
        row = await rig.usage("streams")
        assert (row["ended"], row["outcome"], row["output_tokens"]) == (True, "cut", 4)
        assert (await rig.usage("open"))["input_tokens"] is None
        assert not (await rig.usage("other"))["ended"]
        assert sum(hour["output_tokens"] for hour in await rig.rows(schema.hours)) == 4
        await rig.balanced()

        # It was only cut off: what it says itself counts, instead of what the ledger had guessed.
        assert await rig.take(
            record("streams", "checkpoint:9", gateway="dead", outputTokens=9),
            record("streams", "final", gateway="dead", outputTokens=12, gpuClass="h100"),
        ) == (1, 1, 0)
        row = await rig.usage("streams")
        assert (row["outcome"], row["output_tokens"]) == ("answered", 12)
        hours = await rig.rows(schema.hours)
        assert sum(hour["output_tokens"] for hour in hours) == 12
        assert sum(hour["requests"] for hour in hours) == 2
        await rig.balanced()


async def test_silence_counts_only_while_the_ledger_listens(url: str) -> None:
    now = 1_000_000.0
    async with store(url) as rig:
        await rig.take(record("r1", "open"))
        heard = GatewayLiveness(60.0, lambda: now)  # a ledger that has just started: nobody has had the time to speak
        assert await close_once(rig.store, heard, rig.changes.append) == (0, 1)
        now += 60
        assert await close_once(rig.store, heard, rig.changes.append) == (1, 0)


async def test_a_step_of_the_gateways_clock_moves_no_request_into_another_hour(url: str) -> None:
    async with store(url) as rig:
        await rig.take(record("r1", "open", at=NOON))
        back = record("r1", "final", at=NOON - timedelta(hours=3))
        await rig.take(back)
        (hour,) = await rig.rows(schema.hours)
        assert hour["hour"] == int(NOON.replace(minute=0).timestamp() * 1000)
        await rig.balanced()


async def test_a_record_without_time_of_admission_counts_at_its_own_time(url: str) -> None:
    async with store(url) as rig:
        await rig.take(record("r1", "final", admittedAt=None))
        assert (await rig.usage("r1"))["admitted_at"] == int((NOON + timedelta(seconds=2)).timestamp() * 1000)


async def test_a_replay_from_before_the_retention_is_aside_not_counted_twice(url: str) -> None:
    async with store(url, keep_days=30) as rig:
        assert await rig.take(record("old", at=NOON - timedelta(days=4000)), record("new")) == (1, 0, 1)
        (aside,) = await rig.rows(schema.aside)
        assert "after the retention" in aside["reason"]


async def test_too_many_waiting_records_are_refused_not_piled_up(url: str) -> None:
    async with store(url, max_waiting_records=5) as rig:
        gate = asyncio.Event()
        loop = asyncio.get_running_loop()

        def block(_: Any) -> None:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(20)

        blocked = asyncio.create_task(rig.store.write(block))
        await asyncio.sleep(0.05)
        first = asyncio.create_task(rig.take(*(record(f"a{n}") for n in range(5))))
        await asyncio.sleep(0)
        with pytest.raises(DatabaseUnavailable, match="5 records wait"):
            await rig.take(record("b"))
        gate.set()
        await blocked
        assert await first == (5, 0, 0)
        assert await rig.take(record("b")) == (1, 0, 0)
