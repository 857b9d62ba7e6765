"""`kubectl shoal status` on a live cluster, as a person with ordinary rights uses it."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shoal.cli.status.read import last_progress
from shoal.kube.client import KubeClient
from shoal_dev.demo import steps
from tests.e2e.conftest import Fleet
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


def kubectl_shoal(fleet: Fleet, *args: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
    """kubectl, which finds `kubectl-shoal` on PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [fleet.tools.kubectl, "shoal", *args],
        env={**os.environ, "PATH": path, "KUBECONFIG": str(kubeconfig or fleet.lab.kubeconfig)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_serving_model_shows_where_it_runs_and_how_long_its_start_took(fleet: Fleet) -> None:
    def line() -> str:
        done = kubectl_shoal(fleet, "status", "-n", steps.DEMO_NAMESPACE)
        assert done.returncode == 0, done.stderr
        (found,) = [line for line in done.stdout.splitlines() if line.startswith("tiny-chat ")]
        return found

    # What other tests did to its node is over.
    until(lambda: all(word in line() for word in ("True", "l40s-48gb", "1/1", "Ready", "0.93")), 120, line)
    rows = json.loads(kubectl_shoal(fleet, "status", "-n", steps.DEMO_NAMESPACE, "-o", "json").stdout)["models"]
    (row,) = [row for row in rows if row["model"].endswith("/tiny-chat")]
    assert row["variants"][0]["gpus"] == 1
    assert row["variants"][0]["coldStartSeconds"] is not None


def test_the_per_cent_of_a_fetch_stands_in_the_stage_containers_log(fleet: Fleet) -> None:
    fleet.until_alone()
    selector = "app.kubernetes.io/component=engine,shoal.dev/model=tiny-code"
    (pod,) = fleet.get("pods", "-n", steps.DEMO_NAMESPACE, "-l", selector)

    async def log() -> str:
        async with await KubeClient.from_environment(kubeconfig=str(fleet.lab.kubeconfig)) as client:
            return await client.log(pod["metadata"]["name"], steps.DEMO_NAMESPACE, container="stage", lines=20)

    found = last_progress(asyncio.run(log()))
    assert found is not None
    assert found.state == "fetching"


def test_who_may_only_view_sees_everything(fleet: Fleet, tmp_path: Path) -> None:
    where = ("-n", steps.DEMO_NAMESPACE)
    fleet.kubectl("create", "serviceaccount", "viewer", *where)
    fleet.kubectl(
        "create",
        "rolebinding",
        "viewer",
        "--clusterrole=view",
        f"--serviceaccount={steps.DEMO_NAMESPACE}:viewer",
        *where,
    )
    try:
        token = fleet.kubectl("create", "token", "viewer", *where).strip()
        config = yaml.safe_load(fleet.lab.kubeconfig.read_text())
        user = config["contexts"][0]["context"]["user"]
        config["users"] = [{"name": user, "user": {"token": token}}]
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        # An API server hears of a new RoleBinding by a watch.
        until(lambda: kubectl_shoal(fleet, "status", *where, kubeconfig=path).returncode == 0, 30)
        done = kubectl_shoal(fleet, "status", *where, kubeconfig=path)
        assert done.returncode == 0, done.stderr
        assert "tiny-chat" in done.stdout
        assert "without" not in done.stdout, "nothing is left out"
        refused = kubectl_shoal(fleet, "status", "-A", kubeconfig=path)
        assert refused.returncode == 1
        assert "forbidden" in refused.stderr
    finally:
        fleet.kubectl("delete", "serviceaccount,rolebinding", "viewer", *where, "--ignore-not-found")


def test_a_model_that_does_not_exist_is_told_in_the_servers_words(fleet: Fleet) -> None:
    done = kubectl_shoal(fleet, "status", "model/none", "-n", steps.DEMO_NAMESPACE)
    assert done.returncode == 1
    assert 'models.shoal.dev "none" not found' in done.stderr
