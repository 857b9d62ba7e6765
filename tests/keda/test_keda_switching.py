"""From Shoal's own driver to KEDA and back, under requests: none is lost, and no replica goes."""

from pathlib import Path
from typing import Final

import pytest

from tests.support.keda import DRIVEN, KEDAFleet, stays
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.keda, pytest.mark.timeout(600)]

OWN: Final = DRIVEN | {"driver": "BuiltIn", "idleSeconds": 60}


def test_a_serving_model_changes_its_driver_both_ways_and_never_passes_through_zero(
    fleet: KEDAFleet, tmp_path: Path
) -> None:
    fleet.make_model("switched", scaling=OWN | {"minReplicas": 2, "maxReplicas": 2})
    fleet.until_replicas("switched", 2)
    until(lambda: fleet.condition("switched", "Ready")["reason"] == "ReplicasReady", 120)
    with fleet.history(tmp_path) as history, fleet.asked("switched", 4) as load:
        for driver in ("KEDA", "BuiltIn", "KEDA"):
            fleet.drive("switched", driver)
            if driver == "KEDA":
                fleet.active("switched", "DrivenByKEDA", within=120)
            else:
                gone = lambda: not fleet.scaled_objects("switched") and not fleet.hpas("switched")  # noqa: E731
                until(gone, 120, lambda: fleet.told("switched"))
            stays(lambda: fleet.replicas("switched"), 2, 5)
        seen = history.of(fleet.deployment("switched"))
    assert seen == [2]
    assert not load.problems
    assert load.answers
    fleet.delete_model("switched")


def test_back_to_shoals_driver_while_keda_is_away_says_what_holds_it_and_keeps_the_replicas(
    fleet: KEDAFleet, tmp_path: Path
) -> None:
    fleet.make_model("stuck", scaling=DRIVEN | {"minReplicas": 1, "maxReplicas": 2})
    fleet.until_replicas("stuck", 1)
    fleet.active("stuck", "DrivenByKEDA", within=180)
    with fleet.history(tmp_path) as history:
        fleet.keda_runs("keda-operator", 0)
        try:
            fleet.drive("stuck", "BuiltIn")
            said = lambda: "takes its finalizer off" in fleet.condition("stuck", "ScalingActive")["message"]  # noqa: E731
            until(said, 120, lambda: fleet.told("stuck"))
            message = fleet.condition("stuck", "ScalingActive")["message"]
            [scaled] = fleet.scaled_objects("stuck")
            assert f"kubectl patch scaledobject {scaled['metadata']['name']} -n demo" in message
            assert fleet.replicas("stuck") == 1
        finally:
            fleet.keda_runs("keda-operator", 1)
        until(lambda: not fleet.scaled_objects("stuck"), 120, lambda: fleet.told("stuck"))
        seen = history.of(fleet.deployment("stuck"))
    assert seen == [1]
    fleet.delete_model("stuck")
