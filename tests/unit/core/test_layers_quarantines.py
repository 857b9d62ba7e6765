"""Which pods a device that is out of use is a cause for: `shoal why` of a Model and of a pod on a node with eight."""

from dataclasses import replace
from typing import Any

import pytest

from shoal.core.layers.causes import causes
from shoal.core.layers.types import Explanation, ObjectView, WhyPod
from shoal.kube import layerviews
from tests.faults.test_faults import CUDA, failed, serves
from tests.faults.worlds import NOW, at, condition, crashed, model, node, pod, seen

SICK, WELL = "gpu.example.com/gpu-1/gpu-3", "gpu.example.com/gpu-1/gpu-4"
READY = condition("Ready", "True", "ReplicasReady", "1 of 1 replicas ready")


def gpu_class(*conditions: dict[str, Any], device: str = SICK, state: str = "Quarantined") -> ObjectView:
    entry = {"node": "gpu-1", "device": device, "state": state, "reason": "GPUFellOffBus", "message": "Xid 79",
             "by": "Shoal", "since": at(90), "times": 1}  # fmt: skip
    return layerviews.shoal_object(
        "class",
        {
            "metadata": {"name": "h100-dra", "generation": 1},
            "spec": {"device": {"deviceClassName": "gpu.example.com"}},
            "status": {
                "observedGeneration": 1,
                "conditions": [condition("Ready", "True", "NodesFound"), *conditions],
                "quarantined": [] if conditions else [entry],
            },
        },
    )


def having(raw: dict[str, Any], *devices: str) -> WhyPod:
    return replace(layerviews.pod(raw), devices=frozenset(devices))


def why(view: ObjectView, there: WhyPod, subject: ObjectView | None, kind: str = "model") -> Explanation:
    key = "chat/llama" if kind == "model" else there.key
    world = seen(subject, pods=(), nodes=(node(),), related=(view,))
    return causes(replace(world, kind=kind, key=key, pods=(there,)), NOW)  # pyright: ignore[reportArgumentType]


def told(found: Explanation) -> list[tuple[str, str]]:
    return [(each.reason, each.state) for each in found.causes]


@pytest.mark.parametrize("kind", ["model", "pod"])
def test_a_sick_device_is_the_cause_for_the_pod_that_has_it(kind: str) -> None:
    there = having(pod(crashed(CUDA)), SICK)
    found = why(gpu_class(), there, failed(CUDA) if kind == "model" else None, kind)
    assert (found.causes[0].reason, found.causes[0].layer.label[:2]) == ("GPUFellOffBus", "L0")
    assert any("Shoal starts a replacement for chat/llama-1" in each for each in found.causes[0].tried)


@pytest.mark.parametrize("kind", ["model", "pod"])
def test_a_neighbour_with_another_device_is_told_its_own_cause(kind: str) -> None:
    there = having(pod(crashed(CUDA)), WELL)
    found = why(gpu_class(), there, failed(CUDA) if kind == "model" else None, kind)
    assert found.causes[0].reason == "CUDAError"
    assert not any("replacement" in text for each in found.causes for text in each.tried)
    serving = why(gpu_class(), having(serves(), WELL), model(READY) if kind == "model" else None, kind)
    assert serving.state == "ok"


def test_where_claims_cannot_be_read_it_is_a_note_that_says_so() -> None:
    found = why(gpu_class(), layerviews.pod(serves()), model(READY))
    assert told(found) == [("GPUsQuarantined", "note")]
    assert "whether chat/llama-1 had it is not known" in found.causes[0].message
    assert found.state == "ok"


def test_a_replica_on_probation_serves_and_is_no_fault() -> None:
    found = why(gpu_class(state="Probation"), having(serves(), SICK), model(READY))
    assert told(found) == [("GPUFellOffBus", "note")]
    assert found.state == "ok"


@pytest.mark.parametrize(("devices", "states"), [((SICK,), ["fault"]), ((WELL,), []), (None, ["note"])])
def test_a_device_that_stays_in_use_concerns_the_pod_that_has_it(
    devices: tuple[str, ...] | None, states: list[str]
) -> None:
    text = f"device {SICK} of node gpu-1 stays in use, since no GPU of the class would be left (GPUFellOffBus: Xid 79)"
    there = replace(layerviews.pod(serves()), devices=None if devices is None else frozenset(devices))
    found = why(gpu_class(condition("GPUsHealthy", "False", "QuarantineWithheld", text)), there, model(READY))
    assert [each.state for each in found.causes if each.reason == "QuarantineWithheld"] == states
