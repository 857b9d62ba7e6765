"""GPUs as devices (DRA), partitions and shared GPUs on a real control plane: what counts, and what serves."""

import json
import os
from collections.abc import Generator
from datetime import UTC, datetime
from typing import Any

import openai
import pytest
from click.testing import CliRunner

from shoal.api import names
from shoal.cli.main import main
from shoal.core.health import Unit
from shoal.core.health.requests import CordonRequest, write
from shoal_dev.demo import steps
from shoal_dev.lab.fleet import FleetFile
from tests.e2e.conftest import VALUES, Fleet, serves
from tests.support.lab import make_lab
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

NODES = {
    "nodes": [
        {"name": "cpu-1"},
        {"name": "dra-1", "gpus": 3, "gpuProduct": "NVIDIA L4", "gpuMemoryMiB": 23034, "dra": True},
        {"name": "plugin-1", "gpus": 1, "gpuProduct": "NVIDIA-L40S", "gpuMemoryMiB": 46068},
        # 2 GPUs that time-slicing advertises as 8, and partitions of an H100 as the strategy `single` names them.
        {
            "name": "sliced-1",
            "gpus": 8,
            "gpuProduct": "NVIDIA-A10-SHARED",
            "gpuMemoryMiB": 23028,
            "labels": {"nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.sharing-strategy": "time-slicing"},
        },
        {"name": "mig-1", "gpus": 2, "gpuProduct": "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", "gpuMemoryMiB": 40448},
    ]
}
TOLERATIONS = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
L4 = 'device.attributes["gpu.nvidia.com"].productName == "NVIDIA L4"'


def gpu_class(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "GPUClass",
        "metadata": {"name": name},
        "spec": {"tolerations": TOLERATIONS, "hourlyCost": {"amount": "0.43"}, **spec},
    }


def devices(*expressions: str) -> dict[str, Any]:
    return {
        "deviceClassName": "gpu.nvidia.com",
        "selectors": [{"cel": {"expression": expression}} for expression in expressions],
    }


@pytest.fixture(scope="module")
def mixed() -> Generator[Fleet]:
    """A node whose GPUs are devices, and one with a device plugin; a class and a Model for each."""
    if os.geteuid() != 0:
        pytest.skip("the lab needs root")
    lab = make_lab(NODES)
    try:
        fleet = Fleet(lab)
        steps.install(fleet, "simulator", steps.LAB_IMAGE, VALUES)
        fleet.kubectl("create", "namespace", steps.DEMO_NAMESPACE)
        fleet.kubectl("apply", "-f", str(steps.EXAMPLES / "tenant.yaml"))
        fleet.apply(
            gpu_class("l4", device=devices(L4)),
            gpu_class("l40s", nodeSelector={"nvidia.com/gpu.product": "NVIDIA-L40S"}, memoryPerGPU="48Gi"),
        )
        fleet.make_model("tiny-chat", variants=[{"class": "l4"}], scaling={"minReplicas": 1})
        fleet.make_model("tiny-code", variants=[{"class": "l40s"}], scaling={"minReplicas": 1})
        yield fleet
    finally:
        lab.down()


def status(fleet: Fleet, name: str = "l4") -> dict[str, Any]:
    return json.loads(fleet.kubectl("get", "gpuclasses", name, "-o", "json")).get("status", {})


def ready(fleet: Fleet, name: str = "l4") -> tuple[str, str]:
    found = next((c for c in status(fleet, name).get("conditions", []) if c["type"] == "Ready"), {})
    return found.get("status", ""), found.get("reason", "")


def engines(fleet: Fleet, model: str = "tiny-chat") -> list[dict[str, Any]]:
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE},{names.LABEL_MODEL}={model}"
    return fleet.get("pods", "-n", steps.DEMO_NAMESPACE, "-l", selector)


def change(fleet: Fleet, model: str, **spec: Any) -> None:
    patch = json.dumps({"spec": spec})
    fleet.kubectl("patch", "models.shoal.dev", model, "-n", steps.DEMO_NAMESPACE, "--type=merge", "-p", patch)


def templates(fleet: Fleet) -> set[str]:
    return {t["metadata"]["name"] for t in fleet.get("resourceclaimtemplates", "-n", steps.DEMO_NAMESPACE)}


def serving(fleet: Fleet, replicas: int, model: str = "tiny-chat") -> None:
    def found() -> list[bool]:
        return [serves(pod) for pod in engines(fleet, model)]

    until(lambda: found() == [True] * replicas, 240, lambda: (fleet.model(model), engines(fleet, model)))


def gpus(fleet: Fleet, expected: dict[str, int], *, within: float = 60) -> None:
    def found() -> dict[str, int]:
        counts = status(fleet).get("gpus", {})
        return {name: counts.get(name, -1) for name in expected}

    until(lambda: found() == expected, within, lambda: (status(fleet), expected))


def test_a_model_on_devices_serves(mixed: Fleet) -> None:
    serving(mixed, 1)
    (pod,) = engines(mixed)
    assert pod["spec"]["nodeName"] == "dra-1"
    asked = [c["resources"] for c in (*pod["spec"]["containers"], *pod["spec"]["initContainers"])]
    assert not any("nvidia.com/gpu" in of for r in asked for of in (r.get("limits", {}), r.get("requests", {})))
    (claim,) = mixed.get("resourceclaims", "-n", steps.DEMO_NAMESPACE)
    (device,) = claim["status"]["allocation"]["devices"]["results"]
    assert (device["driver"], device["pool"]) == ("gpu.nvidia.com", "dra-1")
    base = f"http://127.0.0.1:{mixed.lab.forward_port()}/v1"
    with openai.OpenAI(base_url=base, api_key=steps.DEMO_KEY, timeout=60) as client:
        answer = client.completions.create(model="tiny-chat", prompt="x", max_tokens=4)
    assert answer.choices[0].text


def test_a_class_is_described_by_its_devices(mixed: Fleet) -> None:
    serving(mixed, 1)
    gpus(mixed, {"capacity": 3, "allocatable": 3, "allocated": 1, "free": 2, "largestFreeOnOneNode": 2})
    found = status(mixed)
    assert ready(mixed) == ("True", "NodesFound")
    assert found["memory"]["perGPU"] == "23034Mi"
    assert found["memory"]["source"] == "Devices"
    assert found["devices"] == {
        "architecture": "Ada Lovelace",
        "computeCapability": "8.9",
        "drivers": ["gpu.nvidia.com"],
        "products": ["NVIDIA L4"],
    }


def test_both_worlds_in_one_fleet(mixed: Fleet) -> None:
    serving(mixed, 1, "tiny-code")
    (pod,) = engines(mixed, "tiny-code")
    assert pod["spec"]["nodeName"] == "plugin-1"
    assert "resourceClaims" not in pod["spec"]
    assert status(mixed, "l40s")["gpus"]["allocated"] == 1
    change(mixed, "tiny-code", variants=[{"class": "l40s"}, {"class": "l4"}], scaling={"minReplicas": 2})
    serving(mixed, 2, "tiny-code")
    assert {p["spec"]["nodeName"] for p in engines(mixed, "tiny-code")} == {"plugin-1", "dra-1"}
    change(mixed, "tiny-code", variants=[{"class": "l40s"}], scaling={"minReplicas": 1})
    serving(mixed, 1, "tiny-code")
    gpus(mixed, {"allocated": 1, "free": 2})


def test_a_driver_that_is_replaced_moves_no_replica(mixed: Fleet) -> None:
    serving(mixed, 1)
    (before,) = engines(mixed)
    gpus(mixed, {"capacity": 3, "allocated": 1, "free": 2})
    (old,) = mixed.get("resourceslices")
    mixed.lab.dra_driver("dra-1", there=False)
    try:
        assert mixed.get("resourceslices") == []
        # Only the device that the replica holds is known to be there.
        gpus(mixed, {"capacity": 1, "allocated": 1, "free": 0})
    finally:
        mixed.lab.dra_driver("dra-1", there=True)
    gpus(mixed, {"capacity": 3, "allocated": 1, "free": 2})
    (new,) = mixed.get("resourceslices")
    assert new["spec"]["pool"]["generation"] == old["spec"]["pool"]["generation"] + 1
    assert new["spec"]["devices"] == old["spec"]["devices"]
    (after,) = engines(mixed)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert serves(after)
    assert not status(mixed).get("quarantined")


def keep_in_use(fleet: Fleet) -> None:
    """What is counted next are taints alone: a person says that nothing of the node is to be out of use for longer."""
    at = datetime.now(UTC)
    overruled = write([CordonRequest(Unit("dra-1", f"gpu.nvidia.com/dra-1/gpu-{i}"), at) for i in range(3)])
    fleet.kubectl("annotate", "gpuclasses", "l4", f"{names.ANNOTATION_UNCORDON}={overruled}", "--overwrite")


def test_devices_with_the_taint_of_a_persons_rule_are_not_free(mixed: Fleet) -> None:
    serving(mixed, 1)
    gpus(mixed, {"allocatable": 3, "allocated": 1, "free": 2})
    keep_in_use(mixed)
    (claim,) = mixed.get("resourceclaims", "-n", steps.DEMO_NAMESPACE)
    (held,) = claim["status"]["allocation"]["devices"]["results"]
    other = next(f"gpu-{i}" for i in range(3) if f"gpu-{i}" != held["device"])

    def rule(effect: str, device: str) -> None:
        selector = {"driver": held["driver"], "pool": held["pool"], "device": device}
        mixed.apply(
            {
                "apiVersion": "resource.k8s.io/v1beta2",
                "kind": "DeviceTaintRule",
                "metadata": {"name": "repair"},
                "spec": {"deviceSelector": selector, "taint": {"key": "example.com/repair", "effect": effect}},
            }
        )

    try:
        rule("NoSchedule", other)
        gpus(mixed, {"capacity": 3, "allocatable": 2, "allocated": 1, "free": 1})
        rule("None", other)  # a rehearsal
        gpus(mixed, {"allocatable": 3, "allocated": 1, "free": 2})
        rule("NoSchedule", held["device"])
        gpus(mixed, {"allocatable": 3, "allocated": 1, "free": 2})  # an engine's own counts until its pod is gone
    finally:
        mixed.kubectl("delete", "devicetaintrules", "repair", "--ignore-not-found")
    gpus(mixed, {"allocatable": 3, "allocated": 1, "free": 2})


def test_a_device_with_a_taint_and_a_claim_of_others_are_not_free(mixed: Fleet) -> None:
    serving(mixed, 1)
    gpus(mixed, {"allocatable": 3, "allocated": 1, "free": 2})
    keep_in_use(mixed)
    mixed.lab.gpu_health("dra-1", healthy=2)
    gpus(mixed, {"capacity": 3, "allocatable": 2, "free": 1})
    claim = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}}
    mixed.apply(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": "theirs", "namespace": "default"},
            "spec": claim,
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "theirs", "namespace": "default"},
            "spec": {
                "tolerations": TOLERATIONS,
                "terminationGracePeriodSeconds": 0,
                "resourceClaims": [{"name": "gpu", "resourceClaimName": "theirs"}],
                "containers": [
                    {
                        "name": "main",
                        "image": "shoal:lab",
                        "command": ["sleep", "3600"],
                        "resources": {"claims": [{"name": "gpu"}]},
                    }
                ],
            },
        },
    )
    gpus(mixed, {"allocatable": 2, "allocated": 2, "free": 0})
    (held,) = [each for each in why(mixed, "gpuclass/l4")["causes"] if each["reason"] == "GPUsHeldByOthers"]
    assert "1 of 3 devices of GPUClass l4" in held["message"]
    assert "default/theirs (1 on dra-1)" in held["message"]
    mixed.kubectl("delete", "pod", "theirs", "--wait=false")
    mixed.kubectl("delete", "resourceclaim", "theirs", "--wait=false")
    mixed.lab.gpu_health("dra-1", healthy=3)
    gpus(mixed, {"allocatable": 3, "allocated": 1, "free": 2})


def why(fleet: Fleet, subject: str) -> dict[str, Any]:
    return told(fleet, "why", subject)


def told(fleet: Fleet, *command: str) -> dict[str, Any]:
    done = CliRunner().invoke(main, [*command, "-o", "json", "--kubeconfig", str(fleet.lab.kubeconfig)])
    return json.loads(done.stdout)


def test_why_and_doctor_find_the_nodes_of_a_class_by_its_devices(mixed: Fleet) -> None:
    gpus(mixed, {"allocatable": 3, "allocated": 1, "free": 2})
    mixed.kubectl("cordon", "dra-1")
    try:
        causes = {each["reason"]: each["message"] for each in why(mixed, "gpuclass/l4")["causes"]}
        assert "dra-1" in causes["NodeCordoned"]
        found = {each["reason"]: each["message"] for each in told(mixed, "doctor")["results"]}
        assert found["NodeCordoned"].startswith("l4: node dra-1")
        assert "dra-1" not in found.get("GPUsWithoutClass", "")
    finally:
        mixed.kubectl("uncordon", "dra-1")
    gpus(mixed, {"allocatable": 3, "allocated": 1, "free": 2})


def test_another_selector_rolls_the_variant_and_the_old_template_goes(mixed: Fleet) -> None:
    serving(mixed, 1)
    (before,) = templates(mixed)
    mixed.apply(gpu_class("l4", device=devices(L4, 'device.driver == "gpu.nvidia.com"')))
    until(lambda: len(templates(mixed)) == 1 and templates(mixed) != {before}, 240, lambda: templates(mixed))
    serving(mixed, 1)


def test_a_selector_that_does_not_compile_says_so_and_what_runs_stays(mixed: Fleet) -> None:
    serving(mixed, 1)
    (pod,) = engines(mixed)
    mixed.apply(gpu_class("bad", device=devices("device.attributes[")))
    until(lambda: ready(mixed, "bad") == ("False", "SelectorInvalid"), 60, lambda: status(mixed, "bad"))
    mixed.apply(gpu_class("second", device=devices()))
    until(lambda: ready(mixed, "second") == ("False", "Overlaps"), 60, lambda: status(mixed, "second"))
    message = status(mixed, "second")["conditions"][0]["message"]
    assert "GPUClass l4" in message
    mixed.kubectl("delete", "gpuclasses", "bad", "second")
    assert [p["metadata"]["uid"] for p in engines(mixed)] == [pod["metadata"]["uid"]]


def test_time_slices_are_no_gpus_and_a_partition_is_one_of_its_own_memory(mixed: Fleet) -> None:
    mixed.apply(
        gpu_class(
            "a10",
            nodeSelector={"nvidia.com/gpu.product": "NVIDIA-A10-SHARED"},
            memoryPerGPU="24Gi",
            hourlyCost={"amount": "0.1"},
        ),
        gpu_class(
            "h100-3g",
            nodeSelector={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb"},
            memoryPerGPU="40Gi",
        ),
    )
    mixed.make_model(
        "tiny-part", variants=[{"class": "a10"}, {"class": "h100-3g"}], scaling={"minReplicas": 1, "maxReplicas": 2}
    )
    try:
        # The cheaper class has eight parts of two GPUs, and none of them counts.
        until(lambda: ready(mixed, "a10") == ("False", "SharedGPUs"), 60, lambda: status(mixed, "a10"))
        found = status(mixed, "a10")
        (shared,) = [c for c in found["conditions"] if c["type"] == "SharedGPUs"]
        assert shared["status"] == "True"
        assert "sliced-1 (time-slicing, 4 parts of each GPU)" in shared["message"]
        assert found["gpus"]["capacity"] == 0
        # The partition serves, as a GPU with its own memory.
        until(lambda: ready(mixed, "h100-3g") == ("True", "NodesFound"), 60, lambda: status(mixed, "h100-3g"))
        part = status(mixed, "h100-3g")
        assert (part["memory"]["perGPU"], part["memory"]["source"]) == ("40448Mi", "NodeLabels")
        assert (part["gpus"]["capacity"], part["largestNode"]) == (2, 1)
        serving(mixed, 1, "tiny-part")
        (pod,) = engines(mixed, "tiny-part")
        assert pod["spec"]["nodeName"] == "mig-1"
        variant = next(v for v in mixed.model("tiny-part")["status"]["variants"] if v["class"] == "h100-3g")
        assert variant["gpusPerReplica"] == 1
    finally:
        mixed.kubectl("delete", "models.shoal.dev", "tiny-part", "-n", steps.DEMO_NAMESPACE, "--wait=false")
        mixed.kubectl("delete", "gpuclasses", "a10", "h100-3g")


def test_a_fleet_file_with_devices_needs_gpus() -> None:
    with pytest.raises(ValueError, match="dra needs gpus"):
        FleetFile.model_validate({"nodes": [{"name": "x", "dra": True}]})
