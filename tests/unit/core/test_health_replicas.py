"""What only a fleet of replicas shows: one that is far slower, one whose answers differ."""

import random
from collections.abc import Sequence

import pytest

from shoal.core.health import canary, slow
from shoal.core.health.canary import KnownAnswer, judge
from shoal.core.health.slow import PaceMeter, advance, far_slower
from shoal.core.scaling import Load


def minute(running: Sequence[int], per_second: float, *, boot: str = "b") -> PaceMeter | None:
    """A replica with so many running requests, second by second, that makes so many tokens."""
    meter: PaceMeter | None = None
    for second, count in enumerate(running):
        load = Load(engine_boot=boot, running=count, generation_tokens_total=int(second * per_second))
        meter = advance(meter, load, float(second))
    return meter


def test_the_pace_is_seconds_per_token_of_one_answer_however_many_run() -> None:
    one, many = minute([1] * 62, 40), minute([16] * 62, 640)
    assert one is not None
    assert many is not None
    assert one.pace == pytest.approx(1 / 40, rel=0.05)
    assert many.pace == pytest.approx(1 / 40, rel=0.05)


def test_a_replica_with_little_to_do_and_one_that_restarted_have_no_pace() -> None:
    idle = minute([0] * 62, 0)
    assert idle is not None
    assert idle.pace is None
    meter = minute([4] * 50, 100)
    restarted = advance(meter, Load(engine_boot="c", running=4, generation_tokens_total=0), 51.0)
    assert restarted is not None
    assert (restarted.began, restarted.busy) == (51.0, 0.0)
    assert advance(meter, None, 51.0) is None, "unknown is not slow"
    assert advance(meter, Load(running=-3, generation_tokens_total=5), 51.0) is None


def test_one_of_four_that_is_far_slower_is_named_and_of_three_nobody() -> None:
    assert far_slower({"a": 0.02, "b": 0.021, "c": 0.019, "d": 0.1}) == {"d": pytest.approx(4.9, abs=0.2)}
    assert far_slower({"a": 0.02, "b": 0.021, "d": 0.1}) == {}
    assert far_slower({"a": 0.02, "b": 0.021, "c": 0.019, "d": 0.05}) == {}, "slower, and not far slower"


def test_paces_that_differ_anyway_make_nobody_slow() -> None:
    assert far_slower({"a": 0.01, "b": 0.03, "c": 0.05, "d": 0.09, "e": 0.12, "f": 0.02}) == {}


def test_a_faster_one_and_a_class_that_is_slow_as_a_whole_are_not_named() -> None:
    assert far_slower({"a": 0.02, "b": 0.021, "c": 0.019, "d": 0.001}) == {}
    assert far_slower({"a": 0.2, "b": 0.21, "c": 0.19, "d": 0.22}) == {}


@pytest.mark.parametrize("seed", range(3))
def test_a_day_of_noisy_paces_names_nobody_for_as_long_as_it_takes(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - noise
    row = dict.fromkeys(range(16), 0)
    for _ in range(24 * 60):  # a window per minute: log-normal paces, and a tenth of them in a burst of long prompts
        paces = {str(i): 0.02 * chance.lognormvariate(0, 0.25) * (3 if chance.random() < 0.1 else 1) for i in row}
        named = far_slower(paces)
        for i in row:
            row[i] = row[i] + 1 if str(i) in named else 0
            assert row[i] < slow.WINDOWS, "false"


# --- canaries ---------------------------------------------------------------------------------------------------------

GOOD, BAD = "The capital of France is Paris.", "!!!!!!!!!!!!!!!!"


def test_the_one_that_differs_from_the_others_is_named() -> None:
    known, verdicts = judge(None, {"a": GOOD, "b": GOOD, "c": BAD})
    assert verdicts == {"a": "agrees", "b": "agrees", "c": "differs"}
    assert known == KnownAnswer(GOOD[: canary.COMPARED], frozenset({"a", "b"}))


def test_answers_that_begin_alike_agree() -> None:
    _, verdicts = judge(None, {"a": GOOD, "b": "The capital of France, Paris", "c": GOOD})
    assert set(verdicts.values()) == {"agrees"}


def test_of_two_nobody_knows_which_one_is_wrong() -> None:
    known, verdicts = judge(None, {"a": GOOD, "b": BAD})
    assert known is None
    assert set(verdicts.values()) == {"unknown"}
    assert judge(None, {"a": GOOD})[1] == {"a": "unknown"}, "it is its own witness only"


def test_a_replica_is_compared_with_those_that_are_gone() -> None:
    known, _ = judge(None, {"a": GOOD})
    known, verdicts = judge(known, {"b": GOOD})
    assert verdicts == {"b": "agrees"}
    _, verdicts = judge(known, {"c": BAD})
    assert verdicts == {"c": "differs"}


def test_a_canary_that_is_wrong_on_the_healthy_is_learned_anew_and_names_nobody() -> None:
    known, _ = judge(None, {"a": "old answer of before", "b": "old answer of before"})
    known, verdicts = judge(known, {"a": GOOD, "b": GOOD, "c": GOOD})
    assert set(verdicts.values()) == {"agrees"}
    assert known is not None
    assert known.text == GOOD[: canary.COMPARED]


def test_what_is_remembered_is_bounded() -> None:
    known: KnownAnswer | None = None
    for i in range(200):
        known, _ = judge(known, {f"pod-{i}": GOOD * 1000})
    assert known is not None
    assert len(known.witnesses) <= 16
    assert len(known.text) == canary.COMPARED
