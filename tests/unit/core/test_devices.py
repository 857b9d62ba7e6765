"""Devices of DRA drivers: selectors, pools, which class has which device, and what is free."""

from datetime import UTC, datetime
from typing import Any

import pytest

from shoal.api.gpuclass import GPUClass, devices_of
from shoal.api.meta import JsonObject
from shoal.core import candidates
from shoal.core.devices import (
    ClassDevices,
    DeviceId,
    KnownDevices,
    MatchCache,
    current,
    facts_of,
    last_known,
    match,
    offered,
    without_class,
)
from shoal.core.devices.facts import Device, DeviceClass, Slice
from shoal.core.devices.selectors import SelectorFailed, SelectorInvalid, compiled
from shoal.core.facts import Node
from shoal.core.gpus import usage
from shoal.core.sizing import gpu_of
from shoal.core.status.gpuclassstatus import status
from shoal.kube import deviceviews

NOW = datetime(2026, 11, 26, tzinfo=UTC)
DRIVER = "gpu.nvidia.com"
IS_GPU = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'"
CLASSES = {DRIVER: DeviceClass(DRIVER, (IS_GPU,))}
GI = 2**30


def raw_device(name: str, *, product: str = "H100", memory: str | None = "80Gi", **more: Any) -> JsonObject:
    attributes: JsonObject = {
        "type": {"string": "gpu"},
        "productName": {"string": product},
        "architecture": {"string": "Hopper"},
        "cudaComputeCapability": {"version": "9.0.0"},
        "driverVersion": {"version": "580.95.5-rc.1"},
        "index": {"int": 3},
        "other.example/fast": {"bool": True},
    }
    capacity = {"memory": {"value": memory}} if memory else {}
    return {"name": name, "attributes": attributes, "capacity": capacity} | more


def of_node(node: str, *devices: JsonObject, generation: int = 1, of: int = 1, part: int = 0, **more: Any) -> Slice:
    spec = {"driver": DRIVER, "nodeName": node, "devices": list(devices)} | more
    spec["pool"] = {"name": node, "generation": generation, "resourceSliceCount": of}
    return deviceviews.resource_slice({"metadata": {"name": f"{node}-{generation}-{part}"}, "spec": spec})


def gpus(node: str, count: int, **more: Any) -> Slice:
    return of_node(node, *(raw_device(f"gpu-{i}", **more) for i in range(count)))


def gpu_class(name: str = "h100", *selectors: str, deviceclass: str = DRIVER, **spec: Any) -> GPUClass:
    device = {"deviceClassName": deviceclass, "selectors": [{"cel": {"expression": e}} for e in selectors]}
    given = {"metadata": {"name": name, "generation": 1}, "spec": {"device": device} | spec}
    return GPUClass.model_validate(given)


def matched(classes: list[GPUClass], *slices: Slice, cache: MatchCache | None = None) -> dict[str, ClassDevices]:
    labels = {node: {"pool": node[0]} for node in ("a", "a2", "b")}
    pools, incomplete = current(slices)
    return match(classes, CLASSES, pools, incomplete, labels, cache)


def one_device(**more: Any) -> Device:
    return of_node("a", raw_device("gpu-0", **more)).devices[0]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (IS_GPU, True),
        ('device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("80Gi")) >= 0', True),
        ('device.capacity["gpu.nvidia.com"].memory.isGreaterThan(quantity("80Gi"))', False),
        ('device.capacity["gpu.nvidia.com"].memory == quantity("81920Mi")', True),
        ('device.attributes["gpu.nvidia.com"].productName.lowerAscii().matches("^h1")', True),
        ('device.attributes["gpu.nvidia.com"].index > 2', True),
        ('device.attributes["other.example"].fast', True),
        ('"gpu.nvidia.com" in device.attributes', True),
        ('has(device.attributes["no.such"].x)', False),
        ('device.attributes["gpu.nvidia.com"].?x.orValue("none") == "none"', True),
        ('device.attributes["gpu.nvidia.com"].cudaComputeCapability.isGreaterThan(semver("8.9.0"))', True),
        ('device.attributes["gpu.nvidia.com"].driverVersion.isLessThan(semver("580.95.5"))', True),
        ('device.attributes["gpu.nvidia.com"].driverVersion.major() == 580', True),
        ('cel.bind(d, device.attributes["gpu.nvidia.com"], d.type == "gpu" && d.index == 3)', True),
        ('["H100", "H200"].exists(p, p == device.attributes["gpu.nvidia.com"].productName)', True),
        ("!device.allowMultipleAllocations", True),
    ],
)
def test_expressions_mean_what_they_mean_to_the_scheduler(expression: str, expected: bool) -> None:
    assert compiled(expression).matches(DRIVER, one_device()) is expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("device.attributes[", "Syntax error"),
        ("nosuch(1)", "undeclared reference to 'nosuch'"),
        ("devise.driver == 'x'", "undeclared reference to 'devise"),
        ("device.model == 'x'", "undeclared reference to 'device.model'"),
        ("device.driver == 1", "no matching overload"),
        ("device.driver", "of type string; it must be true or false"),
        ("[1].all(a, [1].all(b, [1].all(c, true)))", "3 macros such as `exists`; 2 are allowed"),
        ("'" + "x" * 11_000 + "' == ''", "10240 are allowed"),
        ("(" * 4000 + "true" + ")" * 4000, "recursion limit"),
        ("'\ud800' == 'x'", "incompatible function arguments"),
    ],
)
def test_an_expression_that_does_not_compile_says_why_on_one_line(expression: str, message: str) -> None:
    with pytest.raises(SelectorInvalid) as found:
        compiled(expression)
    assert message in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "expression",
    [
        'device.attributes["gpu.nvidia.com"].nosuch == "x"',
        'device.attributes["gpu.nvidia.com"].index',
        'quantity("many").compareTo(quantity("1")) > 0',
        f"{list(range(900))}.all(a, {list(range(900))}.all(b, a * b >= 0))".replace(" ", ""),
    ],
)
def test_an_expression_without_a_result_for_a_device_fails(expression: str) -> None:
    with pytest.raises(SelectorFailed):
        compiled(expression).matches(DRIVER, one_device())


# --- pools ------------------------------------------------------------------------------------------------------------


def test_of_a_pool_the_newest_complete_generation_counts() -> None:
    old = [of_node("a", raw_device(f"old-{i}"), of=2, part=i) for i in range(2)]
    new = [of_node("a", raw_device(f"new-{i}"), generation=2, of=2, part=i) for i in range(2)]
    (pool,), incomplete = current([*old, new[0]])
    assert [d.name for _, d in pool.devices] == ["old-0", "old-1"]
    assert pool.updating
    assert incomplete == ()
    (pool,), _ = current([*old, *new])
    assert [d.name for _, d in pool.devices] == ["new-0", "new-1"]
    assert not pool.updating
    assert current(new[:1]) == ((), ((DRIVER, "a"),))


def test_two_devices_of_one_name_make_a_pool_useless_as_for_the_scheduler() -> None:
    pools, incomplete = current([of_node("a", raw_device("gpu-0"), raw_device("gpu-0"))])
    assert (pools, incomplete) == ((), ((DRIVER, "a"),))


# --- match ------------------------------------------------------------------------------------------------------------


def test_a_class_has_the_devices_that_all_selectors_choose() -> None:
    big = gpu_class("big", 'device.attributes["gpu.nvidia.com"].productName == "H100"')
    found = matched([big], gpus("a", 2), gpus("b", 1, product="L4"))["big"]
    assert {node: len(of) for node, of in found.by_node.items()} == {"a": 2}
    assert found.problem is None


def test_a_class_with_a_node_selector_has_devices_of_these_nodes_only() -> None:
    found = matched([gpu_class(nodeSelector={"pool": "a"})], gpus("a", 2), gpus("b", 1))["h100"]
    assert list(found.by_node) == ["a"]
    assert matched([gpu_class()], gpus("nowhere", 2))["h100"].by_node == {}, "a node that is not there"


def test_a_device_of_two_classes_counts_for_the_first_and_both_are_named() -> None:
    found = matched([gpu_class("zeta"), gpu_class("alpha", nodeSelector={"pool": "a"})], gpus("a", 2), gpus("b", 1))
    assert {node: len(of) for node, of in found["alpha"].by_node.items()} == {"a": 2}
    assert {node: len(of) for node, of in found["zeta"].by_node.items()} == {"b": 1}
    assert {name: len(ids) for name, ids in found["zeta"].elsewhere.items()} == {"alpha": 2}


@pytest.mark.parametrize(
    ("given", "reason", "message"),
    [
        (gpu_class("h100", "device.x"), "SelectorInvalid", "spec.device.selectors[0] does not compile"),
        (
            gpu_class("h100", 'device.attributes["gpu.nvidia.com"].none == 1'),
            "SelectorInvalid",
            "no result for device gpu.nvidia.com/a/gpu-0: NOT_FOUND",
        ),
        (gpu_class(deviceclass="none"), "DeviceClassNotFound", "there is no DeviceClass none"),
    ],
)
def test_a_class_whose_selectors_do_not_work_has_no_devices(given: GPUClass, reason: str, message: str) -> None:
    good = gpu_class("z-good")
    found = matched([given, good], gpus("a", 2))
    problem = found["h100"].problem
    assert problem is not None
    assert (problem.reason, message in problem.message) == (reason, True), problem
    assert found["h100"].by_node == {}
    assert found["z-good"].problem is None


def test_a_class_that_does_not_work_takes_no_device_from_another() -> None:
    found = matched(
        [gpu_class("a-bad", 'device.attributes["gpu.nvidia.com"].none == 1'), gpu_class("good")], gpus("a", 2)
    )
    assert len(found["good"].by_node["a"]) == 2
    assert found["good"].elsewhere == {}


def test_devices_that_many_nodes_can_use_are_told_and_not_counted() -> None:
    fabric = of_node("a", raw_device("gpu-0"), nodeName=None, allNodes=True)
    found = matched([gpu_class()], fabric)["h100"]
    assert (found.by_node, found.of_many_nodes) == ({}, 1)


def test_slices_that_stay_are_not_evaluated_again() -> None:
    cache, slice_ = MatchCache(), gpus("a", 2)
    first = matched([gpu_class()], slice_, cache=cache)
    assert matched([gpu_class()], slice_, cache=cache) == first
    changed = gpus("a", 1)
    assert len(matched([gpu_class()], changed, cache=cache)["h100"].by_node["a"]) == 1


# --- what is free -----------------------------------------------------------------------------------------------------


def count(devices: ClassDevices, *slices: Slice, allocated: str = "", own: str = "") -> tuple[int, int, int]:
    ids = {DeviceId(DRIVER, "a", name) for name in allocated.split()}
    mine = {DeviceId(DRIVER, "a", name) for name in own.split()}
    found = offered(devices, current(slices)[0], ids | mine, mine)["a"]
    return found.capacity, found.offered, found.taken


@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute"])
def test_a_device_with_a_taint_is_not_offered_unless_an_engine_has_it(effect: str) -> None:
    taints = [{"key": "unhealthy", "effect": effect}]
    slice_ = of_node("a", raw_device("gpu-0"), raw_device("gpu-1", taints=taints), raw_device("gpu-2"))
    devices = matched([gpu_class()], slice_)["h100"]
    assert count(devices, slice_) == (3, 2, 0)
    assert count(devices, slice_, own="gpu-1") == (3, 3, 0)
    assert count(devices, slice_, allocated="gpu-0") == (3, 1, 1)


def test_a_taint_without_effect_on_pods_changes_nothing() -> None:
    slice_ = of_node("a", raw_device("gpu-0", taints=[{"key": "info", "effect": "None"}]))
    assert count(matched([gpu_class()], slice_)["h100"], slice_) == (1, 1, 0)


def test_devices_that_share_counters_are_counted_as_many_as_fit_together() -> None:
    """A GPU and its two halves: the GPU, or both halves."""

    def part(name: str, kind: str, slices: int) -> JsonObject:
        device = raw_device(name, consumesCounters=[{"counterSet": "gpu-0", "counters": {"m": {"value": str(slices)}}}])
        device["attributes"]["type"] = {"string": kind}
        return device

    shared = of_node("a", of=2, sharedCounters=[{"name": "gpu-0", "counters": {"m": {"value": "8"}}}])
    parts = of_node(
        "a", part("whole", "gpu", 8), part("half-0", "mig", 4), part("half-1", "mig", 4), part("half-2", "mig", 4),
        of=2, part=1,
    )  # fmt: skip
    pools, incomplete = current([shared, parts])
    classes = {DRIVER: DeviceClass(DRIVER, ()), **CLASSES}
    halves = gpu_class("halves", f"device.attributes['{DRIVER}'].type == 'mig'")
    whole = gpu_class("whole", f"device.attributes['{DRIVER}'].type == 'gpu'")
    found = match([halves, whole], classes | {DRIVER: DeviceClass(DRIVER, ())}, pools, incomplete, {"a": {}})
    assert count(found["halves"], shared, parts) == (2, 2, 0)
    assert count(found["whole"], shared, parts) == (1, 1, 0)
    assert count(found["halves"], shared, parts, own="half-0") == (2, 2, 0)
    assert count(found["halves"], shared, parts, allocated="half-0") == (2, 1, 1)
    assert count(found["whole"], shared, parts, allocated="half-0") == (1, 0, 0)
    assert count(found["halves"], shared, parts, allocated="whole") == (2, 0, 0)


def several_claims(name: str, **more: Any) -> JsonObject:
    return raw_device(name, allowMultipleAllocations=True, **more)


def test_a_device_that_several_claims_may_share_never_counts() -> None:
    slice_ = of_node("a", raw_device("gpu-0"), several_claims("gpu-1"), several_claims("gpu-2"))
    devices = matched([gpu_class()], slice_)["h100"]
    assert count(devices, slice_) == (1, 1, 0)
    assert count(devices, slice_, allocated="gpu-1") == (1, 1, 0), "who has a part takes no whole GPU away"
    assert count(devices, slice_, own="gpu-1") == (1, 1, 0), "nor does a replica that was given one make it count"
    pools, given = current([slice_])[0], {DeviceId(DRIVER, "a", "gpu-1")}
    assert offered(devices, pools, given, given)["a"].shared == 1
    left_out = matched([gpu_class("h100", "!device.allowMultipleAllocations")], slice_)["h100"]
    assert [str(m.id) for m in left_out.devices] == [f"{DRIVER}/a/gpu-0"]
    assert left_out.shared == ()


def test_a_shared_device_takes_counters_of_its_pool_and_does_not_count_itself() -> None:
    takes = [{"counterSet": "gpu-0", "counters": {"m": {"value": "4"}}}]
    counters = of_node("a", of=2, sharedCounters=[{"name": "gpu-0", "counters": {"m": {"value": "8"}}}])
    parts = [raw_device(f"half-{i}", consumesCounters=takes) for i in range(2)]
    slice_ = of_node("a", several_claims("shared", consumesCounters=takes), *parts, of=2, part=1)
    devices = matched([gpu_class()], counters, slice_)["h100"]
    assert count(devices, counters, slice_) == (2, 2, 0)
    assert count(devices, counters, slice_, allocated="shared") == (2, 1, 0)


# --- sizing and status ------------------------------------------------------------------------------------------------


def node(name: str = "a") -> Node:
    return Node(name, {"pool": "a"}, True, False, (), {}, {})


def test_sizing_takes_memory_and_compute_capability_from_the_devices() -> None:
    slice_ = of_node("a", raw_device("gpu-0"), raw_device("gpu-1", memory="79Gi"))
    facts = facts_of((DRIVER, d) for d in slice_.devices)
    found = gpu_of(gpu_class(), [], facts)
    assert (found.memory_bytes, found.compute_capability) == (79 * GI, (9, 0))
    said = gpu_of(gpu_class(memoryPerGPU="40Gi", computeCapability="8.0"), [], facts)
    assert (said.memory_bytes, said.compute_capability) == (79 * GI, (8, 0))


def test_where_devices_say_nothing_the_class_counts_and_then_nothing_is_placed() -> None:
    facts = facts_of((DRIVER, d) for d in of_node("a", raw_device("gpu-0", memory=None)).devices)
    assert gpu_of(gpu_class(memoryPerGPU="40Gi"), [], facts).memory_bytes == 40 * GI
    assert gpu_of(gpu_class(), [], facts).memory_bytes == 0


def test_what_devices_said_last_counts_while_their_driver_is_replaced() -> None:
    memory = {"perGPU": "79Gi", "source": "Devices"}
    known = GPUClass.model_validate(gpu_class().model_dump(by_alias=True) | {"status": {"memory": memory}})
    assert gpu_of(known, [], None).memory_bytes == 79 * GI


def with_status(**devices: Any) -> GPUClass:
    """A class of whose devices something was known."""
    status_ = {"memory": {"perGPU": "79Gi", "source": "Devices"}, "observedGeneration": 1, "devices": devices}
    return GPUClass.model_validate(gpu_class().model_dump(by_alias=True) | {"status": status_})


def test_without_devices_the_last_compute_capability_and_profile_count_for_as_long_as_the_class_is_the_same() -> None:
    known = with_status(computeCapability="9.0", profile="1g.10gb")
    four = Node("a", {}, True, False, (), {devices_of("h100"): 4}, {})
    assert gpu_of(known, [four], None).compute_capability == (9, 0)
    assert gpu_of(known, [four], None).largest_node == 1
    there = facts_of((DRIVER, d) for d in of_node("b", raw_device("gpu-0")).devices)
    assert gpu_of(known, [four], there).largest_node == 4, "devices that are there speak for themselves"
    changed = known.model_copy(update={"metadata": known.metadata.model_copy(update={"generation": 2})})
    assert gpu_of(changed, [four], None).compute_capability is None
    assert gpu_of(with_status(computeCapability="x.y"), [four], None).compute_capability is None


def test_the_status_keeps_what_devices_said_last() -> None:
    known = with_status(computeCapability="9.0", profile="1g.10gb")
    counts = usage(known.spec, (), {}, known.resource)
    found = status(known, counts, (), overlapping={}, overhead=None, now=NOW, devices=ClassDevices(), facts=None)
    assert known.status is not None
    assert found.devices == known.status.devices
    assert found.memory is not None
    assert (found.memory.per_gpu, found.memory.source) == ("79Gi", "Devices")


class Kept:
    """What is known of the devices of one class, from one view of the slices to the next."""

    def __init__(self) -> None:
        self.known: dict[str, KnownDevices] = {}

    def memory(self, *slices: Slice, nodes: tuple[str, ...] = ("a", "b"), generation: int = 1) -> int | None:
        """GiB of the smallest device."""
        pools, incomplete = current(slices)
        found = match([gpu_class()], CLASSES, pools, incomplete, {node: {} for node in nodes})
        published = {(pool.driver, pool.name) for pool in pools}
        self.known = last_known(self.known, found, {"h100": ("uid", generation)}, published, nodes)
        facts = facts_of((m.id.driver, m.device) for m in self.known["h100"].matched)
        return None if facts is None or facts.memory is None else facts.memory // GI


def test_slices_that_are_gone_for_a_moment_leave_the_facts_as_they_were() -> None:
    small, large = gpus("a", 2, memory="24Gi"), gpus("b", 2)
    kept = Kept()
    assert kept.memory() is None
    assert kept.memory(small, large) == 24
    assert kept.memory(large) == 24, "the large devices do not speak for those whose driver is replaced"
    assert kept.memory() == 24
    half = of_node("a", raw_device("gpu-0", memory="24Gi"), generation=2, of=2)
    assert kept.memory(half, large) == 24
    bigger = of_node("a", raw_device("gpu-0", memory="48Gi"), generation=2)
    assert kept.memory(bigger, large) == 48, "what is published again counts"


def test_devices_of_a_node_that_is_gone_or_of_another_selection_are_forgotten() -> None:
    small, large = gpus("a", 2, memory="24Gi"), gpus("b", 2)
    kept = Kept()
    assert kept.memory(small, large) == 24
    assert kept.memory(large, nodes=("b",)) == 80
    assert kept.memory(large) == 80
    assert kept.memory(generation=2) is None


def test_a_replica_has_one_part_of_a_gpu() -> None:
    raw = raw_device("gpu-0-mig-1g", memory="9984Mi")
    raw["attributes"] |= {"type": {"string": "mig"}, "profile": {"string": "1g.10gb"}}
    facts = facts_of((DRIVER, d) for d in of_node("a", raw, raw | {"name": "gpu-0-mig-2"}).devices)
    assert facts is not None
    assert facts.profile == "1g.10gb"
    assert gpu_of(gpu_class(), [node()], facts).largest_node == 1


def told(given: GPUClass, *slices: Slice, held: int = 0) -> tuple[str, str, str]:
    pools, _ = current(slices)
    devices = matched([given], *slices)[given.metadata.name]
    offers = {n: (c.capacity, c.offered) for n, c in offered(devices, pools, set(), set()).items()}
    own = candidates.members([given], [node("a"), node("b")], {given.metadata.name: offers})[given.metadata.name]
    counts = usage(given.spec, own, {("a", devices_of(given.metadata.name)): held}, given.resource)
    facts = facts_of((m.id.driver, m.device) for m in devices.devices)
    found = status(given, counts, own, overlapping={}, overhead=None, now=NOW, devices=devices, facts=facts)
    (condition,) = (c for c in found.conditions if c.type == "Ready")
    return condition.status, condition.reason, condition.message


def test_the_status_says_what_is_wrong_with_devices() -> None:
    assert told(gpu_class(), gpus("a", 2), held=1)[:2] == ("True", "NodesFound")
    assert told(gpu_class())[:2] == ("False", "NoDevices")
    assert told(gpu_class(), gpus("a", 2, memory=None))[:2] == ("False", "MemoryUnknown")
    status_, reason, message = told(gpu_class(memoryPerGPU="40Gi"), gpus("a", 2))
    assert (status_, reason) == ("True", "LabelsDisagree")
    assert "81920 MiB" in message
    assert told(gpu_class("h100", "device.x"), gpus("a", 2))[1] == "SelectorInvalid"
    status_, reason, message = told(gpu_class(), of_node("a", several_claims("gpu-0"), several_claims("gpu-1")))
    assert (status_, reason) == ("False", "SharedGPUs")
    assert "2 of 2 devices do not count" in message
    assert told(gpu_class(), of_node("a", several_claims("gpu-0"), raw_device("gpu-1")))[:2] == ("True", "NodesFound")
    incomplete = told(gpu_class(), of_node("a", raw_device("gpu-0"), of=2))
    assert incomplete[1] == "NoDevices"
    assert "gpu.nvidia.com/a are not all there" in incomplete[2]


# --- GPUs of no class -------------------------------------------------------------------------------------------------


def left(classes: list[GPUClass], *slices: Slice) -> dict[str, list[str]]:
    found = without_class(current(slices)[0], matched(classes, *slices), {"a", "a2", "b"})
    return {node: [each.device for each in of] for node, of in found.items()}


def test_a_gpu_that_no_class_selects_is_named_with_its_node() -> None:
    assert left([], gpus("a", 2), gpus("b", 1)) == {"a": ["gpu-0", "gpu-1"], "b": ["gpu-0"]}
    assert left([gpu_class()], gpus("a", 2)) == {}
    assert left([gpu_class(nodeSelector={"pool": "b"})], gpus("a", 1), gpus("b", 1)) == {"a": ["gpu-0"]}
    only_one = f'device.attributes["{DRIVER}"].productName == "H100"'
    other = of_node("a", raw_device("gpu-0"), raw_device("gpu-1", product="A2"))
    assert left([gpu_class("h100", only_one)], other) == {"a": ["gpu-1"]}


def test_a_gpu_of_a_node_that_is_not_there_and_what_is_no_gpu_are_not_named() -> None:
    assert left([], gpus("gone", 2)) == {}
    assert left([], of_node("a", raw_device("channel-0"), driver="compute-domain.nvidia.com")) == {}
    passed_through = raw_device("gpu-vfio-0")
    passed_through["attributes"]["type"] = {"string": "vfio"}
    assert left([], of_node("a", passed_through, raw_device("gpu-1", allowMultipleAllocations=True))) == {}


def test_a_part_of_a_gpu_that_a_class_has_otherwise_is_not_named() -> None:
    def part(name: str, gpu: str) -> JsonObject:
        return raw_device(name, consumesCounters=[{"counterSet": gpu, "counters": {"m": {"value": "4"}}}])

    wholes = (part("gpu-0", "of-0"), part("gpu-1", "of-1"))
    parts = (part("gpu-0-mig-0", "of-0"), part("gpu-1-mig-0", "of-1"))
    for each in parts:
        each["attributes"]["type"] = {"string": "mig"}
    assert left([gpu_class()], of_node("a", *wholes, *parts)) == {}
    assert left([gpu_class()], of_node("a", wholes[0], *parts)) == {"a": ["gpu-1-mig-0"]}


def test_no_gpu_is_named_while_the_selectors_of_a_class_cannot_be_evaluated() -> None:
    """They may be its GPUs, and the class says what is wrong."""
    assert left([gpu_class(deviceclass="missing")], gpus("a", 2)) == {}
    assert left([gpu_class("h100", "device.x")], gpus("a", 2)) == {}


# --- claims -----------------------------------------------------------------------------------------------------------


def test_a_claim_has_its_devices_but_not_those_it_may_only_look_at() -> None:
    results = [
        {"driver": DRIVER, "pool": "a", "device": "gpu-0", "request": "gpu"},
        {"driver": DRIVER, "pool": "a", "device": "gpu-1", "request": "watch", "adminAccess": True},
    ]
    raw: JsonObject = {
        "metadata": {"namespace": "ns", "name": "c"},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}],
        },
    }
    claim = deviceviews.resource_claim(raw)
    assert claim is not None
    assert claim.devices == (DeviceId(DRIVER, "a", "gpu-0"),)
    assert claim.pods == (("p", "u"),)
    assert deviceviews.resource_claim({"metadata": raw["metadata"], "status": {}}) is None
