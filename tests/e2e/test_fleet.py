"""A mixed fleet with real pods: what engines say, who owns each field, GPUs that break, nodes that go, drains."""

import json
from typing import Any

import pytest

from shoal.api import names
from shoal_dev.demo.clusters import NAMESPACE
from tests.e2e.conftest import Fleet, serves
from tests.support.pages import page
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

MADE = ("models", "gpuclasses", "deployments", "poddisruptionbudgets", "networkpolicies", "secrets", "jobs")


def variants(fleet: Fleet, name: str) -> dict[str, dict[str, Any]]:
    return {v["class"]: v for v in fleet.model(name).get("status", {}).get("variants", [])}


def engine_pods(fleet: Fleet, name: str) -> list[dict[str, Any]]:
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE},{names.LABEL_MODEL}={name}"
    return fleet.get("pods", "-n", "demo", "-l", selector)


def ready_on(fleet: Fleet, name: str) -> str | None:
    """The node of the Model's one replica, if it is ready."""
    pods = [p for p in engine_pods(fleet, name) if "deletionTimestamp" not in p["metadata"]]
    ready = [p["spec"]["nodeName"] for p in pods if serves(p)]
    return ready[0] if len(pods) == len(ready) == 1 else None


def wait_ready(fleet: Fleet, name: str) -> str:
    until(lambda: fleet.condition(name, "Ready")["reason"] == "ReplicasReady", 180, lambda: fleet.model(name))
    node: str | None = None

    def alone() -> bool:
        nonlocal node
        node = ready_on(fleet, name)
        return node is not None

    until(alone, 120, lambda: engine_pods(fleet, name))
    return str(node)


def test_what_the_engine_says_stands_beside_what_was_computed(fleet: Fleet) -> None:
    def steps() -> list[str | None]:
        """Of the classes of which it has replicas and their engine has spoken."""
        used = [v for v in variants(fleet, "tiny-chat").values() if v.get("desired")]
        return [v.get("step") for v in used if (v.get("kvTokensPerReplica") or {}).get("engine")]

    until(lambda: steps() == ["Ready"], 120, lambda: variants(fleet, "tiny-chat"))
    status = fleet.model("tiny-chat")["status"]
    (used,) = [v for v in status["variants"] if v["desired"]]
    stats = used["kvTokensPerReplica"]
    assert stats["engine"] == pytest.approx(stats["predicted"], rel=0.01), "the simulator sizes the model it serves"
    assert status["coldStartSeconds"] == used["coldStartSeconds"]
    artifact = status["artifact"]
    assert artifact["architecture"]
    assert artifact["kv"]["kind"] == "Full"


def test_a_class_takes_its_memory_from_its_nodes(fleet: Fleet) -> None:
    found = json.loads(fleet.kubectl("get", "gpuclasses", "l4-24gb", "-o", "json"))["status"]
    assert found["memory"]["source"] == "NodeLabels"
    assert found["memory"]["perGPU"] == "23034Mi"
    assert found["largestNode"] == 2


def test_every_field_that_shoal_writes_has_one_writer(fleet: Fleet) -> None:
    def shared() -> dict[str, dict[str, set[str]]]:
        found: dict[str, dict[str, set[str]]] = {}
        for kind in MADE:
            for obj in json.loads(fleet.kubectl("get", kind, "-A", "--show-managed-fields", "-o", "json"))["items"]:
                owners: dict[str, set[str]] = {}
                for entry in obj["metadata"].get("managedFields", []):
                    for path in _paths(entry["fieldsV1"]):
                        owners.setdefault(path, set()).add(entry["manager"])
                if not any(m.startswith("shoal-") for who in owners.values() for m in who):
                    continue
                several = {path: who for path, who in owners.items() if len(who) > 1 and any("shoal" in w for w in who)}
                if several:
                    found[f"{kind} {obj['metadata']['name']}"] = several
        return found

    until(lambda: shared() == {}, 60, shared)  # a Deployment's replicas pass from one to the other when it is made


def test_the_job_that_reads_a_source_is_gone_after_a_while_and_its_facts_stay(fleet: Fleet) -> None:
    fleet.make_model("reader")
    wait_ready(fleet, "reader")
    jobs = fleet.get("jobs", "-n", "demo", "-l", f"{names.LABEL_COMPONENT}={names.COMPONENT_FACTS}")
    assert all(job["spec"]["ttlSecondsAfterFinished"] <= 3600 for job in jobs)
    key = fleet.model("reader")["status"]["artifact"]["readBy"]
    assert key == fleet.model("tiny-chat")["status"]["artifact"]["readBy"], "one source, one Job"
    fleet.delete_model("reader")


def test_a_replica_whose_gpu_breaks_is_replaced_elsewhere(fleet: Fleet) -> None:
    fleet.make_model("broken", variants=[{"class": "l40s-48gb"}])
    node = wait_ready(fleet, "broken")
    fleet.lab.gpu_health(node, healthy=0)
    try:
        until(lambda: ready_on(fleet, "broken") not in (None, node), 300, lambda: engine_pods(fleet, "broken"))
    finally:
        fleet.lab.gpu_health(node, healthy=4)
        fleet.delete_model("broken")


def test_a_cordoned_nodes_replica_is_replaced_and_serves_until_then(fleet: Fleet) -> None:
    fleet.make_model("cordoned", variants=[{"class": "l40s-48gb"}])
    node = wait_ready(fleet, "cordoned")
    fleet.kubectl("cordon", node)
    try:
        until(lambda: ready_on(fleet, "cordoned") not in (None, node), 300, lambda: engine_pods(fleet, "cordoned"))
        until(lambda: fleet.condition("cordoned", "Available")["status"] == "True", 90, lambda: fleet.model("cordoned"))
    finally:
        fleet.kubectl("uncordon", node)
        fleet.delete_model("cordoned")


def test_the_higher_priority_gets_the_gpus_after_the_drain(fleet: Fleet) -> None:
    only = [{"class": "l4-24gb"}]
    nodes = {n["metadata"]["name"] for n in fleet.get("nodes", "-l", "nvidia.com/gpu.product=NVIDIA-L4")}

    def counts() -> tuple[int, int]:
        """GPUs that the class says are free, and those that no engine on its nodes has."""
        gpus = json.loads(fleet.kubectl("get", "gpuclasses", "l4-24gb", "-o", "json"))["status"]["gpus"]
        selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}"
        there = [p for p in fleet.get("pods", "-A", "-l", selector) if p["spec"].get("nodeName") in nodes]
        limits = [c.get("resources", {}).get("limits", {}) for p in there for c in p["spec"]["containers"]]
        return gpus["free"], gpus["capacity"] - sum(int(of.get("nvidia.com/gpu", 0)) for of in limits)

    fleet.until_alone()  # what other tests deleted has given its GPUs back, and the class has heard of it
    until(lambda: len(set(counts())) == 1, 60, counts)
    free, _ = counts()
    assert free > 0
    fleet.make_model("low", variants=only, scaling={"minReplicas": free}, drainSeconds=5, priority=-5)
    try:
        until(lambda: fleet.condition("low", "Ready")["reason"] == "ReplicasReady", 180, lambda: fleet.model("low"))
        fleet.make_model("high", variants=only, priority=500)
        wait_ready(fleet, "high")
        assert "demo/high" in fleet.expect("low", "Placed", "Outranked")
        assert fleet.condition("low", "Placed")["status"] == "False"
        (pod,) = engine_pods(fleet, "high")
        assert pod["spec"]["priorityClassName"] == "shoal-high"
        assert pod["spec"]["preemptionPolicy"] == "Never"
    finally:
        for name in ("high", "low"):
            fleet.delete_model(name)


@pytest.mark.long
def test_a_lost_nodes_replica_is_replaced(fleet: Fleet) -> None:
    fleet.make_model("lost", variants=[{"class": "l40s-48gb"}])
    node = wait_ready(fleet, "lost")
    fleet.lab.kill_node(node)
    try:
        until(lambda: ready_on(fleet, "lost") not in (None, node), 360, lambda: engine_pods(fleet, "lost"))
    finally:
        fleet.lab.start_node(node)
        fleet.kubectl("wait", "--for=condition=Ready", f"node/{node}", "--timeout=120s", timeout=130)
        fleet.delete_model("lost")


def test_the_operator_shows_how_far_the_engines_are_from_what_it_computed(fleet: Fleet) -> None:
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_OPERATOR}"
    text = "".join(page(fleet, p["status"]["podIP"]) for p in fleet.get("pods", "-n", NAMESPACE, "-l", selector))
    assert 'shoal_kv_tokens_engine{gpu_class="' in text


def _paths(fields: dict[str, Any], prefix: str = "") -> list[str]:
    """Leaves of a fieldsV1 tree."""
    found: list[str] = []
    for name, below in fields.items():
        path = f"{prefix}/{name}" if prefix else name
        inner = {k: v for k, v in below.items() if k != "."}
        found += _paths(inner, path) if inner else [path]
    return found
