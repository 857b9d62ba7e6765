"""A Model whose driver is KEDA, as its clients and its owner see it."""

from pathlib import Path

import pytest

from tests.support.keda import DRIVEN, SMALL, KEDAFleet
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.keda, pytest.mark.timeout(600)]


def test_a_request_at_zero_wakes_the_model_through_keda_and_is_answered(fleet: KEDAFleet) -> None:
    fleet.make_model("woken", scaling=DRIVEN)
    fleet.active("woken", "DrivenByKEDA", within=180)
    fleet.expect("woken", "Ready", "ScaledToZero", within=180)
    assert fleet.replicas("woken") == 0

    assert fleet.ask("woken")

    [scaled] = fleet.scaled_objects("woken")
    assert scaled["metadata"]["name"] == fleet.deployment("woken")
    assert scaled["spec"]["triggers"][0]["type"] == "external-push"
    assert len(fleet.hpas("woken")) == 1
    # Idle again: nobody has to do anything for it.
    fleet.until_replicas("woken", 0)
    fleet.delete_model("woken")
    until(lambda: not fleet.scaled_objects("woken") and not fleet.hpas("woken"), 60, lambda: fleet.told("woken"))


def test_load_scales_out_through_the_hpa_and_in_again_without_a_failed_request(
    fleet: KEDAFleet, tmp_path: Path
) -> None:
    fleet.make_model("crowded", engine=SMALL, scaling=DRIVEN | {"maxReplicas": 3, "queuedRequestsPerReplica": 2})
    fleet.active("crowded", "DrivenByKEDA", within=180)
    with fleet.history(tmp_path) as history:
        with fleet.asked("crowded", 14) as load:
            fleet.until_replicas("crowded", 3)
            until(lambda: fleet.model("crowded")["status"]["replicas"]["ready"] == 3, 120)
        fleet.until_replicas("crowded", 0)
        seen = history.of(fleet.deployment("crowded"))
    assert not load.problems
    assert len(load.answers) > 14
    assert max(seen) == 3
    # The same decision stands in the Model's status as with Shoal's own driver.
    until(lambda: fleet.model("crowded")["status"]["replicas"]["desired"] == 0, 60)
    fleet.delete_model("crowded")


def test_under_this_driver_shoal_writes_no_scale_and_the_status_is_the_same(fleet: KEDAFleet) -> None:
    fleet.make_model("shown", scaling=DRIVEN | {"minReplicas": 2, "maxReplicas": 2})
    fleet.until_replicas("shown", 2)
    assert fleet.active("shown", "DrivenByKEDA", within=180) == "KEDA and its HPA carry out what is decided"
    until(lambda: fleet.condition("shown", "Ready")["reason"] == "ReplicasReady", 120, lambda: fleet.told("shown"))
    [deployment] = fleet.get("deployments", "-n", "demo", "-l", "shoal.dev/model=shown", "--show-managed-fields")
    writers = {
        entry["manager"] for entry in deployment["metadata"]["managedFields"] if entry.get("subresource") == "scale"
    }
    assert writers
    assert not [name for name in writers if name.startswith("shoal")]
    assert fleet.model("shown")["status"]["replicas"] == {"desired": 2, "ready": 2}
    fleet.delete_model("shown")
