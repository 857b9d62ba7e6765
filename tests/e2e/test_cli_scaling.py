"""The demo's act on scaling, and `kubectl shoal why`, `top` and `wake` on a live cluster."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Generator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from shoal.api import names
from shoal.kube.client import KubeClient
from shoal_dev.demo import scaleact
from shoal_dev.demo.clusters import NAMESPACE
from shoal_dev.demo.stages import Stages
from tests.e2e.conftest import Fleet, serves
from tests.support.pages import token
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]

WHERE = ("-n", scaleact.NAMESPACE)


@pytest.fixture(scope="module")
def told(fleet: Fleet) -> Generator[str]:
    """What the act printed. The Model stays, at zero."""
    console = Console(record=True, width=200, file=io.StringIO())
    try:
        scaleact.run(fleet, Stages(console), 240)
        yield console.export_text()
    finally:
        scaleact.delete(fleet)


def shoal(fleet: Fleet, *args: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`kubectl shoal`, as people call it."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [fleet.tools.kubectl, "shoal", *args],
        env={**os.environ, "PATH": path, "KUBECONFIG": str(kubeconfig or fleet.lab.kubeconfig)},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip


def counts(fleet: Fleet) -> dict[str, int]:
    return fleet.model(scaleact.MODEL, scaleact.NAMESPACE)["status"]["replicas"]


def decisions(fleet: Fleet) -> list[dict[str, Any]]:
    done = shoal(fleet, "why", "--scaling", f"model/{scaleact.MODEL}", *WHERE, "--last", "20", "-o", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["decisions"]


def decided_at(decision: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(decision["time"])


def test_the_act_goes_from_zero_to_three_replicas_and_back_without_a_failed_request(told: str) -> None:
    (served,) = [line for line in told.splitlines() if "replicas that served: " in line]
    numbers = [int(part.split(": ")[-1]) for part in served.partition("served: ")[2].split(", ")]
    assert numbers[numbers.index(1) :][1] == 0, f"to zero before anybody asks: {served}"
    assert max(numbers) == scaleact.MOST
    assert numbers[-1] == 0
    assert "first token" in told
    assert "answered, first token after" in told


def test_why_tells_the_waking_the_scaling_out_and_the_way_to_zero(fleet: Fleet, told: str) -> None:
    found = decisions(fleet)
    changes = {(d["reason"], d["before"] < d["wanted"]) for d in found if d["before"] != d["wanted"]}
    assert ("Waking", True) in changes
    assert ("ScalingUp", True) in changes
    assert found[0]["wanted"] == 0
    assert all(d["rules"] for d in found), "each has the rules with their inputs"
    assert any(rule["inputs"] for rule in found[0]["rules"])
    table = shoal(fleet, "why", "--scaling", scaleact.MODEL, *WHERE).stdout
    assert table.startswith(f"{scaleact.NAMESPACE}/{scaleact.MODEL}: 0 wanted, 0 ready")
    assert "RULE" in table


def test_top_shows_the_fleet(fleet: Fleet, told: str) -> None:
    def shown() -> tuple[str, str]:
        done = shoal(fleet, "top", "-A", "--once")
        assert done.returncode == 0, done.stderr
        lines = {line.split()[1]: line.split() for line in done.stdout.splitlines()[1:]}
        return lines[scaleact.MODEL][2], lines["tiny-chat"][2]

    def tiny() -> dict[str, Any]:
        models = json.loads(shoal(fleet, "top", "-A", "-o", "json").stdout)
        return next(m for m in models if m["model"] == "demo/tiny-chat")

    # What other tests did to its node, or to a gateway, is over.
    fleet.until_alone()
    until(lambda: shown() == ("0/0", "1/1"), 60, shown)
    until(lambda: [r.get("phase") for r in tiny()["replicas"]] == ["ready"] and tiny()["held"] == 0, 60, tiny)
    (replica,) = tiny()["replicas"]
    assert replica["kvTokensTotal"] > 0


def test_wake_starts_a_replica_without_a_request(fleet: Fleet, told: str) -> None:
    until(lambda: counts(fleet) == {"desired": 0, "ready": 0}, 120, lambda: counts(fleet))
    before = decided_at(decisions(fleet)[0])
    done = shoal(fleet, "wake", f"model/{scaleact.MODEL}", *WHERE, "--wait", "--timeout", "120")
    assert done.returncode == 0, done.stderr
    assert "wakes on the cheapest class that fits and is free" in done.stdout
    assert "a replica serves after" in done.stdout
    until(lambda: counts(fleet) == {"desired": 0, "ready": 0}, 180, lambda: counts(fleet))
    assert any(d["reason"] == "Waking" and decided_at(d) > before for d in decisions(fleet))


def test_without_the_rights_it_is_told_which_ones_are_needed(fleet: Fleet, told: str, tmp_path: Path) -> None:
    fleet.kubectl("create", "serviceaccount", "watcher", *WHERE)
    try:
        kubeconfig = as_account(fleet, "watcher", tmp_path)
        refused = shoal(fleet, "top", "-A", kubeconfig=kubeconfig)
        assert refused.returncode == 1
        assert "get the Lease shoal-operator and pods/proxy in namespace shoal-system" in refused.stderr
        account = f"--serviceaccount={scaleact.NAMESPACE}:watcher"
        fleet.kubectl("create", "rolebinding", "watcher", "-n", NAMESPACE, "--role=shoal-decisions", account)
        until(lambda: shoal(fleet, "top", "-A", kubeconfig=kubeconfig).returncode == 0, 60)
    finally:
        fleet.kubectl("delete", "serviceaccount", "watcher", *WHERE)
        fleet.kubectl("delete", "rolebinding", "watcher", "-n", NAMESPACE, "--ignore-not-found")


def as_account(fleet: Fleet, name: str, folder: Path) -> Path:
    token = fleet.kubectl("create", "token", name, *WHERE).strip()
    config = yaml.safe_load(fleet.lab.kubeconfig.read_text())
    config["users"] = [{"name": config["contexts"][0]["context"]["user"], "user": {"token": token}}]
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_model_that_does_not_exist_is_told(fleet: Fleet) -> None:
    done = shoal(fleet, "why", "none", *WHERE)
    assert done.returncode == 1
    assert 'models.shoal.dev "none" not found' in done.stderr


def test_the_operator_that_does_not_lead_names_the_one_that_does(fleet: Fleet) -> None:
    def places() -> tuple[str, set[str]]:
        """Who leads, and all operators that are there and well."""
        lease = json.loads(fleet.kubectl("get", "lease", "shoal-operator", "-n", NAMESPACE, "-o", "json"))
        pods = fleet.get("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=operator")
        return lease["spec"].get("holderIdentity") or "", {p["metadata"]["name"] for p in pods if serves(p)}

    until(lambda: (now := places())[0] in now[1] and len(now[1]) == 2, 120, places)
    leader, pods = places()
    (other,) = pods - {leader}

    async def ask() -> tuple[int, bytes]:
        async with await KubeClient.from_environment(kubeconfig=str(fleet.lab.kubeconfig)) as client:
            shown = {names.HEADER_KEY: token(fleet)}
            return await client.proxied(other, NAMESPACE, port=names.OPS_PORT, path=names.DECISIONS_PATH, headers=shown)

    status, body = asyncio.run(ask())
    assert status == 503
    assert f"{other} does not lead: {leader} leads" in body.decode()
