"""The operator hears of load and demand from a real Prometheus in the cluster instead of streams."""

import contextlib
import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import openai
import pytest

from shoal.api import names
from shoal.api.keys import hash_api_key
from shoal_dev.demo import steps
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.network import require_programs
from tests.e2e.conftest import VALUES, Fleet
from tests.support.pages import binding
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]

KEY: Final = "sk-scraped-tests"
MODEL: Final = "scraped"
SPACE: Final = "monitoring"
PORT: Final = 9090
SCRAPE_SECONDS: Final = 1


def _configuration() -> dict[str, Any]:
    interval = f"{SCRAPE_SECONDS}s"
    job: dict[str, Any] = {"job_name": "shoal", "file_sd_configs": [{"files": ["/etc/scrape/targets.json"]}]}
    job["authorization"] = {"credentials_file": "/var/run/secrets/kubernetes.io/serviceaccount/token"}
    return {"global": {"scrape_interval": interval, "scrape_timeout": interval}, "scrape_configs": [job]}


def _targets(fleet: Fleet) -> list[dict[str, Any]]:
    """Gateways and engine pods, as the chart's monitors have them found."""
    ports = {names.COMPONENT_GATEWAY: names.OPS_PORT, names.COMPONENT_ENGINE: names.AGENT_PORT}
    found: list[dict[str, Any]] = []
    for pod in fleet.get("pods", "-A", "-l", f"{names.LABEL_COMPONENT} in ({','.join(ports)})"):
        metadata, address = pod["metadata"], pod["status"].get("podIP")
        if address:
            labels = {"namespace": metadata["namespace"], "pod": metadata["name"]}
            port = ports[metadata["labels"][names.LABEL_COMPONENT]]
            found.append({"targets": [f"{address}:{port}"], "labels": labels})
    return found


def _pod(folder: Path) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "prometheus",
        "image": steps.LAB_IMAGE,
        "command": ["prometheus", "--config.file=/etc/scrape/prometheus.yml", "--storage.tsdb.path=/tmp/data"],
        "volumeMounts": [{"name": "config", "mountPath": "/etc/scrape"}],
        "readinessProbe": {"httpGet": {"path": "/-/ready", "port": PORT}, "periodSeconds": 1},
    }
    volume = {"name": "config", "hostPath": {"path": str(folder)}}
    metadata = {"name": "prometheus", "namespace": SPACE, "labels": {"app": "prometheus"}}
    spec = {"containers": [container], "volumes": [volume]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@contextmanager
def _discovery(fleet: Fleet, folder: Path) -> Generator[None]:
    """Keeps the targets up to date: Debian's Prometheus is built without Kubernetes' own discovery."""
    enough = threading.Event()

    def follow() -> None:
        while not enough.wait(0.5):
            new = folder / "targets.new"
            with contextlib.suppress(click.ClickException):  # the next one may do better
                new.write_text(json.dumps(_targets(fleet)))
                new.rename(folder / "targets.json")

    (folder / "prometheus.yml").write_text(json.dumps(_configuration()))
    (folder / "targets.json").write_text("[]")
    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scrape")
    made.chmod(0o755)
    return made


@pytest.fixture(scope="module", autouse=True)
def scraped(fleet: Fleet, folder: Path) -> Generator[None]:
    """Prometheus in the cluster, and an operator that asks it."""
    try:
        require_programs(print, {"prometheus": "prometheus"})
    except LabError as error:
        pytest.skip(f"the real Prometheus is not to be had here: {error}")
    ports = {"selector": {"app": "prometheus"}, "ports": [{"port": PORT}]}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "prometheus", "namespace": SPACE}}
    tenant = {
        "keys": [{"name": "k", "sha256": hash_api_key(KEY)}],
        "models": [{"namespace": steps.DEMO_NAMESPACE, "name": MODEL}],
    }
    metadata = {"name": "scraped-tests"}
    fleet.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}},
        binding("shoal-metrics-reader", account="default", namespace=SPACE),
        service | {"spec": ports},
        {"apiVersion": "shoal.dev/v1alpha1", "kind": "Tenant", "metadata": metadata, "spec": tenant},
    )
    url = f"http://prometheus.{SPACE}.svc:{PORT}"
    signals = {"source": "Prometheus", "prometheus": {"url": url, "scrapeSeconds": SCRAPE_SECONDS}}
    with _discovery(fleet, folder):
        try:
            fleet.apply(_pod(folder))
            fleet.kubectl("wait", "--for=condition=Ready", "pod/prometheus", "-n", SPACE, "--timeout=120s", timeout=130)
            steps.install(fleet, "simulator", steps.LAB_IMAGE, VALUES | {"operator": {"signals": signals}})
            yield
        finally:
            fleet.delete_model(MODEL)
            fleet.kubectl("delete", "tenants.shoal.dev", "scraped-tests")
            steps.install(fleet, "simulator", steps.LAB_IMAGE, VALUES)
            fleet.kubectl("delete", "namespace", SPACE, "--wait=false")


@contextmanager
def _asking(fleet: Fleet) -> Generator[list[str]]:
    """Somebody asks again and again meanwhile; what became of each request."""
    enough = threading.Event()
    heard: list[str] = []

    def ask() -> None:
        url = f"http://127.0.0.1:{fleet.lab.forward_port()}/v1"
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=120) as client:
            while not enough.wait(0.5):
                try:
                    client.completions.create(model=MODEL, prompt="x", max_tokens=2)
                except openai.APIError as error:
                    heard.append(str(error))
                else:
                    heard.append("answered")

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield heard
    finally:
        enough.set()
        thread.join(150)
        assert not thread.is_alive()


def desired(fleet: Fleet) -> int | None:
    return fleet.model(MODEL).get("status", {}).get("replicas", {}).get("desired")


def test_a_model_wakes_and_sleeps_by_what_prometheus_says_and_stays_while_it_says_nothing(
    fleet: Fleet, folder: Path
) -> None:
    fleet.make_model(MODEL, scaling={"minReplicas": 0, "idleSeconds": 5, "stabilizationSeconds": 5})
    until(lambda: fleet.condition(MODEL, "Ready")["reason"] == "ScaledToZero", 120, lambda: fleet.model(MODEL))

    silence = lambda: fleet.condition(MODEL, "SignalsUnknown")["reason"] == "SignalsStale"  # noqa: E731
    with _asking(fleet) as heard:
        until(lambda: heard[:1] == ["answered"], 120, lambda: heard)
        until(lambda: not silence(), 60, lambda: fleet.model(MODEL))
        # Asked until it is gone: what was heard last must not be that nobody asks.
        fleet.kubectl("delete", "pod", "prometheus", "-n", SPACE, "--grace-period=0", "--force")
        until(silence, 120, lambda: fleet.model(MODEL))
    assert set(heard) == {"answered"}
    # Nobody asks any more, but nobody says so either: unknown is not idle.
    time.sleep(12)  # longer than idleSeconds and stabilizationSeconds
    assert desired(fleet) == 1

    fleet.apply(_pod(folder))
    until(lambda: desired(fleet) == 0, 120, lambda: fleet.model(MODEL))
