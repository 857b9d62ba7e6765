"""Faults that an examiner wrote down, told as those of the suite are."""

from dataclasses import replace

import pytest

from shoal.core.layers.causes import causes
from shoal.core.layers.types import GPUHolder
from tests.faults import test_faults
from tests.faults.fourth import FOURTH
from tests.faults.further import FURTHER, node_says
from tests.faults.test_faults import CLASS, FULL, READY, Fault, serves
from tests.faults.third import THIRD
from tests.faults.unseen import UNSEEN, spent
from tests.faults.worlds import GPU, NOW, condition, event, model, node, seen

STARTING = condition("Ready", "False", "Starting", "1 replica is being created")
LID = condition("ChassisProblem", "True", "LidOpen", "the lid of bay 2 is open")


@pytest.mark.parametrize("fault", [*FURTHER, *UNSEEN, *THIRD, *FOURTH], ids=lambda fault: fault.name)
def test_a_further_fault_is_found_on_its_layer_with_what_to_do(fault: Fault) -> None:
    test_faults.test_a_fault_is_found_on_its_layer_with_what_to_do(fault)


def test_an_unknown_report_of_a_node_is_quoted_beside_what_fails_and_hides_nothing() -> None:
    first, second = causes(node_says(conditions=(LID,), text="x"), NOW).causes
    assert (first.layer, first.reason, first.state) == ("L0", "NodeProblem", "fault")
    assert "bay 2 is open" in first.message
    assert second.reason == "EngineFailed"


def test_an_unknown_report_of_a_node_whose_replicas_serve_is_a_note() -> None:
    found = causes(seen(model(READY), pods=(serves(),), nodes=(node(LID),)), NOW)
    assert [(cause.reason, cause.state) for cause in found.causes] == [("NodeProblem", "note")]
    assert found.state == "ok"


def test_a_kill_of_the_kernels_explains_no_engine_that_says_why_it_ended() -> None:
    killed = event("Node", "gpu-1", "OOMKilling", "Killed process 8811 (python3)")
    (cause,) = causes(node_says(killed, text="error: unrecognized arguments: --x"), NOW).causes
    assert cause.reason == "EngineArguments"


def test_a_pod_of_others_with_few_of_the_gpus_is_a_note_beside_what_is_short() -> None:
    few = GPUHolder("ml-train/train-0", "gpu-1", {GPU: 1})
    found = causes(replace(seen(FULL, nodes=(node(),), related=(CLASS,)), holders=(few,)), NOW).causes
    assert [(cause.reason, cause.state) for cause in found] == [("NoCapacity", "fault"), ("GPUsHeldByOthers", "note")]
    assert "1 of 8 nvidia.com/gpu" in found[1].message


def test_a_budget_that_is_nearly_used_and_a_key_that_expired_are_notes() -> None:
    keys = [{"name": "ci", "expires": "2026-11-25T00:00:00Z"}, {"name": "web"}, {"name": "x", "expires": "soon"}]
    found = causes(spent("46", keys=keys), NOW)
    assert [(cause.reason, cause.state) for cause in found.causes] == [
        ("BudgetNearlyUsed", "note"), ("KeyExpired", "note")]  # fmt: skip
    assert "ci on 2026-11-25" in found.causes[1].message
    assert found.state == "ok"
    assert not causes(spent("10"), NOW).causes


def test_a_kubelets_event_that_may_be_over_is_a_note_and_hides_nothing() -> None:
    for reason, text, told in (
        ("Rebooted", "Node gpu-1 has been rebooted, boot id: abc", "NodeRebooted"),
        ("EvictionThresholdMet", "Attempting to reclaim ephemeral-storage", "DiskPressure"),
        ("EvictionThresholdMet", "Attempting to reclaim pids", "PIDPressure"),
    ):
        found = causes(node_says(event("Node", "gpu-1", reason, text)), NOW).causes
        assert [(cause.reason, cause.state) for cause in found] == [("CUDAError", "fault"), (told, "note")]


def test_what_an_engine_says_of_the_gpu_comes_before_its_crash() -> None:
    text = "CUDA error: an illegal memory access was encountered\nFatal Python error: Segmentation fault"
    (cause,) = causes(node_says(text=text, code=139), NOW).causes
    assert cause.reason == "CUDAError"


def test_a_monitor_that_does_not_reach_the_gpus_and_a_planned_maintenance_are_notes() -> None:
    lost = condition("AcceleratedHardwareReady", "False", "DCGMError", "failed to initialize DCGM: connection invalid")
    planned = condition("VMEventScheduled", "True", "Redeploy", "starts at 12:10")
    for seen_, told in ((lost, "GPUMonitorFails"), (planned, "NodeLeaves")):
        found = causes(node_says(conditions=(seen_,)), NOW).causes
        assert [(cause.reason, cause.state) for cause in found] == [("CUDAError", "fault"), (told, "note")]


def test_an_application_error_that_a_monitor_calls_an_xid_is_not_the_gpus() -> None:
    said = condition("SysLogsXIDError", "True", "SysLogsXIDErrorIsNotHealthy", "ErrorCode:31 PCI:0000:3b:00")
    (cause,) = causes(node_says(conditions=(said,)), NOW).causes
    assert (cause.layer, cause.reason) == ("L3", "CUDAError")


def test_words_beside_an_engines_error_are_no_cause() -> None:
    for beside in ("found /dev/kfd with 8 agents", "psutil.AccessDenied: (pid=1)"):
        text = f"{beside}\nlaunch: error: unrecognized arguments: --x"
        (cause,) = causes(node_says(text=text), NOW).causes
        assert cause.reason == "EngineArguments", beside


def test_what_a_traceback_names_says_nothing_of_its_error() -> None:
    text = 'Traceback (most recent call last):\n  File "/m/tokenizer.py", line 3, in cuda_kernel_error:\nKeyError: 7'
    (cause,) = causes(node_says(text=text), NOW).causes
    assert cause.reason == "EngineFailed"


def test_a_refusal_of_another_models_pods_or_of_yesterday_says_nothing() -> None:
    text = 'Error creating: pods "x" is forbidden: exceeded quota: team'
    of_another = model(STARTING, name="llama-2", variants=[{"class": "h100-80gb"}])
    for each, name, ago in (
        (model(STARTING, variants=[{"class": "h100-80gb"}]), "llama-2-h100-80gb-7c9", 20.0),
        (of_another, "llama-h100-80gb-7c9", 20.0),
        (model(STARTING), "llama-h100-80gb-7c9", 80000.0),
        (model(READY), "llama-h100-80gb-7c9", 20.0),
    ):
        said = event("ReplicaSet", name, "FailedCreate", text, ago)
        assert "ResourceQuotaExceeded" not in {c.reason for c in causes(seen(each, events=(said,)), NOW).causes}


def test_a_node_that_a_cloud_takes_back_is_a_note_while_its_replicas_serve() -> None:
    said = event("Node", "gpu-1", "SpotInterrupted", "Spot interruption warning was triggered for the node")
    found = causes(seen(model(READY), pods=(serves(),), nodes=(node(),), events=(said,)), NOW)
    assert [(cause.reason, cause.state) for cause in found.causes] == [("NodeLeaves", "note")]
    assert found.state == "ok"


def test_a_warning_about_a_node_that_nobody_knows_is_a_note_while_its_replicas_serve() -> None:
    said = event("Node", "gpu-1", "MonitorSays", "NVRM: BAR1 is 0M @ 0x0 (PCI:0000:41:00.0)")
    found = causes(seen(model(READY), pods=(serves(),), nodes=(node(),), events=(said,)), NOW)
    assert [(cause.reason, cause.state) for cause in found.causes] == [("DriverFault", "note")]


def test_a_corrected_error_that_an_xid_tells_is_nothing_that_is_wrong() -> None:
    said = event("Node", "gpu-1", "XidError", "NVRM: Xid (PCI:0009:01:00): 121, C2C Link corrected error")
    (cause,) = causes(node_says(said), NOW).causes
    assert cause.reason == "CUDAError"


def test_a_condition_of_a_network_card_is_a_fault_only_where_its_type_tells_of_a_problem() -> None:
    for kind, told in (("SysLogsNICDriverError", "RDMADeviceLost"), ("NICConfigured", "CUDAError")):
        found = causes(node_says(conditions=(condition(kind, "True", "Said", "wait_func: ACCESS_REG timeout"),)), NOW)
        assert found.causes[0].reason == told, kind


def test_a_condition_of_gpus_that_is_true_where_all_is_well_is_no_fault() -> None:
    for kind, status, told in (
        ("GPUDriverInstalled", "True", "CUDAError"),
        ("GPUDriverInstalled", "False", "DriverFault"),
        ("GPUDriverLoaded", "True", "CUDAError"),
        ("GPUDriverLoaded", "False", "DriverFault"),
        ("GPUValidated", "True", "CUDAError"),
        ("NVLinkInactive", "True", "NVLinkFault"),
        ("GPUNotReady", "True", "GPUUnhealthy"),
    ):
        found = causes(node_says(conditions=(condition(kind, status, "Said", "said"),)), NOW)
        assert found.causes[0].reason == told, (kind, status)
