"""The plain scrape jobs: which containers of which pods a real Prometheus would scrape, and under which labels.

Debian's Prometheus has no Kubernetes discovery; what it would have found comes from a file, with the same labels.
"""

import json
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from shoal.api import names
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.network import require_programs
from tests.support.prometheus import Prometheus

ROOT: Final = Path(__file__).resolve().parents[2]
OURS: Final = {names.LABEL_PART_OF: "shoal", names.LABEL_MANAGED_BY: "Helm"}
ENGINE: Final = {
    names.LABEL_MANAGED_BY: names.MANAGED_BY,
    names.LABEL_COMPONENT: names.COMPONENT_ENGINE,
    names.LABEL_MODEL: "llama",
    names.LABEL_GPU_CLASS: "l4",
}
JOBS: Final = ("shoal", "shoal-engines")


def container(pod: str, port: str, labels: dict[str, str], *, space: str = "chat", phase: str = "Running") -> Any:
    """A port of a pod, as Kubernetes discovery tells of it."""
    found = {
        "__meta_kubernetes_namespace": space,
        "__meta_kubernetes_pod_name": pod,
        "__meta_kubernetes_pod_phase": phase,
        "__meta_kubernetes_pod_container_port_name": port,
    }
    for name, value in labels.items():
        found["__meta_kubernetes_pod_label_" + "".join(c if c.isalnum() else "_" for c in name)] = value
    return {"targets": [f"127.0.0.1:{1000 + len(pod)}"], "labels": found}


FOUND: Final = [
    container("gateway-0", "ops", OURS, space="shoal-system"),
    container("gateway-0", "api", OURS, space="shoal-system"),  # clients' port
    container("somebody-else", "ops", {"app": "other"}),
    container("facts-job", "ops", OURS, phase="Succeeded"),
    container("llama-1", "agent", ENGINE),
    container("llama-1", "engine", ENGINE),  # needs a key
    container("llama-22", "agent", ENGINE, phase="Failed"),
]


@contextmanager
def scraping(folder: Path) -> Generator[Prometheus]:
    try:
        require_programs(print, {"prometheus": "prometheus"})
    except LabError as error:
        pytest.skip(f"the real Prometheus is not to be had here: {error}")
    it = Prometheus(folder, {}, 1)
    config = yaml.safe_load((ROOT / "policies" / "prometheus" / "scrape.yaml").read_text())
    (folder / "found.json").write_text(json.dumps(FOUND))
    for job in config["scrape_configs"]:
        (discovery,) = job.pop("kubernetes_sd_configs")
        # Prometheus' own token is shown to pods of Shoal's namespace alone: elsewhere anybody may label a pod.
        assert ("authorization" in job) == (discovery.get("namespaces") == {"names": ["shoal-system"]})
        assert ("authorization" in job) == (job["job_name"] == "shoal")
        job.pop("authorization", None)
        job["file_sd_configs"] = [{"files": [str(folder / "found.json")]}]
    (folder / "prometheus.yaml").write_text(json.dumps(config))
    it.start()
    try:
        yield it
    finally:
        it.stop()


def targets(it: Prometheus) -> dict[tuple[str, str], dict[str, str]]:
    """(job, pod) -> labels, once every job has looked."""
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(f"{it.url}/api/v1/targets?state=active", timeout=10) as answer:
            active = json.load(answer)["data"]["activeTargets"]
        found = {(t["labels"]["job"], t["labels"]["pod"]): t["labels"] for t in active}
        if {job for job, _ in found} == set(JOBS) or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def test_agents_and_shoals_own_pods_are_scraped_and_nothing_else(tmp_path: Path) -> None:
    with scraping(tmp_path) as it:
        found = targets(it)
    assert set(found) == {("shoal", "gateway-0"), ("shoal-engines", "llama-1")}
    assert found["shoal", "gateway-0"]["namespace"] == "shoal-system"
    engine = found["shoal-engines", "llama-1"]
    assert (engine["namespace"], engine["model"], engine["gpu_class"]) == ("chat", "chat/llama", "l4")
    assert engine["shoal_dev_model"] == "llama"  # by which the operator finds what replicas did before
