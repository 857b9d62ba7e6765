"""Faults that an examiner wrote down, told as those of the suite are."""

import pytest

from shoal.core.layers.causes import causes
from tests.faults import test_faults
from tests.faults.further import FURTHER, node_says
from tests.faults.test_faults import READY, Fault, serves
from tests.faults.unseen import UNSEEN
from tests.faults.worlds import NOW, condition, event, model, node, seen

PSU = condition("PowerSupplyProblem", "True", "PSULost", "PSU 2 of 4 failed")


@pytest.mark.parametrize("fault", [*FURTHER, *UNSEEN], ids=lambda fault: fault.name)
def test_a_further_fault_is_found_on_its_layer_with_what_to_do(fault: Fault) -> None:
    test_faults.test_a_fault_is_found_on_its_layer_with_what_to_do(fault)


def test_an_unknown_report_of_a_node_is_quoted_beside_what_fails_and_hides_nothing() -> None:
    first, second = causes(node_says(conditions=(PSU,), text="x"), NOW).causes
    assert (first.layer, first.reason, first.state) == ("L0", "NodeProblem", "fault")
    assert "PSU 2 of 4 failed" in first.message
    assert second.reason == "EngineFailed"


def test_an_unknown_report_of_a_node_whose_replicas_serve_is_a_note() -> None:
    found = causes(seen(model(READY), pods=(serves(),), nodes=(node(PSU),)), NOW)
    assert [(cause.reason, cause.state) for cause in found.causes] == [("NodeProblem", "note")]
    assert found.state == "ok"


def test_a_kill_of_the_kernels_explains_no_engine_that_says_why_it_ended() -> None:
    killed = event("Node", "gpu-1", "OOMKilling", "Killed process 8811 (python3)")
    (cause,) = causes(node_says(killed, text="error: unrecognized arguments: --x"), NOW).causes
    assert cause.reason == "EngineArguments"
