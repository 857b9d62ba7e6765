"""GPUs that nodes share, which never count, and partitions, which do."""

from datetime import UTC, datetime
from typing import Any

import pytest

from shoal.api.gpuclass import GPUClass
from shoal.core.candidates import members, supplies
from shoal.core.devices import ClassDevices
from shoal.core.devices.facts import Device, DeviceId
from shoal.core.devices.match import Matched
from shoal.core.facts import Node
from shoal.core.gpus import usage
from shoal.core.sharing import partition, sharing, strategy_label
from shoal.core.sizing import gpu_of
from shoal.core.status import gpuclassstatus
from shoal_dev.lab.fleet import NodeGroup

NOW = datetime(2026, 11, 25, tzinfo=UTC)
GPU = "nvidia.com/gpu"


def gpu_class(**spec: Any) -> GPUClass:
    base: dict[str, Any] = {"nodeSelector": {"pool": "a"}, "memoryPerGPU": "80Gi"}
    return GPUClass.model_validate(
        {"apiVersion": "shoal.dev/v1alpha1", "kind": "GPUClass", "metadata": {"name": "c"}, "spec": base | spec}
    )


def node(name: str, gpus: int, resource: str = GPU, **labels: str) -> Node:
    said = {f"nvidia.com/{key.replace('__', '-').replace('_', '.')}": text for key, text in labels.items()}
    return Node(name, {"pool": "a"} | said, True, False, (), {resource: gpus}, {resource: gpus})


SLICED = node("sliced", 32, gpu_replicas="4", gpu_sharing__strategy="time-slicing", gpu_product="A100-SHARED")
MPS = node("mps", 16, gpu_replicas="2", gpu_sharing__strategy="mps")
OLD = node("old", 16, gpu_product="NVIDIA-L4-SHARED")
WHOLE = node("whole", 8, gpu_replicas="1", gpu_sharing__strategy="none", gpu_product="A100")


@pytest.mark.parametrize("shared", [SLICED, MPS, OLD])
def test_shared_gpus_never_count(shared: Node) -> None:
    one = gpu_class()
    found = members([one], [shared, WHOLE])
    [supply] = supplies([one], found, {})
    assert sorted((n.name, n.allocatable) for n in supply.nodes) == [(shared.name, 0), ("whole", 8)]
    assert supply.capacity == 8
    assert gpu_of(one, found["c"]).largest_node == 8


def test_the_condition_names_the_nodes_and_how_they_share() -> None:
    one = gpu_class()
    nodes = members([one], [SLICED, MPS, WHOLE])["c"]
    found = gpuclassstatus.status(one, usage(one.spec, nodes, {}), nodes, overlapping={}, overhead=None, now=NOW)
    said = {c.type: c for c in found.conditions}
    assert said["Ready"].status == "True"
    assert said["SharedGPUs"].status == "True"
    assert "mps (mps, 2 parts of each GPU), sliced (time-slicing, 4 parts of each GPU)" in said["SharedGPUs"].message
    assert found.gpus is not None
    assert (found.gpus.capacity, found.gpus.free) == (8, 8)


def test_a_class_of_shared_gpus_only_is_not_ready() -> None:
    one = gpu_class()
    nodes = members([one], [SLICED])["c"]
    found = gpuclassstatus.status(one, usage(one.spec, nodes, {}), nodes, overlapping={}, overhead=None, now=NOW)
    said = {c.type: c for c in found.conditions}
    assert (said["Ready"].status, said["Ready"].reason) == ("False", "SharedGPUs")


def test_whole_gpus_have_no_such_condition() -> None:
    one = gpu_class()
    nodes = members([one], [WHOLE])["c"]
    found = gpuclassstatus.status(one, usage(one.spec, nodes, {}), nodes, overlapping={}, overhead=None, now=NOW)
    assert [c.type for c in found.conditions] == ["Ready"]


@pytest.mark.parametrize("text", ["", "x", "-1", "9" * 40, "٤"])
def test_a_label_that_is_no_number_is_not_believed(text: str) -> None:
    assert sharing(node("n", 8, gpu_replicas=text), GPU) is None


def test_parts_under_a_name_of_their_own_are_shared_too() -> None:
    renamed = node("n", 16, "nvidia.com/gpu.shared", gpu_replicas="2", gpu_sharing__strategy="time-slicing")
    one = gpu_class(resourceName="nvidia.com/gpu.shared")
    assert supplies([one], members([one], [renamed]), {})[0].capacity == 0


def test_a_partition_is_a_gpu_of_its_own_and_a_replica_has_one() -> None:
    name = "nvidia.com/mig-3g.40gb"
    mig = Node("n", {"pool": "a", f"{name}.memory": "40192"}, True, False, (), {name: 2}, {name: 2})
    one = gpu_class(resourceName=name, memoryPerGPU="40Gi")
    found = gpu_of(one, members([one], [mig])["c"])
    assert (found.memory_bytes, found.largest_node) == (40192 * 2**20, 1)
    nodes = members([one], [mig])["c"]
    said = gpuclassstatus.status(one, usage(one.spec, nodes, {}), nodes, overlapping={}, overhead=None, now=NOW)
    assert said.largest_node == 1, "the status said 0"
    assert partition([mig], name) == "3g.40gb"
    assert supplies([one], members([one], [mig]), {})[0].capacity == 2
    single = node("s", 7, gpu_product="NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", gpu_memory="4864")
    of_single = gpu_of(gpu_class(), [single])
    assert (of_single.memory_bytes, of_single.largest_node) == (4864 * 2**20, 1)
    assert strategy_label(name) == "nvidia.com/mig-3g.40gb.sharing-strategy"


def test_a_shared_partition_does_not_count() -> None:
    name = "nvidia.com/mig-1g.5gb"
    labels = {"pool": "a", f"{name}.replicas": "2", f"{name}.sharing-strategy": "time-slicing"}
    mig = Node("n", labels, True, False, (), {name: 14}, {name: 14})
    one = gpu_class(resourceName=name)
    assert supplies([one], members([one], [mig]), {})[0].capacity == 0


def test_devices_that_several_claims_may_share_are_named() -> None:
    one = GPUClass.model_validate(
        {
            "apiVersion": "shoal.dev/v1alpha1", "kind": "GPUClass", "metadata": {"name": "c"},
            "spec": {"device": {"deviceClassName": "gpu.nvidia.com"}, "memoryPerGPU": "80Gi"},
        }
    )  # fmt: skip
    whole, shared = (
        Matched(DeviceId("gpu.nvidia.com", "n", name), Device(name, {}, {}, shared=name == "gpu-0"))
        for name in ("gpu-1", "gpu-0")
    )

    def said(*devices: Matched) -> dict[str, tuple[str, str]]:
        found = gpuclassstatus.status(
            one, usage(one.spec, [], {}), [], overlapping={}, overhead=None, now=NOW,
            devices=ClassDevices(by_node={"n": devices}),
        )  # fmt: skip
        return {c.type: (c.reason, c.message) for c in found.conditions}

    both = said(whole, shared)["SharedGPUs"][1]
    assert "1 of 2 devices do not count" in both
    assert "gpu.nvidia.com/n/gpu-0." in both
    assert "leave them out with `!device.allowMultipleAllocations`" in both
    assert "scheduler may give one to a replica" in both
    alone = said(shared)
    assert alone["Ready"] == alone["SharedGPUs"]
    assert alone["Ready"][0] == "SharedGPUs"
    assert "scheduler may" not in alone["Ready"][1], "no replica is placed there"
    assert "SharedGPUs" not in said(whole)


def test_a_node_of_the_lab_can_show_shared_gpus() -> None:
    labels = {"nvidia.com/gpu.sharing-strategy": "mps", "nvidia.com/gpu.replicas": "4"}
    lab = {"name": "n", "gpus": 8, "gpuProduct": "NVIDIA-L4", "gpuMemoryMiB": 23034}
    plain, shared = NodeGroup.model_validate(lab), NodeGroup.model_validate(lab | {"labels": labels})
    assert sharing(Node("n", plain.node_labels("n"), True, False, (), {GPU: 8}, {GPU: 8}), GPU) is None
    found = sharing(Node("n", shared.node_labels("n"), True, False, (), {GPU: 8}, {GPU: 8}), GPU)
    assert found is not None
    assert (found.strategy, found.replicas) == ("mps", 4)
