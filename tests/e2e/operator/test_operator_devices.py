"""GPUs as devices (DRA) with a real scheduler: slices that come, change and vanish, and clusters without DRA."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from click.testing import CliRunner

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.cli.main import main
from shoal.kube.resources import (
    DEPLOYMENTS,
    DEVICECLASSES,
    GPUCLASSES,
    MODELS,
    PODS,
    RESOURCECLAIMS,
    RESOURCECLAIMTEMPLATES,
    RESOURCESLICES,
    Resource,
)
from shoal.runtime.operator import OperatorProcess
from tests.support.controlplane import Fleet
from tests.support.devices import (
    DRIVER,
    class_of_devices,
    clear_devices,
    device_class,
    partitioned,
    resource_slice,
)
from tests.support.operators import (
    condition,
    eventually,
    model,
    model_with,
    running_operator,
    with_condition,
)

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]
NODE = "h100-0"
QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")


@pytest.fixture
async def devices(fleet: Fleet) -> AsyncIterator[Fleet]:
    await clear_devices(fleet.client)
    await fleet.client.apply(DEVICECLASSES, device_class(), manager="test")
    try:
        yield fleet
    finally:
        await clear_devices(fleet.client)


async def publish(fleet: Fleet, slice_: JsonObject) -> None:
    await fleet.client.apply(RESOURCESLICES, slice_, manager="driver", force=True)


async def counted(fleet: Fleet, name: str = "devices", **expected: int) -> None:
    def found(obj: JsonObject) -> dict[str, Any]:
        gpus = (obj.get("status") or {}).get("gpus") or {}
        return {key: gpus.get(key) for key in expected}

    await eventually(lambda: fleet.client.get(GPUCLASSES, name), lambda o: found(o) == expected, what=str(expected))


async def engines(fleet: Fleet) -> list[str]:
    """Uids of engine pods that are not going."""
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
    pods = await fleet.all(PODS, namespace=fleet.namespace, label_selector=selector)
    return [p["metadata"]["uid"] for p in pods if "deletionTimestamp" not in p["metadata"]]


async def test_counts_follow_slices_taints_and_claims(devices: Fleet) -> None:
    client = devices.client
    async with running_operator(client, str(devices.plane.kubeconfig)):
        await devices.apply(class_of_devices("devices"))
        await with_condition(client, GPUCLASSES, "", "devices", "Ready", "False", "NoDevices")
        await publish(devices, resource_slice(NODE, "gpu-0", "gpu-1", "gpu-2"))
        await with_condition(client, GPUCLASSES, "", "devices", "Ready", "True", "NodesFound")
        await counted(devices, capacity=3, allocatable=3, allocated=0, free=3)
        await publish(devices, resource_slice(NODE, "gpu-0", "gpu-1", "gpu-2!"))
        await counted(devices, capacity=3, allocatable=2, free=2)
        await devices.apply(model("chat", devices.namespace, variants=[{"class": "devices"}]))
        await model_with(client, devices.namespace, "chat", "Ready", "True")
        await counted(devices, capacity=3, allocatable=2, allocated=1, free=1)
        [claim] = await devices.all(RESOURCECLAIMS, namespace=devices.namespace)
        [result] = claim["status"]["allocation"]["devices"]["results"]
        assert (result["pool"], result["device"]) in {(NODE, "gpu-0"), (NODE, "gpu-1")}
        [template] = await devices.all(RESOURCECLAIMTEMPLATES, namespace=devices.namespace)
        [owner] = template["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("Model", "chat")


async def test_a_driver_that_is_replaced_under_load_moves_no_replica(devices: Fleet) -> None:
    client = devices.client
    async with running_operator(client, str(devices.plane.kubeconfig)):
        await devices.apply(class_of_devices("devices", hourlyCost={"amount": "0.1"}))
        await publish(devices, resource_slice(NODE, "gpu-0", "gpu-1", parts=2))
        await publish(devices, resource_slice(NODE, "gpu-2", part=1, parts=2))
        await devices.apply(model("chat", devices.namespace, scaling={"minReplicas": 2}))
        await model_with(client, devices.namespace, "chat", "Ready", "True")
        await counted(devices, capacity=3, allocated=2, free=1)
        before = sorted(await engines(devices))
        # The old driver's slices are gone.
        for part in (0, 1):
            await client.delete(RESOURCESLICES, f"{NODE}-1-{part}")
        await counted(devices, capacity=2, allocatable=2, allocated=2, free=0)
        found = await client.get(GPUCLASSES, "devices")
        assert found["status"]["memory"] == {"perGPU": "81559Mi", "source": "Devices"}
        # The new one publishes the first of two slices: what is not complete counts for nobody.
        await publish(devices, resource_slice(NODE, "gpu-0", "gpu-1", generation=2, parts=2))
        await with_condition(client, GPUCLASSES, "", "devices", "Ready", "True")
        await counted(devices, capacity=2, allocatable=2, allocated=2, free=0)
        await publish(devices, resource_slice(NODE, "gpu-2", "gpu-3", generation=2, part=1, parts=2))
        await counted(devices, capacity=4, allocatable=4, allocated=2, free=2)
        assert sorted(await engines(devices)) == before


async def test_a_replica_is_evicted_from_a_device_that_gets_a_taint_and_comes_back_on_another(devices: Fleet) -> None:
    client = devices.client
    async with running_operator(client, str(devices.plane.kubeconfig)):
        await devices.apply(class_of_devices("devices"))
        await publish(devices, resource_slice(NODE, "gpu-0"))
        await devices.apply(model("chat", devices.namespace, variants=[{"class": "devices"}]))
        await model_with(client, devices.namespace, "chat", "Ready", "True")
        [before] = await engines(devices)
        await publish(devices, resource_slice(NODE, "gpu-0!!", "gpu-1"))
        await eventually(lambda: engines(devices), lambda uids: len(uids) == 1 and before not in uids)
        await model_with(client, devices.namespace, "chat", "Ready", "True")
        await counted(devices, capacity=2, allocatable=1, allocated=1, free=0)


def quota(namespace: str, devices: int) -> JsonObject:
    hard = {f"{DRIVER}.deviceclass.resource.k8s.io/devices": str(devices)}
    metadata = {"name": "devices", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": hard}}


async def test_a_quota_on_devices_is_named_and_a_rollout_goes_in_place(devices: Fleet) -> None:
    """It refuses the ResourceClaim and not the pod, which stays without a word of the scheduler."""
    client, ns = devices.client, devices.namespace
    await client.apply(QUOTAS, quota(ns, 1), manager="person")
    await eventually(lambda: client.get(QUOTAS, "devices", ns), lambda q: bool((q.get("status") or {}).get("hard")))
    async with running_operator(client, str(devices.plane.kubeconfig)):
        await devices.apply(class_of_devices("devices"))
        await publish(devices, resource_slice(NODE, "gpu-0", "gpu-1", "gpu-2"))
        await devices.apply(model("first", ns, variants=[{"class": "devices"}]))
        await model_with(client, ns, "first", "Ready", "True")
        await devices.apply(model("second", ns, variants=[{"class": "devices"}], priority=100))
        waits = await model_with(client, ns, "second", "Ready", "False", "ResourceQuotaExceeded")
        resource = f"{DRIVER}.deviceclass.resource.k8s.io/devices"
        said = f"ResourceQuota devices has no room for a replica: requested {resource}=1, used {resource}=1, limited"
        assert said in condition(waits, "Ready")["message"]
        assert said in condition(waits, "QuotaWait")["message"]
        assert condition(waits, "QuotaWait")["reason"] == "ResourceQuotaExceeded"
        assert not condition(waits, "Stalled"), "more quota ends it, nobody has to change the Model"
        await eventually(
            lambda: client.get(MODELS, "second", ns),
            lambda m: "takes no GPU until then" in condition(m, "Placed").get("message", ""),
            what="the next plan counts no device for it",
        )
        why = ["why", "model/second", "-n", ns, "-o", "json", "--kubeconfig", str(devices.plane.kubeconfig)]
        told = json.loads((await asyncio.to_thread(CliRunner().invoke, main, why)).stdout)
        [cause] = [each for each in told["causes"] if each["reason"] == "ResourceQuotaExceeded"]
        assert cause["layer"] == "L2"
        assert any("event of pod" in each["where"] and "exceeded quota" in each["what"] for each in cause["evidence"])
        assert {"SchedulerAway", "NoDevices"}.isdisjoint(each["reason"] for each in told["causes"])
        await client.delete(MODELS, "second", ns)
        [before] = await eventually(lambda: engines(devices), lambda uids: len(uids) == 1)
        changed = model("first", ns, variants=[{"class": "devices"}], pod={"env": [{"name": "SOME", "value": "thing"}]})
        await devices.apply(changed)
        await eventually(
            lambda: client.get(DEPLOYMENTS, "first-devices", ns),
            lambda d: d["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0,
            what="the old replica has the device that the quota counts",
        )
        await eventually(lambda: engines(devices), lambda uids: len(uids) == 1 and before not in uids, seconds=120)
        await model_with(client, ns, "first", "Ready", "True", seconds=120)
    await client.delete(QUOTAS, "devices", ns)


async def claimed(fleet: Fleet) -> set[str]:
    """Names of devices that claims of engine pods have."""
    claims = await fleet.all(RESOURCECLAIMS, namespace=fleet.namespace, label_selector=names.LABEL_MODEL)
    allocated = [c["status"]["allocation"] for c in claims if (c.get("status") or {}).get("allocation")]
    return {result["device"] for each in allocated for result in each["devices"]["results"]}


async def test_devices_that_several_claims_may_share_never_count(devices: Fleet) -> None:
    client = devices.client
    async with running_operator(client, str(devices.plane.kubeconfig)):
        await devices.apply(class_of_devices("devices"))
        await publish(devices, resource_slice(NODE, "gpu-0"))
        await devices.apply(model("chat", devices.namespace, variants=[{"class": "devices"}]))
        await model_with(client, devices.namespace, "chat", "Ready", "True")
        before = await engines(devices)
        # The driver shares the device of a replica: the replica stays, and the class has no GPUs.
        await publish(devices, resource_slice(NODE, "gpu-0*"))
        found = await with_condition(client, GPUCLASSES, "", "devices", "Ready", "False", "SharedGPUs")
        assert "1 of 1 devices do not count" in message(found)
        await counted(devices, capacity=0, allocatable=0, allocated=1, free=0)
        # A whole one comes: it counts, and the other one does not. A selector leaves that one out.
        await publish(devices, resource_slice(NODE, "gpu-0*", "gpu-1"))
        await with_condition(client, GPUCLASSES, "", "devices", "Ready", "True", "NodesFound")
        await counted(devices, capacity=1, allocatable=1, allocated=1, free=0)
        found = await client.get(GPUCLASSES, "devices")
        assert "gpu.test/h100-0/gpu-0. " in condition(found, "SharedGPUs")["message"]
        assert await engines(devices) == before
        await devices.apply(class_of_devices("devices", "!device.allowMultipleAllocations"))
        await eventually(lambda: claimed(devices), lambda on: on == {"gpu-1"}, what="a replica on the whole device")
        await model_with(client, devices.namespace, "chat", "Ready", "True")
        await counted(devices, capacity=1, allocatable=1, allocated=1, free=0)
        assert condition(await client.get(GPUCLASSES, "devices"), "SharedGPUs") == {}


def of_profile(profile: str) -> str:
    of = f'device.attributes["{DRIVER}"]'
    return f'{of}.type == "mig" && {of}.profile == "{profile}"'


async def test_partitions_of_one_gpu_count_as_many_as_their_shared_counters_allow(devices: Fleet) -> None:
    """A driver publishes all that could be made of an H100: the GPU itself, 2 x 3g.40gb, 7 x 1g.10gb."""
    client, ns = devices.client, devices.namespace
    for each in partitioned(NODE):
        await publish(devices, each)
    async with running_operator(client, str(devices.plane.kubeconfig)):
        await devices.apply(class_of_devices("part", of_profile("3g.40gb")))
        await devices.apply(class_of_devices("whole", f'device.attributes["{DRIVER}"].type == "gpu"'))
        await counted(devices, "part", capacity=2, allocatable=2, allocated=0, free=2)
        await counted(devices, "whole", capacity=1, allocatable=1, allocated=0, free=1)
        # Another pod's partition takes memory slices of one of the two, and the GPU is no whole one any more.
        request = {
            "name": "gpu",
            "exactly": {
                "deviceClassName": DRIVER,
                "selectors": [{"cel": {"expression": of_profile("1g.10gb")}}],
            },
        }
        theirs = {"name": "theirs", "namespace": ns}
        claim = {"metadata": theirs, "spec": {"devices": {"requests": [request]}}}
        await client.apply(
            RESOURCECLAIMS, {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", **claim}, manager="person"
        )
        container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}
        spec = {
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "terminationGracePeriodSeconds": 0,
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "theirs"}],
            "containers": [container],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": theirs, "spec": spec}
        await client.apply(PODS, pod, manager="person")
        await counted(devices, "part", capacity=2, allocatable=1, allocated=0, free=1)
        await counted(devices, "whole", capacity=1, allocatable=0, allocated=0, free=0)
        found = await with_condition(client, GPUCLASSES, "", "whole", "Ready", "True")
        assert "used up by claims of other partitions of their GPU" in message(found)
        # Of two replicas one fits beside it.
        await devices.apply(model("chat", ns, variants=[{"class": "part"}], scaling={"minReplicas": 2}))
        await model_with(client, ns, "chat", "Available", "True")
        await model_with(client, ns, "chat", "Ready", "False", "NoCapacity")
        await counted(devices, "part", capacity=2, allocatable=1, allocated=1, free=0)
        assert len(await engines(devices)) == 1
        await client.delete(PODS, "theirs", ns)
        await client.delete(RESOURCECLAIMS, "theirs", ns)
        both = {"gpu-0-mig-3g40gb-0", "gpu-0-mig-3g40gb-4"}
        await eventually(lambda: claimed(devices), lambda on: on == both, what="two replicas on the two partitions")
        await model_with(client, ns, "chat", "Ready", "True")
        await counted(devices, "part", capacity=2, allocatable=2, allocated=2, free=0)
        await counted(devices, "whole", capacity=1, allocatable=0, allocated=0, free=0)
        found = await client.get(GPUCLASSES, "part")
        assert found["status"]["memory"] == {"perGPU": "40448Mi", "source": "Devices"}
        assert (found["status"]["largestNode"], found["status"]["devices"]["profile"]) == (1, "3g.40gb")


async def test_an_operator_that_starts_leads_once_devices_are_listed(
    devices: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, led = devices.client, list[bool]()
    await devices.apply(class_of_devices("devices"))
    await publish(devices, resource_slice(NODE, "gpu-0"))
    lead = OperatorProcess._lead

    async def noted(operator: OperatorProcess) -> None:
        led.append(operator.dra.complete and operator.state.gpus.gpus()["devices"].compute_capability is not None)
        await lead(operator)

    monkeypatch.setattr(OperatorProcess, "_lead", noted)
    async with running_operator(client, str(devices.plane.kubeconfig)):
        await with_condition(client, GPUCLASSES, "", "devices", "Ready", "True", "NodesFound")
    assert led == [True]


async def test_what_is_wrong_with_a_class_is_said(devices: Fleet) -> None:
    client = devices.client
    await publish(devices, resource_slice(NODE, "gpu-0", "gpu-1"))
    async with running_operator(client, str(devices.plane.kubeconfig)):
        await devices.apply(class_of_devices("b-first"))
        await devices.apply(class_of_devices("c-second"))
        await devices.apply(class_of_devices("bad", "device.attributes["))
        await devices.apply(class_of_devices("failing", 'device.attributes["gpu.test"].none == 1'))
        await with_condition(client, GPUCLASSES, "", "b-first", "Ready", "True", "NodesFound")
        overlaps = await with_condition(client, GPUCLASSES, "", "c-second", "Ready", "False", "Overlaps")
        assert "gpu.test/h100-0/gpu-0, gpu.test/h100-0/gpu-1 count for GPUClass b-first" in message(overlaps)
        bad = await with_condition(client, GPUCLASSES, "", "bad", "Ready", "False", "SelectorInvalid")
        assert "Syntax error" in message(bad)
        failing = await with_condition(client, GPUCLASSES, "", "failing", "Ready", "False", "SelectorInvalid")
        assert "no result for device gpu.test/h100-0/gpu-0" in message(failing)
        await client.delete(DEVICECLASSES, "gpu.test")
        gone = await with_condition(client, GPUCLASSES, "", "b-first", "Ready", "False", "DeviceClassNotFound")
        assert "there is no DeviceClass gpu.test" in message(gone)


def message(obj: JsonObject) -> str:
    return condition(obj, "Ready")["message"]


async def test_a_cluster_without_dra_is_said_and_nothing_else_fails(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, discover = fleet.client, fleet.client.discover

    async def older(group: str, version: str) -> frozenset[str]:
        """What a cluster before 1.34 answers."""
        return frozenset() if group == "resource.k8s.io" else frozenset(await discover(group, version))

    monkeypatch.setattr(client, "discover", older)
    async with running_operator(client, str(fleet.plane.kubeconfig)):
        await fleet.apply(class_of_devices("devices"))
        found = await with_condition(client, GPUCLASSES, "", "devices", "Ready", "False", "DRAUnavailable")
        assert "Kubernetes has from 1.34 on" in message(found)
        await fleet.apply(model("chat", fleet.namespace, variants=[{"class": "devices"}, {"class": "h100"}]))
        await model_with(client, fleet.namespace, "chat", "Ready", "True")
