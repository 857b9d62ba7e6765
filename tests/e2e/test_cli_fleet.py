"""The demo's act on a mixed fleet, and that the offline commands say of it what the operator decided and made."""

import io
import json
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from shoal.kube.drift import covers
from shoal_dev.demo import fleetact
from shoal_dev.demo.clusters import NAMESPACE
from shoal_dev.demo.stages import Stages
from shoal_dev.demo.watch import until
from tests.e2e.conftest import Fleet
from tests.support import waiting

ACT_SECONDS = 240.0
"""For each step of the act."""
pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def act(fleet: Fleet) -> Generator[Fleet]:
    # The sums are those of a fleet on which nothing but the demo's two Models runs: what other tests deleted drains.
    fleet.until_alone("-A")
    fleet.kubectl("apply", "-f", str(fleetact.FILE))
    try:
        until(fleet, fleetact.PLURAL, fleetact.NAMESPACE, fleetact.decided, ACT_SECONDS)
        # What an engine says of its memory, a moment after it is ready, corrects what is computed.
        waiting.until(lambda: still(fleet), 120)
        yield fleet
    finally:
        fleetact.delete(fleet)


def still(fleet: Fleet) -> bool:
    """Whether nothing is decided anew for a while."""
    kinds = ("models.shoal.dev,gpuclasses,deployments", "-n", fleetact.NAMESPACE)

    def versions() -> dict[str, str]:
        return {o["metadata"]["uid"]: o["metadata"]["resourceVersion"] for o in fleet.get(*kinds)}

    before = versions()
    time.sleep(5)
    return versions() == before


@pytest.fixture
def files(act: Fleet, tmp_path: Path) -> dict[str, Path]:
    """The cluster as kubectl prints it."""
    asked = {
        "fleet": ("gpuclasses,nodes,pods", "-A"),
        "models": ("models.shoal.dev", "-n", fleetact.NAMESPACE),
        "config": ("configmap/shoal-operator", "-n", NAMESPACE),
    }
    found = {name: tmp_path / f"{name}.yaml" for name in asked}
    for name, args in asked.items():
        found[name].write_text(act.kubectl("get", *args, "-o", "yaml"))
    return found


def shoal(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *args], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_operator_and_the_offline_command_decide_alike(act: Fleet, files: dict[str, Path]) -> None:
    done = shoal("explain", "-f", files["models"], "--fleet", files["fleet"], "--config", files["config"], "-o", "json")
    assert done.returncode == 1, done.stderr  # one fits nowhere, one waits
    offline = {m["model"]: m for m in json.loads(done.stdout)["models"]}
    for model in act.get("models.shoal.dev", "-n", fleetact.NAMESPACE):
        said = offline[f"{fleetact.NAMESPACE}/{model['metadata']['name']}"]
        status = model["status"]["variants"]
        live = {v["class"]: (v["gpusPerReplica"], v["desired"]) for v in status if v.get("desired")}
        assert {c["gpuClass"]: (c["gpusPerReplica"], c["replicas"]) for c in said["classes"] if c["replicas"]} == live
        predicted = {v["class"]: v["kvTokensPerReplica"]["predicted"] for v in status if v.get("desired")}
        assert {c["gpuClass"]: c["kvTokensPerReplica"] for c in said["classes"] if c["replicas"]} == predicted
        placed = next(c for c in model["status"]["conditions"] if c["type"] == "Placed")
        assert said["placed"] == (placed["status"] == "True")


def test_what_is_rendered_is_what_the_operator_made(act: Fleet, files: dict[str, Path]) -> None:
    done = shoal("render", "-f", files["models"], "--fleet", files["fleet"], "--config", files["config"])
    rendered = [one for one in yaml.safe_load_all(done.stdout) if one and one["kind"] != "Job"]
    assert {one["kind"] for one in rendered} == {"Deployment", "PodDisruptionBudget", "NetworkPolicy"}
    live = {
        (one["kind"], one["metadata"]["name"]): one
        for one in act.get("deployments,poddisruptionbudgets,networkpolicies", "-n", fleetact.NAMESPACE)
    }
    for one in rendered:
        made = live[one["kind"], one["metadata"]["name"]]
        if one["kind"] == "Deployment":
            fingerprint = made["spec"]["template"]["metadata"]["annotations"]["shoal.dev/install-key"]
            one = json.loads(json.dumps(one).replace('"none"', f'"{fingerprint}"').replace("-none", f"-{fingerprint}"))
            # How a rollout is done depends on the room at that moment, and on the last cold start.
            one["spec"].pop("strategy")
            one["spec"].pop("progressDeadlineSeconds", None)
        assert covers(made, one), f"{one['kind']} {one['metadata']['name']}"


@pytest.mark.long
def test_the_one_that_waits_says_for_whom_and_gets_its_gpus(act: Fleet) -> None:
    message = act.condition(fleetact.WAITS, "Placed", fleetact.NAMESPACE)["message"]
    assert f"{fleetact.NAMESPACE}/{fleetact.IN_ITS_WAY}" in message
    console = Console(record=True, width=200, file=io.StringIO())
    fleetact.run(act, Stages(console), ACT_SECONDS)
    told = console.export_text()
    assert f"{fleetact.TOO_LARGE} NoFit: " in told
    assert "weights need 189 GiB" in told
    assert act.condition(fleetact.WAITS, "Ready", fleetact.NAMESPACE)["status"] == "True"
    fleetact.run(
        act, Stages(console), ACT_SECONDS
    )  # once more on the same cluster: what the first run left is in nobody's way
