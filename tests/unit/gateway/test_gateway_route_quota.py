"""Limits of each tenant by a route: what clients see under the route's names, beside their Tenant's own limits."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from shoal.core.hold.limits import Limits as HoldLimits
from shoal.core.quota.month import PICO
from shoal.core.quota.peerusage import GatewayPeer
from shoal.gateway import request as request_module
from shoal.gateway.tenantdemand import route_account
from tests.support.gateway import GatewayUnderTest, tenant
from tests.support.pricelist import PriceList, flat
from tests.support.quota_gateways import crew
from tests.support.routes import a_route, declared, put, target, two_models
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally
from tests.support.streams import until

CHAT: dict[str, Any] = {"model": "front", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
RESERVED = 71
"""Tokens that are reserved for it."""
USED = 10
"""Tokens that the engine counts."""
OTHER_KEY = "sk-globex"
ONE: dict[str, Any] = {"targets": [target("llama")]}
FALLBACK: dict[str, Any] = {**ONE, "fallback": {"targets": [target("other")]}}
ROUTE = a_route(ONE)
COUNT = route_account("acme", ROUTE.metadata.uid)
"""What acme sends under the route."""


@asynccontextmanager
async def front(
    tmp_path: Path,
    engine: ScriptedEngine,
    rule: dict[str, Any] = ONE,
    second: ScriptedEngine | None = None,
    **limits: int,
) -> AsyncGenerator[GatewayUnderTest]:
    """A gateway whose route `front` has these limits of each tenant, and two tenants."""
    async with two_models(tmp_path, engine, second or ScriptedEngine(), rule) as it:
        it.tenants["globex"] = tenant("globex", OTHER_KEY, models=["chat/llama"])
        put(it, rule, servedNames=["front", "alias"], limits=limits)
        yield it


def own(it: GatewayUnderTest, **limits: int) -> None:
    """The Tenant has these limits of its own from now on."""
    it.tenants["acme"] = tenant(models=["chat/llama", "chat/other"], limits=limits)
    it.changed()


async def served(it: GatewayUnderTest, model: str = "front", **more: Any) -> Any:
    response = await it.post({**CHAT, "model": model}, **more)
    assert response.status == 200, await response.text()
    await response.read()
    return response


async def refused(it: GatewayUnderTest, model: str = "front", **body: Any) -> tuple[dict[str, Any], Any]:
    response = await it.post({**CHAT, "model": model, **body})
    assert response.status == 429, await response.text()
    return (await response.json())["error"], response.headers


def use(it: GatewayUnderTest, name: str = COUNT) -> dict[str, int]:
    return it.app.demand.tenants.accounts[name].own_use().model_dump(exclude_defaults=True)


async def settled(it: GatewayUnderTest) -> None:
    await until(lambda: not any(account.busy for account in it.app.demand.tenants.accounts.values()))


async def never(request: EngineRequest) -> None:
    await request.gone.wait()


async def test_each_tenant_has_the_routes_limit_for_what_it_sends_under_the_routes_names(tmp_path: Path) -> None:
    async with front(tmp_path, ScriptedEngine(), requestsPerMinute=2) as it:
        for name in ("front", "alias"):
            assert "x-ratelimit-limit-requests" not in (await served(it, name)).headers
        for name in ("front", "alias", "chat/front"):
            error, headers = await refused(it, name)
            after = int(headers["retry-after"])
            assert 55 <= after <= 60
            assert error == {
                "message": "You have reached your limit on requests per minute of ModelRoute chat/front: limit 2, used "
                f"2. Try again in {after} s, or name another model: such requests do not count here.",
                "type": "requests",
                "param": None,
                "code": "rate_limit_exceeded",
            }
            (known,) = it.app.choices.refusals(headers["x-shoal-request-id"], "gateway-1")
            assert known.limit == "requestsPerMinute of ModelRoute chat/front, 2 for each tenant"
        await served(it, "llama")
        for _ in range(2):
            await served(it, key=OTHER_KEY)
        assert (await it.post(CHAT, key=OTHER_KEY)).status == 429
        await settled(it)
        assert use(it) == {"requests": 2, "tokens": 2 * USED}
        assert it.metric("shoal_tenant_refused_total", tenant="acme", reason="rate_limit_exceeded") == 3


async def test_both_limits_hold_and_a_request_that_one_refuses_counts_for_neither(tmp_path: Path) -> None:
    async with front(tmp_path, ScriptedEngine(), requestsPerMinute=2) as it:
        own(it, requestsPerMinute=4)
        for left in (3, 2):
            assert (await served(it)).headers["x-ratelimit-remaining-requests"] == str(left)
        error, headers = await refused(it)
        assert "ModelRoute chat/front" in error["message"]
        assert headers["x-ratelimit-remaining-requests"] == "2"
        for _ in range(2):
            await served(it, "llama")
        put(it, ONE, limits={"requestsPerMinute": 9})
        error, _ = await refused(it)
        assert error["message"].startswith("You have reached your limit on requests per minute: limit 4, used 4.")
        await settled(it)
        assert use(it) == {"requests": 2, "tokens": 2 * USED}
        assert use(it, "acme") == {"requests": 4, "tokens": 4 * USED, "booked": 4 * USED}


async def test_tokens_are_reserved_and_settled_with_what_the_engine_counted(tmp_path: Path) -> None:
    async with front(tmp_path, ScriptedEngine(), tokensPerMinute=100) as it:
        for own_limits in ({}, {"tokensPerMinute": 1000}):
            own(it, **own_limits)
            await served(it)
            await settled(it)
        assert use(it) == {"requests": 2, "tokens": 2 * USED}
        error, headers = await refused(it, max_tokens=75)
        assert error["message"].startswith(
            "You have reached your limit on tokens per minute of ModelRoute chat/front: limit 100, used 20,"
        )
        assert error["type"] == "tokens"
        error, headers = await refused(it, max_tokens=90)
        assert error["message"].startswith(
            "The request is larger than your limit on tokens per minute of ModelRoute chat/front: limit 100"
        )
        assert headers["x-should-retry"] == "false"
        await served(it)


async def test_a_place_is_free_again_at_the_end_and_when_the_client_leaves(tmp_path: Path) -> None:
    engine = ScriptedEngine(never)
    async with front(tmp_path, engine, concurrentRequests=1) as it:
        own(it, concurrentRequests=2)
        for number in (1, 2):
            waiting = asyncio.create_task(it.post(CHAT))
            await until(lambda number=number: len(engine.requests) == number)
            assert use(it)["inFlight"] == 1
            error, headers = await refused(it)
            assert error["message"].startswith(
                "You have reached your limit on requests at a time of ModelRoute chat/front: limit 1, used 1."
            )
            assert headers["retry-after"] == "1"
            waiting.cancel()
            await asyncio.wait([waiting])
            await settled(it)
            assert "inFlight" not in use(it)


async def test_limits_that_change_hold_from_the_next_request_on(tmp_path: Path) -> None:
    async with front(tmp_path, ScriptedEngine(), requestsPerMinute=1) as it:
        await served(it)
        await refused(it)
        put(it, ONE, limits={"requestsPerMinute": 2})
        await served(it)
        await refused(it)
        put(it, ONE)
        for _ in range(3):
            await served(it)
        await settled(it)
        assert use(it)["requests"] == 2, "without limits nothing is counted"
        # What was counted in this minute still is, so that nobody gets a limit twice by a change.
        put(it, ONE, limits={"requestsPerMinute": 2})
        await refused(it)


async def test_a_running_request_settles_where_it_was_counted_whatever_becomes_of_the_limits(tmp_path: Path) -> None:
    engine = ScriptedEngine(never)
    async with front(tmp_path, engine, concurrentRequests=1) as it:
        waiting = asyncio.create_task(it.post(CHAT))
        await until(lambda: bool(engine.requests))
        put(it, ONE)
        unlimited = asyncio.create_task(it.post(CHAT))
        await until(lambda: len(engine.requests) == 2)
        put(it, ONE, limits={"concurrentRequests": 1})
        await refused(it)
        for task in (waiting, unlimited):
            task.cancel()
            await asyncio.wait([task])
        await settled(it)
        await until(lambda: it.app.in_flight == 0)
        assert "inFlight" not in use(it)


async def test_a_route_that_goes_takes_its_counts_away(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with front(tmp_path, engine, requestsPerMinute=1) as it:
        own(it, requestsPerMinute=100)
        await served(it)
        await settled(it)
        engine.behave = never
        del it.routes[ROUTE.key]
        it.changed()
        assert it.app.demand.tenants.accounts.keys() == {"acme"}
        assert it.app.quotas._quotas.keys() == {"acme"}  # pyright: ignore[reportPrivateUsage]
        put(it, ONE, limits={"requestsPerMinute": 1})
        waiting = asyncio.create_task(it.post(CHAT))
        await until(lambda: len(engine.requests) == 2)
        del it.routes[ROUTE.key]
        it.changed()
        assert use(it)["inFlight"] == 1, "a running request keeps its count"
        waiting.cancel()
        await asyncio.wait([waiting])
        await settled(it)
        it.changed()
        assert it.app.demand.tenants.accounts.keys() == {"acme"}


async def test_what_is_counted_is_dropped_when_no_limit_needs_it_but_not_under_a_running_request(
    tmp_path: Path,
) -> None:
    free, over = asyncio.Event(), 0.0

    async def slow(request: EngineRequest) -> None:
        await free.wait()
        await serve_normally(request)

    engine = ScriptedEngine(slow)
    async with front(tmp_path, engine, requestsPerMinute=2) as it:
        quotas, accounts = it.app.quotas, it.app.demand.tenants.accounts
        quotas.clock = quotas.usage._clock = lambda: time.monotonic() + over
        before = quotas.of_route("acme", it.directory.snapshot.model_index.routes["chat/front"])
        quotas.sweep()
        assert not accounts, "nothing has used it"
        running = asyncio.create_task(served(it))
        await until(lambda: len(engine.requests) == 1)
        assert before.account is not accounts[COUNT]
        assert before.header_lines(), "a request that waited meanwhile may still read it"
        over += 300
        quotas.sweep()
        assert accounts[COUNT].busy
        free.set()
        await running
        await settled(it)
        assert use(it) == {"requests": 1, "tokens": USED}
        over += 62
        quotas.sweep()
        assert orjson.loads(it.app.demand.tenants.take() or b"") == {COUNT: None}
        quotas.sweep()
        assert not accounts
        assert not quotas._quotas
        for _ in range(2):
            await served(it)
        await refused(it)


async def test_a_fallback_counts_once_and_a_copy_does_not(tmp_path: Path) -> None:
    other = ScriptedEngine()
    async with front(tmp_path, ScriptedEngine(), FALLBACK, other, requestsPerMinute=5, tokensPerMinute=1000) as it:
        del it.pods["chat/llama-1"]
        it.model(limits=HoldLimits(max_requests=0))
        await served(it)
        await settled(it)
        assert len(other.requests) == 1
        assert use(it) == {"requests": 1, "tokens": USED}
    other = ScriptedEngine()
    mirrored = {**ONE, "mirror": {**target("other"), "percent": 100}}
    (tmp_path / "second").mkdir()
    async with front(tmp_path / "second", ScriptedEngine(), mirrored, other, requestsPerMinute=5) as it:
        await served(it)
        await until(lambda: bool(other.requests) and not it.app.copies.in_progress)
        await settled(it)
        assert use(it) == {"requests": 1, "tokens": USED}


async def test_a_cheaper_fallback_that_does_not_fit_the_routes_limits_is_not_taken(tmp_path: Path) -> None:
    """Its longest answer may be longer than that of the target."""
    llama, other = ScriptedEngine(), ScriptedEngine()
    rule = {**ONE, "fallback": {"targets": [target("other")], "whenCostAbove": {"amount": "0.01", "currency": "USD"}}}
    async with front(tmp_path, llama, rule, other, tokensPerMinute=100) as it:
        it.app.quotas.ledger = PriceList(flat("chat/llama", PICO // 100), flat("chat/other", PICO // 1000))
        it.model(max_output_tokens=50)
        response = await it.post({**CHAT, "max_tokens": 200})
        assert response.status == 200, await response.text()
        assert (len(llama.requests), len(other.requests)) == (1, 0)
        (stay,) = it.app.choices.stays(response.headers["x-shoal-request-id"], "gateway-1")
        assert "no cheaper fallback fits the limits of its Tenant" in stay.message
        await settled(it)
        await served(it)
        assert (len(llama.requests), len(other.requests)) == (1, 1)


async def test_a_route_without_limits_counts_nothing(tmp_path: Path) -> None:
    async with front(tmp_path, ScriptedEngine(), maxOutputTokens=7) as it:
        await served(it)
        await settled(it)
        assert not it.app.demand.tenants.accounts


async def test_a_request_waits_for_the_next_share_of_a_routes_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for own_limits in ({}, {"requestsPerMinute": 100}):
        folder = tmp_path / str(len(own_limits))
        folder.mkdir()
        async with front(folder, ScriptedEngine(), requestsPerMinute=4) as it:
            others = [GatewayPeer("g1", it.app.quotas.clock())]
            it.app.quotas._read_peers = lambda others=others: others  # pyright: ignore[reportPrivateUsage]
            own(it, **own_limits)
            for _ in range(2):
                await served(it)
            with monkeypatch.context() as patched:
                patched.setattr(request_module, "SHARE_WAIT_SECONDS", 0.1)
                error, _ = await refused(it)
            said = "Your limit on requests per minute of ModelRoute chat/front is shared out: limit 4, used 2."
            assert error["message"].startswith(said)
            waiting = asyncio.create_task(served(it))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            others[:] = [GatewayPeer("g1", it.app.quotas.clock() + 60)]
            await asyncio.wait_for(waiting, 5)
            await settled(it)
            assert use(it)["requests"] == 3


async def test_two_gateways_share_a_routes_limit(tmp_path: Path) -> None:
    async with crew(tmp_path, 2) as them:
        them.release.set()
        route = declared(ONE, limits={"requestsPerMinute": 8})
        for member in them.members:
            member.it.routes[route.key] = route
            member.it.changed()
        first, second = (member.it for member in them.members)
        for _ in range(8):
            await served(first)
        name = route_account("acme", route.uid)
        await until(
            lambda: (
                name in second.app.demand.tenants.accounts
                and sum(
                    heard.requests.sum(second.app.quotas.clock())
                    for heard in second.app.demand.tenants.accounts[name].peer_usage._gateways.values()  # pyright: ignore[reportPrivateUsage]
                )
                == 8
            )
        )
        for it in (first, second):
            error, _ = await refused(it)
            assert error["message"].startswith(
                "You have reached your limit on requests per minute of ModelRoute chat/front: limit 8, used 8."
            )
            await served(it, "llama")
        # The route goes: each drops what it has, and what the other reports then makes no new account.
        for member in them.members:
            del member.it.routes[route.key]
            member.it.changed()
            assert name not in member.it.app.demand.tenants.accounts
        await asyncio.sleep(1.5)
        assert all(name not in member.it.app.demand.tenants.accounts for member in them.members)
