"""A real etcd and kube-apiserver for tests: no nodes, no controllers, no root. About 4 s to start."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from shoal_dev.lab import binaries
from tests.support.controlplane import ControlPlane


@dataclass(frozen=True, slots=True)
class ApiServer:
    """A running API server and its kubectl."""

    url: str
    kubeconfig: Path
    tools: binaries.Binaries
    folder: Path

    def run(self, *args: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """kubectl with these arguments, and with `text` on its standard input; never raises for a failure."""
        return subprocess.run(
            [self.tools.path("kubectl"), f"--kubeconfig={self.kubeconfig}", f"--cache-dir={self.folder}/cache", *args],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def kubectl(self, *args: str, text: str | None = None) -> str:
        """kubectl's output; an AssertionError with its words when it fails."""
        done = self.run(*args, text=text)
        assert done.returncode == 0, f"kubectl {' '.join(args)}: {done.stderr}"
        return done.stdout

    def apply(self, *objects: dict[str, Any], dry_run: bool = False) -> subprocess.CompletedProcess[str]:
        """`kubectl apply` of objects, as people do it."""
        text = "\n---\n".join(orjson.dumps(one).decode() for one in objects)
        return self.run("apply", *(["--dry-run=server"] if dry_run else []), "-f", "-", text=text)

    def json(self, *args: str) -> Any:
        """kubectl's output with `-o json`, decoded."""
        return orjson.loads(self.kubectl(*args, "-o", "json"))

    def install_crds(self) -> None:
        """Installs crds/ and waits until they serve."""
        crds = Path(__file__).resolve().parents[2] / "crds"
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(crds))  # a chart may have been here
        self.kubectl("wait", "--for=condition=Established", "--timeout=50s", "-f", str(crds))
        # Established is not yet published: kubectl finds the kinds by discovery.
        deadline = time.monotonic() + 60
        kinds = len(list(crds.glob("*.yaml")))
        while len(self.run("api-resources", "--api-group=shoal.dev", "-o", "name").stdout.split()) < kinds:
            assert time.monotonic() < deadline, "the kinds are not discovered"
            time.sleep(0.1)


def start(folder: Path) -> Iterator[ApiServer]:
    """Runs etcd and an API server on free loopback ports until the generator is closed."""
    tools = binaries.find()
    if tools is None:
        pytest.skip("the control plane's programs are not there: run `shoal lab binaries`")
    plane = ControlPlane(folder, tools)
    try:
        plane.start(controllers=False)
        yield ApiServer(plane.url, plane.kubeconfig, tools, folder)
    finally:
        plane.stop()
        shutil.rmtree(folder / "etcd", ignore_errors=True)


@pytest.fixture(scope="session")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One API server with Shoal's kinds, for the whole session."""
    for server in start(tmp_path_factory.mktemp("apiserver")):
        server.install_crds()
        yield server
