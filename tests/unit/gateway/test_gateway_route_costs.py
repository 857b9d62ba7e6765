"""Requests that go to a cheaper fallback of their route, as a client of the gateway sees it."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from shoal.core.hold.limits import Limits
from shoal.core.quota.month import PICO, MonthTotal
from shoal.core.quota.peerusage import GatewayPeer
from tests.support.gateway import GatewayUnderTest, replica, tenant
from tests.support.pricelist import PriceList, flat
from tests.support.routes import put, target, two_models
from tests.support.scripted_engine import ScriptedEngine
from tests.support.streams import until

CHAT: dict[str, Any] = {"model": "front", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
FALLBACKS = "shoal_gateway_route_fallbacks_total"
CENT = PICO // 100
DEAR = flat("chat/llama", CENT)
"""A cent for a token: CHAT may cost 0.71 USD."""
CHEAP = flat("chat/other", CENT // 10)


def rule(amount: str | None = "0.50", percent: int | None = None, currency: str = "USD", **more: Any) -> dict[str, Any]:
    fallback: dict[str, Any] = {"targets": [target("other")], **more}
    if amount is not None:
        fallback["whenCostAbove"] = {"amount": amount, "currency": currency}
    if percent is not None:
        fallback["whenBudgetPercent"] = percent
    return {"targets": [target("llama")], "fallback": fallback}


async def ask(it: GatewayUnderTest, status: int = 200, **more: Any) -> str:
    """The request's id."""
    response = await it.post({**CHAT, **more})
    answer = await response.json()
    assert response.status == status, answer
    if status == 200:
        assert answer["model"] == "front"
    return response.headers["x-shoal-request-id"]


def whys(it: GatewayUnderTest, request: str) -> tuple[list[str], list[str]]:
    """Why it went on, and why it stayed."""
    memory = it.app.choices
    return (
        [each.message for each in memory.fallbacks(request, "gateway-1")],
        [each.message for each in memory.stays(request, "gateway-1")],
    )


async def test_a_request_that_may_cost_more_goes_to_the_cheaper_fallback_and_a_cheap_one_stays(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, rule()) as it:
        it.app.quotas.ledger = PriceList(DEAR, CHEAP)
        request = await ask(it)
        assert (len(llama.requests), len(other.requests)) == (0, 1)
        assert other.requests[0].body["max_tokens"] == 50
        assert whys(it, request) == (
            ["went on to chat/other: it may cost 0.71 USD at chat/llama, more than the 0.5 USD of whenCostAbove"],
            [],
        )
        assert it.metric(FALLBACKS, reason="cost") == 1
        opened, (record,) = await it.records("open"), await it.records()
        assert {one.data.model for one in (*opened, record)} == {"chat/other"}
        assert (record.data.route, record.data.outcome) == ("chat/front", "answered")
        assert it.app.demand.demand("uid-llama").arrivals == 0, "nothing wakes the target that it left"
        assert it.app.demand.demand("uid-other").arrivals == 1

        request = await ask(it, max_tokens=5)
        assert (len(llama.requests), len(other.requests)) == (1, 1)
        assert whys(it, request) == ([], []), "a condition that does not hold is nothing to tell"
        assert it.metric(FALLBACKS, reason="cost") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_streams_and_requests_of_other_apis_are_decided_too(tmp_path: Path, stream: bool):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, rule()) as it:
        it.app.quotas.ledger = PriceList(DEAR, CHEAP)
        for path in ("/v1/chat/completions", "/v1/messages"):
            response = await it.post({**CHAT, "stream": stream}, path)
            assert response.status == 200, await response.text()
            await response.read()
        # Counting tokens costs nothing.
        response = await it.post({"model": "front", "prompt": "x" * 4000}, "/v1/tokenize")
        await response.read()
        assert [sent.path for sent in llama.requests] == ["/v1/tokenize"]
        assert len(other.requests) == 2


async def test_each_targets_own_limit_of_output_counts_for_its_cost(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, rule()) as it:
        it.app.quotas.ledger = PriceList(DEAR, CHEAP)
        it.model(max_output_tokens=10)
        await ask(it)
        assert len(llama.requests) == 1, "0.31 USD at most"
        it.model(max_output_tokens=None)
        # A token costs the same at both; the fallback allows fewer of them.
        it.app.quotas.ledger = PriceList(DEAR, flat("chat/other", CENT))
        await ask(it)
        assert (len(llama.requests), len(other.requests)) == (2, 0), "the same cost is not a lower one"
        it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], max_output_tokens=20)
        it.changed()
        await ask(it)
        assert other.requests[0].body["max_tokens"] == 20


async def test_without_a_known_price_a_request_stays_and_says_why(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, rule()) as it:
        none = "stayed: whenCostAbove has no effect: this gateway knows no price list"
        assert whys(it, await ask(it)) == ([], [none]), "no ledger"
        it.app.quotas.ledger = ledger = PriceList(CHEAP)
        ledger.rate_table = None
        assert whys(it, await ask(it)) == ([], [none]), "a gateway that has just started"
        ledger.put(CHEAP)
        assert whys(it, await ask(it)) == ([], ["stayed: whenCostAbove has no effect: chat/llama has no price"])
        ledger.put(DEAR)
        _, (why,) = whys(it, await ask(it))
        assert why.endswith("but no fallback is known to be cheaper; chat/other has no price")
        ledger.put(DEAR, CHEAP, currency="EUR")
        _, (why,) = whys(it, await ask(it))
        assert why.endswith("it is in USD, and the price list in EUR")
        assert (len(llama.requests), len(other.requests)) == (5, 0)
        ledger.put(DEAR, CHEAP)
        await ask(it)
        assert len(other.requests) == 1, "the list is here again"
        ledger.live = False
        await ask(it)
        assert len(other.requests) == 2, "the last list counts while the ledger is silent"


async def test_a_fallback_without_a_replica_or_a_right_or_the_ability_is_none(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, rule()) as it:
        it.app.quotas.ledger = PriceList(DEAR, CHEAP)
        cheap = it.models["chat/other"]
        pod = it.pods.pop("chat/llama-2")
        it.changed()
        _, (why,) = whys(it, await ask(it))
        assert why.endswith("of whenCostAbove, but no cheaper fallback has a replica now")
        it.pods["chat/llama-2"] = pod
        it.models["chat/other"] = dataclasses.replace(cheap, capabilities=frozenset({"embed"}))
        it.changed()
        request = await ask(it)
        _, (why,) = whys(it, request)
        assert why.endswith("of whenCostAbove, but no cheaper fallback can do the request")
        it.models["chat/other"] = cheap
        it.tenants["acme"] = tenant(models=["chat/llama"])
        it.changed()
        await ask(it)
        assert (len(llama.requests), len(other.requests)) == (3, 0)
        assert {one.data.model for one in await it.records(count=3)} == {"chat/llama"}
        assert it.metric(FALLBACKS, reason="cost") == 0


async def test_limits_and_budget_reserve_for_the_fallback_and_count_its_price(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, rule()) as it:
        it.app.quotas.ledger = PriceList(DEAR, CHEAP)
        both = ["chat/llama", "chat/other"]
        # Too little for the target, and enough for the fallback.
        it.tenants["acme"] = tenant(models=both, budget={"amount": "0.10", "currency": "USD"})
        it.changed()
        await ask(it)
        account = it.app.demand.tenants.of("acme")
        await it.records()
        assert (account.own_use().spent, account.own_use().reserved_spend) == (10 * CENT // 10, 0)
        it.tenants["acme"] = tenant(models=both, budget={"amount": "0.05", "currency": "USD"})
        it.changed()
        await ask(it, 429)
        assert (len(llama.requests), len(other.requests)) == (0, 1), "no budget for the fallback: it is refused there"
        assert account.own_use().in_flight == 0
        assert it.metric(FALLBACKS, reason="cost") == 1


async def test_a_fallback_with_a_price_counts_also_where_its_target_has_none(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, rule(amount=None)) as it:
        it.app.quotas.ledger = PriceList(CHEAP)
        both = ["chat/llama", "chat/other"]
        it.tenants["acme"] = tenant(models=both, budget={"amount": "0.10", "currency": "USD"})
        del it.pods["chat/llama-1"]
        it.model(limits=Limits(max_requests=0))
        await ask(it)
        await it.records()
        account = it.app.demand.tenants.of("acme")
        assert (account.own_use().spent, account.own_use().reserved_spend) == (10 * CENT // 10, 0)


async def test_a_cheaper_fallback_for_which_the_limits_have_no_room_is_passed_over(tmp_path: Path):
    """A token of the fallback costs a tenth, but its answers may be longer: it reserves 71 tokens, the target 31."""
    llama, other = ScriptedEngine(), ScriptedEngine()
    both = ["chat/llama", "chat/other"]
    async with two_models(tmp_path, llama, other, rule("0.20")) as it:
        it.app.quotas.ledger = PriceList(DEAR, CHEAP)
        it.model(max_output_tokens=10)
        small: tuple[dict[str, Any], ...] = ({"limits": {"tokensPerMinute": 70}}, {"budget": {"tokens": 70}})
        for spec in small:
            it.tenants["acme"] = tenant(models=both, **spec)
            it.changed()
            request = await ask(it)
            assert whys(it, request)[1] == [
                "stayed: it may cost 0.31 USD at chat/llama, more than the 0.2 USD of whenCostAbove, but no cheaper "
                "fallback fits the limits of its Tenant"
            ]
        assert (len(llama.requests), len(other.requests)) == (2, 0)
        assert {one.data.model for one in await it.records(count=2)} == {"chat/llama"}

        # Room for neither: the answer is the limit's, of all Models together.
        it.tenants["acme"] = tenant(models=both, limits={"tokensPerMinute": 30})
        it.changed()
        response = await it.post(CHAT)
        assert response.status == 429
        error = (await response.json())["error"]
        assert error["message"].startswith("The request is larger than your limit on tokens per minute: limit 30, ")
        assert (len(llama.requests), len(other.requests)) == (2, 0)
        assert it.app.demand.tenants.of("acme").own_use().in_flight == 0

        # Another cheaper fallback that fits goes before the target.
        short = dataclasses.replace(it.models["chat/other"], key="chat/short", uid="uid-short", claims=("short",))
        it.models["chat/short"] = dataclasses.replace(short, max_output_tokens=10)
        it.pods["chat/llama-3"], it.ports["pod-3"] = replica(3, model=short), it.ports["pod-2"]
        it.app.quotas.ledger = PriceList(DEAR, CHEAP, flat("chat/short", CENT // 10))
        it.tenants["acme"] = tenant(models=[*both, "chat/short"], limits={"tokensPerMinute": 70})
        put(it, rule("0.20", targets=[target("other"), target("short")]))
        it.hear(3)
        await ask(it)
        *_, record = await it.records(count=3)
        assert record.data.model == "chat/short"


async def test_a_request_for_which_only_a_fallback_fits_the_budget_waits_for_a_share_of_it(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, rule()) as it:
        it.app.quotas.ledger = PriceList(DEAR, CHEAP)
        others = [GatewayPeer("g1", it.app.quotas.clock())]
        it.app.quotas._read_peers = lambda: others  # pyright: ignore[reportPrivateUsage]
        budget = {"amount": "0.15", "currency": "USD"}
        it.tenants["acme"] = tenant(models=["chat/llama", "chat/other"], budget=budget)
        it.changed()
        await ask(it)
        waiting = asyncio.create_task(ask(it))
        await until(lambda: waiting.done() or it.metric("shoal_gateway_share_waits_total") == 1)
        assert not waiting.done(), "half of the budget is another gateway's, and all of it is too little for the target"
        others[:] = [GatewayPeer("g1", it.app.quotas.clock() + 60)]
        await waiting
        assert (len(llama.requests), len(other.requests)) == (0, 2)


async def test_by_the_share_of_the_budget_that_its_tenant_has_used(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, rule(None, 80)) as it:
        it.app.quotas.ledger = ledger = PriceList(DEAR, CHEAP)
        await ask(it)
        assert len(llama.requests) == 1, "a tenant without a budget"
        it.tenants["acme"] = tenant(models=["chat/llama", "chat/other"], budget={"amount": "100", "currency": "USD"})
        it.changed()
        for spent, requests in ((0, (2, 0)), (79, (3, 0)), (80, (3, 1)), (90, (3, 2))):
            ledger.totals["acme"] = MonthTotal("2999-01", spent=spent * PICO)
            it.app.quotas.totals_changed("acme")
            request = await ask(it)
            assert (len(llama.requests), len(other.requests)) == requests, spent
        assert whys(it, request)[0] == [
            "went on to chat/other: it may cost 0.71 USD at chat/llama, and its Tenant has used 90 % of its budget, at "
            "least the 80 % of whenBudgetPercent"
        ]
        assert it.metric(FALLBACKS, reason="budget") == 2
        ledger.rate_table = None
        assert whys(it, await ask(it))[1] == [
            "stayed: whenBudgetPercent has no effect: this gateway knows no price list"
        ]
        assert len(llama.requests) == 4


async def test_a_fallback_that_refuses_it_sends_it_back_to_its_target(tmp_path: Path):
    """The fallback has a replica when the request arrives, and none that answers."""
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, rule()) as it:
        it.app.quotas.ledger = PriceList(DEAR, CHEAP)
        it.models["chat/other"] = dataclasses.replace(it.models["chat/other"], limits=Limits(max_requests=0))
        it.changed()
        it.ports["pod-2"] = 1
        request = await ask(it)
        assert (len(llama.requests), len(other.requests)) == (1, 0)
        went, _ = whys(it, request)
        assert went[1] == "went on to chat/llama: it refused the request (no_replica)"
        (record,) = await it.records()
        assert record.data.model == "chat/llama"


async def test_prices_that_change_while_a_request_runs_change_nothing_for_it(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    async with two_models(tmp_path, llama, other, rule()) as it:
        it.app.quotas.ledger = ledger = PriceList(CHEAP, flat("chat/llama", 0))
        it.hear(1, phase="stalled")
        asked = asyncio.create_task(it.post(CHAT))
        async with asyncio.timeout(10):
            while not it.app.holds.waiting:
                await asyncio.sleep(0.005)
        ledger.put(DEAR, CHEAP)
        it.hear(1)
        assert (await asked).status == 200
        assert (len(llama.requests), len(other.requests)) == (1, 0)
        await ask(it)
        assert len(other.requests) == 1


async def test_a_canary_that_is_too_dear_for_a_request_has_not_failed(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    halt = {"errorPercent": 0, "minRequests": 1}
    canary = {"target": target("llama"), "percent": 100, "haltOn": halt}
    async with two_models(tmp_path, llama, other, rule() | {"canary": canary, "targets": [target("llama")]}) as it:
        it.app.quotas.ledger = PriceList(DEAR, CHEAP)
        for _ in range(3):
            await ask(it)
        assert len(other.requests) == 3
        assert not it.app.canaries.halts


async def test_a_mirror_that_is_the_fallback_gets_no_copy_of_what_went_there(tmp_path: Path):
    llama, other = ScriptedEngine(), ScriptedEngine()
    mirrored = rule() | {"mirror": {"model": {"name": "other"}, "percent": 100}}
    async with two_models(tmp_path, llama, other, mirrored) as it:
        it.app.quotas.ledger = PriceList(DEAR, CHEAP)
        await ask(it)
        await it.records()
        assert len(other.requests) == 1
        assert it.metric("shoal_gateway_mirrored_total", result="sent") == 0
        put(it, rule("0.99") | {"mirror": {"model": {"name": "other"}, "percent": 100}})
        await ask(it)
        assert it.metric("shoal_gateway_mirrored_total", result="sent") == 1
