"""From Models and a fleet to what the planner is given."""

from typing import Any

from shoal.api.gpuclass import GPUClass
from shoal.api.model import Model
from shoal.core import candidates
from shoal.core.facts import Node, Taint
from shoal.core.sizing import SGLangTuning, Tuning


def gpu_class(name: str, product: str, price: str | None = None, **spec: Any) -> GPUClass:
    cost = {"hourlyCost": {"amount": price}} if price else {}
    selector = {"nodeSelector": {"product": product}, "memoryPerGPU": "80Gi"}
    return GPUClass.model_validate({"metadata": {"name": name}, "spec": selector | cost | spec})


def node(name: str, product: str, gpus: int = 8, **changes: Any) -> Node:
    amount = {"nvidia.com/gpu": gpus}
    given: dict[str, Any] = {
        "name": name,
        "labels": {"product": product},
        "ready": True,
        "unschedulable": False,
        "taints": (),
        "capacity": amount,
        "allocatable": amount,
    }
    return Node(**given | changes)


def model(**spec: Any) -> Model:
    source = {"uri": "hf://owner/model"}
    return Model.model_validate({"metadata": {"name": "m", "namespace": "chat"}, "spec": {"source": source} | spec})


def tune(_: object) -> Tuning:
    return SGLangTuning(device="cpu")


def test_a_node_in_two_classes_counts_for_the_first_by_name() -> None:
    classes = [gpu_class("b", "X"), gpu_class("a", "X")]
    assert candidates.members(classes, [node("n", "X")]) == {"a": (node("n", "X"),), "b": ()}


def test_supply_counts_what_pods_hold_and_leaves_out_nodes_that_take_none() -> None:
    classes = [gpu_class("a", "X")]
    nodes = [
        node("free", "X"),
        node("busy", "X"),
        node("cordoned", "X", unschedulable=True),
        node("tainted", "X", taints=(Taint("gpu", "", "NoSchedule"),)),
    ]
    held, releasing = {("busy", "nvidia.com/gpu"): 6}, {("busy", "nvidia.com/gpu"): 2}
    (supply,) = candidates.supplies(classes, candidates.members(classes, nodes), held, releasing)
    assert [(n.name, n.free, n.allocatable, n.releasing) for n in supply.nodes] == [
        ("free", 8, 8, 0),
        ("busy", 2, 8, 2),
    ]
    assert (supply.matching, supply.capacity) == (4, 32)


def test_a_node_with_unhealthy_gpus_is_short_by_them() -> None:
    classes = [gpu_class("a", "X")]
    sick = node("sick", "X", allocatable={"nvidia.com/gpu": 5})
    (supply,) = candidates.supplies(classes, candidates.members(classes, [sick]), {("sick", "nvidia.com/gpu"): 6})
    assert supply.nodes[0].free == -1


def test_without_facts_every_class_says_that_the_size_is_unknown() -> None:
    classes = {"a": gpu_class("a", "X")}
    found = candidates.consider(model(), None, classes, candidates.gpus_of(classes.values(), {}), tune)
    assert not found.candidates
    assert [(r.gpu_class, r.reason) for r in found.rejected] == [("a", "SizeUnknown")]


def test_only_listed_classes_are_looked_at_and_those_that_do_not_exist_are_told() -> None:
    classes = {"a": gpu_class("a", "X"), "b": gpu_class("b", "Y")}
    spec = {"variants": [{"class": "gone"}, {"class": "b"}]}
    found = candidates.consider(model(**spec), None, classes, candidates.gpus_of(classes.values(), {}), tune)
    assert [(r.gpu_class, r.reason) for r in found.rejected] == [("gone", "ClassNotFound"), ("b", "SizeUnknown")]
    assert found.rejected[0].why == "there is no GPUClass of this name"


def test_a_demand_carries_what_the_model_says() -> None:
    spec = {"priority": 7, "interruptiblePercent": 50, "drainSeconds": 60}
    asked = model(**spec)
    found = candidates.consider(asked, None, {}, {}, tune)
    demand = candidates.demand(asked, found, wanted=3, minimum=2)
    assert (demand.key, demand.wanted, demand.minimum) == ("chat/m", 3, 2)
    assert (demand.priority, demand.interruptible_percent, demand.drain_seconds) == (7, 50, 60)
