"""KEDA, its adapter, its objects or Shoal's leader fail under load: replicas stay, and the Model says what to do."""

import json
import os
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from shoal_dev.demo.clusters import NAMESPACE
from tests.support.keda import DRIVEN, SMALL, SPACE, KEDAFleet, leader, stays
from tests.support.waiting import until

AWAY_SECONDS: Final = float(os.environ.get("SHOAL_AWAY_SECONDS", "30"))
"""That KEDA's operator or both of Shoal's are away. Longer than everything that could act on silence: polling 1 s,
idleSeconds 5, three polls missed 15 s. SHOAL_AWAY_SECONDS=300: five minutes each."""

pytestmark = [pytest.mark.lab, pytest.mark.keda, pytest.mark.timeout(600 + 2 * AWAY_SECONDS)]

MOST: Final = 2
LOADED: Final = DRIVEN | {"maxReplicas": MOST, "queuedRequestsPerReplica": 2, "stabilizationSeconds": 120}
CLIENTS: Final = 14
"""Of batches of two: more than MOST replicas would be wanted, so the number stands."""


def loaded(fleet: KEDAFleet, name: str) -> None:
    fleet.make_model(name, engine=SMALL, scaling=LOADED)
    fleet.active(name, "DrivenByKEDA", within=180)


def until_all_serve(fleet: KEDAFleet, name: str) -> None:
    until(lambda: fleet.model(name)["status"]["replicas"]["ready"] == MOST, 180, lambda: fleet.told(name))


def annotate(fleet: KEDAFleet, name: str, *annotations: str) -> None:
    [scaled] = fleet.scaled_objects(name)
    fleet.kubectl("annotate", "scaledobjects.keda.sh", scaled["metadata"]["name"], "-n", SPACE, *annotations)


def test_kedas_operator_is_away_under_load_and_the_replicas_stay(fleet: KEDAFleet, tmp_path: Path) -> None:
    loaded(fleet, "lonely")
    with fleet.asked("lonely", CLIENTS) as load:
        until_all_serve(fleet, "lonely")
        with fleet.history(tmp_path) as history:
            fleet.keda_runs("keda-operator", 0)
            try:
                message = fleet.active("lonely", "KEDANotPolling", within=120)
                assert "Look whether its operator runs" in message
                stays(lambda: fleet.replicas("lonely"), MOST, AWAY_SECONDS)
            finally:
                fleet.keda_runs("keda-operator", 1)
            fleet.active("lonely", "DrivenByKEDA", within=120)
            assert history.of(fleet.deployment("lonely")) == [MOST]
    assert not load.problems
    fleet.until_replicas("lonely", 0)
    fleet.delete_model("lonely")


def test_the_metrics_adapter_is_away_under_load_and_the_replicas_stay(fleet: KEDAFleet, tmp_path: Path) -> None:
    loaded(fleet, "blind")
    with fleet.asked("blind", CLIENTS) as load:
        until_all_serve(fleet, "blind")
        with fleet.history(tmp_path) as history:
            fleet.keda_runs("keda-metrics-apiserver", 0)
            try:
                message = fleet.active("blind", "MetricsUnavailable", within=120)
                assert "kubectl get apiservice v1beta1.external.metrics.k8s.io" in message
                stays(lambda: fleet.replicas("blind"), MOST, 15)
            finally:
                fleet.keda_runs("keda-metrics-apiserver", 1)
            fleet.active("blind", "DrivenByKEDA", within=120)
            assert history.of(fleet.deployment("blind")) == [MOST]
    assert not load.problems
    fleet.delete_model("blind")


def test_a_scaled_object_is_paused_edited_and_deleted_by_hand(fleet: KEDAFleet, tmp_path: Path) -> None:
    fleet.make_model("touched", scaling=DRIVEN | {"minReplicas": 2, "maxReplicas": 4})
    fleet.until_replicas("touched", 2)
    fleet.active("touched", "DrivenByKEDA", within=180)
    until(lambda: fleet.condition("touched", "Ready")["reason"] == "ReplicasReady", 120, lambda: fleet.told("touched"))
    with fleet.history(tmp_path) as history, fleet.asked("touched", 2) as load:
        annotate(fleet, "touched", "autoscaling.keda.sh/paused=true")
        message = fleet.active("touched", "ScaledObjectPaused", within=60)
        assert "autoscaling.keda.sh/paused- lets KEDA go on" in message
        annotate(fleet, "touched", "autoscaling.keda.sh/paused-")
        fleet.active("touched", "DrivenByKEDA", within=60)

        [before] = fleet.scaled_objects("touched")
        edited = {"minReplicaCount": 0, "maxReplicaCount": 1, "cooldownPeriod": 7}
        name = before["metadata"]["name"]
        fleet.kubectl(
            "patch", "scaledobjects.keda.sh", name, "-n", SPACE, "--type=merge", "-p", json.dumps({"spec": edited})
        )

        def restored() -> bool:
            spec = fleet.scaled_objects("touched")[0]["spec"]
            return all(spec[field] == before["spec"][field] for field in edited)

        until(restored, 60, lambda: fleet.scaled_objects("touched"))

        fleet.kubectl("delete", "scaledobjects.keda.sh", name, "-n", SPACE)
        again = lambda: [s["metadata"]["uid"] for s in fleet.scaled_objects("touched")]  # noqa: E731
        until(lambda: bool(again()) and again() != [before["metadata"]["uid"]], 60, lambda: fleet.told("touched"))
        fleet.active("touched", "DrivenByKEDA", within=120)
        stays(lambda: fleet.replicas("touched"), 2, 5)
        seen = history.of(fleet.deployment("touched"))
    # An edit to fewer may be carried out before it is put right: a serving replica stays in any case.
    assert min(seen) >= 1
    assert not load.problems
    fleet.delete_model("touched")


def autoscaler(deployment: str) -> dict[str, Any]:
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment}
    resource = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}
    spec = {
        "scaleTargetRef": target,
        "minReplicas": 1,
        "maxReplicas": 5,
        "metrics": [{"type": "Resource", "resource": resource}],
    }
    metadata = {"name": "somebody-elses", "namespace": SPACE}
    return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": metadata, "spec": spec}


def test_another_autoscaler_on_the_deployment_is_named_under_load_and_the_replicas_stay(
    fleet: KEDAFleet, tmp_path: Path
) -> None:
    loaded(fleet, "shared")
    with fleet.asked("shared", CLIENTS) as load:
        until_all_serve(fleet, "shared")
        with fleet.history(tmp_path) as history:
            fleet.apply(autoscaler(fleet.deployment("shared")))
            try:
                message = fleet.active("shared", "OtherAutoscaler", within=60)
                assert "HorizontalPodAutoscaler somebody-elses" in message
                assert "delete it" in message
                stays(lambda: fleet.replicas("shared"), MOST, 10)
            finally:
                fleet.kubectl("delete", "hpa", "somebody-elses", "-n", SPACE)
            fleet.active("shared", "DrivenByKEDA", within=60)
            assert history.of(fleet.deployment("shared")) == [MOST]
    assert not load.problems
    fleet.delete_model("shared")


def test_kedas_own_admission_refuses_a_scaled_object_beside_an_autoscaler_and_the_model_says_so(
    fleet: KEDAFleet,
) -> None:
    fleet.make_model("taken", scaling=DRIVEN | {"driver": "BuiltIn", "minReplicas": 1, "maxReplicas": 2})
    fleet.until_replicas("taken", 1)
    fleet.apply(autoscaler(fleet.deployment("taken")))
    try:
        fleet.drive("taken", "KEDA")
        named = lambda: "somebody-elses" in fleet.condition("taken", "ScalingActive")["message"]  # noqa: E731
        until(named, 60, lambda: fleet.told("taken"))
        assert fleet.condition("taken", "ScalingActive")["status"] == "False"
        assert fleet.replicas("taken") == 1
    finally:
        fleet.kubectl("delete", "hpa", "somebody-elses", "-n", SPACE)
    fleet.active("taken", "DrivenByKEDA", within=120)
    fleet.delete_model("taken")


def test_shoals_leader_is_killed_while_keda_holds_a_stream_and_the_next_one_answers(
    fleet: KEDAFleet, tmp_path: Path
) -> None:
    loaded(fleet, "led")
    with fleet.asked("led", CLIENTS) as load:
        until_all_serve(fleet, "led")
        with fleet.history(tmp_path) as history:
            fleet.lab.signal_container(f"{NAMESPACE}/{leader(fleet)}", signal.SIGKILL)
            stays(lambda: fleet.replicas("led"), MOST, 30)
            fleet.active("led", "DrivenByKEDA", within=180)
            assert history.of(fleet.deployment("led")) == [MOST]
    assert not load.problems
    # The new leader is asked and answers: the Model goes to zero by it, and wakes by it.
    fleet.until_replicas("led", 0, within=180)
    assert fleet.ask("led")
    fleet.delete_model("led")


def test_shoals_leader_vanishes_with_its_node_and_keda_is_led_to_the_next_one(fleet: KEDAFleet, tmp_path: Path) -> None:
    """No end of a connection comes from it, and KEDA sets its questions no deadline: TCP alone would keep it there for
    a quarter of an hour."""
    loaded(fleet, "vanished")
    with fleet.asked("vanished", CLIENTS) as load:
        until_all_serve(fleet, "vanished")
        with fleet.history(tmp_path) as history:
            first = leader(fleet)
            with fleet.vanished(first):
                until(lambda: leader(fleet) != first, 60, lambda: leader(fleet))
                second = leader(fleet)
                series = 'shoal_keda_calls_total{method="GetMetrics",outcome="ok"}'
                until(lambda: fleet.metric(second, series) > 0, 240, lambda: fleet.told("vanished"))
                stays(lambda: fleet.replicas("vanished"), MOST, 5)
            assert history.of(fleet.deployment("vanished")) == [MOST]
    assert not load.problems
    fleet.until_replicas("vanished", 0, within=240)
    assert fleet.ask("vanished")
    fleet.delete_model("vanished")


def test_both_operators_are_away_under_load_and_the_replicas_stay(fleet: KEDAFleet, tmp_path: Path) -> None:
    loaded(fleet, "orphaned")
    count = len(fleet.get("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=operator"))
    with fleet.asked("orphaned", CLIENTS) as load:
        until_all_serve(fleet, "orphaned")
        with fleet.history(tmp_path) as history:
            fleet.kubectl("scale", "deployment/shoal-operator", "-n", NAMESPACE, "--replicas=0")
            try:
                stays(lambda: fleet.replicas("orphaned"), MOST, AWAY_SECONDS)
            finally:
                fleet.kubectl("scale", "deployment/shoal-operator", "-n", NAMESPACE, f"--replicas={count}")
            fleet.active("orphaned", "DrivenByKEDA", within=180)
            assert history.of(fleet.deployment("orphaned")) == [MOST]
    assert not load.problems
    fleet.delete_model("orphaned")


def test_a_scaled_object_that_is_not_shoals_is_not_answered(fleet: KEDAFleet) -> None:
    """Somebody copies a ScaledObject to a Deployment of their own: Shoal knows nothing of it, and nothing scales."""
    metadata = {"name": "foreign", "namespace": SPACE}
    container = {
        "name": "c",
        "image": "shoal:lab",
        "command": ["sleep", "3600"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    template = {
        "metadata": {"labels": {"app": "foreign"}},
        "spec": {"securityContext": security, "containers": [container]},
    }
    selector = {"matchLabels": {"app": "foreign"}}
    fleet.make_model("copied", scaling=DRIVEN | {"minReplicas": 1, "maxReplicas": 1})
    fleet.active("copied", "DrivenByKEDA", within=180)
    [scaled] = fleet.scaled_objects("copied")
    spec = scaled["spec"] | {"scaleTargetRef": {"name": "foreign"}, "minReplicaCount": 0}
    deployment = {"replicas": 1, "selector": selector, "template": template}
    fleet.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": deployment})
    fleet.apply({"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": metadata, "spec": spec})

    def words() -> str:
        [found] = [s for s in fleet.get("scaledobjects.keda.sh", "-n", SPACE) if s["metadata"]["name"] == "foreign"]
        return json.dumps(found.get("status", {}).get("conditions", []))

    try:
        until(lambda: '"False"' in words(), 60, words)
        [found] = [d for d in fleet.get("deployments", "-n", SPACE) if d["metadata"]["name"] == "foreign"]
        assert found["spec"]["replicas"] == 1
    finally:
        fleet.kubectl("delete", "scaledobjects.keda.sh/foreign", "deployment/foreign", "-n", SPACE)
    fleet.delete_model("copied")
