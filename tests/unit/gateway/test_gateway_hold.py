"""What clients see while no replica can take their request."""

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.core.fields.kinds import Facts
from shoal.core.hold.limits import Limits
from shoal.core.routing.resolve import DeadEnd
from shoal.gateway import accepted
from tests.support.gateway import MODEL, GatewayUnderTest, gateway, lines, replica, tenant
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally

CHAT = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}


def holding(it: GatewayUnderTest) -> int:
    room = it.app.holds.queues.get(MODEL.uid)
    return room.held.requests if room else 0


async def until_held(it: GatewayUnderTest, count: int) -> None:
    async with asyncio.timeout(20):
        while holding(it) != count:
            await asyncio.sleep(0.005)


def asleep(it: GatewayUnderTest) -> None:
    """The Model has no pod."""
    it.pods.clear()
    it.fleet.update("pod-1", None)
    it.changed()


def wake(it: GatewayUnderTest, **said: Any) -> None:
    it.pods["chat/llama-1"] = replica(1)
    it.changed()
    it.hear(1, **said)


async def test_a_request_waits_until_a_replica_comes(tmp_path: Path):
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        asleep(it)
        posts = [asyncio.create_task(it.post(body)) for body in (CHAT, STREAM)]
        await until_held(it, 2)
        assert it.app.demand.demand(MODEL.uid).held == 2
        assert it.metric("shoal_gateway_held_requests", gen_ai_request_model=MODEL.key) == 2
        assert engine.requests == []
        it.pods["chat/llama-1"] = replica(1, ready=False)
        it.changed()
        await asyncio.sleep(0.05)
        assert holding(it) == 2
        wake(it)
        whole, stream = [await post for post in posts]
        assert (whole.status, (await whole.json())["model"]) == (200, "llama")
        assert [line async for line in lines(stream)][-1] == b"[DONE]"
        records = await it.records(count=2)
        assert {r.data.outcome for r in records} == {"answered"}
        assert all(r.data.hold_ms is not None and r.data.hold_ms >= 50 and r.data.attempts == 1 for r in records)
        demand = it.app.demand.demand(MODEL.uid)
        assert (demand.arrivals, demand.held, demand.held_tokens, demand.in_flight) == (2, 0, 0, 0)
        assert not it.app.holds.queues


async def test_requests_that_waited_are_spread_over_all_of_many_replicas(tmp_path: Path):
    """Of many replicas some are looked at, for each request others."""
    engines = [ScriptedEngine() for _ in range(12)]
    async with gateway(tmp_path, *engines) as it:
        asleep(it)
        for number in range(2, 13):
            it.fleet.update(f"pod-{number}", None)
        bodies = [{**CHAT, "messages": [{"role": "user", "content": f"{n} hi"}]} for n in range(48)]
        posts = [asyncio.create_task(it.post(body)) for body in bodies]
        await until_held(it, 48)
        idle = {"running": 0, "waiting": 0, "waiting_tokens": 0, "kv_tokens_used": 0, "kv_tokens_total": 200_000}
        it.pods.update({f"chat/llama-{number}": replica(number) for number in range(1, 13)})
        it.changed()
        for number in range(1, 13):
            it.hear(number, max_running=64, **idle)
        assert {(await post).status for post in posts} == {200}
        assert max(len(engine.requests) for engine in engines) <= 8
        assert all(engine.requests for engine in engines)


async def test_a_request_that_does_not_wait_has_no_hold_time(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        assert (await it.post(CHAT)).status == 200
        (record,) = await it.records()
        assert record.data.hold_ms is None


async def test_whoever_comes_later_waits_behind_those_who_wait(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        asleep(it)
        first = asyncio.create_task(it.post(CHAT))
        await until_held(it, 1)
        # A replica is there at the very moment, but the one that waits has not been let go yet.
        it.app.holds.queues[MODEL.uid].schedule_round = lambda: None  # type: ignore[method-assign]
        wake(it, max_running=0, running=0, waiting=0)
        second = asyncio.create_task(it.post(CHAT))
        await until_held(it, 2)
        it.hear(1, max_running=8, running=0, waiting=0)
        assert [(await post).status for post in (first, second)] == [200, 200]


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (Limits(max_requests=2, max_tenant_percent=100), "as many requests as allowed already wait for it"),
        (Limits(max_bytes=400, max_tenant_percent=100), "already take all the bytes allowed"),
        (Limits(max_requests=4, max_tenant_percent=50), "as many of your requests as allowed already wait for it"),
    ],
)
async def test_beyond_a_bound_it_is_refused_with_what_is_left_of_the_cold_start(
    tmp_path: Path, limits: Limits, told: str
):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        asleep(it)
        it.model(limits=limits, cold_start_seconds=40.0)
        posts = [asyncio.create_task(it.post(CHAT)) for _ in range(2)]
        await until_held(it, 2)
        refused = await it.post(CHAT)
        assert refused.status == 503
        error = (await refused.json())["error"]
        assert error["code"] == "hold_full"
        assert told in error["message"]
        assert 30 <= int(refused.headers["retry-after"]) <= 40
        assert holding(it) == 2
        (record,) = await it.records()
        assert (record.data.outcome, record.data.status, record.data.attempts) == ("refused", 503, 0)
        wake(it)
        assert [(await post).status for post in posts] == [200, 200]


@pytest.mark.parametrize(("cold_start", "after"), [(None, "30"), (12.0, "12"), (74.0, "60")])
async def test_where_nobody_may_wait_the_cold_start_says_when_to_come_again_and_the_model_wakes(
    tmp_path: Path, cold_start: float | None, after: str
):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        asleep(it)
        it.model(limits=Limits(max_requests=0), cold_start_seconds=cold_start)
        for number, body in enumerate((CHAT, STREAM), 1):
            refused = await it.post(body)
            error = (await refused.json())["error"]
            assert (refused.status, error["code"], refused.headers["retry-after"]) == (503, "no_replica", after)
            assert error["message"] == "The model `llama` cannot serve right now: it has no replica. Try again."
            demand = it.app.demand.demand(MODEL.uid)
            assert (demand.arrivals, demand.held) == (number, 0)  # which is what wakes it
        wake(it)
        assert (await it.post(CHAT)).status == 200


async def test_one_tenants_share_leaves_room_for_another(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.tenants["other"] = tenant("other", key="sk-other")
        asleep(it)
        it.model(limits=Limits(max_requests=4, max_tenant_percent=50))
        posts = [asyncio.create_task(it.post(CHAT)) for _ in range(2)]
        await until_held(it, 2)
        assert (await it.post(CHAT)).status == 503
        posts += [asyncio.create_task(it.post(CHAT, key="sk-other")) for _ in range(2)]
        await until_held(it, 4)
        wake(it)
        assert {(await post).status for post in posts} == {200}


async def test_even_the_smallest_share_is_one_request(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        asleep(it)
        it.model(limits=Limits(max_requests=10, max_bytes=1000, max_tenant_percent=1))
        post = asyncio.create_task(it.post(CHAT))
        await until_held(it, 1)
        assert (await it.post(CHAT)).status == 503
        wake(it)
        assert (await post).status == 200


# --- the deadline -----------------------------------------------------------------------------------------------------


async def test_who_has_waited_as_long_as_it_may_is_told_when_to_try_again(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        asleep(it)
        it.model(limits=Limits(timeout_seconds=0.1), cold_start_seconds=500.0)
        for body in (CHAT, STREAM):
            late = await it.post(body)
            error = (await late.json())["error"]
            assert (late.status, error["code"], late.headers["retry-after"]) == (503, "hold_expired", "60")
            assert error["message"] == "The model `llama` had no free replica within 0.1 s. Try again."
        for record in await it.records(count=2):
            assert (record.data.outcome, record.data.status, record.data.attempts) == ("expired", 503, 0)
            assert record.data.hold_ms is not None
            assert record.data.hold_ms >= 100
        assert it.metric("shoal_gateway_held_requests", gen_ai_request_model=MODEL.key) == 0
        assert it.app.demand.demand(MODEL.uid).held == 0


async def test_who_waits_goes_on_waiting_when_a_slower_class_wakes_than_was_known(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        asleep(it)
        it.model(limits=Limits(timeout_seconds=0.2))
        post = asyncio.create_task(it.post(CHAT))
        await until_held(it, 1)
        it.model(limits=Limits(timeout_seconds=600.0))
        await asyncio.sleep(0.4)
        assert holding(it) == 1
        wake(it)
        assert (await post).status == 200


async def test_the_gateways_own_limit_bounds_what_a_model_allows(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine(), hold_seconds=0.1) as it:
        asleep(it)
        assert (await it.post(CHAT)).status == 503


async def test_time_that_was_waited_is_not_taken_from_the_request(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine(), request_seconds=1.0) as it:
        asleep(it)
        post = asyncio.create_task(it.post(CHAT))
        await until_held(it, 1)
        await asyncio.sleep(1.3)
        wake(it)
        assert (await post).status == 200


async def test_after_waiting_a_request_still_takes_no_longer_than_allowed(tmp_path: Path):
    async def never(request: EngineRequest) -> None:
        await request.gone.wait()

    async with gateway(tmp_path, ScriptedEngine(never), request_seconds=0.3) as it:
        asleep(it)
        post = asyncio.create_task(it.post(CHAT))
        await until_held(it, 1)
        wake(it)
        late = await post
        assert (late.status, (await late.json())["error"]["code"]) == (504, "timeout")
        assert not it.fleet.in_flight("pod-1")


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_a_stream_hears_comments_and_then_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(accepted, "COMMENT_SECONDS", 0.1)
    async with gateway(tmp_path, ScriptedEngine()) as it:
        asleep(it)
        response = await it.post(STREAM)  # the head comes with the first comment
        assert (response.status, response.content_type) == (200, "text/event-stream")
        assert [await response.content.readline() for _ in range(4)] == [b": waiting for a replica\n", b"\n"] * 2
        wake(it)
        data = [line async for line in lines(response)]
        assert "".join(json.loads(d)["choices"][0]["delta"]["content"] for d in data[:-1]) == "abc"
        (record,) = await it.records()
        assert (record.data.outcome, record.data.status, record.data.attempts) == ("answered", 200, 1)


async def test_after_comments_a_refusal_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(accepted, "COMMENT_SECONDS", 0.05)
    async with gateway(tmp_path, ScriptedEngine()) as it:
        asleep(it)
        it.model(limits=Limits(timeout_seconds=1.0), cold_start_seconds=20.0)
        response = await it.post(STREAM)
        assert response.status == 200
        (event,) = [json.loads(line) async for line in lines(response)]
        assert event["error"]["code"] == "hold_expired"
        assert 1 <= event["error"]["retry_after"] <= 60
        (record,) = await it.records()
        assert (record.data.outcome, record.data.status) == ("expired", 200)


async def test_after_comments_another_replica_is_still_tried_and_the_engines_refusal_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(accepted, "COMMENT_SECONDS", 0.05)

    async def full(request: EngineRequest) -> None:
        await request.answer(503, b'{"object":"error","message":"The request queue is full.","code":503}')

    async def wrong(request: EngineRequest) -> None:
        await request.answer(400, b'{"object":"error","message":"too long","type":"BadRequestError","code":400}')

    async with gateway(tmp_path, ScriptedEngine(full), ScriptedEngine(wrong)) as it:
        pods = dict(it.pods)
        it.pods.clear()
        it.changed()
        response = await it.post(STREAM)
        it.pods.update(pods)
        it.changed()
        (event,) = [json.loads(line) async for line in lines(response)]
        assert event["error"]["message"] == "too long"
        (record,) = await it.records()
        assert record.data.outcome == "rejected"


# --- no use in waiting ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    [DeadEnd("NoCapacity", unless_pods=True), DeadEnd("EngineFailed", unless_pods=False)],
    ids=lambda end: end.reason,
)
async def test_nobody_waits_for_a_replica_that_will_not_come(tmp_path: Path, end: DeadEnd):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        asleep(it)
        waiting = asyncio.create_task(it.post(CHAT))
        await until_held(it, 1)
        it.model(dead_end=end)
        for refused in (await waiting, await it.post(CHAT)):
            error = (await refused.json())["error"]
            assert (refused.status, error["code"], refused.headers["retry-after"]) == (503, "model_unavailable", "60")
            assert error["message"] == f"The model `llama` cannot serve right now ({end.reason}). Try again later."
        assert it.app.demand.demand(MODEL.uid).arrivals == 2  # it is wanted all the same
        assert {r.data.outcome for r in await it.records(count=2)} == {"refused"}


async def test_a_dead_end_that_only_a_person_ends_tells_sdks_not_to_retry(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        asleep(it)
        for end, retried in ((DeadEnd("NoFit", True, for_a_person=True), "false"), (DeadEnd("NoCapacity", True), None)):
            it.model(dead_end=end)
            refused = await it.post(CHAT)
            error = (await refused.json())["error"]
            assert (refused.status, error["code"], refused.headers["retry-after"]) == (503, "model_unavailable", "60")
            assert refused.headers.get("x-should-retry") == retried
            if retried is not None:
                assert error["message"] == "The model `llama` cannot serve (NoFit); its owner has to mend it."


async def test_a_further_replica_without_a_place_takes_nothing_from_those_that_start(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.pods["chat/llama-1"] = replica(1, ready=False)
        it.model(dead_end=DeadEnd("NoCapacity", unless_pods=True))
        post = asyncio.create_task(it.post(CHAT))
        await until_held(it, 1)
        wake(it)
        assert (await post).status == 200
        assert (await it.post(CHAT)).status == 200


async def test_a_model_that_is_deleted_lets_nobody_wait(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        asleep(it)
        post = asyncio.create_task(it.post(CHAT))
        await until_held(it, 1)
        it.models.clear()
        it.changed()
        gone = await post
        assert (gone.status, (await gone.json())["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(("change", "status"), [({"suspended": True}, 403), ({"disabled": True}, 401)])
async def test_a_key_that_is_taken_back_meanwhile_is_not_served(tmp_path: Path, change: dict[str, Any], status: int):
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        asleep(it)
        post = asyncio.create_task(it.post(CHAT))
        await until_held(it, 1)
        it.tenants["acme"] = tenant(**change)
        wake(it)
        assert (await post).status == status
        assert engine.requests == []
        assert not it.fleet.in_flight("pod-1")


@pytest.mark.parametrize("size", [2, 256 * 1024, 512 * 1024])
async def test_a_client_that_leaves_is_removed_at_once(tmp_path: Path, size: int):
    long = {"messages": [{"role": "user", "content": "x" * size}]}
    async with gateway(tmp_path, ScriptedEngine()) as it:
        asleep(it)
        it.model(facts=Facts(vocabulary=32_000, context_length=2**20))
        for body in (CHAT | long, STREAM | long):
            post = asyncio.create_task(it.post(body))
            await until_held(it, 1)
            post.cancel()
            await until_held(it, 0)
        demand = it.app.demand.demand(MODEL.uid)
        assert (demand.held, demand.held_tokens, demand.in_flight) == (0, 0, 0)
        assert {r.data.outcome for r in await it.records(count=2)} == {"cancelled"}
        assert not it.app.holds.queues


# --- the pace ---------------------------------------------------------------------------------------------------------


class Gate:
    """An engine whose answers wait."""

    def __init__(self) -> None:
        self.open = asyncio.Semaphore(0)
        self.inside = 0
        self.most = 0
        self.order: list[str] = []

    async def __call__(self, request: EngineRequest) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.order.append(request.body["user"])
        await self.open.acquire()
        self.inside -= 1
        await serve_normally(request)


async def until_inside(gate: Gate, count: int) -> None:
    async with asyncio.timeout(20):
        while gate.inside != count:
            await asyncio.sleep(0.005)


ROOMY = {"running": 0, "waiting": 0, "kv_tokens_used": 0, "kv_tokens_total": 10**6}


async def test_lets_go_as_many_as_there_is_room_for_and_then_one_for_each_that_ends(tmp_path: Path):
    gate = Gate()
    async with gateway(tmp_path, ScriptedEngine(gate)) as it:
        asleep(it)
        posts = [asyncio.create_task(it.post({**CHAT, "user": "a"})) for _ in range(10)]
        await until_held(it, 10)
        wake(it, **ROOMY, max_running=4)
        await until_inside(gate, 4)
        await asyncio.sleep(0.3)  # several rounds
        assert (gate.inside, holding(it)) == (4, 6)
        for _ in range(10):
            gate.open.release()
            await asyncio.sleep(0.01)
        assert {(await post).status for post in posts} == {200}
        assert gate.most == 4


async def test_shares_the_room_with_the_other_gateways(tmp_path: Path):
    gate = Gate()
    async with gateway(tmp_path, ScriptedEngine(gate)) as it:
        it.app.holds.held_by_peers = lambda uid: 30 if uid == MODEL.uid else None
        asleep(it)
        posts = [asyncio.create_task(it.post({**CHAT, "user": "a"})) for _ in range(10)]
        await until_held(it, 10)
        wake(it, **ROOMY, max_running=8)
        await until_inside(gate, 2)
        await asyncio.sleep(0.3)
        assert gate.inside == 2
        for _ in range(10):
            gate.open.release()
        assert {(await post).status for post in posts} == {200}


async def test_room_in_tokens_counts_too(tmp_path: Path):
    gate = Gate()
    async with gateway(tmp_path, ScriptedEngine(gate)) as it:
        it.model(kv_percent=50)
        asleep(it)
        long = {**CHAT, "user": "x" * 4000, "max_tokens": 1}  # about 1,000 tokens
        posts = [asyncio.create_task(it.post(long)) for _ in range(6)]
        await until_held(it, 6)
        wake(it, **{**ROOMY, "kv_tokens_total": 5000}, max_running=100)
        await until_inside(gate, 3)  # 2,500 tokens are free: the third may go over
        await asyncio.sleep(0.3)
        assert gate.inside == 3
        for _ in range(6):
            gate.open.release()
        assert {(await post).status for post in posts} == {200}


async def test_a_replica_whose_room_is_not_known_gets_a_few_at_a_time(tmp_path: Path):
    gate = Gate()
    async with gateway(tmp_path, ScriptedEngine(gate)) as it:
        asleep(it)
        posts = [asyncio.create_task(it.post({**CHAT, "user": "a"})) for _ in range(9)]
        await until_held(it, 9)
        wake(it)
        await until_inside(gate, 4)
        await until_inside(gate, 9)
        for _ in range(9):
            gate.open.release()
        assert {(await post).status for post in posts} == {200}


async def test_a_tenant_with_many_delays_anothers_single_one_by_at_most_a_round(tmp_path: Path):
    gate = Gate()
    async with gateway(tmp_path, ScriptedEngine(gate)) as it:
        it.tenants["other"] = tenant("other", key="sk-other")
        asleep(it)
        it.model(limits=Limits(max_tenant_percent=100))
        posts = [asyncio.create_task(it.post({**CHAT, "user": "many"})) for _ in range(60)]
        await until_held(it, 60)
        wake(it, **ROOMY, max_running=2)
        await until_inside(gate, 2)
        posts.append(asyncio.create_task(it.post({**CHAT, "user": "single"}, key="sk-other")))
        await until_held(it, 59)
        for _ in range(61):
            gate.open.release()
        assert {(await post).status for post in posts} == {200}
        assert gate.order.index("single") < 4


async def test_a_tenant_of_higher_priority_gets_its_share_of_what_is_let_go(tmp_path: Path):
    gate = Gate()
    async with gateway(tmp_path, ScriptedEngine(gate)) as it:
        it.tenants["other"] = tenant("other", key="sk-other", priority=150)  # three times the default
        asleep(it)
        it.model(limits=Limits(max_tenant_percent=100))
        posts = [asyncio.create_task(it.post({**CHAT, "user": "usual"})) for _ in range(24)]
        posts += [asyncio.create_task(it.post({**CHAT, "user": "higher"}, key="sk-other")) for _ in range(24)]
        await until_held(it, 48)
        wake(it, **ROOMY, max_running=1)
        for _ in range(48):
            gate.open.release()
        assert {(await post).status for post in posts} == {200}
        assert gate.order[:16].count("higher") in (11, 12, 13)


async def test_wakes_by_the_streams_alone_while_the_api_server_is_away(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.hear(1, phase="stalled")
        post = asyncio.create_task(it.post(CHAT))
        await until_held(it, 1)
        it.hear(1, phase="ready")  # no object changed
        assert (await post).status == 200


async def test_when_all_streams_are_down_those_who_wait_go_to_ready_pods(tmp_path: Path):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        it.hear(1, phase="stalled")
        posts = [asyncio.create_task(it.post(CHAT)) for _ in range(6)]
        await until_held(it, 6)
        it.fleet.update("pod-1", None)
        assert {(await post).status for post in posts} == {200}
        assert it.metric("shoal_gateway_fallback_choices_total") == 6


# --- again ------------------------------------------------------------------------------------------------------------


async def refuse(request: EngineRequest) -> None:
    await request.answer(503, b'{"object":"error","message":"The request queue is full.","code":503}')


async def test_when_all_replicas_refuse_it_waits_and_tries_again(tmp_path: Path):
    engine = ScriptedEngine(refuse)
    async with gateway(tmp_path, engine) as it:
        post = asyncio.create_task(it.post(CHAT))
        async with asyncio.timeout(20):
            while len(engine.requests) < 3:
                await asyncio.sleep(0.01)
        engine.behave = serve_normally
        assert (await post).status == 200
        (record,) = await it.records()
        assert record.data.outcome == "answered"
        assert record.data.attempts >= 4


async def test_a_model_that_only_refuses_is_not_hammered(tmp_path: Path):
    engine = ScriptedEngine(refuse)
    async with gateway(tmp_path, engine) as it:
        it.model(limits=Limits(timeout_seconds=1.5))
        began = time.monotonic()
        posts = [asyncio.create_task(it.post(CHAT)) for _ in range(40)]
        answers = [await post for post in posts]
        seconds = time.monotonic() - began
        assert {answer.status for answer in answers} == {503}
        # first tries, what the budget begins with, a fifth of a retry for each request, and one a second
        assert len(engine.requests) <= 40 + 10 + 8 + seconds + 1
        assert it.metric("shoal_gateway_retry_budget_exhausted_total") > 0
        assert {r.data.outcome for r in await it.records(count=40)} == {"expired"}


async def test_after_a_bad_time_all_that_waits_goes_on_quickly(tmp_path: Path):
    engine = ScriptedEngine(refuse)
    async with gateway(tmp_path, engine) as it:
        posts = [asyncio.create_task(it.post(CHAT)) for _ in range(60)]
        await until_held(it, 60)
        async with asyncio.timeout(20):
            while it.metric("shoal_gateway_retry_budget_exhausted_total") == 0:
                await asyncio.sleep(0.01)
        engine.behave = serve_normally
        began = time.monotonic()
        assert {(await post).status for post in posts} == {200}
        assert time.monotonic() - began < 45  # at one a second it would be a minute


async def test_a_request_that_loses_one_engine_after_another_does_not_get_all_of_them(tmp_path: Path):
    async def die(request: EngineRequest) -> None:
        request.writer.transport.abort()

    engines = [ScriptedEngine(die) for _ in range(5)]
    async with gateway(tmp_path, *engines) as it:
        refused = await it.post(CHAT)
        assert (refused.status, (await refused.json())["error"]["code"]) == (503, "no_replica")
        assert sum(len(engine.requests) for engine in engines) == 3
        (record,) = await it.records()
        assert (record.data.outcome, record.data.attempts) == ("refused", 3)


async def test_a_pod_whose_keys_are_not_known_yet_is_waited_for(tmp_path: Path):
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        it.pods["chat/llama-1"] = replica(1, install_key="abcdef01")
        it.changed()
        post = asyncio.create_task(it.post(CHAT))
        await until_held(it, 1)
        await asyncio.sleep(0.3)
        assert engine.requests == []
        it.pods["chat/llama-1"] = replica(1)
        it.changed()
        assert (await post).status == 200


# --- clients that do not read -----------------------------------------------------------------------------------------


async def test_a_client_that_never_reads_holds_up_nobody(tmp_path: Path):
    async def much(request: EngineRequest) -> None:
        if not request.body.get("stream"):
            await serve_normally(request)
            return
        await request.begin_stream()
        with contextlib.suppress(ConnectionError):
            while not request.gone.is_set():
                await request.chunk(request.delta("x" * 50_000, 1))

    async with gateway(tmp_path, ScriptedEngine(much), body_seconds=1.0) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.server.port, limit=1024)
        body = json.dumps(STREAM).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-test-acme\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await reader.readline()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            while True:
                assert (await it.post(CHAT)).status == 200
                it.server.sweep()
                if "cancelled" in {r.data.outcome for r in await it.records()}:
                    break
                await asyncio.sleep(0.05)
        assert not it.fleet.in_flight("pod-1")
        writer.close()
