"""DCGM's metrics as evidence: from samples over the status of the class to what `shoal why` and `shoal doctor` say."""

from dataclasses import replace
from typing import Any

import pytest

from shoal.core.doctor.checks import examine
from shoal.core.doctor.types import DoctorResult
from shoal.core.health import HealthPlan, Unit
from shoal.core.health.dcgm import DOUBLE_BIT, LAST_XID, REMAP_FAILED, DCGMSample, of_nodes, reading
from shoal.core.health.decide import CONFIRM_SECONDS, HOLD_SECONDS
from shoal.core.layers.causes import causes
from shoal.core.layers.types import Explanation, LayerCause, ObjectView
from shoal.core.status import healthstatus
from shoal.kube import layerviews
from tests.faults.test_faults import CUDA, failed, serves
from tests.faults.test_installation_faults import WELL
from tests.faults.worlds import CLASS_LABELS, GPU, NOW, at, condition, crashed, model, node, pod, seen
from tests.unit.core.test_health import Clock

NODES = tuple(f"gpu-{number}" for number in range(1, 13))
READY = condition("Ready", "True", "ReplicasReady", "1 of 1 replicas ready")


def sample(metric: str, value: float, host: str = "gpu-1", gpu: int = 3) -> DCGMSample:
    return DCGMSample(metric, {"gpu": str(gpu), "UUID": f"GPU-{host}-{gpu}", "Hostname": host}, value)


def decided(*samples: DCGMSample, after: float = 0) -> HealthPlan:
    """What the operator decides when the metrics say this long enough, `after` seconds after they have ended."""
    clock = Clock(dict.fromkeys(NODES, 8), at=NOW)
    for _ in range(int((CONFIRM_SECONDS + 10) // 5)):
        clock.step(5, *of_nodes(reading(samples), {name: name for name in NODES}, lambda _: None))
    for _ in range(int(after // 5)):
        clock.step(5)
    return clock.plan


def gpu_class(plan: HealthPlan = HealthPlan(()), *, unmeasured: str = "") -> ObjectView:  # noqa: B008 - immutable
    """As its controller writes it."""
    conditions = [condition("Ready", "True", "NodesFound")]
    if (said := healthstatus.condition(plan, (), unmeasured)) is not None:
        conditions.append(condition(said.type, said.status, said.reason, said.message, ago=90))
    listed = [
        each.model_dump(mode="json", by_alias=True, exclude_none=True) | {"since": at(90)}
        for each in healthstatus.shown(plan.quarantined, {})
    ]
    raw: dict[str, Any] = {
        "metadata": {"name": "h100-80gb", "generation": 1},
        "spec": {"nodeSelector": CLASS_LABELS, "resourceName": GPU},
        "status": {"observedGeneration": 1, "conditions": conditions, "quarantined": listed},
    }
    return layerviews.shoal_object("class", raw)


def why_model(view: ObjectView, **how: Any) -> Explanation:
    """Of a Model whose engine on gpu-1 ends with a CUDA error."""
    world: dict[str, Any] = {"subject": failed(CUDA), "pods": (pod(crashed(CUDA)),), **how}
    return causes(seen(related=(view,), nodes=tuple(node(name=name) for name in NODES), **world), NOW)


def why_class(view: ObjectView) -> tuple[LayerCause, ...]:
    return causes(seen(view, nodes=tuple(node(name=name) for name in NODES)), NOW).causes


def doctor(view: ObjectView) -> list[DoctorResult]:
    nodes = tuple(layerviews.node(node(name=name)) for name in NODES)
    said = examine(replace(WELL, classes=(view,), nodes=nodes), NOW)
    return [each for each in said if each.check == "GPU classes" and each.outcome != "ok"]


@pytest.mark.parametrize(
    ("metric", "value", "layer", "reason", "do", "evidence"),
    [
        (LAST_XID, 79, "L0", "GPUFellOffBus", "restart the machine", "Xid 79 (the GPU has fallen off the bus)"),
        (LAST_XID, 95, "L0", "GPUUncorrectableECC", "reset the GPU", "Xid 95 ("),
        (LAST_XID, 74, "L0.5", "NVLinkFault", "NVLinks", "Xid 74 ("),
        (LAST_XID, 119, "L1", "DriverFault", "Restart the machine", "Xid 119 ("),
        (DOUBLE_BIT, 2, "L0", "GPUUncorrectableECC", "reset the GPU", "2 uncorrectable memory errors"),
        (REMAP_FAILED, 1, "L0", "GPUUncorrectableECC", "reset the GPU", "could not be remapped"),
    ],
)
def test_what_dcgm_measures_is_the_cause_of_an_engine_that_ends(
    metric: str, value: float, layer: str, reason: str, do: str, evidence: str
) -> None:
    (cause,) = why_model(gpu_class(decided(sample(metric, value)))).causes
    assert (cause.layer.value, cause.reason, cause.state) == (layer, reason, "fault")
    assert "DCGM: GPU 3 GPU-gpu-1-3: " in cause.message
    [proof] = cause.evidence
    assert proof.where == "status.quarantined of GPUClass h100-80gb"
    assert evidence in proof.what
    assert proof.what.startswith("the GPUs of node gpu-1: ")
    assert proof.age_seconds == 90
    assert do in cause.do
    assert any("places no replica there" in tried for tried in cause.tried)
    assert any("starts a replacement for chat/llama-1" in tried for tried in cause.tried)
    assert any("CUDAError" in each for each in cause.consequences)


def test_metrics_of_another_node_explain_no_engine_here() -> None:
    found = why_model(gpu_class(decided(sample(LAST_XID, 79, host="gpu-2"))))
    assert [(cause.reason, cause.state) for cause in found.causes] == [
        ("CUDAError", "fault"),
        ("GPUsQuarantined", "note"),
    ]


def test_a_model_that_serves_hears_of_it_as_a_note() -> None:
    view = gpu_class(decided(sample(LAST_XID, 79, host="gpu-2")))
    found = why_model(view, subject=model(READY), pods=(serves(),))
    assert found.state == "ok"
    assert [(cause.reason, cause.state) for cause in found.causes] == [("GPUsQuarantined", "note")]


def test_sick_gpus_that_stay_in_use_are_an_error_with_what_dcgm_says() -> None:
    plan = decided(*(sample(LAST_XID, 79, host=name) for name in NODES))
    assert plan.withheld, "never more than a part of a class at once"
    view = gpu_class(plan)
    [withheld] = [cause for cause in why_class(view) if cause.reason == "QuarantineWithheld"]
    assert (withheld.layer.value, withheld.state) == ("L0", "fault")
    [said] = [each for each in doctor(view) if each.reason == "QuarantineWithheld"]
    assert "stays in use" in said.message
    assert "Xid 79 (the GPU has fallen off the bus)" in said.message


def test_gpus_on_probation_are_said_to_be() -> None:
    plan = decided(sample(LAST_XID, 79), after=400 + HOLD_SECONDS)
    assert [(each.state, each.monitor) for each in plan.quarantined] == [("Probation", "DCGM")]
    (cause,) = why_class(gpu_class(plan))
    assert "on probation" in cause.message
    assert any("until one passed a test" in tried for tried in cause.tried)


def failed_its_test() -> HealthPlan:
    """On gpu-1, while a quarter of the class is out of use."""
    clock = Clock(dict.fromkeys(NODES[:4], 8), at=NOW)
    first, second = (of_nodes(reading([sample(LAST_XID, 79, host=name)]), {name: name}, lambda _: None)
                     for name in NODES[:2])  # fmt: skip
    clock.last(60, *first)
    clock.last(400 + HOLD_SECONDS)
    clock.last(60, *second)
    return clock.step(5, *second, tested={Unit("gpu-1"): "failed"})


def test_a_gpu_that_failed_its_test_and_stays_in_use_is_named_with_what_to_do() -> None:
    view = gpu_class(failed_its_test())
    text = "node gpu-1 stays in use, since 8 of 32 GPUs are out of use already, and more than 25 % may not be"
    [withheld] = [cause for cause in why_class(view) if cause.reason == "QuarantineWithheld"]
    assert text in withheld.message
    assert "failed its test" in withheld.message
    assert "shoal cordon" in withheld.do
    assert withheld.evidence
    [said] = [each for each in doctor(view) if each.reason == "QuarantineWithheld"]
    assert text in said.message
    assert "(ReplicaAnswersDiffer: a replica there failed its test" in said.message
    assert "node gpu-2 is out of use" in said.message


def on_node(name: str) -> dict[str, Any]:
    raw = serves()
    return raw | {"spec": raw["spec"] | {"nodeName": name}}


def test_a_model_with_a_replica_on_a_gpu_that_failed_its_test_is_told_and_others_are_not() -> None:
    view = gpu_class(failed_its_test())
    found = why_model(view, subject=model(READY), pods=(on_node("gpu-1"),))
    assert "QuarantineWithheld" in [cause.reason for cause in found.causes]
    for elsewhere in ("gpu-2", "gpu-3"):
        found = why_model(view, subject=model(READY), pods=(on_node(elsewhere),))
        assert "QuarantineWithheld" not in [cause.reason for cause in found.causes]


def test_a_class_names_all_its_gpus_that_are_out_of_use() -> None:
    view = gpu_class(decided(sample(LAST_XID, 79), sample(DOUBLE_BIT, 1, host="gpu-2")))
    (cause,) = why_class(view)
    assert (cause.reason, cause.state) == ("GPUsQuarantined", "note")
    shown = " ".join((cause.message, *(proof.what for proof in cause.evidence)))
    assert "GPU-gpu-1-3: Xid 79" in shown
    assert "GPU-gpu-2-3: 1 uncorrectable" in shown


def test_doctor_names_all_gpus_that_are_out_of_use() -> None:
    view = gpu_class(decided(sample(LAST_XID, 79), sample(DOUBLE_BIT, 1, host="gpu-2")))
    said = doctor(view)
    assert {(each.outcome, each.reason, each.layer.value) for each in said} == {("warning", "GPUsQuarantined", "L0")}
    shown = " ".join(each.message for each in said)
    assert "node gpu-1 is out of use" in shown
    assert "node gpu-2 is out of use" in shown
    assert "GPU-gpu-1-3: Xid 79" in shown
    assert "GPU-gpu-2-3: 1 uncorrectable" in shown


@pytest.mark.parametrize(
    ("unmeasured", "do"),
    [
        ("Prometheus has no fresh metrics of DCGM of the GPUs on gpu-1", "DCGM exporter's pods"),
        ("DCGM's metrics in Prometheus are not known: no answer within 5 s", "Prometheus"),
    ],
)
def test_gpus_that_nobody_measures_are_a_note_and_never_well(unmeasured: str, do: str) -> None:
    view = gpu_class(unmeasured=unmeasured)
    (cause,) = why_class(view)
    assert (cause.reason, cause.state, cause.layer.value) == ("GPUMetricsMissing", "note", "L1")
    assert unmeasured in cause.message
    assert do in cause.do
    [said] = doctor(view)
    assert (said.outcome, said.reason, said.layer.value) == ("warning", "GPUMetricsMissing", "L1")
    assert unmeasured in said.message
    assert do in said.do
    assert why_model(view, subject=model(READY), pods=(serves(),)).causes == (), "it serves all the same"


def test_doctor_says_both_where_some_are_out_of_use_and_others_not_measured() -> None:
    unmeasured = "Prometheus has no fresh metrics of DCGM of the GPUs on gpu-4"
    said = doctor(gpu_class(decided(sample(LAST_XID, 79)), unmeasured=unmeasured))
    shown = " ".join(each.message for each in said)
    assert "GPU-gpu-1-3: Xid 79" in shown
    assert unmeasured in shown


def test_a_healthy_class_is_ok() -> None:
    view = gpu_class(decided(sample(LAST_XID, 0), sample(LAST_XID, 94, gpu=2), sample(LAST_XID, 63, gpu=4)))
    assert why_class(view) == ()
    assert doctor(view) == []


def test_labels_of_the_exporter_do_not_reach_the_terminal() -> None:
    evil = DCGMSample(LAST_XID, {"gpu": "3", "UUID": "GPU-\x1b[31m\nREADY" + "x" * 9000, "Hostname": "gpu-1"}, 79)
    view = gpu_class(decided(evil))
    (cause,) = why_class(view)
    shown = [cause.message, *(proof.what for proof in cause.evidence), *(each.message for each in doctor(view))]
    assert all("\x1b" not in text and "\n" not in text and len(text) < 2000 for text in shown)
