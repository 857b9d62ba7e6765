"""The plain ScaledObjects of policies/keda on the real KEDA and the real Prometheus, as they stand: only the names of
what they scale, and the time until zero, are the test's."""

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from shoal_dev.demo.clusters import NAMESPACE
from tests.support.keda import SMALL, SPACE, KEDAFleet, stays
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.keda, pytest.mark.timeout(600)]

POLICIES: Final = Path(__file__).resolve().parents[2] / "policies" / "keda"
MODEL: Final = "measured"
IDLE_SECONDS: Final = 15
LOAD_SCRIPT: Final = (
    "for i in $(seq 12); do curl -s -m 180 -o /dev/null http://sglang.default.svc:30000/v1/completions "
    "-H 'Content-Type: application/json' "
    """-d '{"model": "tiny-chat", "prompt": "a b c", "max_tokens": 200, "ignore_eos": true}' & done; wait"""
)


def read(file: str, **names: str) -> dict[str, Any]:
    text = (POLICIES / file).read_text()
    for old, new in names.items():
        text = text.replace(old.replace("_", "-"), new)
    return yaml.safe_load(text)


def condition(fleet: KEDAFleet, name: str, kind: str, namespace: str = SPACE) -> dict[str, Any]:
    found = fleet.get("scaledobjects.keda.sh", "-n", namespace)
    [scaled] = [s for s in found if s["metadata"]["name"] == name]
    conditions = scaled.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {"status": None})


@pytest.fixture
def policy(fleet: KEDAFleet) -> Generator[str]:
    """A Model that Shoal leaves to the policy; the ScaledObject's name."""
    scaling = {"minReplicas": 1, "maxReplicas": 3}
    fleet.make_model(MODEL, engine=SMALL, scaling=scaling, variants=[{"class": "l40s-48gb"}])
    until(lambda: fleet.condition(MODEL, "Ready")["reason"] == "ReplicasReady", 180, lambda: fleet.told(MODEL))
    assert fleet.ask(MODEL)  # the gateways know it from now on
    fleet.kubectl("annotate", "models.shoal.dev", MODEL, "-n", SPACE, "shoal.dev/paused=true")
    scaled = read("model.yaml", tiny_chat_l40s_48gb=fleet.deployment(MODEL), tiny_chat=MODEL)
    scaled["spec"] |= {"cooldownPeriod": IDLE_SECONDS, "initialCooldownPeriod": IDLE_SECONDS, "maxReplicaCount": 3}
    fleet.apply(scaled)
    name = scaled["metadata"]["name"]
    until(lambda: condition(fleet, name, "Ready")["status"] == "True", 60, lambda: fleet.told(MODEL))
    try:
        yield name
    finally:
        fleet.kubectl("delete", "scaledobjects.keda.sh", name, "-n", SPACE)
        fleet.kubectl("annotate", "models.shoal.dev", MODEL, "-n", SPACE, "shoal.dev/paused-")
        fleet.delete_model(MODEL)


def test_a_model_scales_by_prometheus_alone_and_its_silence_takes_no_replica(
    fleet: KEDAFleet, policy: str, tmp_path: Path
) -> None:
    with fleet.asked(MODEL, 14) as load:
        until(lambda: fleet.replicas(MODEL) > 1, 120, lambda: fleet.told(MODEL))
    assert not load.problems
    fleet.until_replicas(MODEL, 0, within=180)

    # A request that a gateway holds is the queue: it wakes the Model, a scrape and a poll later.
    assert fleet.ask(MODEL)
    assert fleet.replicas(MODEL) >= 1

    # Prometheus is away for longer than the Model may idle: that is not idleness.
    with fleet.history(tmp_path) as history:
        fleet.lab.kill("prometheus")
        try:
            until(lambda: condition(fleet, policy, "Ready")["status"] != "True", 60, lambda: fleet.told(MODEL))
            stays(lambda: fleet.replicas(MODEL) >= 1, True, IDLE_SECONDS * 2)
        finally:
            fleet.lab.start("prometheus")
        assert 0 not in history.of(fleet.deployment(MODEL))
    fleet.until_replicas(MODEL, 0, within=180)


@contextmanager
def unscraped(fleet: KEDAFleet) -> Generator[None]:
    """Prometheus runs and answers, and has nothing of gateways and engines: their monitors select nobody."""
    kinds = ("servicemonitors.monitoring.coreos.com", "podmonitors.monitoring.coreos.com")
    monitors = [(kind, m["metadata"]["name"]) for kind in kinds for m in fleet.get(kind, "-n", NAMESPACE)]
    assert monitors

    def select(value: str | None) -> None:
        patch = json.dumps({"spec": {"selector": {"matchLabels": {"scraped": value}}}})
        for kind, name in monitors:
            fleet.kubectl("patch", kind, name, "-n", NAMESPACE, "--type=merge", "-p", patch)

    select("no")
    try:
        yield
    finally:
        select(None)


def test_a_prometheus_that_answers_and_has_nothing_takes_no_replica(
    fleet: KEDAFleet, policy: str, tmp_path: Path
) -> None:
    """What `ignoreNullValues: "false"` is for: with KEDA's default, no answer would be "idle" for both triggers."""
    with fleet.asked(MODEL, 4) as load:
        until(lambda: fleet.replicas(MODEL) >= 1, 120, lambda: fleet.told(MODEL))
        with fleet.history(tmp_path) as history:
            with unscraped(fleet):
                until(lambda: condition(fleet, policy, "Ready")["status"] != "True", 60, lambda: fleet.told(MODEL))
                stays(lambda: fleet.replicas(MODEL) >= 1, True, IDLE_SECONDS * 2)
            until(lambda: condition(fleet, policy, "Ready")["status"] == "True", 60, lambda: fleet.told(MODEL))
            assert 0 not in history.of(fleet.deployment(MODEL))
    assert not load.problems
    fleet.until_replicas(MODEL, 0, within=180)


def engine(namespace: str) -> list[dict[str, Any]]:
    """SGLang of somebody's own: the simulator under SGLang's name for its port and metrics, and a PodMonitor."""
    labels = {"app": "sglang"}
    container = {
        "name": "sglang",
        "image": "shoal:lab",
        "command": ["shoal", "sim", "engine"],
        "args": ["--model-path=/opt/shoal/models/tiny-chat", "--host=0.0.0.0", "--port=30000", "--enable-metrics",
                 "--max-running-requests=1", "--sim-speed=0.25"],
        "ports": [{"name": "http", "containerPort": 30000}],
        # SGLang takes a second for this answer, which is the default limit.
        "readinessProbe": {"httpGet": {"path": "/health", "port": 30000}, "periodSeconds": 1, "timeoutSeconds": 5},
    }  # fmt: skip
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    deployment = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    metadata = {"name": "sglang", "namespace": namespace}
    monitor = {
        "selector": {"matchLabels": labels},
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": "1s"}],
    }
    return [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": deployment},
        {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": metadata, "spec": monitor},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata,
         "spec": {"selector": labels, "ports": [{"port": 30000}]}},
    ]  # fmt: skip


def test_engines_of_ones_own_scale_by_sglangs_metrics(fleet: KEDAFleet) -> None:
    space = "default"

    def replicas() -> int:
        [found] = [d for d in fleet.get("deployments", "-n", space) if d["metadata"]["name"] == "sglang"]
        return found["spec"]["replicas"]

    objects = engine(space)
    fleet.apply(*objects)
    try:
        fleet.kubectl("rollout", "status", "deployment/sglang", "-n", space, "--timeout=120s", timeout=130)
        fleet.apply(read("sglang.yaml"))
        until(lambda: condition(fleet, "sglang", "Ready", space)["status"] == "True", 60)
        load = threading.Thread(target=lambda: fleet.lab.exec("sh", "-c", LOAD_SCRIPT, timeout=200, check=False))
        load.start()
        try:
            until(lambda: replicas() > 1, 120, replicas)
        finally:
            load.join(210)
    finally:
        fleet.kubectl("delete", "scaledobjects.keda.sh", "sglang", "-n", space, "--ignore-not-found")
        for each in objects:
            fleet.kubectl("delete", each["kind"], "sglang", "-n", space, "--ignore-not-found")
