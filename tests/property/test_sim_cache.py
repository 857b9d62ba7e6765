"""The simulated KV cache never loses or invents a token, whatever is asked of it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_dev.sim.kv import KVCache
from shoal_dev.sim.scheduler import Scheduler, Sequence
from shoal_dev.sim.timing import Timing

TIMING = Timing(t0=6.0, t1=0.02, t2=3.0, kd=5e-5, kp=1e-6, a0=0.3)
# Few different tokens, so that prefixes are often shared.
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=40).map(tuple)


class Echo:
    """Tokens that are likely to be a prefix of somebody's prompt."""

    def token(self, index: int) -> tuple[int, str, bool]:
        return index % 3, "x", False


def longest_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(deadline=None)
@given(st.lists(PROMPTS, min_size=1, max_size=12), PROMPTS)
def test_a_match_is_the_longest_prefix_of_what_was_inserted(stored: list[tuple[int, ...]], asked: tuple[int, ...]):
    cache = KVCache(10_000)
    for tokens in stored:
        assert cache.take(len(tokens))
        cache.insert(tokens, len(tokens))
    _, length = cache.match(asked)
    assert length == max(longest_common(tokens, asked) for tokens in stored)
    assert cache.used == 0
    assert cache.free + cache.evictable == 10_000


@settings(deadline=None)
@given(
    capacity=st.integers(60, 200),
    chunk=st.integers(1, 64),
    jobs=st.lists(st.tuples(PROMPTS, st.integers(0, 30)), min_size=1, max_size=12),
    aborts=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 11)), max_size=6),
)
def test_every_sequence_ends_and_every_token_comes_back(
    capacity: int, chunk: int, jobs: list[tuple[tuple[int, ...], int]], aborts: list[tuple[int, int]]
):
    scheduler = Scheduler(kv=KVCache(capacity), timing=TIMING, chunk=chunk, max_running=4)
    sequences = [
        # The engine lets nobody in who could never fit.
        Sequence(str(i), prompt, Echo(), min(tokens, capacity - 1 - len(prompt)))
        for i, (prompt, tokens) in enumerate(jobs)
    ]
    for sequence in sequences:
        scheduler.submit(sequence, 0.0)
    for step in range(20_000):
        for when, who in aborts:
            if when == step and who < len(sequences):
                scheduler.abort(sequences[who], float(step))
        duration = scheduler.begin(float(step))
        kv = scheduler.kv
        assert kv.free >= 0
        assert kv.evictable >= 0
        assert kv.free + kv.evictable + kv.used == capacity
        if duration is None:
            break
        scheduler.complete(float(step))
    assert scheduler.idle
    assert scheduler.kv.used == 0
    for sequence in sequences:
        assert sequence.finish is not None
        if sequence.finish.type != "abort":
            assert len(sequence.output) == sequence.max_new_tokens
            assert sequence.output == [i % 3 for i in range(sequence.max_new_tokens)]
