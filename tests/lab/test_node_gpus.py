"""GPUs that fail, nodes that are cordoned: what the scheduler and the pods see."""

from typing import Any

import pytest

from shoal_dev.lab import api
from tests.support.lab import apply, eventually, get

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


def pod(namespace: str, name: str, gpus: int, **spec: Any) -> dict[str, Any]:
    main = {
        "name": "main", "image": "shoal:test", "command": ["sh", "-c", "exec sleep 10000"],
        "resources": {"limits": {"nvidia.com/gpu": str(gpus)}},
    }  # fmt: skip
    base = {"terminationGracePeriodSeconds": 1, "tolerations": [{"operator": "Exists"}], "containers": [main]}
    where = {"nodeSelector": {"kubernetes.io/hostname": "l4-1"}}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": base | where | spec}


def wait(lab: api.Lab, namespace: str, name: str) -> None:
    lab.kubectl("wait", "-n", namespace, "--for=condition=Ready", f"pod/{name}", "--timeout=90s", timeout=100)


def reasons(lab: api.Lab, namespace: str, name: str) -> str:
    events = get(lab, "events", "-n", namespace, f"--field-selector=involvedObject.name={name}")
    return "\n".join(f"{event['reason']}: {event['message']}" for event in events["items"])


def test_a_failed_gpu_is_offered_to_nobody_and_stays_with_the_pod_that_has_it(lab: api.Lab, namespace: str) -> None:
    apply(lab, pod(namespace, "first", 1), pod(namespace, "second", 1))
    wait(lab, namespace, "first")
    wait(lab, namespace, "second")
    try:
        lab.gpu_health("l4-1", healthy=1)
        status = get(lab, "node", "l4-1")["status"]
        assert (status["capacity"]["nvidia.com/gpu"], status["allocatable"]["nvidia.com/gpu"]) == ("2", "1")
        assert {p["status"]["phase"] for p in get(lab, "pods", "-n", namespace)["items"]} == {"Running"}
        lab.kubectl("delete", "pod", "-n", namespace, "first", "second")
        apply(lab, pod(namespace, "third", 1))
        wait(lab, namespace, "third")
        apply(lab, pod(namespace, "fourth", 1))
        eventually(lambda: "Insufficient nvidia.com/gpu" in reasons(lab, namespace, "fourth"), "why it waits")
        # Without the scheduler: the node rejects it for good.
        apply(lab, pod(namespace, "forced", 1, nodeName="l4-1"))
        eventually(lambda: get(lab, "pod", "-n", namespace, "forced")["status"]["phase"] == "Failed", "the rejection")
        rejected = get(lab, "pod", "-n", namespace, "forced")["status"]
        assert rejected["reason"] == "UnexpectedAdmissionError"
        assert rejected["message"] == (
            "Pod was rejected: Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. "
            "Requested: 1, Available: 0, which is unexpected"
        )
    finally:
        lab.gpu_health("l4-1", healthy=2)
    wait(lab, namespace, "fourth")


def test_gpu_health_of_what_is_not_there(lab: api.Lab) -> None:
    with pytest.raises(api.LabError, match="node cpu-1 has no GPUs"):
        lab.gpu_health("cpu-1", healthy=0)
    with pytest.raises(api.LabError, match="node l4-1 has 2 GPUs: --healthy takes 0 to 2"):
        lab.gpu_health("l4-1", healthy=3)
    with pytest.raises(api.LabError, match='nodes "none" not found'):
        lab.gpu_health("none", healthy=1)
    with pytest.raises(api.LabError, match=r"no process 'node-none' in this lab; there are: .*node-l4-1"):
        lab.replace_node("none")


def test_a_cordoned_node_takes_nothing_new(lab: api.Lab, namespace: str) -> None:
    apply(lab, pod(namespace, "before", 1))
    wait(lab, namespace, "before")
    lab.kubectl("cordon", "l4-1")
    try:
        # The DaemonSet controller tolerates the cordon, other pods do not.
        apply(lab, pod(namespace, "after", 1, tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}]))
        eventually(lambda: "were unschedulable" in reasons(lab, namespace, "after"), "why it waits")
        assert get(lab, "pod", "-n", namespace, "before")["status"]["phase"] == "Running"
    finally:
        lab.kubectl("uncordon", "l4-1")
    wait(lab, namespace, "after")
