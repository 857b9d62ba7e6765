"""Whoever may write a status or an event can write anything into it: the answer says less then, and never fails."""

import random
from typing import Any

from shoal.core.layers.causes import causes
from shoal.core.layers.types import WhySnapshot
from shoal.kube import layerviews
from tests.faults.worlds import NOW, condition, crashed, event, gpu_class, model, node, pod


def test_a_log_line_writes_nothing_to_the_terminal() -> None:
    text = "\x1b[31mValueError: \x1b]0;title\x07 x \u202e y\x9b2J"
    world = WhySnapshot("pod", "chat/llama-1", pods=(layerviews.pod(pod(crashed(text))),))
    (cause,) = causes(world, NOW).causes
    for shown in (cause.message, *(each.what for each in cause.evidence)):
        assert "ValueError:" in shown
        assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 or letter == "\u202e" for letter in shown)
        assert "[31m" not in shown


JUNK: list[Any] = [
    None, "", "x" * 50_000, 0, -1, 2**70, True, [], {}, [None], ["x"], {"a": None}, "9999-99-99T99:99:99Z",
    "0000-01-01T00:00:00Z", "\x00\ud800", "Xid: 79", 1.5,
]  # fmt: skip


def spoiled(value: Any, chance: random.Random) -> Any:
    """A copy in which some values are others."""
    if chance.random() < 0.08:
        return chance.choice(JUNK)
    if isinstance(value, dict):
        return {name: spoiled(each, chance) for name, each in value.items()}
    if isinstance(value, list):
        return [spoiled(each, chance) for each in value]
    return value


def _with_status(raw: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    return raw | {"status": spoiled(raw["status"], chance)}


def test_statuses_and_events_of_any_shape_are_explained() -> None:
    chance = random.Random(11)  # noqa: S311
    raw_pod = pod(crashed("CUDA error"), conditions=[condition("PodScheduled", "False", "Unschedulable", "x")])
    raw_node = node(condition("XIDErrors", "True", "x", "Xid: 79"), usable=7)
    raw_event = event("Pod", "llama-1", "FailedMount", "MountVolume")
    for _ in range(2_000):
        seen = WhySnapshot(
            kind="model",
            key="chat/llama",
            subject=model(condition("Ready", "False", "NoCapacity", "x")),
            related=(gpu_class(condition("Ready", "True", "NodesFound")),),
            pods=(layerviews.pod(_with_status(raw_pod, chance)),),
            nodes=(layerviews.node(_with_status(raw_node, chance)),),
            events=(layerviews.event({name: spoiled(each, chance) for name, each in raw_event.items()}),),
            lease=layerviews.lease({"spec": spoiled({"holderIdentity": "a", "renewTime": "x"}, chance)}),
        )
        for cause in causes(seen, NOW).causes:
            assert len(cause.message) < 2_000
            assert all(len(each.what) < 2_000 for each in cause.evidence)
