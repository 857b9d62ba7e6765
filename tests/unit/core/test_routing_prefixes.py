"""What each replica has in its prefix cache, by the prompts that gateways sent there."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.api.prefixes import MOST_MARKS, MOST_PROMPTS, read_sent, to_text
from shoal.api.traffic import AFTER_ANSWER
from shoal.core.advice.marks import prompt_marks
from shoal.core.routing.prefixes import (
    CACHE_SHARE,
    MOST_RETURNED,
    PRIOR_TOKENS,
    PrefixIndex,
    marks_of,
    points_of,
    tokens_of,
)
from shoal.core.routing.prefixes import (
    MOST_MARKS as MOST_KEPT,
)

SYSTEM = {"role": "system", "content": "You help people. " * 200}
LONG = "What is this about? " * 100


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def points(*messages: dict[str, str], secret: int = 7) -> Any:
    marks = prompt_marks(secret, {"messages": list(messages)})
    assert marks is not None
    return points_of(marks)


def tokens(*messages: dict[str, str]) -> int:
    return sum(len(message["content"]) for message in messages) // 4


def test_the_next_turn_is_found_with_the_answer_that_nobody_told() -> None:
    index = PrefixIndex()
    first = (SYSTEM, user("one " + LONG))
    index.sent("pod-1", points(*first))
    answer = {"role": "assistant", "content": "because " * 300}
    assert index.held(points(*first, answer, user("and two?"))) == {"pod-1": tokens(*first, answer)}


def test_a_shared_beginning_is_found_as_far_as_it_goes() -> None:
    index = PrefixIndex()
    index.sent("pod-1", points(SYSTEM, user("one " + LONG)))
    index.sent("pod-2", points(SYSTEM, user("two " + LONG)))
    held = index.held(points(SYSTEM, user("two " + LONG)))
    assert held == {"pod-1": tokens(SYSTEM), "pod-2": tokens(SYSTEM, user("two " + LONG))}


def test_another_tenant_with_the_same_prompt_finds_nothing() -> None:
    index = PrefixIndex()
    index.sent("pod-1", points(SYSTEM, user(LONG), secret=1))
    assert index.held(points(SYSTEM, user(LONG), secret=2)) == {}


def test_what_was_used_longest_ago_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    index = PrefixIndex()
    prompts = [points(user(f"{number} {LONG}")) for number in range(6)]
    each = tokens_of(prompts[0][-1])
    index.reported("pod-1", int(3.6 * each / CACHE_SHARE))
    for prompt in prompts[:3]:
        index.sent("pod-1", prompt)
    index.sent("pod-1", prompts[0])
    index.sent("pod-1", prompts[3])
    known = [index.held(prompt).get("pod-1", 0) for prompt in prompts[:4]]
    assert (known[0], known[2], known[3]) == (each, each, each)
    # Half of it had to go.
    assert 0 < known[1] < each
    # Another engine with a smaller cache.
    index.reported("pod-1", 1)
    assert (len(index), index.tokens("pod-1")) == (0, 0)


def test_a_replica_that_is_gone_or_has_restarted_holds_nothing() -> None:
    index = PrefixIndex()
    for uid in ("pod-1", "pod-2"):
        index.sent(uid, points(SYSTEM, user(LONG)))
    index.forget("pod-1")
    assert set(index.held(points(SYSTEM, user(LONG)))) == {"pod-2"}
    index.keep({"pod-1"})
    assert (index.held(points(SYSTEM, user(LONG))), len(index)) == ({}, 0)


def test_many_tiny_prompts_need_bounded_memory() -> None:
    index = PrefixIndex()
    for number in range(MOST_KEPT + 500):
        index.sent("pod-1", [number | 4 << 32])
    assert len(index) == MOST_KEPT
    # What is not as long as a mark said is no reason for a negative size.
    index.sent("pod-2", [1 | 4000 << 32, 2 | 40 << 32])
    assert index.tokens("pod-2") == 1000


POINTS = st.lists(st.integers(0, 40).map(lambda n: n * 400 << 32 | n % 3), max_size=8)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), POINTS, st.integers(0, 40_000)), max_size=30))
def test_whatever_is_told_the_bounds_hold(told: list[tuple[str, list[int], int]]) -> None:
    index = PrefixIndex()
    for uid, prompt, total in told:
        index.sent(uid, prompt)
        assert index.held(prompt).get(uid, 0) <= max(map(tokens_of, prompt), default=0)
        for each in "abc":
            assert index.held_by(each, prompt) == index.held(prompt).get(each, 0)
        if total:
            index.reported(uid, total)
        assert index.tokens(uid) <= (CACHE_SHARE * total if total else PRIOR_TOKENS)
    for uid in "abc":
        index.forget(uid)
    assert len(index) == 0


def mark(name: int, length: int = 1000) -> list[int]:
    return [length * 4 << 32 | name]


def test_what_is_evicted_costs_as_much_as_comes_again() -> None:
    index = PrefixIndex()
    index.reported("pod-1", 5000)  # holds four marks
    for turn in range(3):
        for name in range(100 * turn, 100 * turn + 20):
            index.sent("pod-1", mark(name))
        assert index.eviction_cost("pod-1") is None  # nothing was used twice
    for name in (1, 2, 3, 4):
        index.sent("pod-1", mark(name))
        index.sent("pod-1", mark(name))
    for name in (5, 6, 7, 8):
        index.sent("pod-1", mark(name))
    assert index.eviction_cost("pod-1") == 0.0  # of what was used twice nothing came again
    index.sent("pod-1", mark(1))
    assert index.eviction_cost("pod-1") == pytest.approx((1 / 4) / (1 - 1 / 4))
    index.sent("pod-1", mark(2))
    assert index.eviction_cost("pod-1") == pytest.approx((2 / 4) / (1 - 2 / 4))
    assert index.eviction_cost("pod-2") is None
    index.forget("pod-1")
    assert index.eviction_cost("pod-1") is None


def test_prompts_that_put_each_other_out_for_ever_have_a_bounded_cost_which_passes() -> None:
    index = PrefixIndex()
    index.reported("pod-1", 5000)
    for _ in range(20):
        for name in range(6):
            index.sent("pod-1", mark(name))
            index.sent("pod-1", mark(name))
    assert index.eviction_cost("pod-1") == pytest.approx(MOST_RETURNED / (1 - MOST_RETURNED))
    for name in range(10, 60):
        index.sent("pod-1", mark(name))
        index.sent("pod-1", mark(name))  # conversations that end
    cost = index.eviction_cost("pod-1")
    assert cost is not None
    assert cost < 0.1


def test_what_the_index_forgets_for_want_of_its_own_memory_is_not_evicted() -> None:
    index = PrefixIndex()
    index.reported("pod-1", 10**9)
    for _ in range(2):
        for name in range(MOST_KEPT + 100):
            index.sent("pod-1", mark(name, 1))
            index.sent("pod-1", mark(name, 1))
    assert index.eviction_cost("pod-1") is None


def test_marks_and_points_are_the_same() -> None:
    marks = prompt_marks(7, {"messages": [SYSTEM, user(LONG), {"role": "assistant", "content": LONG}, user("x")]})
    assert marks is not None
    assert marks_of(points_of(marks)) == marks
    assert read_sent({"pod-1": [to_text(marks)]}) == [("pod-1", marks)]
    assert points_of(None) == ()
    assert tokens_of((400 | AFTER_ANSWER) << 32 | 5) == 100


@pytest.mark.parametrize(
    "content",
    [
        {"pod-1": "AAAA"},
        {"pod-1": [5]},
        {"pod-1": ["!"]},
        {"pod-1": ["AAAA"]},
        {"pod-1": ["A" * 8 * 2 * MOST_MARKS]},
        {"pod-1": [""] * (MOST_PROMPTS + 1)},
        {"p" * 600: []},
    ],
)
def test_absurd_messages_are_refused(content: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_sent(content)
