"""Whatever the replica does, a reader of its stream knows what was told, and soon what is."""

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st

from shoal.agent import stream
from shoal.agent.stream import AgentStream
from shoal.api.replica import ReplicaKeys
from tests.support.clock import Clock

COUNT = st.none() | st.integers(0, 5)
STATES = st.fixed_dictionaries(
    {
        "phase": st.sampled_from([None, "loading", "ready", "draining"]),
        "engine_boot": st.sampled_from([None, "a", "b"]),
        "running": COUNT,
        "waiting": COUNT,
        "kv_tokens_used": st.none() | st.integers(0, 100),
        "kv_tokens_total": st.sampled_from([None, 0, 100]),
        "generation_tokens_total": COUNT,
    }
)
STEPS = st.lists(st.tuples(STATES, st.sampled_from([0.0, 0.4, 1.1])), max_size=20)


def known(state: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in state.items() if value is not None}


@given(STEPS, st.integers(0, 20))
def test_full_state_and_changes_give_the_state_that_was_told(
    steps: list[tuple[dict[str, object], float]], joins_at: int
):
    async def run() -> None:
        clock = Clock(0.0)
        hub = AgentStream(clock)
        for state, wait in steps[:joins_at]:
            clock.now += wait
            hub.update(state)
        with hub.reader() as reader:
            for state, wait in steps[joins_at:]:
                clock.now += wait
                hub.update(state)
            seen: dict[str, object] = {}
            seq: int | None = None
            while True:
                try:
                    raw = await reader.next(0)
                except TimeoutError:
                    break
                assert raw is not None
                message = json.loads(raw.removeprefix(b"data: "))
                assert message["boot"] == hub.boot
                assert message["seq"] == (message["seq"] if seq is None else seq + 1)
                seq = message["seq"]
                keys = ReplicaKeys.model_validate(message["keys"])
                seen |= {name: getattr(keys, name) for name in keys.model_fields_set}
            assert known(seen) == known(dict(hub.published))

    asyncio.run(run())


@given(STATES, STATES, st.floats(0, 3))
def test_nothing_is_kept_back_for_longer_than_the_quiet_time(
    before: dict[str, object], after: dict[str, object], wait: float
):
    clock = Clock(0.0)
    hub = AgentStream(clock)
    hub.update(before)
    clock.now += wait
    hub.update(after)
    if wait >= stream.QUIET_SECONDS or stream.is_urgent(before, after):
        assert known(dict(hub.published)) == known(after)
    else:
        assert known(dict(hub.published)) in (known(before), known(after))
