"""The replica's stream: what is told, when, and what becomes of readers that do not keep up."""

import asyncio
import json
import time

import pytest

from shoal.agent.observe import Probe, phase
from shoal.agent.stream import AgentStream, difference, is_urgent
from shoal.agent.streammetrics import AgentMetrics
from shoal.api.replica import ReplicaMessage, StageProgress
from shoal.net import hub as stream
from shoal.net.hub import HubReader, TooManyReaders
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hub(clock: Clock) -> AgentStream:
    return AgentStream(clock)


IDLE = {"phase": "ready", "engine_boot": "b1", "running": 0, "waiting": 0, "kv_tokens_used": 0, "kv_tokens_total": 1000}


async def read(reader: HubReader) -> dict[str, object]:
    message = await reader.next(1.0)
    assert message is not None
    return json.loads(message.removeprefix(b"data: "))


async def test_a_reader_gets_the_full_state_and_then_what_changed(hub: AgentStream):
    hub.update(IDLE)
    with hub.reader() as reader:
        assert await read(reader) == {
            "boot": hub.boot,
            "seq": 1,
            "full": True,
            "keys": {
                "phase": "ready",
                "engineBoot": "b1",
                "running": 0,
                "waiting": 0,
                "kvTokensUsed": 0,
                "kvTokensTotal": 1000,
            },
        }
        hub.update(IDLE | {"waiting": 3})
        assert await read(reader) == {"boot": hub.boot, "seq": 2, "keys": {"waiting": 3}}


def test_what_speculation_gives_is_a_metric_once_it_is_known(hub: AgentStream):
    metrics = AgentMetrics("b1", lambda: hub.published)

    def told() -> list[float]:
        families = [family for family in metrics.collect() if family.name == "shoal_replica_tokens_per_step"]
        return [sample.value for family in families for sample in family.samples]

    hub.update(IDLE | {"tokens_per_step": None})
    assert told() == []
    hub.update(IDLE | {"tokens_per_step": 2.25})
    assert told() == [2.25]


async def test_what_became_unknown_is_told_as_null_and_is_absent_from_the_full_state(hub: AgentStream):
    hub.update(IDLE)
    with hub.reader() as reader:
        await read(reader)
        hub.update({**IDLE, "running": None})
        message = await reader.next(1.0)
        assert message is not None
        assert b'"keys":{"running":null}' in message
        parsed = ReplicaMessage.model_validate_json(message.removeprefix(b"data: "))
        assert parsed.keys is not None
        assert parsed.keys.model_fields_set == {"running"}
        assert parsed.keys.running is None
    with hub.reader() as another:
        full = await read(another)
    assert "running" not in full["keys"]  # pyright: ignore[reportOperatorIssue]


def test_a_heartbeat_repeats_the_seq_and_has_no_keys(hub: AgentStream):
    hub.update(IDLE)
    assert json.loads(hub.heartbeat().removeprefix(b"data: ")) == {"boot": hub.boot, "seq": 1}


def test_small_changes_wait_for_a_second(hub: AgentStream, clock: Clock):
    hub.update(IDLE)
    clock.now += 0.4
    assert hub.update(IDLE | {"running": 1}) is False
    clock.now += 0.7
    assert hub.update(IDLE | {"running": 1}) is True
    clock.now += 9
    assert hub.update(IDLE | {"running": 1}) is False


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "draining"},
        {"engine_boot": "b2"},
        {"waiting": 1},
        {"kv_tokens_used": 20},
        {"running": None},
    ],
)
def test_changes_that_matter_are_told_at_once(hub: AgentStream, change: dict[str, object]):
    hub.update(IDLE)
    assert hub.update(IDLE | change) is True


@pytest.mark.parametrize("change", [{"running": 5}, {"kv_tokens_used": 19}, {"generation_tokens_total": 7}])
def test_changes_that_do_not_matter_are_not(change: dict[str, object]):
    before = IDLE | {"generation_tokens_total": 1}
    assert difference(before, before | change) == change
    assert is_urgent(before, before | change) is False


async def test_a_slow_reader_is_dropped_and_the_others_go_on(hub: AgentStream):
    with hub.reader() as slow, hub.reader() as quick:
        await read(quick)
        for number in range(stream.QUEUE + 1):
            hub.update(IDLE | {"engine_boot": f"b{number}"})
            await read(quick)
        assert await slow.next(1.0) is None
        assert hub.dropped == 1
        assert hub.readers == 1


async def test_readers_are_bounded(hub: AgentStream, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "READERS", 1)
    with hub.reader(), pytest.raises(TooManyReaders), hub.reader():
        pass
    with hub.reader() as reader:
        assert (await read(reader))["full"] is True


async def test_closing_ends_every_reader_also_a_late_one(hub: AgentStream):
    with hub.reader() as reader:
        hub.close()
        assert await reader.next(1.0) is None
    with hub.reader() as late:
        assert await late.next(1.0) is None


async def test_a_message_that_comes_as_the_heartbeat_is_due_goes_first(hub: AgentStream):
    hub.update(IDLE)
    with hub.reader() as reader:
        await read(reader)
        reading = asyncio.create_task(reader.next(0.05))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.06, hub.update, IDLE | {"waiting": 3})
        time.sleep(0.1)  # noqa: ASYNC251 - so that one turn of the loop has both
        message = await reading
    assert message is not None
    assert b'"waiting":3' in message


FETCHING = StageProgress(state="fetching", bytes_done=1)
STAGED = StageProgress(state="done")


@pytest.mark.parametrize(
    ("stage", "boot", "probe", "was_ready", "silent", "expected"),
    [
        (None, None, None, False, 0, None),
        (FETCHING, None, None, False, 0, "fetching"),
        (StageProgress(state="failed"), None, None, False, 0, "fetching"),
        (STAGED, None, None, False, 0, "loading"),
        (STAGED, "b", Probe.CLOSED, False, 0, "loading"),
        (STAGED, "b", Probe.NOT_READY, False, 0, "loading"),
        (STAGED, "b", Probe.SILENT, False, 9, "loading"),
        (STAGED, "b", Probe.READY, False, 0, "ready"),
        (None, "b", Probe.READY, True, 0, "ready"),
        (STAGED, "b", Probe.NOT_READY, True, 0, "draining"),
        (STAGED, "b", Probe.CLOSED, True, 0, "loading"),
        (STAGED, "b", Probe.SILENT, True, 1, "ready"),
        (STAGED, "b", Probe.SILENT, True, 3, None),
    ],
)
def test_the_phase_is_what_was_seen(
    stage: StageProgress | None,
    boot: str | None,
    probe: Probe | None,
    was_ready: bool,
    silent: int,
    expected: str | None,
):
    assert phase(stage, boot, probe, was_ready=was_ready, silent=silent, before="ready") == expected


@pytest.mark.parametrize("probe", [*Probe, None])
def test_what_the_agent_decided_does_not_give_way_to_a_probe(probe: Probe | None):
    def told(*, stalled: bool, draining: bool) -> str | None:
        return phase(None, "b", probe, was_ready=True, silent=9, before="ready", stalled=stalled, draining=draining)

    assert told(stalled=False, draining=True) == "draining"
    assert told(stalled=True, draining=False) == "stalled"
    # Both are turned away from; that it computes nothing is what people must see.
    assert told(stalled=True, draining=True) == "stalled"
