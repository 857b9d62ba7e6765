"""What only a fleet of replicas shows: one that is far slower, one whose answers differ."""

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from shoal.core.health import canary, slow
from shoal.core.health.canary import CanaryVerdict, CanaryWatch, KnownAnswer, Memory, Spoken, digest, judge
from shoal.core.health.slow import PaceMeter, advance, far_slower
from shoal.core.scaling import Load

START = datetime(2026, 11, 26, tzinfo=UTC)


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


def test_of_two_or_three_one_is_named_only_if_its_clocks_are_held_down_too() -> None:
    paces = {"a": 0.02, "b": 0.1}
    assert far_slower(paces) == {}, "it may be asked something else"
    assert far_slower(paces, {"b"}) == {"b": pytest.approx(5.0)}
    assert far_slower(paces, {"a"}) == {}, "its pace does not suffer"
    assert far_slower(paces, {"a", "b"}) == {}, "a hot room"
    assert far_slower({"b": 0.1}, {"b"}) == {}, "alone"
    assert far_slower({"a": 0.02, "b": 0.05, "c": 0.02}, {"b"}) == {}, "slower, and not far slower"
    assert far_slower({"a": 0.02, "b": 0.07, "c": 0.022}, {"b"}) == {"b": pytest.approx(3.33, abs=0.01)}
    # Among four, their paces say it, whatever anybody measures.
    assert far_slower({"a": 0.02, "b": 0.03, "c": 0.02, "d": 0.02}, {"b"}) == {}


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

GOOD, BAD, OTHER = "The capital of France is Paris.", "xq zv kk jj ww pp", "It is Paris, of course."
PROMPTS = ("one", "two", "three")


def spoken(gpu: str, *texts: str, counts: bool = True, named: bool = True) -> Spoken:
    """One text is the answer to all prompts."""
    said = texts * len(PROMPTS) if len(texts) == 1 else texts
    return Spoken(gpu, named, {p: digest(t) for p, t in zip(PROMPTS, said, strict=False)}, counts)


def rounds(*said: dict[str, Spoken], memory: Memory | None = None) -> tuple[Memory, dict[str, CanaryVerdict]]:
    """The last round's verdicts."""
    verdicts: dict[str, CanaryVerdict] = {}
    for number, each in enumerate(said):
        memory, verdicts = judge(memory or {}, each, START + timedelta(minutes=10 * number))
    assert memory is not None
    return memory, verdicts


def alone(gpu: str, *texts: str) -> dict[str, Spoken]:
    return {f"pod-on-{gpu}": spoken(gpu, *texts)}


def test_the_one_that_differs_from_the_others_is_named() -> None:
    memory, verdicts = rounds({"a": spoken("1", GOOD), "b": spoken("2", GOOD), "c": spoken("3", BAD)})
    assert verdicts == {"a": "agrees", "b": "agrees", "c": "differs"}
    assert {each.known for each in memory.values()} == {(KnownAnswer(digest(GOOD), START, 2),)}


def test_answers_that_begin_alike_agree() -> None:
    _, verdicts = rounds(
        {"a": spoken("1", GOOD), "b": spoken("2", "The capital of France, Paris"), "c": spoken("3", GOOD)}
    )
    assert set(verdicts.values()) == {"agrees"}


def test_of_two_nobody_knows_which_one_is_wrong() -> None:
    memory, verdicts = rounds({"a": spoken("1", GOOD), "b": spoken("2", BAD)})
    assert not any(each.known for each in memory.values())
    assert set(verdicts.values()) == {"unknown"}


def test_one_gpu_alone_makes_no_answer_known_however_many_replicas_ran_there() -> None:
    memory, verdicts = rounds(*({f"pod-{i}": spoken("1", GOOD)} for i in range(20)))
    assert not any(each.known for each in memory.values())
    assert set(verdicts.values()) == {"unknown"}
    memory, _ = rounds({"a": spoken("1", GOOD), "b": spoken("1", GOOD), "c": spoken("1", GOOD)})
    assert not any(each.known for each in memory.values()), "three replicas that share a GPU are one witness"
    memory, _ = rounds(*({f"pod-{i}": spoken("node", GOOD, named=False)} for i in range(20)))
    assert not any(each.known for each in memory.values()), "it may have been the same GPU of that node"


def test_replicas_that_run_at_once_have_different_gpus_though_nobody_names_them() -> None:
    memory, _ = rounds({"a": spoken("node", GOOD, named=False), "b": spoken("node", GOOD, named=False)})
    assert [each.known[0].gpus for each in memory.values()] == [2, 2, 2]


def test_a_model_of_one_replica_is_compared_with_the_gpus_that_it_ran_on_before() -> None:
    learned, verdicts = rounds(alone("1", GOOD), alone("2", GOOD))
    assert verdicts == {"pod-on-2": "agrees"}
    assert rounds(alone("3", BAD), memory=learned)[1] == {"pod-on-3": "differs"}
    # Also one of the GPUs that it is known from.
    assert rounds(alone("2", BAD), memory=learned)[1] == {"pod-on-2": "differs"}
    # And no garbage is believed that a single GPU repeats.
    memory, verdicts = rounds(*[alone("2", BAD)] * 50, memory=learned)
    assert verdicts == {"pod-on-2": "differs"}
    assert rounds(alone("2", GOOD), memory=memory)[1] == {"pod-on-2": "agrees"}


def test_a_replica_alone_differs_only_if_most_of_its_answers_do() -> None:
    """The load of an engine may turn one answer between two words that weigh the same; not several."""
    learned, _ = rounds(alone("1", GOOD), alone("2", GOOD))
    assert rounds(alone("2", OTHER, GOOD, GOOD), memory=learned)[1] == {"pod-on-2": "agrees"}
    assert rounds(alone("2", OTHER, OTHER, GOOD), memory=learned)[1] == {"pod-on-2": "differs"}
    # An agent of before has one prompt.
    one = Spoken("2", True, {"one": digest(OTHER)})
    assert rounds({"a": one}, memory=learned)[1] == {"a": "unknown"}


def test_garbage_that_repeats_one_character_is_never_known() -> None:
    """Broken GPUs often repeat the first token, and two of them the same."""
    memory, verdicts = rounds(*[{x: spoken(x, "!!!!!!!!!!!!!!!!") for x in ("1", "2", "3")}] * 5)
    assert not any(each.known for each in memory.values())
    assert set(verdicts.values()) == {"unknown"}
    learned, _ = rounds(alone("1", GOOD), alone("2", GOOD))
    assert rounds(alone("3", "!!!!!!!!!!!!!!!!"), memory=learned)[1] == {"pod-on-3": "differs"}


def test_a_gpu_that_is_out_of_use_makes_nothing_known() -> None:
    learned, _ = rounds(alone("1", GOOD), alone("2", GOOD))
    out = {"x": spoken("3", BAD, counts=False)}
    memory, verdicts = rounds(out, alone("4", BAD), out, alone("4", BAD), memory=learned)
    assert verdicts == {"pod-on-4": "differs"}
    assert {each.known[0].answer for each in memory.values()} == {digest(GOOD)}


def test_a_known_answer_that_healthy_gpus_do_not_give_any_more_is_not_held_against_them() -> None:
    learned, _ = rounds(alone("1", GOOD), alone("2", GOOD))
    memory, verdicts = rounds({x: spoken(x, OTHER) for x in ("1", "2", "3")}, memory=learned)
    assert set(verdicts.values()) == {"agrees"}
    _, verdicts = rounds(alone("3", OTHER), alone("4", OTHER), memory=learned)
    assert verdicts == {"pod-on-4": "agrees"}, "two GPUs, one after the other"
    assert rounds(alone("5", GOOD), memory=memory)[1] == {"pod-on-5": "agrees"}, "what was right once"


def test_two_of_eight_that_fail_alike_are_not_believed() -> None:
    said = {str(i): spoken(str(i), BAD if i < 2 else GOOD) for i in range(8)}
    memory, verdicts = rounds(*[said] * 5)
    assert [uid for uid, verdict in verdicts.items() if verdict == "differs"] == ["0", "1"]
    assert {each.known[0].gpus for each in memory.values()} == {6}


def test_what_is_remembered_is_bounded_and_stays_the_same_while_nothing_is_new() -> None:
    memory: Memory = {}
    for i in range(200):
        texts = {f"prompt {i}-{j}": digest(f"answer {i}") for j in range(3)}
        memory, _ = judge(memory, {str(j): Spoken(f"{i}-{j}", True, texts) for j in range(4)}, START)
    assert len(memory) <= canary.MOST_PROMPTS
    for i in range(200):
        memory, _ = rounds({str(j): spoken(f"{i}-{j}", f"answer {i}") for j in range(4)}, memory=memory)
    assert all(len(each.known) <= 3 and len(each.last) <= 3 for each in memory.values())
    settled, _ = rounds({x: spoken(x, GOOD) for x in "abcd"})
    again, _ = rounds(*({x: spoken(x, GOOD) for x in pair} for pair in ("ab", "cd", "ef", "ad", "c")), memory=settled)
    assert again == settled, "it is written to the API server when it changes"


@pytest.mark.parametrize("seed", range(3))
def test_a_day_of_answers_that_load_turns_names_nobody(seed: int) -> None:
    """Two replicas that move between eight GPUs, and one prompt of three whose answer the load decides."""
    chance = random.Random(seed)  # noqa: S311 - noise
    watch = CanaryWatch()
    places = {"a": "0", "b": "1"}
    for number in range(24 * 6):
        now = START + timedelta(minutes=10 * number)
        if chance.random() < 0.1:
            places[chance.choice("ab")] = str(chance.randrange(8))
        busy = 8 * 6 < number < 20 * 6
        said = {
            f"{uid}-{gpu}": spoken(gpu, OTHER if busy or chance.random() < 0.2 else GOOD, GOOD, GOOD)
            for uid, gpu in places.items()
        }
        watch.round("g", said, now)
        assert not [uid for uid in said if watch.differs(uid)], "false"
