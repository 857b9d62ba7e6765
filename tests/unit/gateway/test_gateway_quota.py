"""What clients of a tenant with limits see: answers with headers, refusals with reasons, real counts in the end."""

import asyncio
import dataclasses
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.api.demand import TenantUse
from shoal.api.ledger import Prices, Rate
from shoal.core.quota.abandoned import abandoned_tokens
from shoal.core.quota.limits import Cost
from shoal.core.quota.month import PICO, MonthTotal
from shoal.core.quota.peerusage import GatewayPeer
from shoal.core.rating.price import RateTable
from shoal.gateway import quota
from shoal.gateway import request as request_module
from shoal.gateway.quota import Months, Quota
from shoal.gateway.quotamessages import duration
from shoal.metering.spool import SpoolUnavailable
from tests.support.gateway import MODEL, GatewayUnderTest, gateway, lines, tenant
from tests.support.quota_gateways import crew
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally
from tests.support.streams import until

CHAT: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
SIZE = 85
"""Bytes of CHAT as a client sends it."""
PROMPT = SIZE // 4
USED = 10
"""Tokens that the engine counts."""
RATELIMIT = re.compile(r"x-ratelimit-(limit|remaining|reset)-(requests|tokens)")


class FakeLedger:
    def __init__(self, *rates: Rate, currency: str = "USD") -> None:
        self.live = True
        self.rate_table: RateTable | None = RateTable.of(Prices(list="p", currency=currency, rates=rates))
        self.totals: dict[str, MonthTotal] = {}

    def total(self, tenant: str) -> MonthTotal | None:
        return self.totals.get(tenant)


def limit(it: GatewayUnderTest, **spec: Any) -> None:
    it.tenants["acme"] = tenant(**spec)
    it.changed()


def standing(response: Any) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if RATELIMIT.fullmatch(name)}


async def refused(it: GatewayUnderTest, body: Any = CHAT) -> tuple[dict[str, Any], Any]:
    response = await it.post(body)
    assert response.status == 429
    return (await response.json())["error"], response.headers


async def served(it: GatewayUnderTest, body: Any = CHAT) -> Any:
    response = await it.post(body)
    assert response.status == 200, await response.text()
    await response.read()
    return response


async def used(it: GatewayUnderTest, tokens: int) -> None:
    """Waits until everything is settled."""
    account = it.app.demand.tenants.of("acme")
    async with asyncio.timeout(10):
        while account.own_use().in_flight:
            await asyncio.sleep(0.005)
    assert account.own_use().reserved_tokens == 0
    assert account.own_use().tokens == tokens


async def test_over_the_limit_on_requests_the_answer_says_so(tmp_path: Path):
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        limit(it, limits={"requestsPerMinute": 2})
        for left in (1, 0):
            assert standing(await served(it))["x-ratelimit-remaining-requests"] == str(left)
        error, headers = await refused(it)
        after = int(headers["retry-after"])
        assert 55 <= after <= 60
        assert error == {
            "message": f"You have reached your limit on requests per minute: limit 2, used 2. Try again in {after} s.",
            "type": "requests",
            "param": None,
            "code": "rate_limit_exceeded",
        }
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert re.fullmatch(r"5\d(\.\d+)?s|1m[01](\.\d+)?s", headers["x-ratelimit-reset-requests"])
        assert len(engine.requests) == 2
        assert len(await it.records(count=2)) == 2  # what is refused before admission has no record
        assert it.metric("shoal_gateway_rejected_total", reason="rate_limit_exceeded") == 1


async def test_over_the_limit_on_tokens_the_answer_says_what_was_asked_for(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        limit(it, limits={"tokensPerMinute": 100})
        headers = standing(await served(it))
        assert headers["x-ratelimit-limit-tokens"] == "100"
        # What the engine counted is not known yet when the head goes out.
        assert headers["x-ratelimit-remaining-tokens"] == str(100 - PROMPT - 50)
        await used(it, USED)
        error, headers = await refused(it, {**CHAT, "max_tokens": 70})
        after = int(headers["retry-after"])
        assert 55 <= after <= 60
        assert error["type"] == "tokens"
        assert error["message"] == (
            f"You have reached your limit on tokens per minute: limit 100, used 10, asked for {PROMPT + 70}. "
            f"Try again in {after} s."
        )
        assert "x-should-retry" not in headers
        error, headers = await refused(it, {**CHAT, "max_tokens": 80})
        assert error["message"] == (
            f"The request is larger than your limit on tokens per minute: limit 100, asked for {PROMPT + 80} "
            "(its prompt, estimated, and the longest answer that it allows). Send less, or lower `max_tokens`."
        )
        assert headers["x-should-retry"] == "false"


async def test_one_more_at_a_time_than_allowed_is_refused_also_while_they_wait(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        limit(it, limits={"concurrentRequests": 1})
        it.hear(1, phase="stalled")
        waits = asyncio.create_task(it.post(CHAT))
        while not it.app.holds.waiting:
            await asyncio.sleep(0.005)
        error, headers = await refused(it)
        assert (
            error["message"] == "You have reached your limit on requests at a time: limit 1, used 1. Try again in 1 s."
        )
        assert headers["retry-after"] == "1"
        it.hear(1)
        assert standing(await waits) == {}  # OpenAI has no headers for these
        await served(it)


async def test_headers_are_on_every_answer(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        limit(it, limits={"requestsPerMinute": 50, "tokensPerMinute": 100000})
        answers = [
            await it.post(CHAT),
            await it.post({**CHAT, "stream": True}),
            await it.post({"model": "llama", "input": "x"}, "/v1/embeddings"),
            await it.post(b"{"),
            await it.post({"model": "another", "messages": [{"role": "user", "content": "hi"}]}),
            await it.post(CHAT, "/v1/images"),
            await it.post(CHAT, "/v1/usage"),
            await it.session.get(f"{it.url}/v1/models", headers={"authorization": "Bearer sk-test-acme"}),
        ]
        assert [answer.status for answer in answers] == [200, 200, 200, 400, 404, 404, 405, 200]
        for answer in answers:
            await answer.read()
            assert len(standing(answer)) == 6
            assert answer.headers["x-ratelimit-limit-requests"] == "50"
        assert standing(await it.post(CHAT, key="sk-wrong")) == {}
        assert standing(await it.post(CHAT, "/v1/images", key="sk-wrong")) == {}
        assert answers[-1].headers["x-ratelimit-remaining-requests"] == "47"  # three had a model
        limit(it)
        assert standing(await served(it)) == {}


async def test_a_stream_settles_with_what_the_engine_counted_also_when_the_client_leaves(tmp_path: Path):
    async def three_and_wait(request: EngineRequest) -> None:
        await request.begin_stream()
        for n in (1, 2, 3):
            await request.chunk(request.delta("x", n))
        await request.gone.wait()

    async with gateway(tmp_path, ScriptedEngine(three_and_wait)) as it:
        limit(it, limits={"tokensPerMinute": 1000})
        response = await it.post({**CHAT, "stream": True})
        seen = 0
        async for _ in lines(response):
            seen += 1
            if seen == 3:
                break
        response.close()
        await used(it, 7 + 3)
        assert it.app.demand.tenants.of("acme").own_use().booked == 10


async def test_a_request_that_no_engine_had_costs_no_tokens(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        limit(it, limits={"tokensPerMinute": 1000})
        it.model(limits=dataclasses.replace(MODEL.limits, max_requests=0))
        it.hear(1, phase="stalled")
        assert (await it.post(CHAT)).status == 503
        await used(it, 0)


async def test_of_an_engine_that_said_nothing_the_prompt_counts_but_is_not_booked(tmp_path: Path):
    async def say_nothing(request: EngineRequest) -> None:
        await request.begin_stream()
        request.writer.close()

    async with gateway(tmp_path, ScriptedEngine(say_nothing), attempts=1) as it:
        limit(it, limits={"tokensPerMinute": 1000})
        response = await it.post({**CHAT, "stream": True})
        await response.read()
        async with asyncio.timeout(10):
            while it.app.demand.tenants.of("acme").own_use().in_flight:
                await asyncio.sleep(0.005)
        told = it.app.demand.tenants.of("acme").own_use()
        (record,) = await it.records()
        assert record.data.count_source in ("estimated", "none")
        assert told.tokens == (record.data.input_tokens or 0)
        assert told.booked == 0


async def test_without_a_bound_of_the_client_an_answer_is_assumed(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        limit(it, limits={"tokensPerMinute": 3000})
        body = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}
        left = int(standing(await served(it, body))["x-ratelimit-remaining-tokens"])
        assert 3000 - quota.ASSUMED_ANSWER_TOKENS - 20 < left < 3000 - quota.ASSUMED_ANSWER_TOKENS
        left = int(standing(await served(it, {**body, "n": 2, "max_tokens": 1000}))["x-ratelimit-remaining-tokens"])
        assert 3000 - 2000 - USED - 30 < left < 3000 - 2000 - USED


async def test_the_share_of_another_gateway_is_not_this_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request_module, "SHARE_WAIT_SECONDS", 0.3)
    async with gateway(tmp_path, ScriptedEngine()) as it:
        others = [GatewayPeer(None, None)]
        it.app.quotas._read_peers = lambda: others  # pyright: ignore[reportPrivateUsage]
        limit(it, limits={"requestsPerMinute": 4})
        for _ in range(2):
            await served(it)
        error, headers = await refused(it)
        assert error["message"].startswith("You have reached your limit on requests per minute: limit 4, used 4.")
        others[:] = [GatewayPeer("g1", it.app.quotas.clock())]
        it.app.quotas._peers_at = 0.0  # pyright: ignore[reportPrivateUsage]
        limit(it, limits={"requestsPerMinute": 6})
        for _ in range(2):
            await served(it)
        error, headers = await refused(it)
        said = "Your limit on requests per minute is shared out: limit 6, used 4. Try again in 3 s."
        assert error["message"] == said
        assert headers["retry-after"] == "3"
        assert it.metric("shoal_gateway_share_waits_total") == 1


async def test_a_request_waits_for_the_next_share_of_a_limit_that_has_room(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        others = [GatewayPeer("g1", it.app.quotas.clock())]
        it.app.quotas._read_peers = lambda: others  # pyright: ignore[reportPrivateUsage]
        limit(it, limits={"requestsPerMinute": 4})
        for _ in range(2):
            await served(it)
        waiting = asyncio.create_task(served(it))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        others[:] = [GatewayPeer("g1", it.app.quotas.clock() + 60)]  # it reports after this gateway's share was used up
        await asyncio.wait_for(waiting, 5)
        assert it.app.demand.tenants.of("acme").own_use().requests == 3


async def test_a_client_that_leaves_while_it_waits_for_a_share_takes_none(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        others = [GatewayPeer("g1", it.app.quotas.clock())]
        it.app.quotas._read_peers = lambda: others  # pyright: ignore[reportPrivateUsage]
        limit(it, limits={"requestsPerMinute": 2})
        await served(it)
        waiting = asyncio.create_task(served(it))
        await asyncio.sleep(0.2)
        waiting.cancel()
        await asyncio.wait([waiting])
        await until(lambda: it.app.in_flight == 0)
        assert it.metric("shoal_gateway_rejected_total", reason="disconnected") == 1
        assert it.app.demand.tenants.of("acme").own_use().requests == 1


async def test_only_so_many_requests_of_a_tenant_wait_for_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quota, "MOST_SHARE_WAITERS", 1)
    async with gateway(tmp_path, ScriptedEngine()) as it:
        others = [GatewayPeer("g1", it.app.quotas.clock())]
        it.app.quotas._read_peers = lambda: others  # pyright: ignore[reportPrivateUsage]
        limit(it, limits={"requestsPerMinute": 4})
        for _ in range(2):
            await served(it)
        waiting = asyncio.create_task(served(it))
        await asyncio.sleep(0.2)
        error, _ = await refused(it)
        assert "is shared out" in error["message"]
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_a_client_that_sends_one_request_after_the_other_gets_all_of_its_limit(tmp_path: Path):
    async with crew(tmp_path, 2) as them:
        them.release.set()
        them.limit(limits={"requestsPerMinute": 8})
        it = them.members[0].it
        for _ in range(8):
            await served(it)
        error, _ = await refused(it)
        assert error["message"].startswith("You have reached your limit on requests per minute: limit 8, used 8.")


def elsewhere(it: GatewayUnderTest, reported_at: float, **spec: dict[str, Any]) -> list[GatewayPeer]:
    """Another gateway that has one request of the tenant, whose limit that is."""
    others = [GatewayPeer("g1", reported_at)]
    it.app.quotas._read_peers = lambda: others  # pyright: ignore[reportPrivateUsage]
    limit(it, **(spec or {"limits": {"concurrentRequests": 1}}))
    it.app.demand.tenants.peer_reported("g1", "g1", {})
    it.app.demand.tenants.peer_reported("g1", "g1", {"acme": TenantUse(in_flight=1, reserved_tokens=1000)})
    return others


@pytest.mark.parametrize(
    "spec",
    [{"limits": {"concurrentRequests": 1}}, {"limits": {"tokensPerMinute": 1050}}, {"budget": {"tokens": 1050}}],
    ids=["places", "tokens", "budget"],
)
async def test_a_request_waits_until_it_is_known_that_those_at_other_gateways_have_ended(
    tmp_path: Path, spec: dict[str, Any]
):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        others = elsewhere(it, it.app.quotas.clock(), **spec)
        waiting = asyncio.create_task(served(it))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        it.app.demand.tenants.peer_reported("g1", "g1", {"acme": TenantUse(tokens=100, booked=100)})
        others[:] = [GatewayPeer("g1", it.app.quotas.clock() + 1.6)]
        async with asyncio.timeout(2):
            await waiting
        assert it.metric("shoal_gateway_share_waits_total") == 1


async def test_a_limit_that_is_used_up_elsewhere_indeed_is_said_to_be_used_up(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        others = elsewhere(it, it.app.quotas.clock())
        waiting = asyncio.create_task(refused(it))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        others[:] = [GatewayPeer("g1", it.app.quotas.clock() + 1.5)]  # it still has it
        async with asyncio.timeout(2):
            error, headers = await waiting
        said = "You have reached your limit on requests at a time: limit 1, used 1. Try again in 1 s."
        assert error["message"] == said
        assert headers["retry-after"] == "1"


async def test_what_is_left_of_a_budget_may_be_reserved_elsewhere_indeed(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        others = elsewhere(it, it.app.quotas.clock(), budget={"tokens": 1050})
        waiting = asyncio.create_task(refused(it))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        others[:] = [GatewayPeer("g1", it.app.quotas.clock() + 1.5)]  # it still runs there
        async with asyncio.timeout(2):
            error, headers = await waiting
        assert error["message"] == (
            "What is left of your monthly budget is reserved for requests that run: 1000 of 1050 tokens are used or "
            "reserved. Try again in 5 s, or lower `max_tokens`."
        )
        assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
        assert (headers["retry-after"], headers.get("x-should-retry")) == ("5", None)


@pytest.mark.parametrize(("used_there", "answer"), [(1, served), (2, refused)])
async def test_a_request_waits_for_the_first_message_of_a_gateway_that_connects(
    tmp_path: Path, used_there: int, answer: Callable[[GatewayUnderTest], Awaitable[Any]]
):
    """Until then it counts as if it used its equal share."""
    async with gateway(tmp_path, ScriptedEngine()) as it:
        others = [GatewayPeer(None, None, expected=True)]
        it.app.quotas._read_peers = lambda: others  # pyright: ignore[reportPrivateUsage]
        limit(it, limits={"requestsPerMinute": 4})
        for _ in range(2):
            await served(it)
        waiting = asyncio.ensure_future(answer(it))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        use = TenantUse(requests=9, recent=((20, used_there, 0),))
        it.app.demand.tenants.peer_reported("g1", "g1", {"acme": use})
        others[:] = [GatewayPeer("g1", it.app.quotas.clock() + 60)]
        async with asyncio.timeout(2):
            await waiting


async def test_where_no_further_report_comes_the_wait_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quota, "ROUND_SECONDS", 0.3)
    async with gateway(tmp_path, ScriptedEngine()) as it:
        elsewhere(it, it.app.quotas.clock())
        began = it.app.quotas.clock()
        await refused(it)
        assert 0.25 <= it.app.quotas.clock() - began < 2


# --- budgets ----------------------------------------------------------------------------------------------------------


async def test_a_budget_in_money_is_reserved_at_the_price_and_settled_with_the_counts(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        # 7 of input, 4 of them cached, and 3 of output: 3 x 2 + 4 x 1 + 3 x 10 = 40 cents.
        cent = PICO // 100
        ledger = FakeLedger(Rate(model=MODEL.key, input=2 * cent, cached=cent, output=10 * cent))
        it.app.quotas.ledger = ledger
        limit(it, budget={"amount": "6", "currency": "USD"})
        await served(it)
        await used(it, USED)
        assert it.app.demand.tenants.of("acme").own_use().spent == 40 * cent
        error, _ = await refused(it, {**CHAT, "max_tokens": 60})
        assert error["message"].startswith("The request is larger than your monthly budget.")
        ledger.totals["acme"] = MonthTotal("2999-01", spent=599 * cent)
        it.app.quotas.totals_changed("acme")
        error, headers = await refused(it)
        assert error == {
            "message": (
                "You have used up your monthly budget: 5.99 of 6.00 USD. It begins anew with the next month (UTC)."
            ),
            "type": "insufficient_quota",
            "param": None,
            "code": "insufficient_quota",
        }
        assert headers["retry-after"] == "60"
        assert headers["x-should-retry"] == "false"


async def test_a_budget_in_tokens(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        limit(it, budget={"tokens": 100})
        await served(it)
        await used(it, USED)
        await served(it)
        await used(it, 2 * USED)
        error, _ = await refused(it, {**CHAT, "max_tokens": 60})
        assert error["code"] == "insufficient_quota"
        assert error["message"].startswith("You have used up your monthly budget: 20 of 100 tokens.")


async def test_while_the_ledger_is_away_it_refuses_if_told_to(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.app.quotas.ledger = ledger = FakeLedger()
        limit(it, budget={"tokens": 1000, "whenUnknown": "Refuse"})
        await served(it)
        ledger.live = False
        error, headers = await refused(it)
        assert error["code"] == "insufficient_quota"
        assert error["message"].startswith("What you have used of your monthly budget is not known right now")
        assert headers["retry-after"] == "60"
        limit(it, budget={"tokens": 1000})
        await served(it)


async def test_a_budget_in_another_currency_than_the_prices(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.app.quotas.ledger = FakeLedger(Rate(model="*", input=PICO, cached=PICO, output=PICO), currency="EUR")
        limit(it, budget={"amount": "1", "currency": "USD"})
        await served(it)
        limit(it, budget={"amount": "1", "currency": "USD", "whenUnknown": "Refuse"})
        error, _ = await refused(it)
        assert error["message"] == "Your monthly budget is in another currency than the prices, so nothing is served."


async def test_a_request_that_waited_is_refused_if_the_budget_is_used_up_by_then(tmp_path: Path):
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        it.app.quotas.ledger = ledger = FakeLedger()
        limit(it, budget={"tokens": 1000})
        it.hear(1, phase="stalled")
        asked = asyncio.create_task(it.post(CHAT))
        while not it.app.holds.waiting:
            await asyncio.sleep(0.005)
        ledger.totals["acme"] = MonthTotal("2999-01", tokens=1000)
        it.app.quotas.totals_changed(None)
        it.hear(1)
        answer = await asked
        assert answer.status == 429
        assert (await answer.json())["error"]["code"] == "insufficient_quota"
        (record,) = await it.records()
        assert (record.data.outcome, record.data.status) == ("rejected", 429)
        assert engine.requests == []
        await used(it, 0)


async def test_one_that_waited_is_served_if_its_budget_was_raised_meanwhile(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.app.quotas.ledger = ledger = FakeLedger()
        limit(it, budget={"tokens": 1000})
        it.hear(1, phase="stalled")
        asked = [asyncio.create_task(it.post(CHAT)) for _ in range(2)]
        while it.app.holds.waiting < 2:
            await asyncio.sleep(0.005)
        ledger.totals["acme"] = MonthTotal("2999-01", tokens=1000)
        it.app.quotas.totals_changed(None)
        limit(it, budget={"tokens": 2000})
        it.hear(1)
        assert [(await answer).status for answer in asked] == [200, 200]


async def test_a_request_that_cannot_be_recorded_gives_back_what_was_reserved(tmp_path: Path, monkeypatch):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        limit(it, limits={"concurrentRequests": 1})

        def no_room(_: Any) -> Any:
            raise SpoolUnavailable("no space left on device")

        monkeypatch.setattr(it.spool, "commit", no_room)
        for _ in range(2):
            assert (await it.post(CHAT)).status == 503
        await used(it, 0)


# --- caps of the Model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "path", "sent"),
    [
        ({}, "/v1/chat/completions", {"max_tokens": 100}),
        ({"max_tokens": 5000}, "/v1/chat/completions", {"max_tokens": 100}),
        ({"max_completion_tokens": 5000}, "/v1/chat/completions", {"max_completion_tokens": 100}),
        (
            {"max_completion_tokens": 5000, "max_tokens": 7},
            "/v1/chat/completions",
            {"max_completion_tokens": 100, "max_tokens": 7},
        ),
        ({"max_tokens": 20}, "/v1/chat/completions", {"max_tokens": 20}),
        ({}, "/v1/completions", {"max_tokens": 16}),
        ({"max_tokens": 5000}, "/v1/completions", {"max_tokens": 100}),
    ],
)
async def test_an_answer_is_no_longer_than_the_model_allows(
    tmp_path: Path, asked: dict[str, int], path: str, sent: dict[str, int]
):
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        it.model(max_output_tokens=100)
        prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
        response = await it.post({"model": "llama", **prompt, **asked}, path)
        assert response.status == 200
        body = engine.requests[0].body
        assert {name: body[name] for name in ("max_tokens", "max_completion_tokens") if name in body} == sent


@pytest.mark.parametrize("bound", ["5000", 99.5, True, 0, -1])
async def test_a_bound_that_an_engine_may_read_as_none_is_refused_where_there_is_a_cap(tmp_path: Path, bound: Any):
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        it.model(max_output_tokens=100)
        response = await it.post({**CHAT, "max_tokens": bound})
        assert response.status == 400
        error = (await response.json())["error"]
        assert error["message"] == "`max_tokens` must be a whole number of at least 1."
        assert error["param"] == "max_tokens"
        assert engine.requests == []


async def test_without_a_cap_a_bound_goes_to_the_engine_as_it_is(tmp_path: Path):
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        await served(it, {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5000})
        assert engine.requests[0].body["max_tokens"] == 5000
        await served(it, {"model": "llama", "messages": [{"role": "user", "content": "hi"}]})
        assert "max_tokens" not in engine.requests[1].body


async def test_a_request_takes_no_longer_than_its_model_allows(tmp_path: Path):
    async def slow(request: EngineRequest) -> None:
        if request.model == MODEL.engine_name and request.body.get("seed") == 1:
            await request.gone.wait()
        else:
            await serve_normally(request)

    async with gateway(tmp_path, ScriptedEngine(slow), request_seconds=60) as it:
        it.model(request_seconds=1.5)
        response = await it.post({"model": "llama", "messages": [{"role": "user", "content": "hi"}], "seed": 1})
        assert response.status == 504
        assert (await response.json())["error"]["message"] == "The request took longer than 1.5 s."
        await served(it)
        it.model(request_seconds=300.0)
        assert it.app.deadlines_of(it.models[MODEL.key]) is it.app.deadlines


# --- what was taken back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"suspended": True}, 403, "tenant_suspended"),
        ({"disabled": True}, 401, "disabled_api_key"),
        ({"expires": "2026-01-01T00:00:00Z"}, 401, "expired_api_key"),
        ({"models": ["chat/another"]}, 404, "model_not_found"),
    ],
)
async def test_who_waits_is_refused_when_the_right_to_ask_is_taken_back(
    tmp_path: Path, change: dict[str, Any], status: int, code: str
):
    """At once, and not when a replica comes: none does here."""
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.hear(1, phase="stalled")
        asked = asyncio.create_task(it.post(CHAT))
        while not it.app.holds.waiting:
            await asyncio.sleep(0.005)
        it.tenants["another"] = tenant("another", "sk-another")
        it.changed()
        await asyncio.sleep(0.05)
        assert it.app.holds.waiting == 1  # somebody else's change is nothing to it
        it.tenants["acme"] = tenant(**change)
        it.changed()
        async with asyncio.timeout(20):
            answer = await asked
        assert answer.status == status
        assert (await answer.json())["error"]["code"] == code
        assert it.app.holds.waiting == 0
        (record,) = await it.records()
        assert record.data.outcome == "rejected"


# --- small things -----------------------------------------------------------------------------------------------------


def test_durations_are_written_as_go_does():
    said = {0.0: b"0s", 0.0004: b"1ms", 0.12: b"120ms", 1.0: b"1s", 8.64: b"8.64s", 60.0: b"1m0s", 90.5: b"1m30.5s"}
    assert {seconds: duration(seconds) for seconds in said} == said


def test_a_month_is_asked_for_once_and_turns_at_midnight_utc():
    now = 1796083199.0  # 2026-11-30T23:59:59Z
    months = Months(lambda: now)
    assert months.now() == "2026-11"
    now += 1
    assert months.now() == "2026-12"
    now += 31 * 86400
    assert months.now() == "2027-01"
    now -= 40 * 86400
    assert months.now() == "2026-11"


# --- clients that leave -----------------------------------------------------------------------------------------------


async def abandons(it: GatewayUnderTest, engine: ScriptedEngine, times: int) -> list[int]:
    """Asks for long answers that are no streams, and leaves each as soon as the engine has it. The status of those
    that were refused."""
    refusals: list[int] = []
    for _ in range(times):
        had = len(engine.requests)
        post = asyncio.create_task(it.post({**CHAT, "max_tokens": 100}))
        while len(engine.requests) == had and not post.done():
            await asyncio.sleep(0.005)
        if post.done():
            refusals.append((await post).status)
            continue
        post.cancel()
        async with asyncio.timeout(10):
            while it.app.demand.tenants.of("acme").own_use().in_flight:
                await asyncio.sleep(0.005)
    return refusals


async def never(request: EngineRequest) -> None:
    await request.gone.wait()


@pytest.mark.parametrize("spec", [{"limits": {"tokensPerMinute": 400}}, {"budget": {"tokens": 400}}])
async def test_who_always_leaves_before_the_answer_uses_up_what_the_tenant_has(tmp_path: Path, spec: dict[str, Any]):
    engine = ScriptedEngine(never)
    async with gateway(tmp_path, engine) as it:
        limit(it, **spec)
        refusals = await abandons(it, engine, 60)
        assert refusals
        assert set(refusals) == {429}
        told = it.app.demand.tenants.of("acme").own_use()
        assert told.booked > 0
        records = await it.records()
        assert {(r.data.outcome, r.data.count_source) for r in records} == {("cancelled", "estimated")}


async def test_without_the_estimate_a_budget_is_never_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def as_before(self: Quota, asked: Cost, *_: Any) -> None:
        self.account.settle(self._quotas.clock(), asked, 0, 0, 0)

    monkeypatch.setattr(Quota, "settle", as_before)
    engine = ScriptedEngine(never)
    async with gateway(tmp_path, engine) as it:
        limit(it, budget={"tokens": 400})
        assert await abandons(it, engine, 60) == []


def test_an_abandoned_answer_counts_as_far_as_it_may_have_come():
    assert abandoned_tokens(1, 1000, 0.1) == 25
    assert abandoned_tokens(3, 1000, 0.1) == 75
    assert abandoned_tokens(1, 1000, 60.0) == 1000
    assert abandoned_tokens(0, 1000, 60.0) == 0
    assert abandoned_tokens(1, 1000, -1.0) == 0
