"""What is remembered of canaries, as the status of a Model keeps it."""

from datetime import UTC, datetime
from typing import Any

from shoal.api.model import Model
from shoal.core.health.canary import CanaryContext, KnownAnswer, PromptMemory, digest
from shoal.core.placement import Placement, VariantPlan
from shoal.core.status import canaryanswers
from shoal.core.status.variants import variants
from tests.support.operators import model

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
