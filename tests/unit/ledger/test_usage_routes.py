"""Usage by route, counted from stored requests: the same numbers as the sums of hours."""

import contextlib
from typing import Any

import pytest
from sqlalchemy import Connection, select

from shoal.ledger import ingest, schema
from shoal.ledger.database import Database
from shoal.ledger.queries.requests import as_hours
from shoal.ledger.queries.sums import UsageQuery, answer
from shoal.ledger.queries.times import Span
from shoal.ledger.sums import Changes, HourKey, HourlySums
from tests.support.ledger import NOW_MS, record, server, store, url, usage_row

__all__ = ["server", "url"]

HOUR = 3_600_000
SPAN = Span(NOW_MS - 48 * HOUR, NOW_MS + 48 * HOUR)
NOTHING: dict[str, Any] = {"inputTokens": None, "cachedTokens": None, "outputTokens": None, "reasoningTokens": None}
RECORDS: list[dict[str, Any]] = [
    record("plain"),
    record("front", route="chat/front", images=2, imageTokens=3),
    record("front too", route="chat/front", adapter="chat/sql", externalId=None, plan="gold"),
    record("back", route="chat/back", cachedTokens=10**6, documents=4, audioMs=7),
    record("unknown", route="chat/back", cachedTokens=None),
    record("heard", audioMs=9, countSource="none", outcome="failed", **NOTHING),
    record("nothing", route="chat/back", **NOTHING),
    record("rejected", route="chat/back", outcome="rejected", **NOTHING),
    record("refused", route="chat/back", countSource="none", outcome="refused", attempts=0, documents=9, **NOTHING),
    record("estimated", route="chat/front", countSource="estimated", outputTokens=None),
]


def filled(url: str, stack: contextlib.ExitStack) -> tuple[Connection, Changes]:
    connection = Database(url).open(stack)
    rows, changes = [usage_row(one) for one in RECORDS], Changes()
    for row in rows:
        changes.add(row)
    with connection.begin():
        ingest.store(connection, rows, changes, NOW_MS)
    return connection, changes


def test_requests_sum_up_to_their_hours(url: str) -> None:
    with contextlib.ExitStack() as stack:
        connection, changes = filled(url, stack)
        source = as_hours(SPAN)
        fields = [source.c[name] for name in (*HourKey._fields, *HourlySums._fields) if name != "estimated_input"]
        found: dict[HourKey, list[int]] = {}
        with connection.begin():
            for row in connection.execute(select(*fields)).all():
                values = list(row)
                key = HourKey._make([*values[:8], bool(values[8])])
                found[key] = [a + b for a, b in zip(found.get(key, [0] * 13), values[9:], strict=True)]
    wanted = {key: [*sums._replace(estimated_input=0)] for key, sums in changes.hours.items()}
    at = HourlySums._fields.index("estimated_input")
    assert found == {key: [*sums[:at], *sums[at + 1 :]] for key, sums in wanted.items()}


@pytest.mark.parametrize(
    ("query", "requests"),
    [
        ({"by": ("route",), "only": {}}, {None: 2, "chat/back": 5, "chat/front": 2}),
        ({"by": ("route",), "only": {"route": ("chat/front", "")}}, {None: 2, "chat/front": 2}),
        ({"by": ("route",), "only": {"adapter": ("chat/sql",)}}, {"chat/front": 1}),
        ({"by": ("route",), "only": {"tenant": ("nobody",)}}, {}),
        ({"by": ("route",), "only": {}, "namespace": "elsewhere"}, {}),
        ({"by": ("route",), "only": {}, "billed": False}, {"chat/front": 1}),
    ],
)
def test_usage_by_route(url: str, query: dict[str, Any], requests: dict[str | None, int]) -> None:
    with contextlib.ExitStack() as stack:
        connection, _ = filled(url, stack)
        with connection.begin():
            page = answer(connection, UsageQuery(SPAN, **query))
    assert {row.route: row.requests for row in page.rows} == requests
    assert page.next is None


def test_pages_of_usage_by_route_and_day(url: str) -> None:
    with contextlib.ExitStack() as stack:
        connection, _ = filled(url, stack)
        with connection.begin():
            page = answer(connection, UsageQuery(SPAN, ("route", "day"), {}, limit=2))
    assert [row.route for row in page.rows] == [None, "chat/back"]
    assert page.next is not None


async def test_a_copy_for_a_mirror_is_stored_without_a_request_and_billed_to_nobody(url: str) -> None:
    copy = record("copy", "attempt:1", route="chat/front", mirrorOf="front", model="chat/next")
    async with store(url) as rig:
        assert await rig.take(copy, copy, record("front", route="chat/front")) == (2, 1, 0)
        await rig.balanced()
        hours = {hour["model"]: hour for hour in await rig.rows(schema.hours)}
        assert (hours["chat/next"]["billed"], hours["chat/next"]["requests"]) == (False, 0)
        assert hours["chat/next"]["output_tokens"] > 0
        assert [row["requests"] for row in await rig.rows(schema.gateways)] == [1]
