"""What a lab has beside Shoal: which add-ons there are, and how its Prometheus finds what to scrape."""

from pathlib import Path
from typing import Any

import pytest

from shoal_dev.lab.addons import choice, keda, monitors, prometheus
from shoal_dev.lab.errors import LabError


def test_addons_are_a_comma_list_and_a_wrong_name_is_told_what_there_is() -> None:
    assert choice.parse("prometheus, keda") == ("keda", "prometheus")
    assert choice.parse("") == ()
    with pytest.raises(LabError, match="--with kedo: the lab has keda, prometheus"):
        choice.parse("kedo,prometheus")
    with pytest.raises(LabError, match=r"no package registry .* has a Grafana that runs"):
        choice.parse("keda,grafana")


def test_kedas_probes_look_at_once_and_nothing_else_of_its_manifests_changes() -> None:
    probe = {"httpGet": {"path": "/healthz", "port": 8081}, "initialDelaySeconds": 25}
    container = {"name": "keda-operator", "args": ["--leader-elect"], "livenessProbe": probe, "readinessProbe": probe}
    deployment = {"kind": "Deployment", "spec": {"template": {"spec": {"containers": [container]}}}}
    account = {"kind": "ServiceAccount", "metadata": {"name": "keda-operator"}}
    made, same = keda.adapted([deployment, account])
    assert same == account
    [changed] = made["spec"]["template"]["spec"]["containers"]
    assert changed["livenessProbe"]["initialDelaySeconds"] == 0
    assert changed["livenessProbe"]["httpGet"] == probe["httpGet"]
    assert changed["args"] == ["--leader-elect"]


# --- monitors ---------------------------------------------------------------------------------------------------------


def pod(name: str, namespace: str = "demo", phase: str = "Running", **labels: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/component": "engine"} | labels,
        },
        "spec": {
            "nodeName": "l4-1",
            "initContainers": [{"name": "agent", "ports": [{"name": "agent", "containerPort": 8400}]}],
            "containers": [{"name": "engine", "ports": [{"name": "http", "containerPort": 30000}]}],
        },
        "status": {"podIP": "10.244.3.7", "phase": phase},
    }


def pod_monitor(**endpoint: Any) -> dict[str, Any]:
    spec = {
        "namespaceSelector": {"any": True},
        "selector": {"matchLabels": {"app.kubernetes.io/component": "engine"}},
        "podTargetLabels": ["shoal.dev/model"],
        "podMetricsEndpoints": [{"port": "agent", "interval": "1s"} | endpoint],
    }
    metadata = {"name": "shoal-engines", "namespace": "shoal-system"}
    return {"kind": "PodMonitor", "metadata": metadata, "spec": spec}


def test_a_pod_monitor_scrapes_the_named_port_of_pods_that_run_also_of_a_sidecar() -> None:
    cluster = monitors.MonitoredCluster((), (), [pod("a", **{"shoal.dev/model": "m"}), pod("done", phase="Succeeded")])
    [job] = monitors.jobs([], [pod_monitor()], cluster)
    [target] = job.targets
    assert target["targets"] == ["10.244.3.7:8400"]
    assert target["labels"]["__meta_kubernetes_pod_name"] == "a"
    assert target["labels"]["__meta_kubernetes_pod_container_name"] == "agent"
    assert target["labels"]["__meta_kubernetes_pod_label_shoal_dev_model"] == "m"
    assert job.name == "podMonitor/shoal-system/shoal-engines/0"
    assert (job.config["scrape_interval"], job.config["scrape_timeout"]) == ("1s", "1s")
    labels = {each.get("target_label") for each in job.config["relabel_configs"]}
    assert {"namespace", "pod", "container", "job", "endpoint", "shoal_dev_model"} <= labels


def test_relabelings_of_a_monitor_are_written_in_prometheus_own_words() -> None:
    given = {"sourceLabels": ["a", "b"], "separator": "/", "targetLabel": "model", "action": "Replace"}
    [job] = monitors.jobs([], [pod_monitor(relabelings=[given], tlsConfig={})], monitors.MonitoredCluster((), (), ()))
    assert job.config["relabel_configs"][-1] == {
        "source_labels": ["a", "b"], "separator": "/", "target_label": "model", "action": "replace",
    }  # fmt: skip
    assert job.unread == ("tlsConfig",)


def test_a_service_monitor_scrapes_each_endpoint_of_its_own_namespaces_services() -> None:
    def service(namespace: str) -> dict[str, Any]:
        return {"metadata": {"name": "pods", "namespace": namespace, "labels": {"shoal.dev/service": "pods"}}}

    def slice_of(namespace: str) -> dict[str, Any]:
        return {
            "metadata": {"name": "x", "namespace": namespace, "labels": {"kubernetes.io/service-name": "pods"}},
            "addressType": "IPv4",
            "ports": [{"name": "ops", "port": 9090}],
            "endpoints": [
                {"addresses": ["10.244.1.5"], "targetRef": {"kind": "Pod", "name": "gateway-1"}},
                {"addresses": ["10.244.1.6"], "conditions": {"ready": False}},
            ],
        }

    monitor = {
        "kind": "ServiceMonitor",
        "metadata": {"name": "shoal", "namespace": "shoal-system"},
        "spec": {"selector": {"matchLabels": {"shoal.dev/service": "pods"}}, "endpoints": [{"port": "ops"}]},
    }
    spaces = ("shoal-system", "other")
    cluster = monitors.MonitoredCluster(
        [service(space) for space in spaces],
        [slice_of(space) for space in spaces],
        [pod("gateway-1", namespace="shoal-system")],
    )
    [job] = monitors.jobs([monitor], [], cluster)
    assert [t["targets"] for t in job.targets] == [["10.244.1.5:9090"], ["10.244.1.6:9090"]]
    assert job.targets[0]["labels"]["__meta_kubernetes_pod_name"] == "gateway-1"
    assert {t["labels"]["__meta_kubernetes_namespace"] for t in job.targets} == {"shoal-system"}


def test_rules_of_the_cluster_become_files() -> None:
    rule = {"metadata": {"name": "shoal", "namespace": "s"}, "spec": {"groups": [{"name": "g", "rules": []}]}}
    assert monitors.rules([rule]) == {"s_shoal.yml": {"groups": [{"name": "g", "rules": []}]}}


def test_prometheus_can_start_before_anything_is_known(tmp_path: Path) -> None:
    prometheus.prepare(tmp_path / "prometheus")
    assert '"scrape_configs":[]' in (tmp_path / "prometheus" / "prometheus.yml").read_text()
