"""What is remembered of canaries, as the status of a Model keeps it."""

from datetime import UTC, datetime
from typing import Any

import pytest

from shoal.api.model import CanaryAnswers, Model, VariantStatus
from shoal.core.health.canary import CanaryContext, KnownAnswer, Memory, PromptMemory, Spoken, digest, judge
from shoal.core.layers.causes import causes
from shoal.core.placement import Placement, VariantPlan
from shoal.core.status import canaryanswers
from shoal.core.status.conditions import find
from shoal.core.status.modelstatus import status
from shoal.core.status.variants import variants
from tests.faults import worlds
from tests.support.operators import model
from tests.unit.core.test_model_status import observed

NOW = datetime(2026, 11, 26, tzinfo=UTC)
CONTEXT = CanaryContext("0" * 16, "sglang:1", "sha256:" + "1" * 64, "FP8")
MEMORY = {
    "a": PromptMemory((KnownAnswer(digest(" Paris. It is"), NOW, 2),), (("2" * 16, digest("!!!!!!")), ("3" * 16, "-"))),
    "b": PromptMemory(),
}


def with_status(**of_variant: Any) -> Model:
    raw: dict[str, Any] = dict(model("chat", "ns"))
    raw["metadata"] |= {"uid": "u", "resourceVersion": "1", "generation": 1}
    return Model.model_validate(raw | {"status": {"variants": [{"class": "l4", **of_variant}]}})


def test_it_is_read_as_it_was_written() -> None:
    shown = canaryanswers.shown(CONTEXT, MEMORY)
    again = with_status(canary=shown.model_dump(mode="json", by_alias=True, exclude_none=True))
    assert canaryanswers.stored(again) == {"l4": shown}
    assert canaryanswers.memory(canaryanswers.stored(again)["l4"], CONTEXT) == MEMORY


def test_under_other_circumstances_nothing_is_known() -> None:
    shown = canaryanswers.shown(CONTEXT, MEMORY)
    other = CanaryContext("f" * 16, CONTEXT.image, CONTEXT.weights, CONTEXT.quantization)
    assert canaryanswers.memory(shown, other) == {}
    assert canaryanswers.memory(None, CONTEXT) == {}
    assert canaryanswers.stored(with_status()) == {}


def test_each_class_shows_its_own() -> None:
    shown = canaryanswers.shown(CONTEXT, MEMORY)
    placement = Placement((VariantPlan("l4", 1, 1, "0.43"), VariantPlan("h100", 0, 1, None)), (), 0, "Placed", "")
    found = variants(placement, deployments=[], pods=[], sized={}, tokens={}, cold_starts={}, canaries={"l4": shown})
    assert [(each.gpu_class, each.canary) for each in found] == [("l4", shown), ("h100", None)]


# --- a class that is wrong as a whole ---------------------------------------------------------------------------------

PROMPTS = ("The capital of France is", "1, 2, 3, 4, 5, 6, 7,", "Monday, Tuesday, Wednesday,")
RIGHT = (" Paris. It is the", " 8, 9, 10, 11, 12", " Thursday, Friday,")
OTHER = (" Paris, a city", " 8, 9, 10, 11, 13", " Thursday, and so")
"""As another kind of GPU may answer."""
BROKEN = ("!!!!!!!!!!!!!!!!", "", "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd")


def answers(*gpus: tuple[str, ...], weights: str | None = "sha256:" + "1" * 64) -> CanaryAnswers:
    """As learned in three rounds in which each of these GPUs, of one class, gives its texts."""
    memory: Memory = {}
    for _ in range(3):
        said = {
            f"pod-{n}": Spoken(f"{n:016x}", True, {p: digest(text) for p, text in zip(PROMPTS, texts, strict=False)})
            for n, texts in enumerate(gpus)
        }
        memory, _ = judge(memory, said, NOW)
    return canaryanswers.shown(CanaryContext("0" * 16, "sglang:1", weights, "FP8"), memory)


def variant(gpu_class: str, canary: CanaryAnswers | None, ready: int = 2) -> VariantStatus:
    return VariantStatus(gpu_class=gpu_class, gpusPerReplica=1, desired=ready, ready=ready, canary=canary)


def test_a_class_that_repeats_itself_where_another_answers_is_named() -> None:
    [found] = canaryanswers.garbled([variant("h100", answers(RIGHT, RIGHT)), variant("l4", answers(BROKEN, BROKEN))])
    assert (found.gpu_class, found.other, found.gpus, found.prompts) == ("l4", "h100", 2, 3)
    assert found.text == (
        "class l4 (sglang:1, quantization FP8): the last 2 GPUs answered each of 3 canaries with one or two characters "
        "repeated, or with nothing; class h100 answers them with the same weights"
    )


@pytest.mark.parametrize(
    ("this", "other"),
    [
        pytest.param(answers(OTHER, OTHER), answers(RIGHT, RIGHT), id="kinds of GPUs differ in words"),
        pytest.param(answers(BROKEN, BROKEN), answers(BROKEN, BROKEN), id="random weights repeat on every class"),
        pytest.param(
            answers(BROKEN, BROKEN), answers(("abcd",) * 3, ("abcd",) * 3), id="the other says one thing always"
        ),
        pytest.param(answers(BROKEN, BROKEN), None, id="nothing is known of the other"),
        pytest.param(answers(BROKEN, BROKEN), answers(RIGHT), id="one GPU of the other makes nothing known"),
        pytest.param(answers(BROKEN), answers(RIGHT, RIGHT), id="one GPU of this one"),
        pytest.param(answers(BROKEN, RIGHT), answers(RIGHT, RIGHT), id="one GPU of this one answers"),
        pytest.param(answers((*BROKEN[:2], RIGHT[2]), BROKEN), answers(RIGHT, RIGHT), id="to one prompt one answers"),
        pytest.param(answers(BROKEN[:1], BROKEN[:1]), answers(RIGHT, RIGHT), id="one prompt"),
        pytest.param(answers(BROKEN, BROKEN), answers(RIGHT, RIGHT, weights="sha256:" + "2" * 64), id="other weights"),
        pytest.param(
            answers(BROKEN, BROKEN, weights=None), answers(RIGHT, RIGHT, weights=None), id="weights of an image"
        ),
    ],
)
def test_what_says_nothing_of_a_class(this: CanaryAnswers, other: CanaryAnswers | None) -> None:
    assert canaryanswers.garbled([variant("h100", other), variant("l4", this)]) == ()


def test_a_class_without_a_replica_is_not_named() -> None:
    good, bad = answers(RIGHT, RIGHT), answers(BROKEN, BROKEN)
    assert canaryanswers.garbled([variant("h100", good), variant("l4", bad, ready=0)]) == ()
    assert canaryanswers.garbled([variant("h100", good, ready=0), variant("l4", bad)]), "what is known stays known"


def test_the_condition_is_a_cause_that_why_tells_with_what_to_do() -> None:
    placement = Placement((VariantPlan("l4", 1, 1, "0.43"), VariantPlan("h100", 1, 1, None)), (), 0, "Placed", "")
    canaries = {"l4": answers(BROKEN, BROKEN), "h100": answers(RIGHT, RIGHT)}
    said = status(observed(placement=placement, canaries=canaries), NOW)
    found = find(said.conditions, "ClassAnswersGarbled")
    assert found is not None
    assert (found.status, found.reason) == ("True", "ClassAnswersGarbled")
    well = status(observed(placement=placement, canaries=canaries | {"l4": answers(OTHER, OTHER)}), NOW)
    assert find(well.conditions, "ClassAnswersGarbled") is None

    view = worlds.model(worlds.condition("Ready", "True", "ReplicasReady"),
                        worlds.condition(found.type, found.status, found.reason, found.message))  # fmt: skip
    [cause] = causes(worlds.seen(view), worlds.NOW).causes
    assert (cause.reason, cause.layer.value, cause.state) == ("ClassAnswersGarbled", "L3", "fault")
    assert "class l4 (sglang:1, quantization FP8): the last 2 GPUs" in cause.message
    assert "spec.variants" in cause.do
    assert [proof.where for proof in cause.evidence] == [f"condition of {view.text}"]


def test_it_explains_no_engine_that_does_not_start() -> None:
    garbled = worlds.condition("ClassAnswersGarbled", "True", "ClassAnswersGarbled", "class l4: ...")
    view = worlds.model(worlds.condition("Ready", "False", "EngineFailed", "the engine ends"), garbled)
    found = {cause.reason for cause in causes(worlds.seen(view), worlds.NOW).causes}
    assert found == {"EngineFailed", "ClassAnswersGarbled"}
