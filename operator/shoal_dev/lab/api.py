"""The lab for programs: tests, the demo, benches. The command line is a thin layer above it.

lab = Lab.up("mine")
lab.kubectl("get", "nodes")
lab.down()
"""

import fcntl
import hashlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import orjson

from shoal_dev.lab import binaries, fleet, images, network, nodes
from shoal_dev.lab.addons import choice, keda, prometheus
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.node import enter
from shoal_dev.lab.node.config import ImageConfig
from shoal_dev.lab.realnode import cgroups
from shoal_dev.lab.realnode import programs as realnode
from shoal_dev.lab.state import LabForward, LabState, Paths
from shoal_dev.lab.supervisor import SupervisorConfig, UpProgress

DEFAULT_NAME: Final = "default"
GATEWAY_FORWARD: Final = LabForward(namespace="shoal-system", service="shoal-gateway", port=80)
UP_TIMEOUT_S: Final = 300.0
_END_TIMEOUT_S: Final = 20.0

Announce = Callable[[str], None]
T = TypeVar("T")


def _silent(_line: str) -> None:
    return


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process of the lab, as its supervisor knows it. `exit_code` as a shell has it: 128 + signal."""

    name: str
    pid: int
    running: bool
    exit_code: int | None
    killed_by_user: bool
    started: float
    ended: float | None


@dataclass(frozen=True, slots=True)
class Status:
    """`ready`: `up` has come to its end."""

    ready: bool
    processes: tuple[ProcessStatus, ...]

    def dead(self) -> list[ProcessStatus]:
        """Processes that ended and that nobody asked to kill."""
        return [p for p in self.processes if not p.running and not p.killed_by_user]


def require_root() -> None:
    """Raises LabError for anybody but root: namespaces with mounts, bridges and other users' processes need it."""
    if os.geteuid() != 0:
        raise LabError(
            "the lab needs root: it makes network namespaces and mounts, and runs pods as other users. "
            "Try `sudo -E shoal lab ...`, or a virtual machine or privileged container of your own."
        )


class Lab:
    """A running lab."""

    def __init__(self, paths: Paths, state: LabState) -> None:
        self.paths = paths
        self.state = state

    # --- life ---------------------------------------------------------------------------------------------------------

    @classmethod
    def up(
        cls,
        name: str = DEFAULT_NAME,
        *,
        fleet_file: Path | None = None,
        fleet_data: fleet.FleetFile | None = None,
        binaries_folder: Path | None = None,
        status_nodes: int = 0,
        faults: bool = False,
        addons: Sequence[str] = (),
        hpa_sync_seconds: float | None = None,
        forwards: Sequence[LabForward] = (),
        extra_images: Mapping[str, ImageConfig] | None = None,
        announce: Announce = _silent,
        timeout: float = UP_TIMEOUT_S,
    ) -> Self:
        """Starts a lab and returns when its nodes take pods; a healthy one of that name is returned as it is.

        `fleet_data` goes before `fleet_file`; without both it is the default fleet. `status_nodes` more only report.
        `faults`: dead nodes are noticed within seconds. `addons`: of `addons.choice.KNOWN`. `hpa_sync_seconds`: how
        often HorizontalPodAutoscalers are looked at, instead of every 15 s. `forwards` are beside the default one, to
        the gateway; a forward to the same Service and port replaces it. `timeout` in seconds, without a build of the
        binaries.

        Raises LabError. A lab that did not come up, or whose start was interrupted, is removed again.
        """
        require_root()
        paths = Paths.of(name)
        wanted = fleet_data if fleet_data is not None else fleet.load(fleet_file)
        wanted = wanted.with_status_nodes(status_nodes)
        chosen = choice.check(addons)
        with_prometheus = "prometheus" in chosen
        more = (prometheus.FORWARD,) if with_prometheus else ()
        targets = {f.target(): f for f in (GATEWAY_FORWARD, *more, *forwards)}
        network.require_programs(announce, network.PROGRAMS | (prometheus.PACKAGES if with_prometheus else {}))
        programs = binaries.find_or_build(binaries_folder, announce)
        keda_programs = keda.find_or_build(announce) if "keda" in chosen else None
        rows = keda.images(keda_programs) if keda_programs else {}
        table = images.defaults() | rows | dict(wanted.images) | dict(extra_images or {})
        digest = _digest(wanted, tuple(targets.values()), table, faults, chosen, hpa_sync_seconds)
        node_programs = realnode.find_or_build(programs, announce) if wanted.with_real_kubelet() else None
        with _locked(paths):
            running = cls._running(paths)
            if running is not None:
                running._must_be(digest)
                announce(f"lab {name!r} is up already")
                return running
            _remove(paths)
            for folder in (paths.state, paths.run, paths.logs, paths.configs, paths.node_data):
                folder.mkdir(parents=True, exist_ok=True)
            config = SupervisorConfig(
                name=name,
                binaries=programs.components,
                helm=programs.helm,
                fleet=wanted,
                fleet_digest=digest,
                images=table,
                node_programs=node_programs,
                forwards=tuple(targets.values()),
                faults=faults,
                hpa_sync_seconds=hpa_sync_seconds,
                with_prometheus=with_prometheus,
                progress_fd=0,
            )
            try:
                _start(paths, config, announce, timeout)
                state = paths.read()
                if state is None:
                    raise LabError(f"lab {name!r} came up without a state file in {paths.state}")
                lab = cls(paths, state)
                if keda_programs is not None:
                    keda.install(lab, keda_programs, announce)
            except BaseException:
                _end(paths)
                _remove(paths)
                raise
            return lab

    @classmethod
    def get(cls, name: str = DEFAULT_NAME) -> Self:
        """The running lab of that name. Raises LabError when there is none."""
        paths = Paths.of(name)
        lab = cls._running(paths)
        if lab is None:
            if paths.state.exists():
                raise LabError(f"lab {name!r} has ended by itself or was killed: see {paths.logs}, then `shoal lab up`")
            raise LabError(f"there is no lab {name!r}: `shoal lab up --name {name}` makes it")
        return lab

    @classmethod
    def _running(cls, paths: Paths) -> Self | None:
        state = paths.read()
        return cls(paths, state) if state is not None and state.alive() else None

    def _must_be(self, digest: str) -> None:
        status = self.status()
        if not status.ready:
            raise LabError(f"lab {self.state.name!r} is there but did not come up: `shoal lab down` removes it")
        if dead := status.dead():
            names = ", ".join(p.name for p in dead)
            raise LabError(f"lab {self.state.name!r} is there, but {names} ended: `shoal lab down` removes it")
        if digest != self.state.fleet_digest:
            raise LabError(
                f"lab {self.state.name!r} is up with another fleet or other options: `shoal lab down` removes it, "
                "or take another --name"
            )

    def down(self) -> None:
        """See the function `down`."""
        down(self.state.name)

    # --- use ----------------------------------------------------------------------------------------------------------

    @property
    def kubeconfig(self) -> Path:
        """For programs on the host."""
        return self.paths.kubeconfig

    def environment(self) -> dict[str, str]:
        """This process's environment with KUBECONFIG set, and kubectl and helm in front of PATH."""
        path = f"{self.state.binaries}:{self.state.helm.parent}:{os.environ.get('PATH', '')}"
        return os.environ | {"KUBECONFIG": str(self.kubeconfig), "PATH": path}

    def forward_port(self, namespace: str = "shoal-system", service: str = "shoal-gateway", port: int = 80) -> int:
        """The port on the host's loopback that leads to the Service. Raises LabError when `up` was not told of it."""
        for forward in self.state.forwards:
            if (forward.namespace, forward.service, forward.port) == (namespace, service, port):
                return forward.host_port
        raise LabError(f"lab {self.state.name!r} forwards nothing to {namespace}/{service}:{port}")

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout: float = 60, check: bool = True) -> str:
        """Runs kubectl on the host and returns what it prints. Raises LabError with its error output, if `check`."""
        return self._run([str(self.state.binaries / "kubectl"), *arguments], stdin, timeout, check)

    def helm(self, *arguments: str, timeout: float = 300, check: bool = True) -> str:
        """Runs helm on the host and returns what it prints. Raises LabError with its error output, if `check`."""
        return self._run([str(self.state.helm), *arguments], None, timeout, check)

    def exec(self, *command: str, stdin: str | None = None, timeout: float = 60, check: bool = True) -> str:
        """Runs a command inside the lab's network. Raises LabError with its error output, if `check`."""
        return self._run([*self.enter_command(), *command], stdin, timeout, check, inside=True)

    def enter_command(self) -> list[str]:
        """The argv prefix that runs a command inside the lab, in the current folder."""
        pid = str(self.state.pid)
        return ["nsenter", "--target", pid, "--net", "--mount", "--pid", f"--wd={os.getcwd()}", "--"]

    def pod_command(self, pod: str, command: Sequence[str]) -> list[str]:
        """The argv, for the host, that runs a command inside a running container: as its user, with its environment.

        `pod` is NAMESPACE/NAME or NAMESPACE/NAME:CONTAINER. Raises LabError.
        """

        def call(folder: Path, namespace: str, name: str, container: str | None) -> list[str]:
            return enter.argv(folder, namespace, name, container, command)

        return self._in_container(pod, call)

    def signal_container(self, pod: str, number: signal.Signals) -> None:
        """To a container's first process, from outside, where even SIGKILL reaches it; `pod` as in `pod_command`.

        Raises LabError.
        """
        try:
            os.kill(self.first_process(pod), number)
        except ProcessLookupError as error:
            raise LabError(f"{pod} has just ended") from error

    def first_process(self, pod: str) -> int:
        """The pid of a container's first process, by its number on this machine; `pod` as in `pod_command`.

        Raises LabError.
        """
        return self._in_container(pod, enter.first_process)

    def _in_container(self, pod: str, call: Callable[[Path, str, str, str | None], T]) -> T:
        namespace, separator, rest = pod.partition("/")
        name, _, container = rest.partition(":")
        if not separator or not name:
            raise LabError(f"--pod {pod!r}: expected NAMESPACE/NAME or NAMESPACE/NAME:CONTAINER")
        reasons: list[str] = []
        nodes = self.paths.node_runs
        for folder in sorted(nodes.iterdir()) if nodes.is_dir() else ():
            if any((folder / "containers").glob(f"{namespace}_{name}_*.json")):
                try:
                    return call(folder, namespace, name, container or None)
                except enter.NotRunning as error:
                    reasons.append(str(error))
        raise LabError(reasons[0] if reasons else f"no pod {namespace}/{name} runs in lab {self.state.name!r}")

    def inside_environment(self) -> dict[str, str]:
        """Like `environment`, with a kubeconfig that holds inside the lab's network."""
        return self.environment() | {"KUBECONFIG": str(self.paths.admin_kubeconfig)}

    def _run(self, command: Sequence[str], stdin: str | None, timeout: float, check: bool, inside: bool = False) -> str:
        try:
            result = subprocess.run(
                command,
                input=stdin or "",
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
                env=self.inside_environment() if inside else self.environment(),
            )
        except subprocess.TimeoutExpired as error:
            raise LabError(f"`{' '.join(command)}` did not end within {timeout:.0f} s") from error
        if check and result.returncode != 0:
            raise LabError(f"`{' '.join(command)}` failed with {result.returncode}: {result.stderr.strip()}")
        return result.stdout

    # --- its processes ------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """Raises LabError when the supervisor does not answer."""
        return _status(self._ask("status"))

    def kill(self, process: str) -> None:
        """SIGKILL to one process of the lab, such as `kube-apiserver` or `node-h100-1`. Raises LabError."""
        self._ask("kill", process)

    def start(self, process: str) -> None:
        """Starts a process again that was killed or ended. Raises LabError."""
        self._ask("start", process)

    def kill_node(self, name: str) -> None:
        """The node's switch: it and all its containers are gone at once, as if the power had failed."""
        self.kill(f"node-{name}")

    def start_node(self, name: str) -> None:
        """Switches the node on again."""
        self.start(f"node-{name}")

    def restart_kubelet(self, name: str) -> None:
        """The node's kubelet alone ends and starts again; its containers run on. Raises LabError."""
        self._ask("restart-kubelet", f"node-{name}")

    def replace_node(self, name: str) -> None:
        """Another machine under the same name, switched on: empty disk, labels as at `up`. Raises LabError."""
        nodes.replace(self, name)

    def gpu_health(self, name: str, *, healthy: int) -> None:
        """So many of the node's GPUs work: it offers no more, and pods keep those that they have. Raises LabError."""
        nodes.set_gpu_health(self, name, healthy)

    def dra_driver(self, name: str, *, there: bool) -> None:
        """Takes the DRA driver of the node away, or brings a new one: its slices go, and come back with the next
        generation. Pods keep their devices. Raises LabError."""
        nodes.set_driver(self, name, there=there)

    def _ask(self, command: str, process: str = "") -> dict[str, Any]:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(30)
                client.connect(str(self.paths.socket))
                client.sendall(orjson.dumps({"command": command, "process": process}) + b"\n")
                data = b"".join(iter(lambda: client.recv(1 << 16), b""))
        except OSError as error:
            raise LabError(f"the supervisor of lab {self.state.name!r} does not answer: {error}") from error
        answer: dict[str, Any] = orjson.loads(data or b'{"error": "no answer"}')
        if "error" in answer:
            raise LabError(str(answer["error"]))
        return answer


def down(name: str = DEFAULT_NAME) -> bool:
    """Ends the lab and removes everything it made; returns whether there was anything. Raises LabError."""
    require_root()
    paths = Paths.of(name)
    if not paths.state.exists() and not paths.run.exists():
        return False
    with _locked(paths):
        _end(paths)
        _remove(paths)
    return True


def _status(answer: Mapping[str, Any]) -> Status:
    return Status(
        answer["ready"],
        tuple(
            ProcessStatus(p["name"], p["pid"], p["running"], p["exitCode"], p["killedByUser"], p["started"], p["ended"])
            for p in answer["processes"]
        ),
    )


def _digest(
    wanted: fleet.FleetFile,
    forwards: Sequence[LabForward],
    table: Mapping[str, ImageConfig],
    faults: bool,
    addons: Sequence[str],
    hpa_sync: float | None,
) -> str:
    """Of everything that a running lab cannot change any more."""
    parts: list[object] = [
        wanted.model_dump(mode="json"),
        [f.model_dump() for f in forwards],
        {name: image.model_dump(mode="json") for name, image in table.items()},
        faults,
        addons,
        hpa_sync,
    ]
    return hashlib.sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


@contextmanager
def _locked(paths: Paths) -> Generator[None]:
    """`up` and `down` of one lab, one at a time. The lock's file goes when no lab is left behind."""
    paths.lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with paths.lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_file(paths.lock, file.fileno()):
                continue  # the one before us has removed it: somebody else may hold a new one
            try:
                yield
            finally:
                if not paths.state.exists():
                    paths.lock.unlink(missing_ok=True)
            return


def _is_file(path: Path, descriptor: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _start(paths: Paths, config: SupervisorConfig, announce: Announce, timeout: float) -> None:
    """Starts the supervisor and follows its progress until it is ready. Raises LabError."""
    read, write = os.pipe()
    file = paths.configs / "supervisor.json"
    file.write_text(config.model_copy(update={"progress_fd": write}).model_dump_json())
    with (paths.logs / "supervisor.log").open("ab") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "shoal_dev.lab.supervisor", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
            pass_fds=(write,),
        )
    os.close(write)
    try:
        _follow(read, paths, announce, time.monotonic() + timeout)
        launcher.wait(timeout=10)
    except BaseException:
        launcher.kill()
        launcher.wait(timeout=10)
        raise
    finally:
        os.close(read)


def _follow(read: int, paths: Paths, announce: Announce, deadline: float) -> None:
    buffer = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([read], [], [], left)[0]:
            raise LabError(f"the lab did not come up in time; logs are in {paths.logs}")
        data = os.read(read, 1 << 16)
        if not data:
            tail = (paths.logs / "supervisor.log").read_text(errors="replace")[-1500:]
            raise LabError(f"the lab's supervisor ended while it was coming up:\n{tail}")
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            progress = UpProgress.model_validate_json(line)
            if progress.kind == "failed":
                raise LabError(progress.text)
            if progress.kind == "ready":
                return
            announce(progress.text)


def _end(paths: Paths) -> None:
    """SIGKILL to the supervisor, if it runs; the kernel ends the rest. Returns when all of it is gone."""
    state = paths.read()
    if state is None or not state.alive():
        return
    os.kill(state.pid, signal.SIGKILL)
    deadline = time.monotonic() + _END_TIMEOUT_S
    while state.alive():
        if time.monotonic() > deadline:
            raise LabError(f"the supervisor of lab {paths.name!r} (pid {state.pid}) does not end")
        time.sleep(0.01)


def _remove(paths: Paths) -> None:
    """Files of a lab that does not run. Its mounts were in a namespace that ended with it: nothing is mounted here."""
    shutil.rmtree(paths.state, ignore_errors=True)
    shutil.rmtree(paths.run, ignore_errors=True)
    cgroups.remove(paths.name)
