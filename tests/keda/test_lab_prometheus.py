"""The lab's Prometheus follows what the chart's monitors and anybody's rules say."""

import json
import urllib.request
from typing import Any
from urllib.parse import quote

import pytest

from shoal_dev.lab.addons import prometheus
from tests.support.keda import SPACE, KEDAFleet
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.keda, pytest.mark.timeout(600)]


def api(fleet: KEDAFleet, path: str) -> Any:
    port = fleet.lab.forward_port(prometheus.NAMESPACE, prometheus.SERVICE, prometheus.PORT)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=20) as answer:
        return json.load(answer)["data"]


def targets(fleet: KEDAFleet) -> set[tuple[str, str]]:
    """Job and health of each target."""
    return {(t["labels"]["job"], t["health"]) for t in api(fleet, "targets")["activeTargets"]}


def test_every_target_of_the_charts_monitors_is_scraped_also_an_engine_that_comes_later(fleet: KEDAFleet) -> None:
    own = {("shoal-operator-pods", "up"), ("shoal-gateway-pods", "up"), ("shoal-cache-pods", "up")}
    until(lambda: own <= targets(fleet), 60, lambda: targets(fleet))
    fleet.make_model("measured", scaling={"minReplicas": 1, "maxReplicas": 1})
    until(lambda: ("shoal-system/shoal-engines", "up") in targets(fleet), 180, lambda: targets(fleet))
    words = f'shoal_replica_running{{namespace="{SPACE}",shoal_dev_model="measured"}}'
    query = f"query?query={quote(words)}"
    until(lambda: bool(api(fleet, query)["result"]), 60, lambda: api(fleet, query))
    fleet.delete_model("measured")
    instances = lambda: {t["labels"]["pod"] for t in api(fleet, "targets")["activeTargets"]}  # noqa: E731
    until(lambda: not any(pod.startswith("measured-") for pod in instances()), 120, instances)


def test_a_rule_of_the_cluster_is_loaded_and_unloaded(fleet: KEDAFleet) -> None:
    rule = {"record": "shoal_test:one", "expr": "vector(1)"}
    group = {"name": "tests", "interval": "1s", "rules": [rule]}
    metadata = {"name": "tests", "namespace": SPACE}
    body = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": metadata}
    fleet.apply(body | {"spec": {"groups": [group]}})

    def loaded() -> bool:
        return "tests" in [g["name"] for g in api(fleet, "rules")["groups"]]

    until(loaded, 30)
    fleet.kubectl("delete", "prometheusrules.monitoring.coreos.com", "tests", "-n", SPACE)
    until(lambda: not loaded(), 30)
