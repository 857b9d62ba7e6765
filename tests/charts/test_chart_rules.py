"""The chart's PrometheusRule and monitors: the same rules as the plain file, with people's own labels and pages."""

from typing import Any

import yaml

from shoal.api.chartvalues import RUNBOOKS
from tests.support.charts import ROOT, rendered


def rule(**values: Any) -> dict[str, Any]:
    found = [o for o in rendered({"prometheusRule": {"enabled": True, **values}}) if o["kind"] == "PrometheusRule"]
    (one,) = found
    return one


def test_without_being_asked_there_are_no_rules() -> None:
    assert not [o for o in rendered({}) if o["kind"] in ("PrometheusRule", "ServiceMonitor", "PodMonitor")]


def test_the_charts_rules_are_those_of_the_plain_file() -> None:
    """Prometheus' own templates come through helm's as they are."""
    plain = yaml.safe_load((ROOT / "policies" / "prometheus" / "rules.yaml").read_text())
    assert rule()["spec"] == plain
    texts = [r["annotations"]["summary"] for g in plain["groups"] for r in g["rules"] if "alert" in r]
    assert "No replica of {{ $labels.model }} is ready." in texts


def test_pages_of_ones_own() -> None:
    found = rule(runbookBaseUrl="https://wiki.example.com/shoal/", labels={"release": "prometheus"})
    urls = [r["annotations"]["runbook_url"] for g in found["spec"]["groups"] for r in g["rules"] if "alert" in r]
    assert "https://wiki.example.com/shoal/kv-near-full.md" in urls
    assert not [url for url in urls if RUNBOOKS in url]
    assert found["metadata"]["labels"]["release"] == "prometheus"


def test_engine_pods_series_name_their_model_and_class_as_shoals_own_do() -> None:
    objects = rendered({"podMonitor": {"enabled": True}, "pods": {"scraperNamespaces": ["monitoring"]}})
    (monitor,) = [o for o in objects if o["kind"] == "PodMonitor"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    model, gpu_class = endpoint["relabelings"]
    assert model["sourceLabels"] == ["__meta_kubernetes_namespace", "__meta_kubernetes_pod_label_shoal_dev_model"]
    assert (model["separator"], model["targetLabel"]) == ("/", "model")
    assert gpu_class["targetLabel"] == "gpu_class"
    plain = yaml.safe_load((ROOT / "policies" / "prometheus" / "scrape.yaml").read_text())
    (job,) = [job for job in plain["scrape_configs"] if job["job_name"] == "shoal-engines"]
    made = {rule["target_label"]: rule["source_labels"] for rule in job["relabel_configs"] if "target_label" in rule}
    assert made["model"] == model["sourceLabels"]
    assert made["gpu_class"] == gpu_class["sourceLabels"]
