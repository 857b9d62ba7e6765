"""Where the demo runs: in a lab of its own, or on the cluster that kubectl points to."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from shoal_dev.lab.api import Lab

NAMESPACE = "shoal-system"
"""Where the demo installs Shoal."""
GATEWAY_SERVICE = "shoal-gateway"
_FORWARD_TIMEOUT_S = 15


@dataclass(frozen=True, slots=True)
class ClusterTools:
    """kubectl and helm, and how they reach the cluster."""

    kubectl: Path
    helm: Path
    env: Mapping[str, str] = field(default_factory=dict[str, str])

    def run(self, program: Path, args: Sequence[str], stdin: str | None, timeout: float) -> str:
        """Output of the program. Raises ClickException with the program's own error text."""
        try:
            done = subprocess.run(
                [str(program), *args],
                input=stdin,
                env={**os.environ, **self.env},
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise click.ClickException(f"{program.name} {' '.join(args)}: no answer within {timeout:.0f} s") from e
        if done.returncode:
            raise click.ClickException(f"{program.name} {' '.join(args)} failed:\n{done.stderr.strip()}")
        return done.stdout


class DemoCluster(ABC):
    """A Kubernetes cluster, as the demo uses it."""

    tools: ClusterTools

    def kubectl(self, *args: str, stdin: str | None = None, timeout: float = 60) -> str:
        return self.tools.run(self.tools.kubectl, args, stdin, timeout)

    def helm(self, *args: str, values: Mapping[str, Any] | None = None, timeout: float = 300) -> str:
        """Runs helm; `values` go to its standard input, for `-f -`."""
        return self.tools.run(self.tools.helm, args, None if values is None else json.dumps(values), timeout)

    def get(self, *args: str) -> list[dict[str, Any]]:
        """`kubectl get ... -o json`, as objects."""
        return json.loads(self.kubectl("get", *args, "-o", "json")).get("items", [])

    @abstractmethod
    def gateway(self) -> AbstractContextManager[str]:
        """The gateway's base URL on this machine, for as long as the context lasts."""

    @abstractmethod
    def exec(self, pod: str, *argv: str) -> str:
        """Runs a command in a pod of Shoal's namespace and returns its output."""

    @abstractmethod
    def try_it(self) -> list[str]:
        """Shell lines that set up a terminal for kubectl and curl against this cluster."""


class CurrentCluster(DemoCluster):
    """The cluster that kubectl points to."""

    def __init__(self, gateway_url: str | None = None) -> None:
        """`gateway_url`: where the gateway is reached from here; without it through kubectl port-forward."""
        self._gateway_url = gateway_url
        found = {name: shutil.which(name) for name in ("kubectl", "helm")}
        missing = [name for name, path in found.items() if path is None]
        if missing:
            raise click.ClickException(f"{' and '.join(missing)} must be on PATH for --cluster current")
        self.tools = ClusterTools(Path(found["kubectl"] or ""), Path(found["helm"] or ""))
        try:
            self.kubectl("version", timeout=15)
        except click.ClickException as e:
            raise click.ClickException(f"kubectl does not reach a cluster: {e.message}") from e

    @property
    def context(self) -> str:
        return self.kubectl("config", "current-context").strip()

    @contextmanager
    def gateway(self) -> Generator[str]:
        if self._gateway_url:
            yield self._gateway_url.rstrip("/")
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # To one pod of the Service, as long as that lives.
        command = [self.tools.kubectl, "-n", NAMESPACE, "port-forward", f"svc/{GATEWAY_SERVICE}", f"{port}:80"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as forward:
            try:
                _wait_until_open(port, forward)
                yield f"http://127.0.0.1:{port}"
            finally:
                forward.terminate()

    def exec(self, pod: str, *argv: str) -> str:
        return self.kubectl("-n", NAMESPACE, "exec", pod, "--", *argv)

    def try_it(self) -> list[str]:
        if self._gateway_url:
            return [f"GATEWAY={self._gateway_url}"]
        return [f"kubectl -n {NAMESPACE} port-forward svc/{GATEWAY_SERVICE} 8080:80 &", "GATEWAY=http://127.0.0.1:8080"]


def _wait_until_open(port: int, forward: subprocess.Popen[str]) -> None:
    """Raises ClickException with kubectl's own reason when it ends, or does not listen in time."""
    deadline = time.monotonic() + _FORWARD_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError as e:
            if forward.poll() is not None or time.monotonic() > deadline:
                forward.kill()
                raise click.ClickException(f"kubectl port-forward failed: {forward.communicate()[1]}") from e
            time.sleep(0.1)


class LabCluster(DemoCluster):
    """A lab of the demo's own: a real control plane on this machine, GPU nodes as processes."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.tools = ClusterTools(
            kubectl=lab.state.binaries / "kubectl", helm=lab.state.helm, env={"KUBECONFIG": str(lab.kubeconfig)}
        )

    @contextmanager
    def gateway(self) -> Generator[str]:
        yield f"http://127.0.0.1:{self.lab.forward_port(NAMESPACE, GATEWAY_SERVICE, 80)}"

    def exec(self, pod: str, *argv: str) -> str:
        shoal = [sys.executable, "-m", "shoal", "lab", "exec", "--name", self.lab.state.name]
        done = subprocess.run(
            [*shoal, "--pod", f"{NAMESPACE}/{pod}", "--", *argv],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if done.returncode:
            raise click.ClickException(f"{' '.join(argv)} in {pod} failed:\n{done.stderr.strip()}")
        return done.stdout

    def try_it(self) -> list[str]:
        name = self.lab.state.name
        port = self.lab.forward_port(NAMESPACE, GATEWAY_SERVICE, 80)
        return [
            f"export KUBECONFIG={self.lab.kubeconfig}",
            f"export PATH={self.lab.state.binaries}:{self.lab.state.helm.parent}:$PATH:{Path(sys.executable).parent}"
            f"   # kubectl, helm, shoal ({name})",
            f"GATEWAY=http://127.0.0.1:{port}",
        ]
