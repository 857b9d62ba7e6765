"""`GET /v1/usage`: what was counted, by anything, for anybody who may ask."""

import base64
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ledger import server, url
from tests.support.queryapi import ADMIN, GATEWAY, Ledger, hour, ledger

__all__ = ["server", "url"]

USAGE = "/v1/usage"

ROWS = (
    hour("2026-11-01T00:00", requests=2, input_tokens=100, cached_tokens=30, output_tokens=10, reasoning_tokens=4),
    hour("2026-11-01T23:00", requests=1, input_tokens=7, unknown_cached_input=7, output_tokens=1, key_name="batch"),
    hour("2026-11-02T00:00", adapter="chat/sql", input_tokens=20, output_tokens=2, unknown_requests=1),
    hour("2026-11-20T05:00", plan="gold", gpu_class="l4", input_tokens=1_000, output_tokens=3),
    hour("2026-10-31T23:00", input_tokens=5),
    hour("2026-11-01T00:00", "globex", external_id="", model="chat/qwen", requests=9, input_tokens=50),
    hour("2026-11-01T00:00", billed=False, requests=0, input_tokens=777),
)


@pytest.fixture
async def books(url: str, tmp_path: Path) -> AsyncGenerator[Ledger]:
    async with ledger(url, tmp_path) as found:
        await found.fill(*ROWS)
        yield found


def _after(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


async def rows(books: Ledger, **query: Any) -> list[dict[str, Any]]:
    answer = await books.get(USAGE, **query)
    assert answer.status == 200, answer.body
    return answer.json["rows"]


async def test_without_words_it_is_the_sum_of_this_month(books: Ledger) -> None:
    answer = await books.get(USAGE, tenant="acme")
    assert answer.json == {
        "from": "2026-11-01T00:00:00Z",
        "to": "2026-12-01T00:00:00Z",
        "by": [],
        "next": None,
        "unseen": [],
        "rows": [
            {
                "requests": 5,
                "inputTokens": 1127,
                "cachedTokens": 30,
                "unknownCachedInputTokens": 7,
                "outputTokens": 16,
                "reasoningTokens": 4,
                "unknownRequests": 1,
                "documents": 0,
                "images": 0,
                "audioMs": 0,
                "imageTokens": 0,
                "audioTokens": 0,
                "acceptedTokens": 0,
            }
        ],
    }


async def test_by_several_things_at_once(books: Ledger) -> None:
    found = await rows(books, by="model,adapter,day", tenant="acme")
    assert [(r["model"], r["adapter"], r["day"], r["inputTokens"]) for r in found] == [
        ("chat/llama", None, "2026-11-01", 107),
        ("chat/llama", None, "2026-11-20", 1000),
        ("chat/llama", "chat/sql", "2026-11-02", 20),
    ]
    assert "tenant" not in found[0], "what was not asked for is absent"


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("tenant", [("acme", 1127), ("globex", 50)]),
        ("key", [("batch", 7), ("main", 1170)]),
        ("externalID", [(None, 50), ("cus_acme", 1127)]),
        ("model", [("chat/llama", 1127), ("chat/qwen", 50)]),
        ("adapter", [(None, 1157), ("chat/sql", 20)]),
        ("class", [("h100", 177), ("l4", 1000)]),
        ("plan", [(None, 177), ("gold", 1000)]),
        ("day", [("2026-11-01", 157), ("2026-11-02", 20), ("2026-11-20", 1000)]),
        ("month", [("2026-11", 1177)]),
        (
            "hour",
            [
                ("2026-11-01T00:00:00Z", 150),
                ("2026-11-01T23:00:00Z", 7),
                ("2026-11-02T00:00:00Z", 20),
                ("2026-11-20T05:00:00Z", 1000),
            ],
        ),
    ],
)
async def test_by_each_thing(books: Ledger, by: str, expected: list[tuple[str | None, int]]) -> None:
    assert [(r[by], r["inputTokens"]) for r in await rows(books, by=by)] == expected


@pytest.mark.parametrize(
    ("query", "tokens"),
    [
        ({"tenant": "acme", "adapter": ""}, 1107),
        ({"adapter": "chat/sql"}, 20),
        ({"tenant": ["acme", "globex"]}, 1177),
        ({"key": "batch"}, 7),
        ({"externalID": "cus_acme", "class": "l4"}, 1000),
        ({"plan": "gold"}, 1000),
        ({"model": "chat/qwen"}, 50),
        ({"from": "2026-10", "to": "2026-11"}, 5),
        ({"from": "2026-11-01T01:00:00Z", "to": "2026-11-02"}, 7),
        ({"from": "2026-11-01T02:00:00+02:00", "to": "2026-11-01T01:00:00Z"}, 150),
        ({"from": "2026-10-01"}, 1182),
        ({"billed": "false"}, 777),
    ],
)
async def test_only_what_was_asked_for(books: Ledger, query: dict[str, Any], tokens: int) -> None:
    assert [row["inputTokens"] for row in await rows(books, **query)] == [tokens]


async def test_months_of_a_longer_time(books: Ledger) -> None:
    found = await rows(books, by="month,tenant", from_="2026-09", to="2026-12")
    assert [(r["month"], r["tenant"], r["inputTokens"]) for r in found] == [
        ("2026-10", "acme", 5),
        ("2026-11", "acme", 1127),
        ("2026-11", "globex", 50),
    ]


async def test_pages_follow_each_other_without_gap_or_repetition(books: Ledger) -> None:
    whole = await rows(books, by="tenant,key,adapter,hour", from_="2026-10")
    paged: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    while True:
        answer = await books.get(USAGE, by="tenant,key,adapter,hour", from_="2026-10", limit="2", **after)
        paged += answer.json["rows"]
        assert len(answer.json["rows"]) <= 2
        if (cursor := answer.json["next"]) is None:
            break
        after = {"after": cursor}
    assert paged == whole
    assert len(whole) == 6


async def test_as_csv(books: Ledger) -> None:
    answer = await books.get(USAGE, by="tenant,adapter", limit="2", output="csv")
    assert answer.headers[b"content-type"].startswith(b"text/csv")
    assert answer.body.decode().splitlines() == [
        "tenant,adapter,requests,inputTokens,cachedTokens,unknownCachedInputTokens,outputTokens,reasoningTokens,"
        "unknownRequests,documents,images,audioMs,imageTokens,audioTokens,acceptedTokens",
        "acme,,4,1107,30,7,14,4,0,0,0,0,0,0,0",
        "acme,chat/sql,1,20,0,0,2,0,1,0,0,0,0,0,0",
    ]
    rest = await books.get(
        USAGE, by="tenant,adapter", limit="2", output="csv", after=answer.headers[b"x-shoal-next"].decode()
    )
    assert rest.body.decode().splitlines()[1:] == ["globex,,9,50,0,0,0,0,0,0,0,0,0,0,0"]


async def test_nothing_found_says_whether_the_tenant_was_ever_seen(books: Ledger) -> None:
    answer = await books.get(USAGE, tenant=["acme", "acmee"], from_="2026-01", to="2026-02")
    assert (answer.json["rows"], answer.json["unseen"]) == ([], ["acmee"])


async def test_a_gateway_asks_for_one_tenant_and_gets_no_other_s_rows(books: Ledger) -> None:
    answer = await books.get(USAGE, as_=GATEWAY, tenant="globex", by="tenant,model")
    assert [(r["tenant"], r["model"]) for r in answer.json["rows"]] == [("globex", "chat/qwen")]
    for query in ({}, {"tenant": ["acme", "globex"]}, {"tenant": ""}):
        answer = await books.get(USAGE, as_=GATEWAY, **query)
        assert (answer.status, answer.message) == (400, "a gateway asks for one tenant: tenant=<name>")


@pytest.mark.parametrize("query", [{"by": "class"}, {"class": "h100"}])
async def test_what_the_fleet_is_made_of_is_not_for_tenants(books: Ledger, query: dict[str, str]) -> None:
    answer = await books.get(USAGE, as_=GATEWAY, tenant="acme", **query)
    assert answer.status == 400
    assert "class" in answer.message


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"by": "colour"}, "by=colour: it is one of tenant, key, externalID, model, adapter, class, plan, route, hour"),
        ({"by": "hour,day"}, "by=hour,day: choose one unit of time"),
        ({"tennant": "acme"}, "unknown parameter tennant: there are adapter, after"),
        ({"from": "yesterday"}, "from=yesterday: write 2026-11, 2026-11-01 or 2026-11-01T06:00:00Z (UTC)"),
        ({"from": "2026-11-01T06:30:00Z"}, "from=2026-11-01T06:30:00Z is not on the hour"),
        ({"from": "2026-13"}, "from=2026-13: write"),
        ({"from": "0000-01"}, "from=0000-01 is before 1970"),
        ({"from": "0001-01-01T00:00:00+14:00"}, "is before 1970"),
        ({"from": "x" * 500}, "from=xxx"),
        ({"to": "9999-12"}, "more than 3700 days apart"),
        ({"to": "9999-12-31T23:00:00-14:00"}, "more than 3700 days apart"),
        ({"to": "2026-10"}, "to (2026-10-01T00:00:00Z) is not after from (2026-11-01T00:00:00Z)"),
        ({"from": "1980"}, "from=1980: write"),
        ({"from": "2010-01"}, "more than 3700 days apart"),
        ({"from": ["2026-10", "2026-11"]}, "from is given 2 times; once is enough"),
        ({"limit": "0"}, "limit=0: a number from 1 to 10000"),
        ({"limit": "99999"}, "limit=99999: a number from 1 to 10000"),
        ({"limit": "ten"}, "limit=ten: a number from 1 to 10000"),
        ({"billed": "maybe"}, "billed is true, or false for usage that is not billed"),
        ({"output": "xml"}, "output=xml: json or csv"),
        ({"by": "tenant", "after": "x"}, "after is not a `next` of the same query"),
        ({"by": "tenant", "after": "WzVd"}, "after is not a `next` of the same query"),
        ({"after": "W10="}, "after is not a `next` of the same query"),
        ({"by": "tenant", "after": _after(r'["acme\u0000"]')}, "after is not a `next` of the same query"),
        ({"by": "hour", "after": _after(f"[{1 << 63}]")}, "after is not a `next` of the same query"),
        ({"from": "9998-01", "to": "9999-12-31T23:00:00-05:00"}, "to is after 9998, the last year"),
        ({"from": "9999-12", "to": "9999-12-31", "by": "month"}, "from is after 9998, the last year"),
    ],
)
async def test_a_question_that_is_wrong_is_told_what_is(tmp_path: Path, query: dict[str, Any], message: str) -> None:
    async with ledger(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path) as books:
        answer = await books.get(USAGE, as_=ADMIN, **query)
    assert answer.status == 400
    assert message in answer.message


@pytest.mark.parametrize("path", ["/v1/bill", "/v1/credits", "/v1/margin", "/v1/focus"])
async def test_a_gateway_hears_nothing_of_money(tmp_path: Path, path: str) -> None:
    async with ledger(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path) as books:
        assert (await books.get(path, as_=GATEWAY, tenant="acme", month="2026-11")).status == 403
        assert (await books.get(path, as_="someone", tenant="acme", month="2026-11")).status == 401
