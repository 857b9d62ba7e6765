"""A real etcd and kube-apiserver for tests: no nodes, no controllers, no root. About 4 s to start."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from shoal.lab import binaries, pki

START_SECONDS = 90.0
"""Generous: the machine may be busy with a build."""


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
        self.kubectl("apply", "--server-side", "-f", str(crds))
        self.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(crds))
        # Established is not yet published: kubectl finds the kinds by discovery.
        deadline = time.monotonic() + 30
        while len(self.run("api-resources", "--api-group=shoal.dev", "-o", "name").stdout.split()) < 3:
            assert time.monotonic() < deadline, "the kinds are not discovered"
            time.sleep(0.1)


def start(folder: Path) -> Iterator[ApiServer]:
    """Runs etcd and an API server on free loopback ports until the generator is closed."""
    tools = binaries.find()
    if tools is None:
        pytest.skip("the control plane's programs are not there: run `shoal lab binaries`")
    etcd_port, peer_port, api_port = _free_ports(3)
    url, keys = f"https://127.0.0.1:{api_port}", folder / "pki"
    kubeconfig = folder / "kubeconfig"
    pki.write(
        keys,
        pki.Addresses(
            inside=url,
            outside=url,
            api_names=("127.0.0.1", "10.96.0.1", "localhost", "kubernetes.default.svc"),
            node_address="127.0.0.1",
        ),
        (),
        kubeconfig,
    )
    etcd, peer = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{peer_port}"
    commands = {
        "etcd": [
            "--name=test",
            f"--data-dir={folder}/etcd",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=test={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ],
        "kube-apiserver": [
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--secure-port={api_port}",
            "--authorization-mode=RBAC",
            f"--client-ca-file={keys}/ca.crt",
            f"--tls-cert-file={keys}/apiserver.crt",
            f"--tls-private-key-file={keys}/apiserver.key",
            f"--service-account-key-file={keys}/sa.pub",
            f"--service-account-signing-key-file={keys}/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--profiling=false",
        ],
    }
    server = ApiServer(url, kubeconfig, tools, folder)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, arguments in commands.items():
            with (folder / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(
                    [tools.path(name), *arguments], stdout=log, stderr=log, start_new_session=True
                )
        deadline = time.monotonic() + START_SECONDS
        while server.run("get", "--raw", "/readyz", "--request-timeout=2s").returncode != 0:
            for name, process in processes.items():
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended: {(folder / f'{name}.log').read_text()[-2000:]}")
            assert time.monotonic() < deadline, "the API server does not become ready"
            time.sleep(0.2)
        yield server
    finally:
        for process in processes.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder / "etcd", ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


@pytest.fixture(scope="session")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One API server with Shoal's kinds, for the whole session."""
    for server in start(tmp_path_factory.mktemp("apiserver")):
        server.install_crds()
        yield server
