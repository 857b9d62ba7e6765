"""Nodes of classes whose GPUs are devices, and who else has these devices."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shoal.api import names
from shoal.api.gpuclass import GPUClass, devices_of
from shoal.cli import gpus
from shoal.cli.gpus import GPUsView
from shoal.cli.main import main
from shoal.core.devices import DeviceClass
from shoal.core.facts import Node
from shoal.core.layers.types import GPUHolder
from shoal.kube import deviceviews
from shoal.kube.layerviews import device_holders
from tests.faults.worlds import condition, engine, node, pod
from tests.support.cannedapi import CannedApi
from tests.support.devices import DRIVER, class_of_devices, device_class, resource_slice

NODE = Node("b", {}, True, False, (), {}, {})
FLEET = GPUsView(
    (GPUClass.model_validate(class_of_devices("devices")),),
    (NODE,),
    (deviceviews.resource_slice(resource_slice("b", "gpu-0", "gpu-1", "gpu-2", "gpu-3*")),),
    {DRIVER: DeviceClass(DRIVER, ())},
)


def claim(*devices: str, pods: tuple[str, ...] = (), labels: dict[str, str] | None = None, **more: Any) -> Any:
    results = [{"driver": DRIVER, "pool": "b", "device": device, **more} for device in devices]
    users = [{"resource": "pods", "name": pod, "uid": pod} for pod in pods]
    return {
        "metadata": {"name": "theirs", "namespace": "ml", "labels": labels},
        "status": {"allocation": {"devices": {"results": results}}, "reservedFor": users},
    }


def holders(raw: Any) -> list[GPUHolder]:
    return list(device_holders(raw, gpus.matched(FLEET)))


def test_the_pod_that_uses_a_claim_holds_its_devices() -> None:
    assert holders(claim("gpu-0", "gpu-2", pods=("train-0",))) == [
        GPUHolder("ml/train-0", "b", {devices_of("devices"): 2})
    ]


def test_a_claim_that_no_pod_uses_holds_them_too() -> None:
    (found,) = holders(claim("gpu-1"))
    assert found.pod == "ml/theirs (a ResourceClaim that no pod uses)"


def test_claims_of_engines_of_other_devices_and_for_monitoring_hold_nothing_of_others() -> None:
    assert not holders(claim("gpu-0", pods=("chat-0",), labels={names.LABEL_MODEL_UID: "u"}))
    assert not holders(claim("nic-0", pods=("train-0",)))
    assert not holders(claim("gpu-0", pods=("dcgm",), adminAccess=True))
    assert not holders({"metadata": {"name": "new", "namespace": "ml"}})


def test_a_device_that_several_claims_may_share_is_not_held() -> None:
    """It does not count among the devices of the class either."""
    assert not holders(claim("gpu-3", pods=("notebook",)))
    assert gpus.counts(gpus.matched(FLEET)) == {"devices": {"b": 3}}


# --- nodes of a class that has no nodeSelector ------------------------------------------------------------------------

SHOAL = "/apis/shoal.dev/v1alpha1"
SLICES, DEVICECLASSES = (f"/apis/resource.k8s.io/v1/{plural}" for plural in ("resourceslices", "deviceclasses"))
OF_DEVICES = class_of_devices("devices") | {"status": {"conditions": [condition("Ready", "True", "NodesFound")]}}
TAINT = {"key": "team", "value": "ml", "effect": "NoSchedule"}


def listed(*items: Any) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "1"}, "items": list(items)}


def bare(name: str, *conditions: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """A node without the labels of any class, and without a device plugin."""
    found = node(*conditions, name=name, gpus=0, **spec)
    return found | {"metadata": {"name": name, "labels": {}}}


@pytest.fixture
def api() -> CannedApi:
    """Nodes a and b have devices of the class; c has none."""
    model = {
        "metadata": {"name": "llama", "namespace": "chat", "generation": 1},
        "spec": {"source": {"uri": "hf://owner/llama"}, "variants": [{"class": "devices"}]},
        "status": {"conditions": [condition("Ready", "False", "NoCapacity", "class devices has no GPU free")]},
    }
    silent = condition("Ready", "Unknown", "NodeStatusUnknown", "Kubelet stopped posting node status.")
    return CannedApi(
        {
            f"{SHOAL}/gpuclasses": listed(OF_DEVICES),
            f"{SHOAL}/gpuclasses/devices": OF_DEVICES,
            f"{SHOAL}/namespaces/chat/models/llama": model,
            "/api/v1/nodes": listed(bare("a"), bare("b", silent), bare("c", silent)),
            SLICES: listed(resource_slice("a", "gpu-0"), resource_slice("b", "gpu-0")),
            DEVICECLASSES: listed(device_class()),
            "/apis/resource.k8s.io/v1/resourceclaims": listed(),
            "/apis/events.k8s.io/v1/namespaces/chat/events": listed(),
            "/apis/events.k8s.io/v1/namespaces/default/events": listed(),
        }
    )


@pytest.fixture
def kubeconfig(api: CannedApi, tmp_path: Path) -> Generator[Path]:
    with api.kubeconfig(tmp_path) as path:
        yield path


def why(kubeconfig: Path, target: str, *more: str) -> Any:
    runner = CliRunner(catch_exceptions=False)
    done = runner.invoke(main, ["why", target, "-o", "json", *more], env={"KUBECONFIG": str(kubeconfig)})
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def told(kubeconfig: Path, target: str, *more: str) -> dict[str, str]:
    return {each["reason"]: each["message"] for each in why(kubeconfig, target, *more)["causes"]}


@pytest.mark.parametrize("target", ["gpuclass/devices", "model/llama"])
def test_a_silent_node_that_has_devices_of_the_class_is_a_cause(kubeconfig: Path, target: str) -> None:
    found = told(kubeconfig, target)
    assert "node b" in found["NodeSilent"]
    causes = why(kubeconfig, target)["causes"]
    assert not any("node c" in each["message"] for each in causes), "it has none of the class's devices"


def test_a_taint_that_the_class_does_not_tolerate_is_told_of_class_and_node(kubeconfig: Path, api: CannedApi) -> None:
    tainted = bare("a", taints=[TAINT, {"key": "nvidia.com/gpu", "effect": "NoSchedule"}])
    api.answers["/api/v1/nodes"] = listed(tainted, bare("b"))
    api.answers["/api/v1/nodes/a"] = tainted
    for target in ("gpuclass/devices", "node/a"):
        found = told(kubeconfig, target)
        assert found["TaintNotTolerated"] == "node a has the taint team=ml:NoSchedule, which its GPU class does not " \
            "tolerate"  # fmt: skip
        assert len(found) == 1, "the class tolerates the other taint"


def test_pods_may_go_where_any_class_with_devices_there_tolerates_the_taint(kubeconfig: Path, api: CannedApi) -> None:
    tolerant = class_of_devices("tolerant", 'device.attributes["gpu.test"].uuid == "GPU-a-gpu-1"')
    tolerant["spec"]["tolerations"] = [{"key": "team", "operator": "Exists"}]
    first = class_of_devices("devices", 'device.attributes["gpu.test"].uuid != "GPU-a-gpu-1"')
    api.answers |= {
        f"{SHOAL}/gpuclasses": listed(first | {"status": OF_DEVICES["status"]}, tolerant),
        SLICES: listed(resource_slice("a", "gpu-0", "gpu-1")),
        "/api/v1/nodes": listed(tainted := bare("a", taints=[TAINT])),
        "/api/v1/nodes/a": tainted,
    }
    assert told(kubeconfig, "node/a") == {}


def test_slices_that_may_not_be_read_are_told_and_a_cluster_without_them_is_not(
    kubeconfig: Path, api: CannedApi
) -> None:
    api.answers[SLICES] = (403, "resourceslices.resource.k8s.io is forbidden")
    unread = why(kubeconfig, "gpuclass/devices")["unread"]
    assert {"what": "ResourceSlices", "why": "resourceslices.resource.k8s.io is forbidden"} in unread
    del api.answers[SLICES]
    unread = why(kubeconfig, "gpuclass/devices")["unread"]
    assert not any("Slices" in each["what"] for each in unread)


def test_slices_are_read_for_classes_of_devices_only(kubeconfig: Path, api: CannedApi) -> None:
    spec = {"nodeSelector": {"pool": "h100"}, "resourceName": "nvidia.com/gpu"}
    api.answers[f"{SHOAL}/gpuclasses/devices"] = OF_DEVICES | {"spec": spec}
    why(kubeconfig, "gpuclass/devices")
    assert not any("resource.k8s.io" in path for path in api.asked)


def test_of_two_replicas_on_a_node_only_the_one_with_the_sick_device_is_told_of_it(
    kubeconfig: Path, api: CannedApi
) -> None:
    sick = {
        "node": "a", "device": f"{DRIVER}/a/gpu-0", "state": "Quarantined", "reason": "GPUFellOffBus",
        "message": "Xid 79", "by": "Shoal", "since": "2026-11-26T00:00:00Z", "times": 1,
    }  # fmt: skip
    conditions = [condition("Ready", "True", "NodesFound")]
    gpu_class = class_of_devices("devices") | {"status": {"conditions": conditions, "quarantined": [sick]}}
    pods = {
        name: pod(engine(ready=True), name=name, node="a")
        | {"metadata": {"namespace": "chat", "name": name, "labels": {names.LABEL_GPU_CLASS: "devices"}}}
        for name in ("llama-1", "llama-2")
    }
    own = [
        {"metadata": {"name": f"{name}-gpu", "namespace": "chat"}, "status": {
            "allocation": {"devices": {"results": [{"driver": DRIVER, "pool": "a", "device": device}]}},
            "reservedFor": [{"resource": "pods", "name": name, "uid": name}],
        }}
        for name, device in (("llama-1", "gpu-0"), ("llama-2", "gpu-1"))
    ]  # fmt: skip
    claims = "/apis/resource.k8s.io/v1/namespaces/chat/resourceclaims"
    api.answers |= {
        f"{SHOAL}/gpuclasses": listed(gpu_class),
        f"{SHOAL}/gpuclasses/devices": gpu_class,
        "/api/v1/nodes/a": bare("a"),
        claims: listed(*own),
        **{f"/api/v1/namespaces/chat/pods/{name}": each for name, each in pods.items()},
    }
    ask = ("-n", "chat")
    assert "GPUFellOffBus" in told(kubeconfig, "pod/llama-1", *ask)
    assert not told(kubeconfig, "pod/llama-2", *ask)
    api.answers[claims] = (403, "resourceclaims is forbidden")
    found = why(kubeconfig, "pod/llama-2", *ask)
    assert [(each["reason"], each["state"]) for each in found["causes"]] == [("GPUsQuarantined", "note")]
    assert "ResourceClaims of namespace chat" in str(found), "and what could not be read"
