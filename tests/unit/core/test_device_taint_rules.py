"""DeviceTaintRules: which devices they taint, and what is free then."""

from collections.abc import Sequence
from typing import Any

import pytest

from shoal.core.devices import DeviceTaintRule, RuleTaints, Slice, current, match, offered
from shoal.kube import deviceviews
from tests.unit.core.test_devices import CLASSES, DRIVER, gpu_class, gpus, of_node, raw_device


def rule(name: str = "broken", effect: str = "NoSchedule", **selector: str) -> DeviceTaintRule:
    spec = {"deviceSelector": selector, "taint": {"key": "example.com/broken", "effect": effect}}
    found = deviceviews.device_taint_rule({"metadata": {"name": name}, "spec": spec})
    assert found is not None
    return found


def free(slices: Sequence[Slice], *rules: DeviceTaintRule) -> dict[str, int]:
    """Node -> devices that pods may have."""
    pools, incomplete = current(RuleTaints().add(slices, rules))
    classes = match([gpu_class()], CLASSES, pools, incomplete, {"a": {}, "b": {}})
    return {node: of.offered for node, of in offered(classes["h100"], pools, set(), set()).items()}


FLEET = (gpus("a", 2), gpus("b", 3))


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, {"a": 0, "b": 0}),
        ({"driver": DRIVER}, {"a": 0, "b": 0}),
        ({"driver": "other.example"}, {"a": 2, "b": 3}),
        ({"pool": "a"}, {"a": 0, "b": 3}),
        ({"device": "gpu-1"}, {"a": 1, "b": 2}),
        ({"driver": DRIVER, "pool": "b", "device": "gpu-2"}, {"a": 2, "b": 2}),
        ({"pool": "a", "device": "gpu-2"}, {"a": 2, "b": 3}),
    ],
)
def test_a_rule_takes_the_devices_that_it_selects_from_what_is_free(
    selector: dict[str, str], expected: dict[str, int]
) -> None:
    assert free(FLEET, rule(**selector)) == expected


@pytest.mark.parametrize(("effect", "left"), [("NoSchedule", 0), ("NoExecute", 0), ("None", 2)])
def test_a_rule_whose_effect_is_none_is_only_a_rehearsal(effect: str, left: int) -> None:
    assert free(FLEET, rule(effect=effect, pool="a"))["a"] == left


def test_a_rule_without_a_selector_selects_nothing() -> None:
    for spec in ({}, {"taint": {"key": "x", "effect": "NoExecute"}}, {"deviceSelector": None}):
        assert deviceviews.device_taint_rule({"metadata": {"name": "x"}, "spec": spec}) is None


def test_several_rules_add_up_with_the_drivers_own_taints() -> None:
    own: dict[str, Any] = {"taints": [{"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoExecute"}]}
    slices = (of_node("a", raw_device("gpu-0", **own), raw_device("gpu-1"), raw_device("gpu-2")),)
    (tainted,) = RuleTaints().add(slices, [rule("x", device="gpu-0"), rule("y", "None"), rule("x", device="gpu-0")])
    keys = [[(taint.key, taint.effect) for taint in device.taints] for device in tainted.devices]
    added = ("example.com/broken", "None")
    assert keys == [
        [("gpu.nvidia.com/xid", "NoExecute"), ("example.com/broken", "NoSchedule"), added],
        [added],
        [added],
    ], "a rule that two versions of the API show taints once"


def test_a_slice_that_no_rule_changes_stays_the_same_object() -> None:
    """By it is known whether selectors are to be evaluated again."""
    taints = RuleTaints()
    before = taints.add(FLEET, [rule(pool="a")])
    assert before[1] is FLEET[1], "no rule reaches it"
    assert before[0] is not FLEET[0]
    assert taints.add(FLEET, [rule(pool="a")])[0] is before[0]
    assert taints.add(FLEET, [rule("more", pool="b"), rule(pool="a")])[0] is before[0]
    assert taints.add(FLEET, [rule(pool="a", device="gpu-1")])[0] is not before[0], "the rule is another one"
    assert taints.add(FLEET, [rule(pool="a", device="gpu-7")])[0] is FLEET[0], "it selects nothing there"
    assert taints.add(FLEET, []) == list(FLEET)
