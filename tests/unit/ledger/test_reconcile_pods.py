"""What the ledger reads of engine pods and GPU classes."""

from decimal import Decimal
from typing import Any

import pytest

from shoal.api import names
from shoal.core.reconcile import Held, Price, price
from shoal.ledger.reconcile.pods import EnginePod, GPUPrice, project_class, project_pod

TEN = 1_795_341_600_000  # 2026-11-22T10:00:00Z
MINUTE = 60_000


def raw(status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    asks: dict[str, Any] = {"resources": {"limits": {"nvidia.com/gpu": "4", "rdma/hca": "1", "cpu": "8"}}}
    return {
        "metadata": {
            "name": "llama-1",
            "namespace": "chat",
            "uid": "u1",
            "creationTimestamp": "2026-11-22T10:00:00Z",
            "labels": {names.LABEL_MODEL: "llama", names.LABEL_MODEL_UID: "m1", names.LABEL_GPU_CLASS: "h100"},
        },
        "spec": {"nodeName": "n1", "containers": [{"name": "engine", **asks}, {"name": "other"}], **spec},
        "status": status or {},
    }


def pod(status: dict[str, Any] | None = None, **spec: Any) -> EnginePod:
    found = project_pod(raw(status, **spec))
    assert found is not None
    return found


def test_a_pod_holds_gpus_from_when_it_was_put_on_its_node():
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-22T10:05:00Z"}
    found = pod({"podIP": "10.0.0.7", "conditions": [{"type": "Ready", "status": "False"}, scheduled]})
    assert (found.key, found.model, found.model_uid, found.gpu_class) == ("chat/llama-1", "chat/llama", "m1", "h100")
    assert found.held("nvidia.com/gpu", None) == Held("u1", "chat/llama", "h100", 4, TEN + 5 * MINUTE)
    assert found.held("amd.com/gpu", None) is None
    assert pod().held("nvidia.com/gpu", TEN) == Held("u1", "chat/llama", "h100", 4, TEN, TEN)


def test_a_pod_that_claims_devices_holds_those_of_its_class():
    claims = raw(containers=[{"name": "engine"}])
    claims["metadata"]["annotations"] = {names.ANNOTATION_DEVICES: "2"}
    found = project_pod(claims)
    assert found is not None
    priced = project_class({"metadata": {"name": "h100"}, "spec": {"device": {"deviceClassName": "gpu.nvidia.com"}}})
    assert priced is not None
    held = found.held(priced.resource, TEN)
    assert held is not None
    assert held.gpus == 2


def test_a_pod_without_a_node_or_without_gpus_holds_none():
    assert pod(nodeName=None).held("nvidia.com/gpu", None) is None
    assert pod(containers=[{"name": "engine"}]).held(None, None) is None


def test_a_pod_that_ended_says_when():
    ended = [
        {"name": "engine", "state": {"terminated": {"finishedAt": "2026-11-22T10:20:00Z"}}},
        {"name": "agent", "state": {"terminated": {"finishedAt": "2026-11-22T10:21:00Z"}}},
    ]
    found = pod({"phase": "Failed", "containerStatuses": ended})
    assert (found.finished, found.ended) == (True, TEN + 21 * MINUTE)
    # One container that ended and starts again is not the end of the pod.
    assert (pod({"phase": "Running", "containerStatuses": ended[:1]}).ended) is None
    evicted = pod({"phase": "Failed", "reason": "Evicted"})
    assert (evicted.finished, evicted.ended) == (True, None)


def test_a_pod_of_no_model_is_of_no_interest():
    other = raw()
    del other["metadata"]["labels"][names.LABEL_MODEL]
    assert project_pod(other) is None


def gpu_class(**spec: Any) -> GPUPrice | None:
    fields = {"nodeSelector": {"gpu": "h100"}, "memoryPerGPU": "80Gi", **spec}
    metadata = {"name": "h100", "uid": "c", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return project_class({"metadata": metadata, "spec": fields})


def test_prices_are_exact():
    assert gpu_class(hourlyCost={"amount": "2.49", "currency": "USD"}) == GPUPrice(
        "h100", "nvidia.com/gpu", Price(2_490_000_000, "USD")
    )
    assert gpu_class(resourceName="amd.com/gpu") == GPUPrice("h100", "amd.com/gpu", None)
    assert price(Decimal("0.1") / 3, "EUR").hourly == 33_333_333


@pytest.mark.parametrize("wrong", [{"hourlyCost": {"amount": "cheap"}}, {"nodeSelector": {}}])
def test_a_class_that_does_not_validate_is_left_out(wrong: dict[str, Any]):
    assert gpu_class(**wrong) is None
