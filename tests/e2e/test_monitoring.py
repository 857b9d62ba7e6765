"""A fleet whose only source of load and demand is a real Prometheus, by the chart's monitors; and its rules there."""

import os
from collections.abc import Generator
from typing import Any, Final

import httpx
import pytest
from rich.console import Console

from shoal_dev.demo import loraact, steps
from shoal_dev.demo.clusters import LabCluster
from shoal_dev.demo.stages import Stages
from shoal_dev.demo.watch import wait_until_ready
from shoal_dev.generate.monitoring import ALERTS, RECORDED
from shoal_dev.lab.addons import prometheus
from shoal_dev.lab.api import Lab
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]

URL: Final = f"http://{prometheus.SERVICE}.{prometheus.NAMESPACE}.svc:{prometheus.PORT}"
VALUES: Final[dict[str, Any]] = {
    **prometheus.values(),
    "prometheusRule": {"enabled": True},
    "operator": {"signals": {"source": "Prometheus", "prometheus": {"url": URL, "scrapeSeconds": 1}}},
}
TOO_LARGE: Final = """
apiVersion: shoal.dev/v1alpha1
kind: Model
metadata: {name: too-large, namespace: demo}
spec:
  source: {uri: "file:///opt/shoal/models/tiny-chat"}
  engine: {parallelism: {tensor: 64}}
  scaling: {minReplicas: 1}
"""


class Fleet:
    """A lab with Shoal, and its Prometheus from here."""

    def __init__(self, lab: Lab) -> None:
        self.cluster = LabCluster(lab)
        port = lab.forward_port(prometheus.NAMESPACE, prometheus.SERVICE, prometheus.PORT)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)

    def get(self, path: str, **params: str) -> Any:
        return self.client.get(path, params=params).raise_for_status().json()["data"]

    def value(self, query: str) -> float | None:
        found = self.get("/api/v1/query", query=query)["result"]
        return float(found[0]["value"][1]) if found else None

    def alerts(self) -> dict[str, str]:
        """Name -> state, of those that are active."""
        return {a["labels"]["alertname"]: a["state"] for a in self.get("/api/v1/alerts")["alerts"]}


@pytest.fixture(scope="module")
def fleet() -> Generator[Fleet]:
    if os.geteuid() != 0:
        pytest.skip("the lab needs root")
    lab = Lab.up(f"monitoring-{os.getpid()}", addons=("prometheus",))
    try:
        it = Fleet(lab)
        steps.install(it.cluster, "simulator", steps.LAB_IMAGE, VALUES)
        steps.apply_examples(it.cluster)
        wait_until_ready(it.cluster, steps.DEMO_NAMESPACE, Console(quiet=True), 240)
        with it.client:
            yield it
    finally:
        lab.down()


def test_every_rule_of_the_chart_is_there_and_has_an_answer(fleet: Fleet) -> None:
    def read() -> dict[str, list[Any]]:
        return {g["name"]: g["rules"] for g in fleet.get("/api/v1/rules")["groups"]}

    wanted = {"shoal.recorded": {r.record for r in RECORDED}} | {g: {a.name for a in of} for g, of in ALERTS.items()}
    until(lambda: {n: {r["name"] for r in of} for n, of in read().items()} == wanted, 60, read)
    until(lambda: all(r["health"] == "ok" for of in read().values() for r in of), 120, read)


def test_a_fleet_that_is_well_wakes_nobody(fleet: Fleet) -> None:
    until(lambda: fleet.value("sum(shoal_leading)") == 1, 60, fleet.alerts)
    until(lambda: not fleet.alerts(), 180, fleet.alerts)


def test_adapters_are_placed_though_loads_come_from_prometheus(fleet: Fleet) -> None:
    loraact.run(fleet.cluster, Stages(Console(quiet=True)), 240)
    until(
        lambda: (fleet.value('sum(shoal_adapter_desired_writes_total{outcome="written"})') or 0) > 0, 60, fleet.alerts
    )
    age = lambda: fleet.value("max(shoal_signals_age_seconds)")  # noqa: E731
    # Three scrapes: what is older is stale. A busy machine may miss one.
    until(lambda: (now := age()) is not None and now <= 3, 60, age)


def test_a_model_that_fits_nowhere_is_about_to_wake_somebody(fleet: Fleet) -> None:
    fleet.cluster.kubectl("apply", "-f", "-", stdin=TOO_LARGE)
    until(lambda: "ShoalModelWithoutCapacity" in fleet.alerts(), 120, fleet.alerts)
    query = 'shoal_model_condition{model="demo/too-large",type="Placed",status="False"}'
    until(lambda: fleet.value(query) == 1, 60, fleet.alerts)
