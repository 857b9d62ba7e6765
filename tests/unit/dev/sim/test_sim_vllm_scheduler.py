"""vLLM's blocks and scheduler in the simulator."""

import pytest

from shoal_dev.sim.args import engine_params
from shoal_dev.sim.scheduler import QueueFullError, Sequence
from shoal_dev.sim.timing import Timing
from shoal_dev.sim.vllm.kv import BlockCache
from shoal_dev.sim.vllm.scheduler import VLLMScheduler, VLLMSlots


class Endless:
    """An answer without end."""

    def token(self, index: int) -> tuple[int, str, bool]:
        return index, "x", False


def scheduler(blocks: int = 9, size: int = 4, *, running: int = 8, queued: int | None = None) -> VLLMScheduler:
    return VLLMScheduler(
        pool=BlockCache(blocks, size), timing=Timing.of(engine_params()["h100_sxm:bfloat16"]), budget=100,
        max_running=running, max_queued=queued, share=True,
    )  # fmt: skip


def sequence(prompt: range, tokens: int = 4, adapter: str | None = None) -> Sequence:
    return Sequence("r", tuple(prompt), Endless(), tokens, adapter=adapter)


def run(engine: VLLMScheduler, steps: int = 100) -> int:
    """Steps until nothing is left to do."""
    for step in range(steps):
        if engine.begin(float(step)) is None:
            return step
        engine.complete(float(step))
    return steps


def test_one_block_is_not_usable_and_blocks_are_whole():
    engine = scheduler()
    assert engine.pool.capacity == 32
    engine.submit(sequence(range(5), 1000), 0.0)
    engine.begin(0.0)
    engine.complete(0.0)
    assert engine.gauges.usage == 2 / 8


def test_whole_blocks_of_a_prompt_are_found_again_and_its_last_token_never():
    engine = scheduler(blocks=20)
    cached: list[int | None] = []
    for length in (8, 8, 9, 12):
        one = sequence(range(length), 1)
        engine.submit(one, 0.0)
        run(engine)
        cached.append(one.cached)
    assert cached == [0, 4, 8, 8]


def test_prefixes_of_an_adapter_belong_to_its_name_and_path():
    engine = scheduler(blocks=20)
    found: list[int | None] = []
    for load, known_by in (("1", "a /a"), ("2", "a /a"), ("3", "a /b"), ("4", None)):
        one = sequence(range(9), 1, adapter=load)
        one.prefixes = known_by
        engine.submit(one, 0.0)
        run(engine)
        found.append(one.cached)
    assert found == [0, 8, 0, 0]


def test_nothing_is_lost_or_counted_twice_when_the_newest_is_preempted():
    engine = scheduler()
    both = [sequence(range(100, 108), 20), sequence(range(200, 208), 20)]
    for one in both:
        engine.submit(one, 0.0)
    run(engine)
    assert [len(one.output) for one in both] == [20, 20]
    assert both[1].retractions > 0
    assert both[0].retractions == 0
    assert engine.counters.preemptions == both[1].retractions
    assert (engine.counters.prompt, engine.counters.generated) == (16, 40)
    assert engine.pool.used == 0


def test_counters_and_gauges_are_those_of_the_last_step():
    engine = scheduler()
    engine.submit(sequence(range(4), 10), 0.0)
    assert engine.gauges.waiting == 0, "no step has told of it"
    engine.begin(0.0)
    engine.complete(0.0)
    assert (engine.gauges.running, engine.counters.generated) == (1, 1)


def test_a_waiting_one_whose_adapter_finds_no_slot_is_passed_and_told_apart():
    engine = scheduler(blocks=40)
    engine.slots = VLLMSlots(1)
    engine.slots.add("a", 1, pinned=False)
    engine.slots.add("b", 1, pinned=False)
    first, waits = sequence(range(4), 30, "a"), sequence(range(4), 1, "b")
    passes, base = sequence(range(4), 30, "a"), sequence(range(4), 30)
    for one in (first, waits, passes, base):
        engine.submit(one, 0.0)
    for step in range(5):
        engine.begin(float(step))
        engine.complete(float(step))
    assert (engine.gauges.running, engine.gauges.waiting, engine.gauges.deferred) == (3, 1, 1)
    run(engine)
    assert waits.finish is not None


def test_the_queue_limit_counts_running_ones():
    engine = scheduler(queued=2)
    for at in range(2):
        engine.submit(sequence(range(at, at + 4)), 0.0)
    with pytest.raises(QueueFullError):
        engine.submit(sequence(range(4)), 0.0)


def test_blocks_used_least_recently_make_room():
    pool = BlockCache(4, 4)
    for start in (0, 100):
        held = pool.admit([], 4)
        assert held is not None
        pool.cache(held, range(start, start + 4))
        pool.release(held)
    assert len(pool.match((0, 1, 2, 3, 9))) == 1
    hits = pool.match((0, 1, 2, 3, 9))
    again = pool.admit(hits, 5)
    assert again is not None
    other = pool.admit([], 4)
    assert other is not None
    assert pool.match((100, 101, 102, 103, 9)) == []
    assert pool.admit([], 8) is None
