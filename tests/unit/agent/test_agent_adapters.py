"""A replica's adapters as gateways and operators see them: over HTTP, beside an engine that a test can break."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.agent.adapters import calls, service
from shoal.api import adapters as wire
from shoal.api import reasons
from shoal.api.adapters import AdapterSettings, AdapterWanted
from shoal.artifacts import ArtifactError
from shoal.core import drain
from shoal.core.lora.lifecycle import leases, planstep, registry, unload
from tests.support.adapter_world import wanted
from tests.support.agentpod import KEYS, Pod, Stream, make_quick
from tests.support.waiting import until_async

A, B, C, D = (wanted(number) for number in range(4))


def fill(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")


class Sources:
    """Where adapters come from: brings a folder with one file, or fails, or takes its time."""

    def __init__(self) -> None:
        self.fails: dict[str, Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.brought: list[str] = []

    async def bring(self, adapter: AdapterWanted, folder: Path) -> None:
        await self.gate.wait()
        if adapter.name in self.fails:
            raise self.fails[adapter.name]
        self.brought.append(adapter.name)
        await asyncio.to_thread(fill, folder)


def pool_of(slots: int = 3, cached: int = 3) -> AdapterSettings:
    return AdapterSettings(
        pool="chat/llama", slots=slots, cached=cached, max_rank=64, target_modules=("q_proj",), max_bytes=1 << 20
    )


@pytest.fixture
def sources() -> Sources:
    return Sources()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch)
    # The seconds of the rules are tested where the rules are.
    monkeypatch.setattr(drain, "RESTART_SECONDS", 0.0)
    monkeypatch.setattr(unload, "LINGER_SECONDS", 0.0)
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.3)
    monkeypatch.setattr(service, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(registry, "RETRY_SECONDS", 0.2)


@pytest.fixture
async def pod(tmp_path: Path, sources: Sources) -> AsyncGenerator[Pod]:
    async with running(tmp_path, sources) as pod:
        yield pod


@asynccontextmanager
async def running(folder: Path, sources: Sources, settings: AdapterSettings | None = None) -> AsyncGenerator[Pod]:
    pod = Pod(folder, pool=settings or pool_of(), bring=sources.bring)
    pod.keys.write_text(json.dumps(KEYS))
    async with pod.running():
        pod.boot("boot-1")
        try:
            yield pod
        finally:
            pod.engine.gate.set()


@asynccontextmanager
async def gateway(pod: Pod, caller: str = "gw-0", boot: str = "g") -> AsyncGenerator[Stream]:
    """One that listens, and knows that adapters are served."""
    async with pod.stream(caller=caller, boot=boot) as stream:
        await stream.message()
        while stream.state.get("adapters") is None:
            assert await stream.message() is not None
        yield stream


async def until_state(stream: Stream, adapter: AdapterWanted, state: str | None) -> None:
    def now() -> str | None:
        held = stream.state.get("adapters")
        assert isinstance(held, dict)
        return held.get(adapter.name, {}).get("state")  # pyright: ignore

    while now() != state:
        assert await stream.message() is not None


async def acks(
    pod: Pod, stream: Stream, running: dict[str, int] | None = None, caller: str = "gw-0", boot: str = "g"
) -> None:
    counts = running or {}
    status, text = await pod.ack(stream, sum(counts.values()), caller=caller, boot=boot, runningByAdapter=counts)
    assert status == 204, text


# --- ensure ---------------------------------------------------------------------------------------------------------


async def test_an_adapter_is_staged_and_loaded_with_the_first_call_that_wants_it(pod: Pod) -> None:
    async with gateway(pod) as stream:
        status, lease = await pod.ensure(stream, A)
        assert status == 200
        assert (lease["name"], lease["engineBoot"], lease["loaded"], lease["seconds"]) == (A.name, "boot-1", True, 10.0)
        assert pod.engine.adapters == {A.name: str(pod.files.path(A.name))}
        await until_state(stream, A, "loaded")
        assert stream.seq <= lease["seq"], "the lease came before the message that calls it loaded"
        status, again = await pod.ensure(stream, A)
        assert (status, again["loaded"]) == (200, False)
        assert pod.engine.calls == [f"load {A.name}"]


async def test_callers_who_want_the_same_adapter_share_one_load(pod: Pod, sources: Sources) -> None:
    async with gateway(pod) as one, gateway(pod, "gw-1", "h") as other:
        sources.gate.clear()
        asked = [asyncio.create_task(pod.ensure(one, A)) for _ in range(3)]
        asked.append(asyncio.create_task(pod.ensure(other, A, caller="gw-1", boot="h")))
        await until_state(one, A, "staging")
        sources.gate.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 4
    assert sources.brought == [A.name]
    assert pod.engine.calls == [f"load {A.name}"]


async def test_an_engine_is_asked_for_one_thing_at_a_time(pod: Pod) -> None:
    await pod.floor(C)
    async with gateway(pod) as stream:
        await asyncio.gather(pod.ensure(stream, A), pod.ensure(stream, B))
        await until_state(stream, C, "loaded")
    assert sorted(pod.engine.calls) == sorted(f"load {each.name}" for each in (A, B, C))
    assert pod.engine.most_in_call == 1


async def test_who_hangs_up_while_it_waits_for_a_slot_waits_no_longer(pod: Pod) -> None:
    async with gateway(pod) as stream:
        for each in (A, B):
            assert (await pod.ensure(stream, each))[0] == 200
        await acks(pod, stream, {A.name: 1, B.name: 1})
        third = asyncio.create_task(pod.ensure(stream, C))
        await stream.until(adaptersWaiting=1)
        third.cancel()
        async with asyncio.timeout(20):
            while stream.state.get("adaptersWaiting"):
                await acks(pod, stream, {A.name: 1, B.name: 1})
                assert await stream.message() is not None
        assert C.name not in pod.engine.adapters


async def test_when_all_slots_are_leased_the_next_adapter_waits_and_the_wait_is_told(pod: Pod) -> None:
    async with gateway(pod) as stream:
        for each in (A, B):
            assert (await pod.ensure(stream, each))[0] == 200
        await acks(pod, stream, {A.name: 1, B.name: 1})
        third = asyncio.create_task(pod.ensure(stream, C))
        await stream.until(adaptersWaiting=1, adapterSlots=2, adapterSlotsLeased=2)
        status, refusal = await pod.ensure(stream, D, seconds=0.1)
        assert (status, refusal["reason"]) == (503, "SlotsFull")
        assert refusal["message"] == "all 2 slots are used by other adapters"
        _, text = await pod.get("/metrics")
        assert 'shoal_agent_adapter_refusals_total{layer="L4",reason="SlotsFull"} 1.0' in text
        assert not third.done()
        await acks(pod, stream, {B.name: 1})  # the last request of A has ended, and its lease ends soon
        status, lease = await third
        assert (status, lease["name"]) == (200, C.name)
        assert lease["waitedSeconds"] > 0
        # An adapter that has a slot is no further one: it does not wait.
        assert (await pod.ensure(stream, B, seconds=0.1))[0] == 200


async def test_what_was_used_longest_ago_goes_for_what_is_wanted_now(tmp_path: Path, sources: Sources) -> None:
    async with running(tmp_path, sources, pool_of(slots=2, cached=2)) as pod, gateway(pod) as stream:
        for each in (A, B):
            assert (await pod.ensure(stream, each))[0] == 200
            await until_state(stream, each, "loaded")
            await acks(pod, stream)
        wants = asyncio.create_task(pod.ensure(stream, C))
        await until_state(stream, A, "retiring")
        assert f"unload {A.name}" not in pod.engine.calls
        await acks(pod, stream)
        assert (await wants)[0] == 200
        assert pod.engine.calls[-2:] == [f"unload {A.name}", f"load {C.name}"]
        await until_async(lambda: not pod.files.path(A.name).exists())
        assert set(pod.engine.adapters) == {B.name, C.name}
        await stream.until(adapterEvictionsTotal=1)


async def test_who_does_not_listen_gets_no_lease(pod: Pod) -> None:
    async with gateway(pod) as stream:
        for status, refusal in (
            await pod.ensure(stream, A, caller="gw-9"),
            await pod.ensure(stream, A, boot="other"),
            await pod.ensure(stream, A, agentBoot="a former one"),
        ):
            assert (status, refusal["reason"]) == (409, "NotListening")
    assert pod.engine.calls == []


async def test_an_operator_loads_ahead_and_takes_no_slot(pod: Pod) -> None:
    async with gateway(pod) as stream:
        for each in (A, B, C):
            status, lease = await pod.ensure(None, each, key="operator-key")
            assert (status, lease["seconds"]) == (200, 0.0)
        assert stream.state["adapterSlotsLeased"] == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"revision": B.revision}, "is no name of revision"),
        ({"name": B.name}, "the path says"),
        ({"waitSeconds": 61}, "waitSeconds"),
        ({"uri": None}, "uri"),
        ({"revision": "sha256:short"}, "revision"),
    ],
)
async def test_what_is_no_request_is_explained(pod: Pod, body: dict[str, Any], says: str) -> None:
    async with gateway(pod) as stream:
        status, refusal = await pod.ensure(stream, A, **body)
        assert (status, refusal["reason"]) == (400, "Invalid")
        assert says in refusal["message"]


async def test_keys_decide_who_may_ask(pod: Pod) -> None:
    async with gateway(pod) as stream:
        assert (await pod.ensure(stream, A, key="wrong"))[0] == 401
        assert (await pod.floor(A, key="gateway-key"))[0] == 403
        assert (await pod.floor(A, key="wrong"))[0] == 401


async def test_without_a_pool_there_are_no_adapters(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    pod.keys.write_text(json.dumps(KEYS))
    async with pod.running():
        pod.boot("boot-1")
        async with pod.stream(caller="gw-0", boot="g") as stream:
            await stream.until(phase="ready")
            assert "adapters" not in stream.state
            status, refusal = await pod.ensure(stream, A)
            assert (status, refusal["message"]) == (404, "the replica's Model has no LoRAPool")
            assert (await pod.floor(A))[0] == 404


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "message", "status"),
    [
        (reasons.RANK_TOO_HIGH, "128 > 64 of pool chat/llama", 422),
        (reasons.CORRUPT, "its header is broken", 422),
        (reasons.SOURCE_UNREACHABLE, "nobody answers", 503),
    ],
)
async def test_files_that_cannot_be_had_are_told_and_disturb_nobody(
    pod: Pod, sources: Sources, reason: str, message: str, status: int
) -> None:
    sources.fails[A.name] = ArtifactError(reason, message)
    async with gateway(pod) as stream:
        found, refusal = await pod.ensure(stream, A)
        assert (found, refusal["reason"], refusal["message"]) == (status, reason, message)
        await until_state(stream, A, "failed")
        assert (await pod.ensure(stream, B))[0] == 200
    assert pod.engine.calls == [f"load {B.name}"]


async def test_a_source_that_nobody_thought_of_ends_no_agent(pod: Pod, sources: Sources) -> None:
    sources.fails[A.name] = ValueError("invalid literal")
    async with gateway(pod) as stream:
        found, refusal = await pod.ensure(stream, A)
        assert (found, refusal["reason"]) == (503, reasons.SOURCE_UNREACHABLE)
        assert refusal["message"] == "its files cannot be fetched: ValueError"
        assert (await pod.ensure(stream, B))[0] == 200


async def test_a_source_that_is_there_again_is_tried_again(pod: Pod, sources: Sources) -> None:
    sources.fails[A.name] = ArtifactError(reasons.SOURCE_UNREACHABLE, "nobody answers")
    await pod.floor(A)
    async with gateway(pod) as stream:
        await until_state(stream, A, "failed")
        del sources.fails[A.name]
        await until_state(stream, A, "loaded")


async def test_an_engines_refusal_is_told_without_the_names_of_others(pod: Pod) -> None:
    pod.engine.refuses[A.name] = "rank is incompatible with the pool. Loaded LoRAs: dict_keys(['rival.secret@1'])"
    async with gateway(pod) as stream:
        status, refusal = await pod.ensure(stream, A)
    assert (status, refusal["reason"], refusal["message"]) == (
        503,
        "LoadFailed",
        "rank is incompatible with the pool.",
    )
    await until_async(lambda: not pod.files.path(A.name).exists())


async def test_a_load_that_hangs_is_told_and_holds_up_neither_stream_nor_acknowledgements_nor_drain(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "LOAD_SECONDS", 0.2)
    monkeypatch.setattr(drain, "IDLE_SECONDS", 0.1)
    async with gateway(pod) as stream:
        pod.engine.gate.clear()
        await pod.floor(A)
        status, refusal = await pod.ensure(stream, A)
        assert (status, refusal["reason"]) == (503, "LoadHangs")
        assert refusal["message"] == "the engine did not finish loading it within 0.2 s"
        await until_state(stream, A, "failed")
        await acks(pod, stream)
        pod.engine.gate.set()  # it does finish, after all
        await until_state(stream, A, "loaded")
        pod.engine.gate.clear()
        hanging = asyncio.create_task(pod.ensure(stream, B))
        await until_async(lambda: f"load {B.name}" in pod.engine.calls)
        hook = asyncio.create_task(pod.hook())
        await stream.until(phase="draining")
        await acks(pod, stream)
        assert (await asyncio.wait_for(hook, 20)).startswith("idle")
        assert (await hanging)[1]["reason"] in ("Draining", "LoadHangs")
        pod.engine.gate.set()


async def test_an_unload_that_hangs_is_told_and_asked_again(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "UNLOAD_SECONDS", 0.2)
    await pod.floor(A)
    async with gateway(pod) as stream:
        await until_state(stream, A, "loaded")
        pod.engine.gate.clear()
        await pod.floor()
        await until_state(stream, A, "retiring")
        await acks(pod, stream)
        await until_state(stream, A, "failed")
        assert stream.state["adapters"][A.name]["reason"] == "LoadHangs"  # pyright: ignore
        pod.engine.gate.set()
        await until_state(stream, A, None)
        assert A.name not in pod.engine.adapters


async def test_a_draining_replica_loads_nothing_more(pod: Pod) -> None:
    async with gateway(pod) as stream:
        hook = asyncio.create_task(pod.hook())
        await stream.until(phase="draining")
        status, refusal = await pod.ensure(stream, A)
        assert (status, refusal["reason"], refusal["message"]) == (503, "Draining", "the replica drains")
        await acks(pod, stream)
        await hook


# --- the floor ------------------------------------------------------------------------------------------------------


async def test_the_floor_is_loaded_before_adapters_are_spoken_of(pod: Pod, sources: Sources) -> None:
    pod.engine.ready = 503
    sources.gate.clear()
    assert (await pod.floor(A, B))[0] == 204
    async with pod.stream(caller="gw-0", boot="g") as stream:
        pod.engine.ready = 200
        await stream.until(phase="ready")
        assert stream.state.get("adapters") is None
        sources.gate.set()
        while stream.state.get("adapters") is None:
            assert await stream.message() is not None
        assert stream.state["adapters"] == {each.name: {"state": "loaded"} for each in (A, B)}


async def test_a_new_engine_gets_the_floor_anew_and_leases_are_over(pod: Pod) -> None:
    await pod.floor(A)
    async with gateway(pod) as stream:
        await until_state(stream, A, "loaded")
        assert (await pod.ensure(stream, B))[0] == 200
        pod.engine.adapters.clear()
        pod.boot("boot-2")
        await stream.until(engineBoot="boot-2")
        assert stream.state["adapters"] is None
        await stream.until(adapters={A.name: {"state": "loaded"}})
        assert stream.state["adapterSlotsLeased"] == 0
        assert (await pod.ensure(stream, A))[1]["engineBoot"] == "boot-2"


async def test_what_leaves_the_floor_is_unloaded_when_every_gateway_has_acknowledged_that_none_of_it_runs(
    pod: Pod,
) -> None:
    await pod.floor(A, B)
    async with gateway(pod) as one, gateway(pod, "gw-1", "h") as other:
        for each in (A, B):
            await until_state(one, each, "loaded")
        await pod.floor(B)
        for stream in (one, other):
            await until_state(stream, A, "retiring")
        await acks(pod, one)
        await acks(pod, other, {A.name: 1}, "gw-1", "h")
        await asyncio.sleep(0.2)
        assert f"unload {A.name}" not in pod.engine.calls
        assert pod.files.path(A.name).exists()
        await acks(pod, other, {}, "gw-1", "h")
        await until_state(one, A, None)
    await until_async(lambda: set(pod.engine.adapters) == {B.name})
    await until_async(lambda: not pod.files.path(A.name).exists())


async def test_an_ensure_takes_back_a_retirement_that_the_engine_has_not_heard_of(pod: Pod) -> None:
    await pod.floor(A)
    async with gateway(pod) as stream:
        await until_state(stream, A, "loaded")
        await pod.floor()
        await until_state(stream, A, "retiring")
        status, lease = await pod.ensure(stream, A)
        assert (status, lease["loaded"]) == (200, False)
        await until_state(stream, A, "loaded")
        assert stream.seq == lease["seq"]
        assert pod.engine.calls == [f"load {A.name}"]
        await until_state(stream, A, "retiring")  # with the end of the lease: it left the floor
        await acks(pod, stream)
        await until_state(stream, A, None)


async def test_pinned_adapters_are_never_evicted_and_what_has_no_place_is_told(pod: Pod) -> None:
    await pod.floor(*(each.model_copy(update={"pinned": True}) for each in (A, B, C)), D)
    async with gateway(pod) as stream:
        await until_state(stream, C, "loaded")
        await until_state(stream, D, "failed")
        held = stream.state["adapters"]
        assert isinstance(held, dict)
        assert held[D.name] == {
            "state": "failed",
            "reason": "NoRoom",
            "message": "all 3 places hold adapters that are pinned or in use",
        }
        status, refusal = await pod.ensure(stream, wanted(9), seconds=0.2)
        assert (status, refusal["message"]) == (503, "all 3 places hold adapters in use")
        assert set(pod.engine.adapters) == {A.name, B.name, C.name}


@pytest.mark.parametrize("restart_first", [False, True])
async def test_an_adapter_whose_load_ended_the_engine_twice_waits_and_says_so_and_others_are_loaded(
    pod: Pod, restart_first: bool
) -> None:
    """The agent sees the broken call first, or the engine's next start."""
    engine = pod.engine
    engine.deadly.add(A.name)
    engine.gate.clear()
    await pod.floor(A, B)
    async with pod.stream(caller="gw-0", boot="g") as stream:
        for ends in (1, 2):
            await until_async(lambda ends=ends: engine.calls.count(f"load {A.name}") == ends)
            if restart_first:
                pod.boot(f"boot-{ends + 1}")
                await stream.until(engineBoot=f"boot-{ends + 1}")
            engine.gate.set()
            await until_async(lambda: engine.dead)
            if not restart_first:
                pod.boot(f"boot-{ends + 1}")
                await stream.until(engineBoot=f"boot-{ends + 1}")
            engine.dead = False
        engine.gate.set()
        while not stream.state.get("adapters"):
            assert await stream.message() is not None
        await until_state(stream, B, "loaded")
        held = stream.state["adapters"]
        assert isinstance(held, dict)
        told = held[A.name]  # pyright: ignore
        assert (told["state"], told["reason"]) == ("failed", "LoadEndedEngine")
        assert told["message"].startswith(
            "the engine ended while it loaded this adapter, 2 times in a row; next try at 20"
        )
        status, refusal = await pod.ensure(stream, A)
        assert (status, refusal["reason"], refusal["message"]) == (503, "LoadEndedEngine", told["message"])
    assert engine.calls == [f"load {A.name}", f"load {A.name}", f"load {B.name}"]


# --- restarts of the agent --------------------------------------------------------------------------------------------


async def test_an_agent_that_restarts_finds_what_the_engine_has(pod: Pod) -> None:
    for each in (A, B):
        pod.files.path(each.name).mkdir(parents=True)
        pod.engine.adapters[each.name] = str(pod.files.path(each.name))
    async with gateway(pod) as stream:
        assert stream.state["adapters"] == {each.name: {"state": "loaded"} for each in (A, B)}
        assert (await pod.ensure(stream, A))[0] == 200
    assert pod.engine.calls == []


async def test_an_agent_killed_while_it_retired_goes_on_with_that(pod: Pod) -> None:
    """Its predecessor put the files away and asked for the unload, which may come at any time: not to be used."""
    pod.engine.adapters[A.name] = str(pod.files.path(A.name))
    async with gateway(pod) as stream:
        assert stream.state["adapters"] in ({}, {A.name: {"state": "retiring"}})
        await until_async(lambda: pod.engine.adapters == {})
        status, lease = await pod.ensure(stream, A)
        assert (status, lease["loaded"]) == (200, True)
    assert pod.engine.calls == [f"unload {A.name}", f"load {A.name}"]


async def test_an_agent_killed_while_it_loaded_finds_it_loaded(pod: Pod) -> None:
    pod.files.path(A.name).mkdir(parents=True)
    async with gateway(pod) as stream:
        pod.engine.adapters[A.name] = str(pod.files.path(A.name))  # after the agent asked what there is
        assert (await pod.ensure(stream, A))[0] == 200
    assert pod.engine.calls == [f"load {A.name}"]


async def test_an_engine_that_lost_an_adapter_is_believed(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planstep, "LIST_SECONDS", 0.05)
    await pod.floor(A)
    async with gateway(pod) as stream:
        await until_state(stream, A, "loaded")
        pod.engine.adapters.clear()
        await until_state(stream, A, "staging")
        await until_state(stream, A, "loaded")
    assert pod.engine.calls == [f"load {A.name}"] * 2


async def test_adapters_of_others_in_the_engine_are_left_alone_and_take_their_place(pod: Pod) -> None:
    pod.engine.adapters["by-hand"] = "/somewhere"
    await pod.floor(A, B, C)
    async with gateway(pod) as stream:
        await until_state(stream, C, "failed")
    assert set(pod.engine.adapters) == {"by-hand", A.name, B.name}


async def test_scrapers_see_adapters_without_their_names(pod: Pod) -> None:
    async with gateway(pod) as stream:
        await pod.ensure(stream, A)
        await stream.until(adapterLoadsTotal=1)
    _, text = await pod.get("/metrics")
    assert 'shoal_agent_adapters{state="loaded"} 1.0' in text
    assert "shoal_agent_adapter_load_seconds_count 1.0" in text
    assert "shoal_replica_adapter_slots 2.0" in text
    assert A.name not in text


def test_a_lease_lasts_as_long_as_the_contract_says() -> None:
    assert wire.LEASE_SECONDS == 10.0
