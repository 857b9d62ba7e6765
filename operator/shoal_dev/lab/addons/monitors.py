"""From Prometheus Operator's ServiceMonitors, PodMonitors and PrometheusRules to Prometheus' own configuration. Pure.

Targets carry the `__meta_kubernetes_*` labels of Prometheus' Kubernetes discovery, and jobs the relabelings that
Prometheus Operator writes, so that series have the same labels as in a cluster that has both.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shoal_dev.lab.services import slices_by_service

GROUP: Final = "monitoring.coreos.com"
TOKEN: Final = "token"  # noqa: S105 - a name
"""File in the folder of Prometheus."""
_INTERVAL: Final = "15s"
_META: Final = "__meta_kubernetes_"
_RELABEL_FIELDS: Final = {
    "sourceLabels": "source_labels",
    "targetLabel": "target_label",
    "regex": "regex",
    "replacement": "replacement",
    "separator": "separator",
    "modulus": "modulus",
}
_ENDPOINT_FIELDS: Final = frozenset(
    {
        "port",
        "path",
        "interval",
        "scrapeTimeout",
        "scheme",
        "honorLabels",
        "relabelings",
        "metricRelabelings",
        "bearerTokenFile",
    }
)

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ScrapeJob:
    """One endpoint of one monitor."""

    name: str
    """As Prometheus Operator calls it: serviceMonitor/NAMESPACE/NAME/INDEX."""
    config: Object
    """For `scrape_configs`, without its discovery."""
    targets: tuple[Object, ...]
    """For a file of `file_sd_configs`."""
    unread: tuple[str, ...]
    """Fields of the endpoint that this does not know."""
    shows_token: bool = False
    """Whether Prometheus shows the token of its own ServiceAccount (`bearerTokenFile`)."""

    @property
    def file(self) -> str:
        return f"{self.name.replace('/', '_')}.json"


@dataclass(frozen=True, slots=True)
class MonitoredCluster:
    """What monitors select from."""

    services: Sequence[Object]
    slices: Sequence[Object]
    pods: Sequence[Object]


def configuration(jobs: Iterable[ScrapeJob], folder: Path) -> dict[str, Any]:
    """`prometheus.yml` (JSON is YAML); files are in `folder`/targets and `folder`/rules."""
    scrape = [
        dict(job.config)
        | {"file_sd_configs": [{"files": [f"{folder}/targets/{job.file}"]}]}
        | ({"authorization": {"credentials_file": f"{folder}/{TOKEN}"}} if job.shows_token else {})
        for job in jobs
    ]  # fmt: skip
    return {
        "global": {"scrape_interval": _INTERVAL, "evaluation_interval": _INTERVAL},
        "rule_files": [f"{folder}/rules/*.yml"],
        "scrape_configs": scrape,
    }


def rules(found: Iterable[Object]) -> dict[str, Object]:
    """File name -> content, of each PrometheusRule."""
    return {f"{_key(item).replace('/', '_')}.yml": {"groups": item["spec"].get("groups") or []} for item in found}


def jobs(
    service_monitors: Iterable[Object], pod_monitors: Iterable[Object], cluster: MonitoredCluster
) -> list[ScrapeJob]:
    """Every endpoint of every monitor, in a stable order."""
    made: list[ScrapeJob] = []
    slices = slices_by_service(cluster.slices)
    pods = {_key(pod): pod for pod in cluster.pods}
    for monitor in sorted(service_monitors, key=_key):
        selected = [s for s in cluster.services if _selects(monitor, s)]
        for index, endpoint in enumerate(monitor["spec"].get("endpoints") or ()):
            targets = [t for s in selected for t in _of_service(s, slices, endpoint, pods)]
            made.append(_job(f"serviceMonitor/{_key(monitor)}/{index}", monitor, endpoint, targets))
    for monitor in sorted(pod_monitors, key=_key):
        selected = [p for p in cluster.pods if _selects(monitor, p)]
        for index, endpoint in enumerate(monitor["spec"].get("podMetricsEndpoints") or ()):
            targets = [t for p in selected for t in _of_pod(p, endpoint)]
            made.append(_job(f"podMonitor/{_key(monitor)}/{index}", monitor, endpoint, targets))
    return made


# --- what is selected -------------------------------------------------------------------------------------------------


def _key(item: Object) -> str:
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"


def _selects(monitor: Object, item: Object) -> bool:
    space: Object = monitor["spec"].get("namespaceSelector") or {}
    own = monitor["metadata"]["namespace"]
    spaces: Sequence[str] = space.get("matchNames") or ([] if space.get("any") else [own])
    if spaces and item["metadata"]["namespace"] not in spaces:
        return False
    selector: Object = monitor["spec"].get("selector") or {}
    labels: Mapping[str, str] = item["metadata"].get("labels") or {}
    wanted: Mapping[str, str] = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_matches(labels, expression) for expression in selector.get("matchExpressions") or ())


def _matches(labels: Mapping[str, str], expression: Object) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case _:
            return value is None


# --- targets ----------------------------------------------------------------------------------------------------------


def _of_service(
    service: Object, slices: Mapping[tuple[str, str], Sequence[Object]], endpoint: Object, pods: Mapping[str, Object]
) -> Iterator[Object]:
    metadata = service["metadata"]
    namespace = metadata["namespace"]
    # As Kubernetes discovery: endpoints that are not ready are scraped too, and their silence shows.
    for item in slices.get((namespace, metadata["name"]), ()):
        numbers = [p["port"] for p in item.get("ports") or () if p.get("name") == endpoint.get("port")]
        for each in item.get("endpoints") or ():
            reference: Object = each.get("targetRef") or {}
            name = reference.get("name", "") if reference.get("kind") == "Pod" else ""
            labels = {
                f"{_META}namespace": namespace,
                f"{_META}service_name": metadata["name"],
                f"{_META}endpoint_port_name": str(endpoint.get("port")),
                **_labels("service_label", metadata),
            }
            for number in numbers:
                of_pod = _pod_labels(pods.get(f"{namespace}/{name}"), number)
                yield {"targets": [f"{each['addresses'][0]}:{number}"], "labels": labels | of_pod}


def _of_pod(pod: Object, endpoint: Object) -> Iterator[Object]:
    address = pod.get("status", {}).get("podIP")
    if not address or pod["status"].get("phase") in ("Succeeded", "Failed"):
        return
    for container in _containers(pod):
        for port in container.get("ports") or ():
            if port.get("name") == endpoint.get("port"):
                number = port["containerPort"]
                yield {"targets": [f"{address}:{number}"], "labels": _pod_labels(pod, number)}


def _containers(pod: Object) -> list[Object]:
    return [*(pod["spec"].get("initContainers") or ()), *(pod["spec"].get("containers") or ())]


def _pod_labels(pod: Object | None, port: int) -> dict[str, str]:
    if pod is None:
        return {}
    with_port = [c for c in _containers(pod) if any(p["containerPort"] == port for p in c.get("ports") or ())]
    return {
        f"{_META}namespace": pod["metadata"]["namespace"],
        f"{_META}pod_name": pod["metadata"]["name"],
        f"{_META}pod_node_name": pod["spec"].get("nodeName", ""),
        f"{_META}pod_ip": pod.get("status", {}).get("podIP", ""),
        f"{_META}pod_container_name": with_port[0]["name"] if with_port else "",
        **_labels("pod_label", pod["metadata"]),
    }


def _labels(prefix: str, metadata: Object) -> dict[str, str]:
    found: Mapping[str, str] = metadata.get("labels") or {}
    return {f"{_META}{prefix}_{_sane(key)}": value for key, value in found.items()}


def _sane(label: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", label)


# --- jobs -------------------------------------------------------------------------------------------------------------


def _job(name: str, monitor: Object, endpoint: Object, targets: Sequence[Object]) -> ScrapeJob:
    spec = monitor["spec"]
    config: dict[str, Any] = {
        "job_name": name,
        "scrape_interval": endpoint.get("interval") or _INTERVAL,
        "metrics_path": endpoint.get("path") or "/metrics",
        "scheme": (endpoint.get("scheme") or "http").lower(),
        "honor_labels": bool(endpoint.get("honorLabels")),
        "relabel_configs": [
            *_own_relabelings(monitor, endpoint),
            *[_copy("pod_label", label) for label in spec.get("podTargetLabels") or ()],
            *[_copy("service_label", label) for label in spec.get("targetLabels") or ()],
            *[_relabeling(each) for each in endpoint.get("relabelings") or ()],
        ],
        "metric_relabel_configs": [_relabeling(each) for each in endpoint.get("metricRelabelings") or ()],
    }
    # Prometheus refuses a time-out longer than the interval, and its default is 10 s.
    config["scrape_timeout"] = endpoint.get("scrapeTimeout") or config["scrape_interval"]
    unread = tuple(sorted(endpoint.keys() - _ENDPOINT_FIELDS))
    return ScrapeJob(name, config, tuple(targets), unread, "bearerTokenFile" in endpoint)


def _own_relabelings(monitor: Object, endpoint: Object) -> Iterator[Object]:
    for source, target in (
        ("namespace", "namespace"),
        ("service_name", "service"),
        ("pod_name", "pod"),
        ("pod_container_name", "container"),
    ):
        yield {"source_labels": [_META + source], "target_label": target}
    if monitor["kind"] == "ServiceMonitor":
        yield {"source_labels": [f"{_META}service_name"], "target_label": "job"}
    else:
        yield {"target_label": "job", "replacement": _key(monitor)}
    yield {"target_label": "endpoint", "replacement": str(endpoint.get("port", ""))}


def _copy(prefix: str, label: str) -> Object:
    return {
        "source_labels": [f"{_META}{prefix}_{_sane(label)}"],
        "target_label": _sane(label),
        "regex": "(.+)",
        "replacement": "$1",
    }


def _relabeling(given: Object) -> Object:
    made = {theirs: given[ours] for ours, theirs in _RELABEL_FIELDS.items() if ours in given}
    return made | ({"action": given["action"].lower()} if "action" in given else {})
