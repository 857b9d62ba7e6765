"""Whose GPUs are taken, where they are devices that pods claim."""

from typing import Any

from shoal.api import names
from shoal.api.gpuclass import GPUClass, devices_of
from shoal.cli import gpus
from shoal.cli.gpus import GPUsView
from shoal.core.devices import DeviceClass
from shoal.core.facts import Node
from shoal.core.layers.types import GPUHolder
from shoal.kube import deviceviews
from shoal.kube.layerviews import device_holders
from tests.support.devices import DRIVER, class_of_devices, resource_slice

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
