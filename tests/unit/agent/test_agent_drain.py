"""A drain as kubelet and gateways see it: over HTTP, with an engine beside it that the test moves."""

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shoal.agent import hook as hooks
from shoal.core import drain
from tests.support.agentpod import KEYS, Pod, make_quick
from tests.support.fake_engine import load
from tests.support.waiting import until_async


@pytest.fixture
async def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Pod]:
    make_quick(monkeypatch)
    # The seconds of the rules are tested in test_drain_decision.py.
    monkeypatch.setattr(drain, "IDLE_SECONDS", 0.1)
    pod = Pod(tmp_path)
    pod.keys.write_text(json.dumps(KEYS))
    async with pod.running():
        # The agent comes first, as in a pod, and sees the engine start.
        await until_async(lambda: pod.drain.has_observed)
        async with pod.stream("operator-key") as stream:
            await stream.message()
            pod.boot("boot-1")
            await stream.until(phase="ready")
        yield pod


@asynccontextmanager
async def hooked(pod: Pod) -> AsyncGenerator[asyncio.Task[str]]:
    """A kubelet that waits for the hook."""
    task = asyncio.create_task(pod.hook())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def still_waits(task: asyncio.Task[str]) -> bool:
    await asyncio.wait([task], timeout=0.4)
    return not task.done()


async def test_the_hook_returns_when_the_last_stream_has_ended_and_was_acknowledged(pod: Pod) -> None:
    pod.engine.ranks, pod.engine.active, pod.engine.requests = [load(running=1)], 1, 1
    async with pod.stream(caller="gw-0", boot="g") as stream:
        await stream.until(phase="ready", running=1)
        assert (await pod.ack(stream, 1))[0] == 204
        async with hooked(pod) as hook:
            await stream.until(phase="draining")
            assert (await pod.ack(stream, 1))[0] == 204
            assert await still_waits(hook)
            pod.engine.ranks, pod.engine.active = [load()], 0
            assert await still_waits(hook)
            assert (await pod.ack(stream, 0))[0] == 204
            text = await asyncio.wait_for(hook, 20)
    assert text == "idle: no gateway has anything in flight here, and the engine is idle"


async def test_draining_is_told_at_once_and_to_those_who_come_later(pod: Pod) -> None:
    async with pod.stream(caller="gw-0", boot="g") as early, hooked(pod):
        await early.until(phase="draining")
        assert early.messages[-1]["keys"] == {"phase": "draining"}
        async with pod.stream(caller="gw-1", boot="h") as late:
            await late.message()
            assert late.state["phase"] == "draining"
            assert late.seq >= early.seq


async def test_zero_in_flight_of_before_the_barrier_does_not_count(pod: Pod) -> None:
    async with pod.stream(caller="gw-0", boot="g") as stream:
        await stream.until(phase="ready")
        before = dict(stream.messages[-1])
        async with hooked(pod) as hook:
            await stream.until(phase="draining")
            assert (await pod.ack(stream, 0, seq=before["seq"]))[0] == 204
            assert await still_waits(hook)
            assert (await pod.ack(stream, 0))[0] == 204
            assert (await asyncio.wait_for(hook, 20)).startswith("idle")


async def test_without_gateways_the_idle_engine_may_go(pod: Pod) -> None:
    assert (await asyncio.wait_for(pod.hook(), 20)).startswith("idle")


async def test_an_engine_that_still_loads_may_go(pod: Pod) -> None:
    await pod.engine_server.close()
    pod.boot("boot-2")
    async with pod.stream() as stream:
        await stream.until(phase="loading", engineBoot="boot-2")
    assert await asyncio.wait_for(pod.hook(), 20) == "gone: nothing listens on the engine's port"


async def test_an_engine_that_cannot_be_asked_is_waited_for(pod: Pod) -> None:
    pod.engine.raw_loads = "nonsense"
    async with hooked(pod) as hook:
        assert await still_waits(hook)
        pod.engine.raw_loads = None
        assert (await asyncio.wait_for(hook, 20)).startswith("idle")


async def test_scrapers_see_the_drain(pod: Pod) -> None:
    pod.engine.active = pod.engine.requests = 1
    assert "shoal_agent_draining 0.0" in (await pod.get("/metrics"))[1]
    async with hooked(pod) as hook:
        assert await still_waits(hook)
        metrics = (await pod.get("/metrics"))[1]
    assert "shoal_agent_draining 1.0" in metrics
    assert "shoal_agent_stalled 0.0" in metrics


async def test_an_operators_stream_holds_nothing_up(pod: Pod) -> None:
    async with pod.stream("operator-key", caller="op-0", boot="o"):
        assert (await asyncio.wait_for(pod.hook(), 20)).startswith("idle")


async def test_a_gateway_that_vanishes_holds_the_engine_for_its_claim(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "CLAIM_SECONDS", 3.0)
    async with pod.stream(caller="gw-0", boot="g") as stream:
        await stream.message()
    async with hooked(pod) as hook:
        assert await still_waits(hook)
        assert (await asyncio.wait_for(hook, 20)).startswith("idle")


async def test_a_gateway_of_an_older_version_never_acknowledges_and_is_not_waited_for_for_ever(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "CLAIM_SECONDS", 3.0)
    async with pod.stream(), hooked(pod) as hook:  # without a name
        assert await still_waits(hook)
        assert (await asyncio.wait_for(hook, 20)).startswith("idle")


async def test_a_request_that_the_engine_still_answers_holds_it_though_nobody_claims_it(pod: Pod) -> None:
    pod.engine.active = pod.engine.requests = 1
    async with hooked(pod) as hook:
        assert await still_waits(hook)
        pod.engine.active = 0
        assert (await asyncio.wait_for(hook, 20)).startswith("idle")


async def test_the_hook_may_be_called_again_and_both_calls_return(pod: Pod) -> None:
    """A restarted kubelet calls a second time; the first call's connection is gone."""
    pod.engine.active = pod.engine.requests = 1
    async with pod.stream(caller="gw-0", boot="g") as stream:
        async with hooked(pod) as first:
            await stream.until(phase="draining")
            barrier = stream.seq
            assert await still_waits(first)
        async with hooked(pod) as second:
            assert await still_waits(second)
            assert stream.seq == barrier
            pod.engine.active = 0
            await pod.ack(stream, 0)
            assert (await asyncio.wait_for(second, 20)).startswith("idle")
        assert (await asyncio.wait_for(pod.hook(), 20)).startswith("idle")


async def test_an_engine_that_was_not_stopped_serves_again(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "AFTER_SECONDS", 0.5)
    async with pod.stream(caller="gw-0", boot="g") as stream:
        await stream.message()
        async with hooked(pod) as hook:
            await stream.until(phase="draining")
            await pod.ack(stream, 0)
            await asyncio.wait_for(hook, 20)
        await stream.until(phase="ready")
        # And another drain is another barrier: what was acknowledged for the first one is void.
        async with hooked(pod) as hook:
            await stream.until(phase="draining")
            assert await still_waits(hook)
            await pod.ack(stream, 0)
            assert (await asyncio.wait_for(hook, 20)).startswith("idle")


async def test_a_new_process_of_the_engine_ends_the_drain(pod: Pod) -> None:
    """Liveness: hook, SIGTERM, restart, in a pod that stays."""
    pod.engine.active = pod.engine.requests = 1
    async with pod.stream(caller="gw-0", boot="g") as stream, hooked(pod) as hook:
        await stream.until(phase="draining")
        pod.boot("boot-2")
        assert await asyncio.wait_for(hook, 20) == "restarted: the engine to be stopped is gone"
        await stream.until(phase="ready", engineBoot="boot-2")


async def test_drain_seconds_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch)
    pod = Pod(tmp_path, drain_seconds=0.5)
    pod.keys.write_text(json.dumps(KEYS))
    pod.boot("boot-1")
    async with pod.running(), pod.stream(caller="gw-0", boot="g") as stream:
        await stream.until(phase="ready")
        assert await asyncio.wait_for(pod.hook(), 20) == "time-over: drainSeconds (0.5) are over"


async def test_an_agent_that_restarted_beside_its_engine_does_not_trust_what_it_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_quick(monkeypatch)
    monkeypatch.setattr(drain, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(drain, "RESTART_SECONDS", 4.0)
    pod = Pod(tmp_path)
    pod.keys.write_text(json.dumps(KEYS))
    pod.boot("boot-1")  # before the agent
    async with pod.running(), hooked(pod) as hook:
        assert await still_waits(hook)
        assert (await asyncio.wait_for(hook, 20)).startswith("idle")


async def test_nobody_drains_from_outside_the_pod(pod: Pod) -> None:
    """Earlier versions had a hook on the agent's port, for a token that stood in the pod."""
    for path in ("/v1/drain", "/v1/replica/drain"):
        assert (await pod.get(path, "gateway-key"))[0] == 404
    async with pod.stream() as stream:
        await stream.message()
        assert stream.state["phase"] == "ready"


async def test_an_agent_that_restarts_during_the_drain_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_quick(monkeypatch)
    monkeypatch.setattr(drain, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(drain, "RESTART_SECONDS", 1.0)
    pod = Pod(tmp_path)
    pod.engine.active = pod.engine.requests = 1
    pod.keys.write_text(json.dumps(KEYS))
    pod.boot("boot-1")
    async with hooked(pod) as hook:
        async with pod.running(), pod.stream() as stream:
            await stream.until(phase="draining")
        assert await still_waits(hook)
        successor = Pod(tmp_path)
        successor.engine.active = successor.engine.requests = 1
        async with successor.running(), successor.stream() as stream:
            await stream.until(phase="draining")
            assert await still_waits(hook)
            successor.engine.active = 0
            await asyncio.wait_for(hook, 20)
            assert successor.drain.stopped is not None
            assert successor.drain.stopped.reason == "idle"


async def test_the_restart_of_an_agent_gives_a_drain_no_further_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_quick(monkeypatch)
    pod = Pod(tmp_path, drain_seconds=100)
    pod.engine.active = pod.engine.requests = 1
    pod.keys.write_text(json.dumps(KEYS))
    pod.boot("boot-1")
    pod.drain_file.touch()
    os.utime(pod.drain_file, (0, time.time() - 101))  # as an earlier agent left it
    async with pod.running():
        assert await asyncio.wait_for(pod.hook(), 20) == "time-over: drainSeconds (100) are over"


async def test_an_agent_that_is_dead_is_not_waited_for(tmp_path: Path) -> None:
    """A kubelet does not start it again while the pod terminates."""
    pod = Pod(tmp_path)
    assert await asyncio.wait_for(pod.hook(rounds=3), 20) == ""
    assert pod.drain_file.exists()


async def test_an_agent_that_lives_is_waited_for_however_long(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: without its beat the hook takes it for dead."""
    pod.engine.active = pod.engine.requests = 1
    for beat, waits in ((0.2, True), (60, False)):
        monkeypatch.setattr(hooks, "HEARTBEAT_SECONDS", beat)
        hook = asyncio.create_task(pod.hook(rounds=5))
        await asyncio.wait([hook], timeout=3)
        assert hook.done() != waits
        pod.engine.active = 0
        await asyncio.wait_for(hook, 20)
        await until_async(lambda: not pod.drain_file.exists())
        pod.engine.active = 1


async def test_acknowledgements_that_are_none_are_refused_with_the_reason(pod: Pod) -> None:
    async with pod.stream(caller="gw-0", boot="g") as stream:
        await stream.message()
        assert (await pod.ack(stream, 0, key="operator-key"))[0] == 401
        status, text = await pod.ack(stream, 0, agentBoot="another")
        assert (status, "this agent has restarted since: connect again" in text) == (409, True)
        status, text = await pod.ack(stream, 0, seq="x")
        assert (status, "not an acknowledgement: seq" in text) == (400, True)
        assert (await pod.ack(stream, 0, seq=99))[0] == 400
        assert (await pod.ack(stream, -1))[0] == 400
        # A newer gateway may say more.
        assert (await pod.ack(stream, 0, future={"x": 1}))[0] == 204


# --- stalls ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def quick_to_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Pod]:
    make_quick(monkeypatch)
    pod = Pod(tmp_path, stall_seconds=0.5)
    pod.keys.write_text(json.dumps(KEYS))
    pod.boot("boot-1")
    async with pod.running():
        yield pod


async def test_a_stalled_engine_is_told_leaves_its_mark_and_recovers(quick_to_stall: Pod) -> None:
    pod = quick_to_stall
    async with pod.stream() as stream:
        await stream.until(phase="ready")
        pod.engine.ranks = [load(running=1, used=100)]
        await stream.until(phase="stalled")
        assert pod.stalled_file.exists()
        pod.engine.ranks = [load(running=1, used=101)]
        await stream.until(phase="ready")
        assert not pod.stalled_file.exists()


async def test_the_hook_of_a_stalled_engine_returns_at_once(quick_to_stall: Pod) -> None:
    """Else a hung engine would live through the whole grace period."""
    pod = quick_to_stall
    async with pod.stream(caller="gw-0", boot="g") as stream:
        await stream.until(phase="ready")
        pod.engine.ranks = [load(running=1, used=100)]
        await stream.until(phase="stalled")
        await pod.ack(stream, 1)
        assert await asyncio.wait_for(pod.hook(), 20) == "stalled: the engine makes no progress"
        # Restarted by the kubelet: another process, which has not stalled yet.
        pod.engine.ranks = [load()]
        pod.stalled_file.unlink()  # as the engine's command does
        pod.boot("boot-2")
        await stream.until(phase="ready", engineBoot="boot-2")
        assert not pod.stalled_file.exists()


async def test_a_restarted_agent_goes_on_with_its_predecessors_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_quick(monkeypatch)
    (tmp_path / "stalled").touch()
    pod = Pod(tmp_path)
    pod.keys.write_text(json.dumps(KEYS))
    pod.boot("boot-1")
    pod.engine.ranks = [load(running=1, used=100)]
    async with pod.running(), pod.stream() as stream:
        await stream.until(phase="stalled", running=1)
        assert pod.stalled_file.exists()
        pod.engine.ranks = [load(running=1, used=101)]
        await stream.until(phase="ready")
        assert not pod.stalled_file.exists()
