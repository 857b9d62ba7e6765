"""The simulated engine's core: batching, cache, pace. No waiting: the clock is the test's."""

import asyncio
from dataclasses import dataclass

import pytest

from shoal_dev.sim.kv import KVCache
from shoal_dev.sim.loop import EngineLoop
from shoal_dev.sim.scheduler import QueueFullError, Scheduler, Sequence
from shoal_dev.sim.timing import EngineStep, Timing, kv_tokens

TIMING = Timing(t0=6.0, t1=0.02, t2=3.0, kd=5e-5, kp=1e-6, a0=0.3)


class Counting:
    """Answers 0, 1, 2, ... and never ends."""

    def token(self, index: int) -> tuple[int, str, bool]:
        return 1000 + index, f"w{index} ", False


def scheduler(*, capacity: int = 10_000, chunk: int = 512, running: int = 8, queued: int | None = None) -> Scheduler:
    return Scheduler(kv=KVCache(capacity), timing=TIMING, chunk=chunk, max_running=running, max_queued=queued)


def sequence(rid: str, prompt: range | tuple[int, ...], tokens: int = 4, **more: object) -> Sequence:
    return Sequence(rid, tuple(prompt), Counting(), tokens, **more)  # pyright: ignore[reportArgumentType]


def turn(s: Scheduler, now: float = 0.0) -> float | None:
    duration = s.begin(now)
    if duration is not None:
        s.complete(now + duration)
    return duration


def run(s: Scheduler, limit: int = 10_000) -> int:
    """Until idle; the number of steps."""
    for steps in range(limit):
        if turn(s, float(steps)) is None:
            return steps
    raise AssertionError("never idle")


def test_a_prompt_and_its_answer_end_where_they_should():
    s = scheduler()
    one = sequence("a", range(10), 4)
    s.submit(one, 0.0)
    assert run(s) == 4, "the prefill gives the first token"
    assert one.finish is not None
    assert one.finish.type == "length"
    assert one.output == [1000, 1001, 1002, 1003]
    assert one.text == "w0 w1 w2 w3 "
    assert s.idle
    assert s.kv.used == 0
    assert s.kv.evictable == 13, "prompt and answer stay cached, but for the last token"


def test_a_long_prompt_is_read_in_chunks_while_others_go_on_decoding():
    s = scheduler(chunk=100)
    short = sequence("short", range(10), 50)
    s.submit(short, 0.0)
    turn(s)
    long = sequence("long", range(1000, 1350), 2)
    s.submit(long, 0.0)
    for _ in range(3):
        turn(s)
        assert not long.output
    assert len(short.output) == 4, "one token in every step"
    turn(s)
    assert len(long.output) == 1


def test_a_cached_prefix_is_not_computed_again():
    s = scheduler()
    first, second = sequence("a", range(100), 1), sequence("b", range(100), 1)
    s.submit(first, 0.0)
    run(s)
    s.submit(second, 0.0)
    run(s)
    assert (first.cached, second.cached) == (0, 99)
    assert s.totals.prefill_uncached_tokens == 101


def test_more_sequences_than_may_run_wait_in_order_and_too_many_are_refused():
    s = scheduler(running=1, queued=1)
    a, b = sequence("a", range(5)), sequence("b", range(5, 10))
    s.submit(a, 0.0)
    turn(s)
    s.submit(b, 0.0)
    with pytest.raises(QueueFullError):
        s.submit(sequence("c", range(5)), 0.0)
    assert (s.running, s.waiting) == (1, 1)
    run(s)
    assert b.finish is not None


def test_a_full_cache_takes_back_the_newest_and_computes_it_again_later():
    s = scheduler(capacity=60, running=4)
    first, second = sequence("a", range(20), 30), sequence("b", range(100, 110), 30)
    s.submit(first, 0.0)
    s.submit(second, 0.0)
    run(s)
    assert len(first.output) == len(second.output) == 30
    assert s.kv.used == 0
    assert s.kv.free + s.kv.evictable == 60


def test_retraction_when_all_were_admitted_too_boldly():
    s = scheduler(capacity=80, running=4)
    first, second = sequence("a", range(10), 60), sequence("b", range(100, 110), 60)
    # Both ask for little at first: the reservation cannot know that they will go on.
    first.max_new_tokens = second.max_new_tokens = 10
    s.submit(first, 0.0)
    s.submit(second, 0.0)
    turn(s)
    first.max_new_tokens = second.max_new_tokens = 60
    run(s)
    assert second.retractions > 0
    assert first.retractions == 0
    assert len(first.output) == len(second.output) == 60
    assert second.output == [1000 + i for i in range(60)], "nothing is said twice"


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_an_abort_frees_everything(when: str):
    s = scheduler(chunk=10, running=1 if when == "waiting" else 8)
    blocker = sequence("blocker", range(5), 100)
    s.submit(blocker, 0.0)
    turn(s)
    victim = sequence("victim", range(100, 130), 100)
    s.submit(victim, 0.0)
    for _ in range({"waiting": 1, "prefilling": 1, "decoding": 10}[when]):
        turn(s)
    assert bool(victim.output) == (when == "decoding")
    s.abort(victim, 1.0)
    s.abort(victim, 2.0)
    assert victim.finish is not None
    assert victim.finish.type == "abort"
    s.abort(blocker, 1.0)
    assert s.idle
    assert s.kv.used == 0
    assert s.totals.aborted == 2
    assert turn(s) is None


def test_an_abort_during_a_step_is_not_answered_any_more():
    s = scheduler()
    one = sequence("a", range(5), 100)
    s.submit(one, 0.0)
    assert s.begin(0.0) is not None
    s.abort(one, 0.0)
    s.complete(1.0)
    assert one.output == []
    assert s.kv.used == 0


def test_a_paused_engine_computes_nothing():
    s = scheduler()
    s.submit(sequence("a", range(5)), 0.0)
    s.paused = True
    assert s.begin(0.0) is None
    s.paused = False
    assert s.begin(0.0) is not None


def test_a_stop_string_may_span_tokens():
    s = scheduler()
    one = sequence("a", range(5), 100, stop=("w3 w4",))
    s.submit(one, 0.0)
    run(s)
    assert one.finish is not None
    assert (one.finish.type, one.finish.matched) == ("stop", "w3 w4")
    assert one.text == "w0 w1 w2 "
    assert len(one.output) == 5


def test_step_time_follows_the_formula():
    # Few tokens: the weights have to be read anyway.
    assert TIMING.seconds(EngineStep(1, 100, 0, 1)) == pytest.approx((6.0 + 0.3 + 1.0 + 0.01) / 1000)
    # Many: compute and attention dominate.
    step = EngineStep(2048, 50_000, 2048 * 1024, 33)
    expected = (0.02 * 2048 + 3.0) + (5e-5 * 50_000 + 1e-6 * 2048 * 1024) + 1.0 + 0.33
    assert TIMING.seconds(step) == pytest.approx(expected / 1000)


@pytest.mark.parametrize(
    ("gpu", "tokens"),
    [("h100_sxm:bfloat16", 448_226), ("l40s:bfloat16", 190_048), ("l4:bfloat16", 23_880), ("h200_sxm:fp8", 959_243)],
)
def test_kv_tokens_of_one_gpu_match_the_published_ones(gpu: str, tokens: int):
    assert kv_tokens(gpu, 1, 0.9) == pytest.approx(tokens, rel=0.02)


def test_a_model_that_does_not_fit_is_refused_in_the_words_of_the_engine():
    with pytest.raises(ValueError, match=r"Not enough memory\. Please try to increase --mem-fraction-static"):
        kv_tokens("l4:bfloat16", 1, 0.5)


@dataclass
class FakeClock:
    """Time that passes only by sleeping."""

    time: float = 0.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        await asyncio.sleep(0)


@pytest.mark.parametrize("speed", [1.0, 4.0])
async def test_the_loop_takes_the_time_of_the_gpu_divided_by_the_speed(speed: float):
    s, clock = scheduler(), FakeClock()
    loop = EngineLoop(s, clock, speed=speed)
    done = asyncio.Event()
    one = sequence("a", range(10), 100)
    one.on_update = lambda: done.set() if one.finish else None
    task = asyncio.create_task(loop.run())
    s.submit(one, clock.now())
    loop.wake()
    async with asyncio.timeout(10):
        await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    # 100 steps of about 7.3 ms.
    assert clock.now() == pytest.approx(0.731 / speed, rel=0.02)


async def test_a_stalled_engine_is_not_alive_until_it_recovers():
    loop = EngineLoop(scheduler(), FakeClock())
    assert await loop.alive(0.01)
    loop.stall()
    assert not await loop.alive(0.01)
    loop.recover()
    assert await loop.alive(0.01)


def test_what_is_aborted_while_its_prompt_is_computed_ends_with_a_token():
    s = scheduler()
    one = sequence("a", range(10))
    s.submit(one, 0.0)
    assert s.begin(0.0) is not None
    s.abort_by_id(one, 0.0)
    assert one.finish is None
    s.complete(1.0)
    assert one.finish is not None
    assert (one.finish.type, len(one.output), one.admitted) == ("abort", 1, 0.0)


def test_what_is_aborted_in_a_piece_of_its_prompt_or_while_it_waits_was_never_admitted():
    s = scheduler(chunk=4, running=1)
    one, two = sequence("a", range(10)), sequence("b", range(10))
    s.submit(one, 0.0)
    s.submit(two, 0.0)
    assert s.begin(0.0) is not None
    for each in (one, two):
        s.abort_by_id(each, 0.0)
        assert each.finish is not None
        assert (each.finish.type, each.output, each.admitted) == ("abort", [], None)
    s.complete(1.0)
    assert s.idle
    assert s.kv.used == 0


def test_what_is_aborted_while_it_answers_has_what_it_wrote():
    s = scheduler()
    one = sequence("a", range(10))
    s.submit(one, 0.0)
    turn(s)
    s.abort_by_id(one, 1.0)
    assert one.finish is not None
    assert (one.finish.type, one.output, one.admitted) == ("abort", [1000], 0.0)
