"""`GET /v1/usage` at the gateway: a tenant sees its own rows with its own key, and nobody else's."""

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from aiohttp import web

from shoal.gateway import usageapi
from shoal.gateway.usageapi import PER_MINUTE
from tests.support.gateway import API_KEY, GatewayUnderTest, gateway, tenant
from tests.support.queryapi import ADMIN, Ledger, hour, ledger

OTHER_KEY = "sk-test-globex"


async def ask(shop: GatewayUnderTest, query: str = "", key: str = API_KEY, method: str = "GET") -> tuple[int, Any, Any]:
    headers = {"authorization": f"Bearer {key}"}
    async with shop.session.request(method, f"{shop.url}/v1/usage{query}", headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers


@contextlib.asynccontextmanager
async def both(path: Path) -> AsyncGenerator[tuple[GatewayUnderTest, Ledger]]:
    async with (
        ledger(f"sqlite:///{path}/ledger.sqlite", path) as books,
        books.served() as url,
        gateway(path / "gateway", ledger_url=url) as shop,
    ):
        await books.fill(
            hour("2026-11-01T00:00", requests=2, input_tokens=100, cached_tokens=30, output_tokens=10),
            hour("2026-11-02T00:00", adapter="chat/sql", input_tokens=20, output_tokens=2),
            hour("2026-11-01T00:00", "globex", model="secret/model", requests=9, input_tokens=50),
        )
        shop.tenants["globex"] = tenant("globex", OTHER_KEY)
        shop.changed()
        yield shop, books


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> None:
    (tmp_path / "gateway").mkdir()


async def test_a_tenant_gets_its_own_rows_and_no_other_s(tmp_path: Path) -> None:
    async with both(tmp_path) as (shop, _):
        status, own, _ = await ask(shop, "?from=2026-11&by=adapter")
        assert status == 200
        assert [(r["adapter"], r["inputTokens"]) for r in own["rows"]] == [(None, 100), ("chat/sql", 20)]
        _, other, _ = await ask(shop, "?by=tenant,model", OTHER_KEY)
        assert [(r["tenant"], r["model"], r["requests"]) for r in other["rows"]] == [("globex", "secret/model", 9)]
        _, whole, _ = await ask(shop)
        assert [(r["requests"], r["inputTokens"], r["cachedTokens"]) for r in whole["rows"]] == [(3, 120, 30)]


@pytest.mark.parametrize(
    ("query", "accept"),
    [("&output=csv", "*/*"), ("", "text/csv"), ("", "text/html, text/csv;q=0.9"), ("&output=csv", "application/json")],
)
async def test_its_rows_are_csv_for_who_asks_for_it(tmp_path: Path, query: str, accept: str) -> None:
    async with both(tmp_path) as (shop, _):
        url = f"{shop.url}/v1/usage?from=2026-11&by=externalID,adapter{query}"
        headers = {"authorization": f"Bearer {API_KEY}", "accept": accept}
        async with shop.session.get(f"{url}&limit=1", headers=headers) as answer:
            assert answer.status == 200
            assert answer.headers["content-type"] == "text/csv; charset=utf-8"
            first = (await answer.text()).splitlines()
        async with shop.session.get(f"{url}&after={answer.headers['x-shoal-next']}", headers=headers) as answer:
            rest = (await answer.text()).splitlines()
            assert "x-shoal-next" not in answer.headers
    assert first[0] == rest[0]
    assert first[0].startswith("externalID,adapter,requests,inputTokens,cachedTokens,")
    assert [line.split(",")[:4] for line in (*first[1:], *rest[1:])] == [
        ["cus_acme", "", "2", "100"],
        ["cus_acme", "chat/sql", "1", "20"],
    ]


@pytest.mark.parametrize("accept", ["*/*", "application/json, text/csv", ""])
async def test_its_rows_are_json_for_all_others(tmp_path: Path, accept: str) -> None:
    async with both(tmp_path) as (shop, _):
        headers = {"authorization": f"Bearer {API_KEY}", "accept": accept}
        async with shop.session.get(f"{shop.url}/v1/usage", headers=headers) as answer:
            assert (answer.status, answer.content_type) == (200, "application/json")


@pytest.mark.parametrize(
    "query",
    ["?tenant=globex", "?tenant=acme&tenant=globex", "?%74enant=globex", "?by=model&tenant="],
)
async def test_a_tenant_cannot_name_another(tmp_path: Path, query: str) -> None:
    async with both(tmp_path) as (shop, _):
        status, body, _ = await ask(shop, query)
    assert (status, body["error"]["message"]) == (400, "`tenant` is set by your key: leave it out.")


async def test_each_of_the_two_walls_holds_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway fixes the tenant, and the ledger answers a gateway about one. Without both, rows of others leak."""
    async with both(tmp_path) as (shop, _):
        monkeypatch.setattr(usageapi, "_query", lambda given: parse_qsl(given.decode()))
        status, _, _ = await ask(shop, "?tenant=globex&by=tenant")
        assert status == 400, "the ledger's wall"
        monkeypatch.setattr(shop.app.usage, "_keys", lambda: [ADMIN])
        _, leaked, _ = await ask(shop, "?tenant=globex&by=tenant")
        assert [row["tenant"] for row in leaked["rows"]] == ["acme", "globex"]


@pytest.mark.parametrize(
    "query",
    [
        "?model=chat/llama%26tenant%3Dglobex",  # a value that would be a parameter, were it not quoted again
        "?model=x%00&by=model",
        "?key=main;tenant=globex",
        "?externalID=cus_globex",
        "?model=secret/model",
    ],
)
async def test_no_filter_leads_to_rows_of_others(tmp_path: Path, query: str) -> None:
    async with both(tmp_path) as (shop, _):
        status, body, _ = await ask(shop, query)
    assert status == 400 or body["rows"] == []


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            "?by=class",
            "`by` takes a comma-separated list of tenant, key, externalID, model, adapter, plan, route, hour, day, "
            "month",
        ),
        ("?class=h100", "`class` is not known; there are from, to, by"),
        ("?output=xml", "output=xml: json or csv"),
        ("?from=yesterday", "from=yesterday: write 2026-11, 2026-11-01 or 2026-11-01T06:00:00Z (UTC)"),
        ("?by=hour,day", "by=hour,day: choose one unit of time"),
        ("?" + "&".join(["model=a"] * 101), "more than 100 parameters"),
    ],
)
async def test_a_wrong_question_is_told_in_openai_s_shape(tmp_path: Path, query: str, message: str) -> None:
    async with both(tmp_path) as (shop, _):
        status, body, _ = await ask(shop, query)
    assert status == 400
    assert message in body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"


async def test_without_a_good_key_there_is_nothing_to_see(tmp_path: Path) -> None:
    async with both(tmp_path) as (shop, _):
        assert (await ask(shop, key="sk-wrong"))[0] == 401
        shop.tenants["acme"] = tenant(suspended=True)
        shop.changed()
        assert (await ask(shop))[0] == 403
        assert (await ask(shop, key=OTHER_KEY, method="POST"))[0] == 405


async def test_a_ledger_that_is_away_is_a_503_with_retry_after(tmp_path: Path) -> None:
    async with gateway(tmp_path / "gateway", ledger_url="http://127.0.0.1:9") as shop:
        status, body, headers = await ask(shop)
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, "ledger_unavailable", "10")


@pytest.mark.parametrize("status", [401, 403, 500, 503, 301])
async def test_no_word_of_a_failing_ledger_reaches_a_tenant(tmp_path: Path, status: int) -> None:
    async def fail(_: web.Request) -> web.Response:
        return web.Response(status=status, text='{"error": {"message": "inner life"}}')

    app = web.Application()
    app.router.add_get("/v1/usage", fail)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with gateway(tmp_path / "gateway", ledger_url=f"http://127.0.0.1:{port}") as shop:
            answered, body, _ = await ask(shop)
    finally:
        await runner.cleanup()
    assert (answered, body["error"]["code"]) == (503, "ledger_unavailable")
    assert "inner life" not in str(body)


async def test_an_installation_without_a_ledger_says_so(tmp_path: Path) -> None:
    async with gateway(tmp_path / "gateway") as shop:
        status, body, _ = await ask(shop)
    assert (status, body["error"]["code"]) == (404, "no_ledger")


async def test_who_asks_too_often_waits_and_others_do_not(tmp_path: Path) -> None:
    async with both(tmp_path) as (shop, _):
        now = 0.0
        shop.app.usage._clock = lambda: now
        for _ in range(PER_MINUTE):
            assert (await ask(shop))[0] == 200
        status, body, headers = await ask(shop)
        assert (status, body["error"]["type"], headers["retry-after"]) == (429, "rate_limit_error", "3")
        assert (await ask(shop, key=OTHER_KEY))[0] == 200
        now = 2.0
        assert (await ask(shop))[0] == 200
