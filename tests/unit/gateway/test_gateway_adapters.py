"""Adapters as a client of the gateway sees them."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.api.adapters import Ensure
from shoal.api.demand import AdapterDemand, DemandMessage
from shoal.api.replica import ReplicaKeys
from shoal.core.hold.limits import Limits
from shoal.gateway import accepted, acks, leases
from shoal.gateway.adaptertarget import AdapterTarget
from shoal.gateway.target import BaseTarget
from tests.support.adapter_agents import V2, AdapterAgent, TunedGateway, adapter, name_of, pool, tuned
from tests.support.gateway import MODEL, lines, tenant
from tests.support.scripted_engine import EngineRequest, serve_normally
from tests.support.streams import until

V1_NAME, V2_NAME = name_of(), name_of(revision=V2)


async def refuse(status: int, reason: str, message: str = "secret s3://other/path", **rest: Any):
    return status, {"reason": reason, "message": message, **rest}


async def test_an_adapter_is_loaded_with_its_first_request_and_answers(tmp_path: Path):
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it:
        response = await it.ask("support")
        assert response.status == 200
        assert (await response.json())["model"] == "support"
        sent = it.engines[0].requests[0].body
        assert (sent["model"], sent["lora_path"]) == ("chat/llama", V1_NAME)
        (record,) = await it.it.records()
        assert (record.data.model, record.data.adapter) == ("chat/llama", "chat/support")
        assert record.data.adapter_revision == adapter().current.revision  # type: ignore[union-attr]
        (wanted,) = agent.ensured
        assert (wanted.uri, wanted.gateway, wanted.boot) == (
            "s3://adapters/support",
            "gateway-1",
            "boot-of-the-gateway",
        )
        for _ in range(5):
            assert (await it.ask("chat/support")).status == 200
        assert len(agent.ensured) == 1  # the lease is kept: no call in the request's way


async def test_requests_that_come_together_load_it_once(tmp_path: Path):
    gate = asyncio.Event()

    async def slowly(_: Ensure):
        await gate.wait()
        return 200, {}

    agent = AdapterAgent(1, answer=slowly)
    async with tuned(tmp_path, agent) as it:
        asked = [asyncio.create_task(it.ask()) for _ in range(20)]
        await until(lambda: it.it.app.holds.waiting == 20)
        demand = it.it.app.demand
        here = demand.adapters.demand("uid-chat-support")
        assert here is not None
        assert (here.model, here.arrivals, here.held, here.misses) == ("uid-llama", 20, 20, 20)
        assert demand.demand("uid-llama").held == 20  # the wait is demand
        gate.set()
        assert {r.status for r in await asyncio.gather(*asked)} == {200}
        assert len(agent.ensured) == 1
        here = demand.adapters.demand("uid-chat-support")
        assert here is not None
        assert (here.held, here.in_flight) == (0, 0)
        assert demand.demand("uid-llama").held == 0


async def test_operators_hear_of_each_adapter_what_the_gateway_has(tmp_path: Path):
    """What the stream says of adapters, beside the Models, as its reader takes it."""
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        assert (await it.ask()).status == 200
        book = it.it.app.demand
        full = DemandMessage.model_validate_json(b'{"boot":"b","seq":1,"full":true,"models":%b}' % book.full())
        assert full.adapters == {"uid-chat-support": AdapterDemand(model="uid-llama", arrivals=1, misses=1)}
        assert full.models is not None
        assert full.models["uid-llama"] == book.demand("uid-llama")
        changed = book.take()
        assert changed is not None
        assert (await it.ask()).status == 200
        change = DemandMessage.model_validate_json(b'{"boot":"b","seq":2,"models":%b}' % (book.take() or b""))
        assert change.adapters == {"uid-chat-support": AdapterDemand(model="uid-llama", arrivals=2, misses=1)}
        assert book.take() is None
        it.adapters.clear()
        it.changed()
        book.adapters.retain(it.it.directory.snapshot.model_index.adapter_uids)
        gone = DemandMessage.model_validate_json(b'{"boot":"b","seq":3,"models":%b}' % (book.take() or b""))
        assert gone.adapters == {"uid-chat-support": None}


async def test_a_stream_hears_comments_while_its_adapter_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(accepted, "COMMENT_SECONDS", 0.05)
    gate = asyncio.Event()

    async def slowly(_: Ensure):
        await gate.wait()
        return 200, {}

    async with tuned(tmp_path, AdapterAgent(1, answer=slowly)) as it:
        response = await it.ask(stream=True)
        assert await response.content.readline() == b": waiting for a replica\n"
        gate.set()
        assert [line async for line in lines(response)][-1] == b"[DONE]"


async def test_it_goes_where_it_is_loaded(tmp_path: Path):
    idle, home = AdapterAgent(1), AdapterAgent(2, adapters={V1_NAME: {"state": "loaded"}})
    async with tuned(tmp_path, idle, home) as it:
        for _ in range(4):
            assert (await it.ask()).status == 200
        assert not idle.ensured
        assert len(home.ensured) == 1
        here = it.it.app.demand.adapters.demand("uid-chat-support")
        assert here is not None
        assert (here.arrivals, here.misses) == (4, 0)


async def test_a_full_home_loses_to_an_idle_replica(tmp_path: Path):
    home = AdapterAgent(1, adapters={V1_NAME: {"state": "loaded"}})
    home.said = {"running": 8, "waiting": 3, "maxRunning": 8, "kvTokensUsed": 10, "kvTokensTotal": 1000}
    other = AdapterAgent(2)
    other.said = {"running": 0, "waiting": 0, "maxRunning": 8, "kvTokensUsed": 10, "kvTokensTotal": 1000}
    async with tuned(tmp_path, home, other) as it:
        assert (await it.ask()).status == 200
        assert [len(engine.requests) for engine in it.engines] == [0, 1]


async def test_without_a_live_stream_no_adapter_is_served_but_the_base_is(tmp_path: Path):
    agent = AdapterAgent(1, adapters={V1_NAME: {"state": "loaded"}})
    async with tuned(tmp_path, agent, live=False) as it:
        assert (await it.ask("chat/llama")).status == 200  # on hearsay
        asked = asyncio.create_task(it.ask())
        await until(lambda: it.it.app.holds.waiting == 1)
        assert it.asked() == [None]
        it.it.fleet.streams.set_peers([agent.peer()])
        assert (await asked).status == 200  # as soon as the stream is there
        assert it.asked() == [None, V1_NAME]


async def test_an_engine_whose_floor_is_not_loaded_yet_is_waited_for(tmp_path: Path):
    agent = AdapterAgent(1, adapters=None)
    async with tuned(tmp_path, agent) as it:
        asked = asyncio.create_task(it.ask())
        await until(lambda: it.it.app.holds.waiting == 1)
        assert not agent.ensured
        agent.adapters = {}
        await agent.say()
        assert (await asked).status == 200


async def test_a_pool_at_zero_wakes_for_an_adapter(tmp_path: Path):
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent, live=False) as it:
        pods = dict(it.it.pods)
        it.it.pods.clear()
        it.changed()
        asked = asyncio.create_task(it.ask())
        await until(lambda: it.it.app.demand.demand("uid-llama").held == 1)
        here = it.it.app.demand.adapters.demand("uid-chat-support")
        assert here is not None
        assert (here.held, here.misses) == (1, 1)
        it.it.pods.update(pods)
        it.changed()
        it.it.fleet.streams.set_peers([agent.peer()])
        assert (await asked).status == 200
        assert it.asked() == [V1_NAME]


# --- refusals -------------------------------------------------------------------------------------------------------


async def test_slots_that_are_full_at_one_replica_send_it_to_another(tmp_path: Path):
    full = AdapterAgent(1, answer=lambda _: refuse(503, "SlotsFull", retryAfter=20))
    async with tuned(tmp_path, full) as it:
        asked = asyncio.create_task(it.ask())
        await until(lambda: bool(full.ensured))
        await until(lambda: it.it.app.holds.waiting == 1)  # the only one: it waits, and that is demand
        full.answer = None
        it.it.app.leases._refused.clear()  # instead of 20 s of waiting
        await full.say(running=0)
        other = asyncio.create_task(it.ask())
        assert (await other).status == 200
        asked.cancel()


def hangs(gate: asyncio.Event, left: list[str] | None = None):
    """An agent that has no slot until the gate opens; `left` gets those whose callers took their call back."""

    async def answer(wanted: Ensure):
        try:
            await gate.wait()
        except asyncio.CancelledError:
            if left is not None:
                left.append(wanted.name)
            raise
        return 200, {}

    return answer


async def test_one_that_waits_for_a_slot_moves_to_another_replica_when_that_has_one(tmp_path: Path):
    left: list[str] = []
    one, other = (AdapterAgent(n, slots=1, said={"adapterSlotsLeased": 1}, cancels=True) for n in (1, 2))
    one.answer, other.answer = hangs(asyncio.Event(), left), hangs(asyncio.Event(), left)
    async with tuned(tmp_path, one, other) as it:
        asked = asyncio.create_task(it.ask())
        await until(lambda: len(one.ensured) + len(other.ensured) == 1)
        home, away = (one, other) if one.ensured else (other, one)
        await until(lambda: it.it.app.holds.waiting == 1)
        await away.say(adapterSlotsLeased=1)  # nothing new: it goes on waiting
        await asyncio.sleep(0.05)
        assert not away.ensured
        away.answer = None
        await away.say(adapterSlotsLeased=0)
        assert (await asked).status == 200
        assert len(away.ensured) == 1
        await until(lambda: left == [V1_NAME])  # its place in the other line is free
        assert not it.it.app.leases.under_way(V1_NAME)
        assert len(home.ensured) == 1


async def test_one_that_moved_still_takes_its_old_place_when_that_comes_first(tmp_path: Path):
    gates = asyncio.Event(), asyncio.Event()
    agents = [
        AdapterAgent(n, slots=1, said={"adapterSlotsLeased": 1}, answer=hangs(gate)) for n, gate in enumerate(gates, 1)
    ]
    async with tuned(tmp_path, *agents) as it:
        asked = asyncio.create_task(it.ask())
        await until(lambda: sum(len(a.ensured) for a in agents) == 1)
        home, away = agents if agents[0].ensured else agents[::-1]
        await away.say(adapterSlotsLeased=0)
        await until(lambda: len(away.ensured) == 1)  # somebody else was faster there: it waits at both
        gates[home.number - 1].set()
        assert (await asked).status == 200
        assert [len(engine.requests) for engine in it.engines] == [int(a is home) for a in agents]


async def test_so_many_move_as_there_are_slots(tmp_path: Path):
    one, other = (
        AdapterAgent(n, slots=1, said={"adapterSlotsLeased": 1}, answer=hangs(asyncio.Event())) for n in (1, 2)
    )
    async with tuned(tmp_path, one, other) as it:
        it.declare(*(adapter(f"a{n}") for n in range(6)))
        asked = [asyncio.create_task(it.ask(f"chat/a{n}")) for n in range(6)]
        await until(lambda: len(one.ensured) + len(other.ensured) == 6)
        before = {wanted.name for wanted in other.ensured}
        await other.say(adapterSlotsLeased=0)
        await until(lambda: len({wanted.name for wanted in other.ensured} - before) == 1)
        await asyncio.sleep(0.05)
        assert len({wanted.name for wanted in other.ensured} - before) == 1
        for task in asked:
            task.cancel()


async def test_one_that_no_replica_can_load_is_told_to_the_client_without_the_agents_words(tmp_path: Path):
    agent = AdapterAgent(1, answer=lambda _: refuse(422, "RankTooHigh"))
    async with tuned(tmp_path, agent) as it:
        response = await it.ask()
        assert response.status == 422
        error = (await response.json())["error"]
        assert error["code"] == "adapter_unusable"
        assert error["message"] == (
            "The adapter `support` cannot be loaded as it is (RankTooHigh); its owner has to mend it."
        )
        assert it.asked() == []
        (known,) = it.it.app.choices.refusals(response.headers["x-shoal-request-id"], "gateway-1")
        assert known.subject == "adapter/chat/support", "`shoal why request/ID` goes on there"


async def test_where_loading_fails_everywhere_nobody_waits(tmp_path: Path):
    agents = [AdapterAgent(n, answer=lambda _: refuse(503, "LoadFailed")) for n in (1, 2)]
    async with tuned(tmp_path, *agents) as it:
        response = await it.ask()
        assert (response.status, response.headers["retry-after"]) == (503, "60")
        assert (await response.json())["error"]["code"] == "adapter_unavailable"
        (known,) = it.it.app.choices.refusals(response.headers["x-shoal-request-id"], "gateway-1")
        assert known.subject == "adapter/chat/support"
        assert [len(a.ensured) for a in agents] == [1, 1]  # each was asked, once


async def test_an_agent_of_a_version_without_adapters_is_asked_again_only_later(tmp_path: Path):
    agent = AdapterAgent(1, answer=lambda _: refuse(404, "x"))
    async with tuned(tmp_path, agent) as it:
        asked = asyncio.create_task(it.ask())
        await until(lambda: bool(agent.ensured))
        await asyncio.sleep(0.2)
        assert len(agent.ensured) == 1
        asked.cancel()


async def test_nobody_may_wait_where_the_model_says_so(tmp_path: Path):
    agent = AdapterAgent(1, answer=lambda _: refuse(503, "SlotsFull"))
    async with tuned(tmp_path, agent) as it:
        it.it.models[MODEL.key] = dataclasses.replace(MODEL, limits=Limits(max_requests=0))
        it.changed()
        response = await it.ask()
        assert response.status == 503
        assert (await response.json())["error"]["message"] == (
            "The model `support` cannot serve right now: no replica takes its adapter now. Try again."
        )
        agent.answer = None
        it.it.app.leases._refused.clear()
        assert (await it.ask()).status == 200  # loading it is not waiting for a replica


async def test_those_who_wait_for_adapters_count_against_the_models_bounds(tmp_path: Path):
    gate = asyncio.Event()

    async def slowly(_: Ensure):
        await gate.wait()
        return 200, {}

    async with tuned(tmp_path, AdapterAgent(1, answer=slowly)) as it:
        it.it.models[MODEL.key] = dataclasses.replace(MODEL, limits=Limits(max_requests=2, max_tenant_percent=100))
        it.changed()
        asked = [asyncio.create_task(it.ask()) for _ in range(2)]
        await until(lambda: it.it.app.holds.waiting == 2)
        response = await it.ask()
        assert (response.status, (await response.json())["error"]["code"]) == (503, "hold_full")
        gate.set()
        assert {r.status for r in await asyncio.gather(*asked)} == {200}


async def test_a_client_that_leaves_leaves_nothing_waiting(tmp_path: Path):
    gate = asyncio.Event()

    async def slowly(_: Ensure):
        await gate.wait()
        return 200, {}

    async with tuned(tmp_path, AdapterAgent(1, answer=slowly)) as it:
        asked = asyncio.create_task(it.ask())
        await until(lambda: it.it.app.holds.waiting == 1)
        asked.cancel()
        await until(lambda: it.it.app.holds.waiting == 0)
        (record,) = await it.it.records()
        assert record.data.outcome == "cancelled"
        gate.set()


# --- leases ---------------------------------------------------------------------------------------------------------


async def test_a_lease_ends_with_the_engine_that_it_was_for(tmp_path: Path):
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it:
        assert (await it.ask()).status == 200
        agent.engine_boot, agent.adapters = "another", {}
        await agent.say(engineBoot="another")
        await until(lambda: it.it.fleet.live["pod-1"].engine_boot == "another")
        assert (await it.ask()).status == 200
        assert len(agent.ensured) == 2
        assert (await it.it.records(count=2))[0].data.outcome == "answered"


@pytest.mark.parametrize("state", ["retiring", "gone", "failed"])
async def test_a_lease_is_void_when_the_agent_says_anything_but_loaded(tmp_path: Path, state: str):
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it:
        assert (await it.ask()).status == 200
        await agent.set(**{V1_NAME: state})
        await until(lambda: not it.it.app.leases.is_valid("pod-1", V1_NAME))
        assert (await it.ask()).status == 200
        assert len(agent.ensured) == 2


async def test_a_lease_that_is_used_is_renewed_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it:
        assert (await it.ask()).status == 200
        monkeypatch.setattr(leases, "RENEW_SECONDS", 100.0)
        assert (await it.ask()).status == 200
        await until(lambda: len(agent.ensured) == 2)


async def test_an_old_lease_is_no_lease(tmp_path: Path):
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it:
        assert (await it.ask()).status == 200
        it.it.app.leases._leases["pod-1"][V1_NAME].until = time.monotonic() + leases.MARGIN_SECONDS
        assert (await it.ask()).status == 200
        assert len(agent.ensured) == 2


async def test_a_lease_too_short_to_be_used_is_not_asked_for_again_and_again(tmp_path: Path):
    agent = AdapterAgent(1, lease_seconds=1.0)
    async with tuned(tmp_path, agent) as it:
        asked = asyncio.create_task(it.ask())
        await until(lambda: bool(agent.ensured))
        await asyncio.sleep(0.3)
        assert len(agent.ensured) == 1
        asked.cancel()


async def test_once_leases_are_closed_a_request_waits_and_does_not_spin(tmp_path: Path):
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it:
        await it.it.app.leases.close()
        asked = asyncio.create_task(it.ask())
        await until(lambda: it.it.app.holds.waiting == 1)
        assert not agent.ensured
        asked.cancel()


async def test_a_lease_counts_when_the_stream_has_said_as_much_as_it(tmp_path: Path):
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it:
        agent.held_back = True
        asked = asyncio.create_task(it.ask())
        await until(lambda: bool(agent.ensured))
        await asyncio.sleep(0.1)
        assert it.engines[0].requests == []  # an acknowledgement of now would not tell of this request's adapter
        agent.held_back = False
        await agent.tell()
        assert (await asked).status == 200


# --- leases that are given back -------------------------------------------------------------------------------------


def streams_until(end: asyncio.Event) -> Callable[[EngineRequest], Awaitable[None]]:
    """An engine whose streams have one token, and end with the event."""

    async def behave(request: EngineRequest) -> None:
        await request.begin_stream()
        await request.chunk(request.delta("a", 1))
        await end.wait()
        await request.chunk(request.closing())
        await request.chunk(b"data: [DONE]\n\n")
        await request.end_stream()

    return behave


def reported(it: TunedGateway, uid: str) -> ReplicaKeys:
    found = it.it.fleet.report(uid)
    assert found is not None
    return found


def given_back(agent: AdapterAgent) -> list[dict[str, int]]:
    return [ack.given_back for ack in agent.acks if ack.given_back]


async def test_an_unused_lease_is_given_back_for_a_caller_that_waits_for_a_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(leases, "UNUSED_SECONDS", 0.0)
    agent = AdapterAgent(1, slots=1)

    async def when_free(wanted: Ensure):
        await agent.say(adapterSlotsLeased=1, adaptersWaiting=1)
        await until(lambda: bool(given_back(agent)))
        await agent.say(adaptersWaiting=0)
        return 200, {}

    async with tuned(tmp_path, agent) as it:
        it.declare(adapter("other"))
        assert (await it.ask()).status == 200
        agent.answer = when_free
        assert (await it.ask("chat/other")).status == 200
        assert given_back(agent) == [{V1_NAME: 1}]
        agent.answer = None
        assert (await it.ask()).status == 200
        assert [wanted.name for wanted in agent.ensured][::2] == [V1_NAME, V1_NAME]  # a new one, since it ended


async def test_while_callers_wait_one_unused_lease_after_the_other_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another gateway may have a lease of the same adapter, so the first one frees no slot."""
    monkeypatch.setattr(leases, "UNUSED_SECONDS", 0.0)
    monkeypatch.setattr(acks, "RETRY_SECONDS", 0.01)
    agent = AdapterAgent(1, slots=2)
    async with tuned(tmp_path, agent) as it:
        it.declare(adapter("other"))
        assert (await it.ask()).status == 200
        assert (await it.ask("chat/other")).status == 200
        await agent.say(adapterSlotsLeased=2, adaptersWaiting=1)
        await until(lambda: given_back(agent) == [{V1_NAME: 1}, {name_of("chat/other"): 2}])


async def test_a_lease_that_is_used_is_kept_until_its_last_request_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(leases, "UNUSED_SECONDS", 0.0)
    agent, end = AdapterAgent(1, slots=1), asyncio.Event()
    async with tuned(tmp_path, agent) as it:
        it.engines[0].behave = streams_until(end)
        response = await it.ask(stream=True)
        await until(lambda: bool(it.it.fleet.residency.running("pod-1")))
        before = len(agent.acks)
        await agent.set(**{V1_NAME: "loaded"})
        await agent.say(adapterSlotsLeased=1, adaptersWaiting=1)
        await until(lambda: reported(it, "pod-1").adapters_waiting == 1)
        assert not given_back(agent)
        assert len(agent.acks) == before, "nothing to say"
        end.set()
        await response.read()
        await until(lambda: given_back(agent) == [{V1_NAME: 1}])


@pytest.mark.parametrize("old", [True, False], ids=["an agent that numbers no grants", "right after the grant"])
async def test_a_lease_that_cannot_or_may_not_be_given_back_is_kept(tmp_path: Path, old: bool):
    agent = AdapterAgent(1, slots=1, numbers_grants=not old)
    async with tuned(tmp_path, agent) as it:
        assert (await it.ask()).status == 200
        if old:
            it.it.app.leases._leases["pod-1"][V1_NAME].used -= 60.0
        await agent.say(adapterSlotsLeased=1, adaptersWaiting=1)
        await until(lambda: reported(it, "pod-1").adapters_waiting == 1)
        await asyncio.sleep(0.05)
        assert not given_back(agent)
        assert it.it.app.leases.is_valid("pod-1", V1_NAME)


async def test_a_slot_that_an_unused_lease_takes_is_no_reason_to_load_the_adapter_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(leases, "UNUSED_SECONDS", 0.0)
    one, other = (AdapterAgent(n, slots=1) for n in (1, 2))
    async with tuned(tmp_path, one, other) as it:
        it.declare(adapter("other"))
        assert (await it.ask()).status == 200
        home, away = (one, other) if one.ensured else (other, one)
        await home.set(**{name_of("chat/other"): "loaded"})
        await home.say(adapterSlotsLeased=1)
        await until(lambda: reported(it, f"pod-{home.number}").adapter_slots_leased == 1)
        assert (await it.ask("chat/other")).status == 200
        assert not away.ensured


# --- acknowledgements -----------------------------------------------------------------------------------------------


async def test_the_agent_hears_of_each_adapter_how_many_run_and_at_once_when_a_retiring_one_ends(tmp_path: Path):
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it:
        end = asyncio.Event()
        it.engines[0].behave = streams_until(end)
        response = await it.ask(stream=True)
        base = await it.ask("chat/llama", stream=True)
        await agent.set(**{V1_NAME: "retiring"})
        await until(lambda: any(a.seq >= agent.seq and a.running_by_adapter == {V1_NAME: 1} for a in agent.acks))
        assert agent.acks[-1].running == 2
        end.set()
        await response.read()
        await base.read()
        await until(lambda: any(a.seq >= agent.seq and not a.running_by_adapter for a in agent.acks))


# --- switching (invariant 3) ----------------------------------------------------------------------------------------


async def test_a_new_revision_takes_over_and_what_runs_stays_with_the_old_one(tmp_path: Path):
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it:
        end = asyncio.Event()

        async def old_ones_take_long(request: EngineRequest) -> None:
            if request.body["lora_path"] == V1_NAME:
                await end.wait()
            await serve_normally(request)

        it.engines[0].behave = old_ones_take_long
        old = [asyncio.create_task(it.ask()) for _ in range(3)]
        await until(lambda: len(it.engines[0].requests) == 3)
        it.declare(adapter(revision=V2))
        new = await asyncio.gather(*(it.ask() for _ in range(3)))
        assert {r.status for r in new} == {200}
        end.set()
        assert {r.status for r in await asyncio.gather(*old)} == {200}
        assert sorted(it.asked(), key=str) == sorted([V1_NAME] * 3 + [V2_NAME] * 3)
        records = await it.it.records(count=6)
        assert sorted(r.data.adapter_revision or "" for r in records) == sorted(
            [f"sha256:{'1' * 64}"] * 3 + [f"sha256:{'2' * 64}"] * 3
        )


async def test_who_waited_for_the_old_revision_gets_the_one_that_answers_now(tmp_path: Path):
    gate = asyncio.Event()

    async def slowly(wanted: Ensure):
        if wanted.name == V1_NAME:
            await gate.wait()
        return 200, {}

    async with tuned(tmp_path, AdapterAgent(1, answer=slowly)) as it:
        asked = asyncio.create_task(it.ask())
        await until(lambda: it.it.app.holds.waiting == 1)
        it.declare(adapter(revision=V2))
        assert (await asked).status == 200
        assert it.asked() == [V2_NAME]
        gate.set()


@pytest.mark.parametrize("mutated", [False, True], ids=["", "without the protection"])
async def test_swaps_under_load_never_reach_the_base_and_never_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutated: bool
):
    if mutated:  # the adapter's name is left out: SGLang would answer with the base, and 200
        monkeypatch.setattr(AdapterTarget, "adapter_name", BaseTarget.adapter_name)
    agents = [AdapterAgent(n) for n in (1, 2)]
    async with tuned(tmp_path, *agents) as it:
        revisions = [f"sha256:{digit * 64}" for digit in "12345678"]
        answered = 0

        async def client() -> None:
            nonlocal answered
            for _ in range(12):
                assert (await it.ask()).status == 200
                answered += 1

        async def swap() -> None:
            before = revisions[0]
            for number, revision in enumerate(revisions[1:], 1):
                # By answers, not by the clock: no request meets more swaps than it has tries.
                await until(lambda least=12 * number: answered >= least)
                it.declare(adapter(revision=revision))
                for agent in agents:  # the agent lets the one before last go
                    await agent.set(**{name_of(revision=before): "gone"})
                before = revision

        await asyncio.gather(swap(), *(client() for _ in range(8)))
        assert (None in it.asked()) == mutated
        assert mutated or set(it.asked()) <= {name_of(revision=r) for r in revisions}
        assert {r.data.outcome for r in await it.it.records(count=96)} == {"answered"}


# --- what is taken away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "tenant taken away", "pool deleted", "pool not accepted", "another uid"])
async def test_what_is_taken_away_stops_at_once_also_for_who_waits(tmp_path: Path, how: str):
    gate = asyncio.Event()

    async def slowly(_: Ensure):
        await gate.wait()
        return 200, {}

    async with tuned(tmp_path, AdapterAgent(1, answer=slowly)) as it:
        asked = asyncio.create_task(it.ask())
        await until(lambda: it.it.app.holds.waiting == 1)
        take_away(it, how)
        response = await asked
        assert response.status == (503 if how == "pool not accepted" else 404)
        if how != "another uid":
            assert (await it.ask()).status == response.status
        gate.set()
        assert it.asked() == []


def take_away(it: TunedGateway, how: str) -> None:
    if how == "deleted":
        it.adapters.clear()
    elif how == "tenant taken away":
        it.adapters["chat/support"] = adapter(tenants=("other",))
    elif how == "pool deleted":
        it.pools.clear()
    elif how == "pool not accepted":
        it.pools["chat/pool"] = pool(accepted=False)
    else:
        it.adapters["chat/support"] = adapter(uid="made-anew")
    it.changed()


async def test_a_suspended_tenant_that_waits_gets_nothing(tmp_path: Path):
    gate = asyncio.Event()

    async def slowly(_: Ensure):
        await gate.wait()
        return 200, {}

    async with tuned(tmp_path, AdapterAgent(1, answer=slowly)) as it:
        asked = asyncio.create_task(it.ask())
        await until(lambda: it.it.app.holds.waiting == 1)
        it.it.tenants["acme"] = tenant(suspended=True)
        it.changed()
        assert (await asked).status == 403
        gate.set()


# --- errors of the engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "Got LoRA adapter that has never been loaded: x\nAll loaded adapters: dict_keys(['rival.secret@0123456789ab'])",
        "Failed to implicitly load LoRA adapter x: no such file /shoal/adapters/rival.secret@0123456789ab",
    ],
)
async def test_an_engine_that_lacks_it_is_left_for_another_and_its_words_stay_here(
    tmp_path: Path, text: str, stream: bool
):
    agents = [AdapterAgent(n, adapters={V1_NAME: {"state": "loaded"}}) for n in (1, 2)]
    async with tuned(tmp_path, *agents) as it:
        lost: list[int] = []

        async def first_one_lacks_it(request: EngineRequest) -> None:
            if lost:
                return await serve_normally(request)
            lost.append(1)
            error = {"object": "error", "message": text, "type": "BadRequestError", "code": 400}
            if stream:
                await request.begin_stream()
                await request.chunk(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
                await request.end_stream()
            else:
                await request.answer(400, json.dumps(error).encode())

        for engine in it.engines:
            engine.behave = first_one_lacks_it
        response = await it.ask(stream=stream)
        assert response.status == 200
        assert "rival" not in await response.text()
        assert it.asked() == [V1_NAME, V1_NAME]
        assert [len(e.requests) for e in it.engines] == [1, 1]


@pytest.mark.parametrize("model", ["support", "chat/llama"])
async def test_other_tenants_adapters_are_never_in_an_error(tmp_path: Path, model: str):
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it:
        texts = iter(
            [
                "LoRA adapter rival.secret@0123456789ab is busy",
                "something about rival.secret@0123456789ab",
                "All loaded adapters: dict_keys(['rival'])",
            ]
        )

        async def complain(request: EngineRequest) -> None:
            body = {"object": "error", "message": next(texts), "type": "BadRequestError", "code": 400}
            await request.answer(400, json.dumps(body).encode())

        it.engines[0].behave = complain
        for _ in range(3):
            response = await it.ask(model)
            assert response.status == 400
            assert (await response.json())["error"]["message"] == "The engine refused the request."


async def test_an_engine_that_never_has_it_is_not_asked_for_ever(tmp_path: Path):
    agent = AdapterAgent(1)
    async with tuned(tmp_path, agent) as it:

        async def never(request: EngineRequest) -> None:
            body = {"object": "error", "message": "Got LoRA adapter that has never been loaded: x", "code": 400}
            await request.answer(400, json.dumps(body).encode())

        it.engines[0].behave = never
        response = await it.ask()
        assert response.status == 503
        assert len(it.engines[0].requests) == 3


# --- the list -------------------------------------------------------------------------------------------------------


async def test_models_lists_adapters_with_their_base(tmp_path: Path):
    async with tuned(tmp_path, AdapterAgent(1)) as it:
        it.declare(adapter("private", tenants=("other",)), adapter("broken", revision=None, reason="Corrupt"))
        headers = {"authorization": "Bearer sk-test-acme"}
        response = await it.it.session.get(f"{it.it.url}/v1/models", headers=headers)
        cards = {card["id"]: card for card in (await response.json())["data"]}
        assert set(cards) == {"llama", "support"}
        assert (cards["support"]["root"], cards["support"]["parent"]) == ("chat/support", "chat/llama")
        assert cards["llama"]["parent"] is None
        response = await it.it.session.get(f"{it.it.url}/v1/models/broken", headers=headers)
        assert response.status == 503
        assert (await response.json())["error"]["message"] == (
            "The adapter `broken` does not answer now (Corrupt); its status says more. Try again later."
        )
        response = await it.it.session.get(f"{it.it.url}/v1/models/private", headers=headers)
        assert response.status == 404
