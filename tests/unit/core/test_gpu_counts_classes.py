"""What a GPUClass says of its nodes: their labels, other classes, unhealthy GPUs, a price that is missing."""

from datetime import UTC, datetime
from typing import Any

from shoal.api.gpuclass import GPUClass, GPUClassStatus
from shoal.core import candidates
from shoal.core.facts import Node
from shoal.core.gpus import usage
from shoal.core.status.gpuclassstatus import status

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
GPU = "nvidia.com/gpu"


def gpu_class(name: str = "l4", *, cost: bool = True, memory: str = "24Gi", **selector: str) -> GPUClass:
    spec: dict[str, Any] = {"nodeSelector": selector or {"pool": "l4"}, "memoryPerGPU": memory}
    if cost:
        spec["hourlyCost"] = {"amount": "0.43"}
    return GPUClass.model_validate({"metadata": {"name": name, "generation": 1}, "spec": spec})


def node(
    name: str,
    *,
    mib: int | None = 23034,
    gpus: int = 4,
    healthy: int | None = None,
    product: str = "NVIDIA-L4",
    **labels: str,
) -> Node:
    found = {"pool": "l4", "nvidia.com/gpu.product": product} | labels
    if mib is not None:
        found["nvidia.com/gpu.memory"] = str(mib)
    return Node(name, found, True, False, (), {GPU: gpus}, {GPU: gpus if healthy is None else healthy})


def told(
    given: GPUClass, *nodes: Node, others: tuple[GPUClass, ...] = (), overhead: int | None = None
) -> GPUClassStatus:
    members = candidates.members((given, *others), nodes)
    own = members[given.metadata.name]
    selector = given.spec.node_selector.items()
    overlapping = {
        n.name: name for name, of in members.items() if name != given.metadata.name for n in of
        if selector <= n.labels.items()
    }  # fmt: skip
    found = usage(given.spec, own, {})
    return status(given, found, own, overlapping=overlapping, overhead=overhead, now=NOW)


def ready(found: GPUClassStatus) -> tuple[str, str, str]:
    (condition,) = found.conditions
    return condition.status, condition.reason, condition.message


def test_memory_is_the_least_that_the_nodes_say_and_without_labels_what_the_class_says() -> None:
    labelled = told(gpu_class(), node("a"), node("b", mib=23000)).memory
    assert labelled is not None
    assert (labelled.per_gpu, labelled.source) == ("23000Mi", "NodeLabels")
    plain = told(gpu_class(), node("a", mib=None)).memory
    assert plain is not None
    assert (plain.per_gpu, plain.source) == ("24Gi", "Spec")


def test_a_measured_overhead_is_shown_and_outlives_a_restart() -> None:
    first = told(gpu_class(), node("a"), overhead=900 * 2**20)
    assert first.memory is not None
    assert first.memory.overhead == "900Mi"
    again = told(gpu_class().model_copy(update={"status": first}), node("a"))
    assert again.memory == first.memory


def test_nodes_whose_memory_is_another_are_named() -> None:
    assert ready(told(gpu_class(), node("a"), node("b", mib=46068))) == (
        "True",
        "LabelsDisagree",
        "b: label nvidia.com/gpu.memory says 46068 MiB, memoryPerGPU says 24Gi. 2 nodes with 8 x nvidia.com/gpu",
    )


def test_what_ecc_and_the_data_sheets_units_take_is_no_disagreement() -> None:
    assert ready(told(gpu_class(memory="24Gi"), node("a", mib=23034)))[1] == "NodesFound"
    assert ready(told(gpu_class(memory="80Gi"), node("a", mib=81559)))[1] == "NodesFound"


def test_different_products_in_one_class_are_named() -> None:
    _, reason, message = ready(told(gpu_class(), node("a"), node("b", product="NVIDIA-T4")))
    assert reason == "LabelsDisagree"
    assert message.startswith("its nodes have different products: NVIDIA-L4 (a), NVIDIA-T4 (b)")


def test_a_node_of_two_classes_counts_for_the_first_by_name_and_the_other_names_it() -> None:
    first, second = gpu_class("all", zone="x"), gpu_class("l4")
    shared, own = node("both", zone="x"), node("own")
    assert ready(told(first, shared, own, others=(second,)))[1] == "NodesFound"
    found = told(second, shared, own, others=(first,))
    assert found.nodes == 1
    assert ready(found) == (
        "True",
        "Overlaps",
        "both also has the labels of all and counts there: make the selectors exclude each other. "
        "1 nodes with 4 x nvidia.com/gpu",
    )
    assert ready(told(second, shared, others=(first,)))[:2] == ("False", "Overlaps")


def test_gpus_of_a_device_plugin_on_a_node_that_has_devices_too_are_told_to_count_twice() -> None:
    plugin = gpu_class("l4")
    devices = GPUClass.model_validate(
        {
            "metadata": {"name": "l4-dra", "uid": "d"},
            "spec": {"device": {"deviceClassName": "gpu.example.com"}, "memoryPerGPU": "24Gi"},
        }
    )
    nodes = [node("moved", gpus=0), node("both"), node("plugin")]
    members = candidates.members((plugin, devices), nodes, {"l4-dra": {"moved": (4, 4), "both": (4, 4)}})
    twice = candidates.counted_twice(plugin, (plugin, devices), members)
    assert twice == {"both": "l4-dra"}
    assert candidates.counted_twice(devices, (plugin, devices), members) == {}, "said once, at the plugin's class"
    own = members["l4"]
    found = status(plugin, usage(plugin.spec, own, {}), own, overlapping={}, overhead=None, now=NOW, twice=twice)
    _, reason, message = ready(found)
    assert reason == "Overlaps"
    assert "both offers both nvidia.com/gpu and devices of GPUClass l4-dra" in message


def test_unhealthy_gpus_are_told_and_not_free() -> None:
    found = told(gpu_class(), node("a", healthy=3))
    assert found.gpus is not None
    assert (found.gpus.capacity, found.gpus.allocatable, found.gpus.free) == (4, 3, 3)
    assert ready(found)[2] == "1 nodes with 4 x nvidia.com/gpu, 1 of them unhealthy"
    assert found.largest_node == 4


def test_a_class_without_a_price_says_what_that_means() -> None:
    assert (
        "no hourlyCost: it is used after all classes that have one" in ready(told(gpu_class(cost=False), node("a")))[2]
    )


def test_a_class_without_nodes_says_which_labels_nobody_has() -> None:
    assert ready(told(gpu_class())) == ("False", "NoNodes", "no node has the labels pool=l4")
