"""What `GET /v1/unattributed` answers: the engines' counters, what was billed, and the difference."""

import csv
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
import pytest
from sqlalchemy import Connection
from starlette.responses import Response

from shoal.core.reconcile import HOUR_MS, Compared, Tokens
from shoal.ledger.queries.times import moment
from shoal.ledger.reconcile.compare import total
from shoal.ledger.reconcile.routes import Routes
from shoal.ledger.reconcile.watch import EngineCoverage
from shoal.ledger.schema import engine_hours, engines, hours, usage
from shoal.net.errors import Problem
from tests.support.ledger import server, url
from tests.support.ledgertables import LedgerTables
from tests.support.queryapi import asked

__all__ = ["server", "url"]

T = TypeVar("T")

TEN = moment("from", "2026-11-22T10:00:00Z")
LLAMA, QWEN = "chat/llama", "chat/qwen"


class Desk:
    """The route, over tables that a test fills."""

    def __init__(self, tables: LedgerTables) -> None:
        self.tables = tables
        self.standing = EngineCoverage(True, 2, ())

    async def read(self, work: Callable[[Connection], T]) -> T:
        with self.tables.begin() as connection:
            return work(connection)

    async def raw(self, **query: str) -> Response:
        routes = Routes(self, lambda: self.standing, lambda: TEN)
        return await routes.unattributed(asked("/v1/unattributed", **query))

    async def ask(self, **query: str) -> Any:
        answer = await self.raw(**query)
        assert isinstance(answer.body, bytes)
        return orjson.loads(answer.body)

    def engine(self, prompt: int, generation: int, **more: Any) -> None:
        values = {"hour": TEN, "model": LLAMA, "gpu_class": "h100", **more}
        self.tables.add(engine_hours, prompt_tokens=prompt, generation_tokens=generation, **values)

    def used(self, input: int, output: int, **more: Any) -> None:
        values = {"hour": TEN, "model": LLAMA, "gpu_class": "h100", "billed": True, **more}
        self.tables.add(hours, input_tokens=input, output_tokens=output, **values)


@pytest.fixture
def desk(url: str) -> Desk:
    return Desk(LedgerTables(url))


def numbers(row: dict[str, Any], what: str) -> tuple[int | None, int | None]:
    return row[f"{what}Input"], row[f"{what}Output"]


async def test_billed_and_unattributed_are_the_engines_counters(desk: Desk):
    desk.engine(1_000, 500)
    desk.used(700, 400, tenant="acme")
    desk.used(200, 90, tenant="globex")
    desk.used(50, 4, tenant="acme", billed=False, estimated_input=30)
    answer = await desk.ask()
    (row,) = answer["rows"]
    assert row["model"] == LLAMA
    assert numbers(row, "engine") == (1_000, 500)
    assert numbers(row, "billed") == (900, 490)
    assert numbers(row, "notBilled") == (50, 4)
    assert row["estimatedInput"] == answer["total"]["estimatedInput"] == 30
    assert numbers(row, "unattributed") == (100, 10)
    assert row["share"] == pytest.approx(110 / 1_500)
    assert "class" not in row
    assert numbers(answer["total"], "unattributed") == (100, 10)
    assert (answer["from"], answer["to"]) == ("2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z")


async def test_it_is_negative_where_an_engine_died_before_it_was_read(desk: Desk):
    desk.engine(100, 10)
    desk.used(150, 30)
    (row,) = (await desk.ask())["rows"]
    assert numbers(row, "unattributed") == (-50, -20)
    assert row["share"] < 0


async def test_an_engine_that_nobody_heard_is_unknown_and_not_zero(desk: Desk):
    desk.used(150, 30)
    (row,) = (await desk.ask())["rows"]
    assert numbers(row, "engine") == numbers(row, "unattributed") == (None, None)
    assert row["share"] is None
    assert numbers(row, "billed") == (150, 30)


async def test_an_engine_that_counted_nothing_has_no_share(desk: Desk):
    desk.engine(0, 0)
    (row,) = (await desk.ask())["rows"]
    assert numbers(row, "unattributed") == (0, 0)
    assert (row["share"], row["estimatedInput"]) == (None, 0)


async def test_by_time_and_class(desk: Desk):
    for hour, model, gpu_class in ((TEN, LLAMA, "h100"), (TEN + HOUR_MS, LLAMA, "l4"), (TEN + 24 * HOUR_MS, QWEN, "")):
        desk.engine(100, 10, hour=hour, model=model, gpu_class=gpu_class)
        # Rows of several prices, as after a change of a class.
        desk.engine(1, 1, hour=hour, model=model, gpu_class=gpu_class, currency="USD")
        desk.used(90, 9, hour=hour, model=model, gpu_class=gpu_class)
    by_hour = (await desk.ask(by="hour"))["rows"]
    assert [(row["hour"], row["unattributedInput"]) for row in by_hour] == [
        ("2026-11-22T10:00:00Z", 11),
        ("2026-11-22T11:00:00Z", 11),
        ("2026-11-23T10:00:00Z", 11),
    ]
    by_day = (await desk.ask(by="day,class"))["rows"]
    assert [(row["day"], row["class"], row["billedOutput"]) for row in by_day] == [
        ("2026-11-22", "h100", 9),
        ("2026-11-22", "l4", 9),
        ("2026-11-23", None, 9),
    ]
    (month,) = (await desk.ask(by="month"))["rows"]
    assert (month["month"], month["engineInput"]) == ("2026-11", 303)
    (one,) = (await desk.ask(by="model", model=QWEN))["rows"]
    assert (one["model"], one["engineInput"]) == (QWEN, 101)
    (part,) = (await desk.ask(by="model", to="2026-11-22T11:00:00Z"))["rows"]
    assert part["engineInput"] == 101


async def test_by_engine_over_its_whole_life(desk: Desk):
    common = {"model": LLAMA, "gpu_class": "h100", "node": "n1"}
    heard = {"first_heard": TEN - 40 * 24 * HOUR_MS, "last_heard": TEN}
    desk.tables.add(
        engines, boot="e1", replica="chat/llama-1", prompt_tokens=100, generation_tokens=50, **common, **heard
    )
    desk.tables.add(engines, boot="e2", replica="chat/llama-2", prompt_tokens=9, generation_tokens=8, **common, **heard)
    for number, row in enumerate(
        (
            {"engine_boot": "e1", "input_tokens": 60, "output_tokens": 30, "count_source": "final"},
            {"engine_boot": "e1", "input_tokens": 10, "output_tokens": 4, "count_source": "continuous"},
            {"engine_boot": "e1", "input_tokens": 7, "output_tokens": 1, "count_source": "continuous", "attempt": 1},
            {"engine_boot": "e1", "input_tokens": 5, "count_source": "estimated"},
            {"engine_boot": "e1", "input_tokens": 999, "count_source": "continuous", "ended": False},
            {"engine_boot": "e9", "input_tokens": 999, "count_source": "final"},
        )
    ):
        # A month ago: the engine's counters know of no period.
        desk.tables.add(usage, request=str(number), admitted_at=TEN - 30 * 24 * HOUR_MS, **({"ended": True} | row))
    first, second = (await desk.ask(by="engine"))["rows"]
    assert (first["engine"], first["replica"], first["model"], first["class"]) == ("e1", "chat/llama-1", LLAMA, "h100")
    assert first["lastReport"] == "2026-11-22T10:00:00Z"
    assert numbers(first, "engine") == (100, 50)
    assert numbers(first, "billed") == (70, 34)
    assert numbers(first, "notBilled") == (12, 1)
    assert first["estimatedInput"] == 5
    assert numbers(first, "unattributed") == (30, 16)
    assert numbers(second, "unattributed") == (9, 8)  # called around the gateways
    assert (await desk.ask(by="engine", to="2026-11-01", from_="2026-09-01"))["rows"][0]["engine"] == "e1"
    assert (await desk.ask(by="engine", from_="2026-11-23"))["rows"] == []


async def test_it_says_how_much_it_knows(desk: Desk):
    desk.standing = EngineCoverage(False, 1, tuple(f"chat/p{n}" for n in range(150)))
    answer = await desk.ask()
    assert answer["rows"] == []
    assert (answer["watching"], answer["live"], len(answer["stale"])) == (False, 1, 100)
    assert numbers(answer["total"], "engine") == (None, None)


async def test_as_a_file(desk: Desk):
    desk.engine(100, 10)
    desk.used(90, 9)
    answer = await desk.raw(output="csv", by="day,model")
    assert isinstance(answer.body, bytes)
    (row,) = csv.DictReader(answer.body.decode().splitlines())
    assert (row["day"], row["model"], row["unattributedInput"]) == ("2026-11-22", LLAMA, "10")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"by": "tenant"}, "by=tenant: it is one of model, class, hour, day, month, engine"),
        ({"by": "hour,day"}, "choose one unit of time"),
        ({"by": "engine,day"}, "by=engine is over the whole life of an engine: leave day out"),
        ({"tenant": "acme"}, "unknown parameter tenant"),
        ({"from_": "yesterday"}, "write 2026-11, 2026-11-01 or"),
        ({"from_": "2026-11-02", "to": "2026-11-02"}, "is not after from"),
        ({"output": "xml"}, "output=xml: json or csv"),
    ],
)
async def test_bad_questions(desk: Desk, query: dict[str, str], words: str):
    with pytest.raises(Problem, match=words) as caught:
        await desk.ask(**query)
    assert caught.value.status == 400


def test_sums_of_rows_keep_what_is_unknown():
    known, unknown = Compared(Tokens(10, 1), Tokens(4, 1)), Compared(None, Tokens(3, 0))
    assert total([unknown, unknown]).unattributed is None
    assert total([known, unknown]).unattributed == Tokens(3, 0)
    assert total([]) == Compared(None)
