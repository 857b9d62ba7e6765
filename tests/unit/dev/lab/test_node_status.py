"""Phases and conditions from what is known of containers."""

from typing import Any

import pytest

from shoal_dev.lab.node.status import ContainerRecord, Kind, conditions, phase, terminated

RUNNING: dict[str, Any] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
WAITING: dict[str, Any] = {"waiting": {"reason": "PodInitializing"}}


def record(kind: Kind, state: dict[str, Any], ready: bool = False, **more: Any) -> ContainerRecord:
    return ContainerRecord(f"{kind}-1", "image", kind, state, ready=ready, **more)


def ended(code: int) -> dict[str, Any]:
    return {"terminated": terminated(code, "2026-01-01T00:00:00Z", "id")}


@pytest.mark.parametrize(
    ("records", "policy", "terminating", "expected"),
    [
        ([record("sidecar", RUNNING), record("main", WAITING)], "Always", False, "Pending"),
        ([record("sidecar", RUNNING), record("main", RUNNING)], "Always", False, "Running"),
        ([record("main", ended(1))], "Always", False, "Running"),  # to be restarted
        ([record("main", WAITING, restarts=1)], "Always", False, "Running"),  # in back-off
        ([record("main", ended(0))], "Always", True, "Succeeded"),
        ([record("main", ended(137))], "Always", True, "Failed"),
        ([record("main", ended(0))], "OnFailure", False, "Succeeded"),
        ([record("main", ended(1))], "OnFailure", False, "Running"),
        ([record("main", ended(1))], "Never", False, "Failed"),
        ([record("sidecar", RUNNING), record("main", ended(1))], "Never", False, "Running"),  # the sidecar still ends
        ([record("init", ended(1)), record("main", WAITING)], "Never", False, "Failed"),
        ([record("init", ended(1)), record("main", WAITING)], "Always", False, "Pending"),
    ],
)
def test_phase(records: list[ContainerRecord], policy: str, terminating: bool, expected: str) -> None:
    assert phase(records, policy, terminating) == expected


def condition(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(entry for entry in found if entry["type"] == kind)


def test_an_unready_sidecar_makes_the_pod_unready() -> None:
    records = [record("sidecar", RUNNING, started=True), record("main", RUNNING, ready=True)]
    ready = condition(conditions(records, "Running", True, []), "Ready")
    assert (ready["status"], ready["message"]) == ("False", "containers with unready status: [sidecar-1]")


def test_a_transition_time_changes_with_the_value_only() -> None:
    records = [record("main", RUNNING, ready=True)]
    before = [{"type": "Ready", "status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z"}]
    kept = condition(conditions(records, "Running", True, before), "Ready")
    assert kept["lastTransitionTime"] == "2020-01-01T00:00:00Z"
    records[0].ready = False
    changed = condition(conditions(records, "Running", True, before), "Ready")
    assert changed["lastTransitionTime"] > "2020-01-01T00:00:00Z"


def test_a_signal_is_named() -> None:
    assert terminated(137, "t", "id")["signal"] == 9
    assert "signal" not in terminated(3, "t", "id")
