"""The lab's PID 1: it makes the namespaces, starts every other process, and tells of those that end.

`python -m shoal_dev.lab.supervisor CONFIG` opens the host's sockets, enters new network, mount and process namespaces,
and goes on there as a daemon. Because it is PID 1 of its process namespace, the kernel ends everything in the lab when
it ends, however that happens; mounts and network go with the last process. Nothing is restarted by itself: a lab is
for seeing what a cluster does when something dies.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import orjson
import structlog
from pydantic import BaseModel, ConfigDict

from shoal_dev.lab import bootstrap, controlplane, dns, network, nodefork, pki
from shoal_dev.lab.addons import prometheus
from shoal_dev.lab.binaries import Binaries, minor
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.fleet import FleetFile
from shoal_dev.lab.kubeapi import Api
from shoal_dev.lab.node.config import ImageConfig, NodeConfig, NodeSpec, StatusOnly
from shoal_dev.lab.node.linux import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, unshare
from shoal_dev.lab.realnode.config import RealNodeConfig
from shoal_dev.lab.realnode.programs import Programs
from shoal_dev.lab.state import LabForward, LabState, Paths, start_time

_log = structlog.get_logger()
_API_TIMEOUT_S: Final = 120.0
_NODES_TIMEOUT_S: Final = 120.0
_KILL_TIMEOUT_S: Final = 10.0
_FORK_TIMEOUT_S: Final = 60.0
"""The forker's first answer comes when it has loaded the nodes' code; on a busy machine that takes a while."""
FORKER: Final = "node-forker"
CLUSTER: Final = "cluster"
STATUS_NODES: Final = "status-nodes"


class SupervisorConfig(BaseModel):
    """What `up` hands over."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    binaries: Path
    helm: Path
    fleet: FleetFile
    fleet_digest: str
    images: dict[str, ImageConfig]
    node_programs: Programs | None = None
    """For nodes with a real kubelet; None: the fleet has none."""
    forwards: tuple[LabForward, ...]
    api_port: int = 0
    faults: bool = False
    hpa_sync_seconds: float | None = None
    """How often HorizontalPodAutoscalers are looked at; None: as Kubernetes does it, every 15 s."""
    with_prometheus: bool = False
    progress_fd: int


class UpProgress(BaseModel):
    """One line from the supervisor to `up`: a step that is done, the end, or why there will be none."""

    kind: Literal["step", "ready", "failed"]
    text: str = ""


# --- processes --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SupervisedProcess:
    """One child. Times are Unix seconds."""

    name: str
    command: Sequence[str]
    """Of a node: empty, and `node_config` is set."""
    pass_fds: Sequence[int] = ()
    node_config: Path | None = None
    pid: int | None = None
    started: float = 0.0
    ended: float | None = None
    exit_code: int | None = None
    """As a shell has it: 128 + signal for a killed one."""
    killed_by_user: bool = False

    @property
    def running(self) -> bool:
        return self.pid is not None and self.ended is None


class Processes:
    """Starts and reaps. As PID 1 it also reaps orphans that are nobody's."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self._logs = logs
        self._environment = environment
        self._kept: list[subprocess.Popen[bytes]] = []
        self._forker: socket.socket | None = None
        self._forking = asyncio.Lock()
        self._ended_early: dict[int, int] = {}
        """Exit statuses of children that are not known (yet): a node may end before its pid has been told."""
        self.known: dict[str, SupervisedProcess] = {}
        self.changed = asyncio.Event()
        """Set whenever a child ended; whoever waits clears it first."""

    def start(self, name: str, command: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
        """Starts a child that is not running; its output is appended to LOGS/NAME.log. Raises LabError."""
        process = SupervisedProcess(name, command, pass_fds, started=time.time())
        with (self._logs / f"{name}.log").open("ab") as log:
            try:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    cwd="/",
                    start_new_session=True,
                    pass_fds=pass_fds,
                )
            except OSError as error:
                raise LabError(f"{command[0]} cannot be started: {error}") from error
        # Kept and never waited for by the subprocess module: `reap` is the only one to collect exits.
        self._kept.append(child)
        process.pid = child.pid
        self.known[name] = process

    def start_forker(self) -> None:
        """Starts the process that forks nodes; it loads their code while the API server comes up."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._forker = ours
        with theirs:
            command = [sys.executable, "-m", "shoal_dev.lab.nodefork", str(theirs.fileno())]
            self.start(FORKER, command, [theirs.fileno()])

    async def start_node(self, name: str, config: Path) -> None:
        """Has a node forked. Raises LabError."""
        if self._forker is None:
            raise LabError("nodes are started before their forker")
        loop = asyncio.get_running_loop()
        request = nodefork.ForkRequest(config=str(config), log=str(self._logs / f"{name}.log"))
        process = SupervisedProcess(name, (), node_config=config, started=time.time())
        async with self._forking:
            try:
                async with asyncio.timeout(_FORK_TIMEOUT_S):
                    await loop.sock_sendall(self._forker, request.model_dump_json().encode())
                    answer = await loop.sock_recv(self._forker, 1 << 16)
                process.pid = nodefork.ForkAnswer.model_validate_json(answer).pid
            except (OSError, TimeoutError, ValueError) as error:
                raise LabError(f"{name} cannot be started: {FORKER} does not answer ({error})") from error
            self.known[name] = process
            if process.pid in self._ended_early:
                self._note_end(process, self._ended_early[process.pid])
            self._ended_early.clear()

    def reap(self) -> None:
        """Collects every child that has ended. Called on SIGCHLD."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            process = next((p for p in self.known.values() if p.pid == pid and p.ended is None), None)
            if process is not None:
                self._note_end(process, status)
            elif self._forking.locked():
                self._ended_early[pid] = status

    def _note_end(self, process: SupervisedProcess, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        process.ended, process.exit_code = time.time(), code if code >= 0 else 128 - code
        if not process.killed_by_user:
            _log.error("process_ended", process=process.name, exit_code=process.exit_code)
        self.changed.set()

    async def kill(self, name: str) -> None:
        """SIGKILL, and waits until it is gone. Raises LabError."""
        process = self.get(name)
        if not process.running or process.pid is None:
            raise LabError(f"{name} does not run")
        process.killed_by_user = True
        os.kill(process.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                while process.running:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError as error:
            raise LabError(f"{name} (pid {process.pid}) does not end") from error

    async def hang_up(self, name: str) -> None:
        """SIGHUP: a node takes it for a restart of its kubelet alone. Raises LabError."""
        process = self.get(name)
        if not process.running or process.pid is None:
            raise LabError(f"{name} does not run")
        os.kill(process.pid, signal.SIGHUP)

    async def restart(self, name: str) -> None:
        """Starts a child again that has ended. Raises LabError."""
        process = self.get(name)
        if process.running:
            raise LabError(f"{name} runs already")
        if process.node_config is not None:
            await self.start_node(name, process.node_config)
        else:
            self.start(name, process.command, process.pass_fds)

    def get(self, name: str) -> SupervisedProcess:
        """Raises LabError with the known names."""
        if name not in self.known:
            raise LabError(f"no process {name!r} in this lab; there are: {', '.join(self.known)}")
        return self.known[name]


# --- in the host's namespaces -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _HostSockets:
    api: socket.socket
    forwards: tuple[tuple[LabForward, socket.socket], ...]
    dns: socket.socket | None


def _listen(port: int, purpose: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise LabError(f"port {port} of 127.0.0.1, wanted for {purpose}, cannot be used: {error.strerror}") from error
    listener.listen(512)
    return listener


def _open_host_sockets(config: SupervisorConfig) -> _HostSockets:
    forwards: list[tuple[LabForward, socket.socket]] = []
    for wanted in config.forwards:
        listener = _listen(wanted.host_port, wanted.target())
        forwards.append((wanted.model_copy(update={"host_port": listener.getsockname()[1]}), listener))
    upstream = None
    with suppress(OSError):
        resolver = dns.host_resolver(Path("/etc/resolv.conf").read_text())
        upstream = dns.open_upstream(resolver) if resolver else None
    return _HostSockets(_listen(config.api_port, "the API server"), tuple(forwards), upstream)


# --- inside the lab ---------------------------------------------------------------------------------------------------


def _mount_own(paths: Paths) -> None:
    """A /proc of the new process namespace, a tmpfs for short-lived things, and the cluster DNS for whoever enters."""

    def mount(*arguments: str) -> None:
        result = subprocess.run(["mount", *arguments], capture_output=True, text=True, timeout=30, check=False)
        if result.returncode != 0:
            raise LabError(f"mount {' '.join(arguments)}: {result.stderr.strip()}")

    mount("--make-rprivate", "/")
    mount("-t", "proc", "-o", "nosuid,nodev,noexec", "proc", "/proc")
    paths.work.mkdir(parents=True, exist_ok=True)
    mount("-t", "tmpfs", "-o", "mode=0755", "shoal-lab", str(paths.work))
    resolver = paths.work / "resolv.conf"
    domain = network.DOMAIN
    resolver.write_text(
        f"nameserver {network.DNS}\nsearch default.svc.{domain} svc.{domain} {domain}\noptions ndots:5\n"
    )
    if Path("/etc/resolv.conf").exists():
        mount("--bind", str(resolver), str(Path("/etc/resolv.conf").resolve()))


def _first(error: BaseException) -> BaseException:
    """The innermost first of nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


class Supervisor:
    """The daemon's life inside the lab's namespaces."""

    def __init__(self, config: SupervisorConfig, paths: Paths, sockets: _HostSockets, state: LabState) -> None:
        self._config = config
        self._paths = paths
        self._sockets = sockets
        self._state = state
        self._begun = time.monotonic()
        self._stop = asyncio.Event()
        self._ready = False
        path = f"{config.binaries}:{config.helm.parent}:{os.environ.get('PATH', '/usr/sbin:/usr/bin:/sbin:/bin')}"
        environment = {
            "PATH": path,
            "HOME": str(paths.work),
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
        }
        # Coverage and the like start from the environment; nothing else of the caller's matters to a cluster.
        environment |= {k: v for k, v in os.environ.items() if k.startswith(("PYTHONPATH", "COVERAGE_"))}
        self._processes = Processes(paths.logs, environment)
        self._binaries = Binaries(config.binaries, config.helm)
        self._nodes = config.fleet.running(paths.pki)
        self._status_nodes = config.fleet.status_only()

    async def run(self) -> None:
        """Until told to stop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._processes.reap)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._paths.socket.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, self._paths.socket)
        self._paths.socket.chmod(0o600)
        try:
            async with asyncio.TaskGroup() as tasks:
                working = [tasks.create_task(work) for work in (self._start_all(), self._keep_gpus())]
                await self._stop.wait()
                for task in working:
                    task.cancel()
        except* LabError as errors:
            reason = str(_first(errors))
            _log.error("up_failed", error=reason)
            self._report(UpProgress(kind="failed", text=reason))
        server.close()
        # This process is PID 1: the kernel ends all others with it.

    def _report(self, progress: UpProgress) -> None:
        with suppress(OSError):  # nobody listens any more: `up` has ended
            os.write(self._config.progress_fd, progress.model_dump_json().encode() + b"\n")
        if progress.kind != "step":
            with suppress(OSError):
                os.close(self._config.progress_fd)

    def _step(self, text: str) -> None:
        self._report(UpProgress(kind="step", text=f"[{time.monotonic() - self._begun:5.1f} s] {text}"))

    async def _start_all(self) -> None:
        commands = controlplane.commands(
            self._binaries,
            self._paths,
            minor=await asyncio.to_thread(minor, self._binaries),
            faults=self._config.faults,
            hpa_sync=self._config.hpa_sync_seconds,
        )
        # The controllers end 10 s after their start if the API server has not authorised them by then; a busy machine
        # takes longer than that to start it.
        before = ("etcd", "kube-apiserver")
        for name in before:
            self._processes.start(name, commands[name])
        self._start_cluster()
        self._processes.start_forker()
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(self._fail_early())
            async with Api(self._paths.admin_kubeconfig) as api:
                await bootstrap.wait_for_api(api, _API_TIMEOUT_S)
                for name in commands.keys() - before:
                    self._processes.start(name, commands[name])
                self._step(f"API server ready at https://127.0.0.1:{self._state.api_port}")
                for node in self._nodes:
                    await self._start_node(node)
                await self._start_status_nodes()
                await bootstrap.apply_basics(api)
                if any(node.dra is not None for node in (*self._nodes, *self._status_nodes)):
                    await bootstrap.apply_device_class(api)
                await bootstrap.wait_for_default_account(api, _API_TIMEOUT_S)
                self._step("control plane ready")
                if self._config.with_prometheus:
                    await self._start_prometheus(api)
                names = [n.name for n in (*self._nodes, *self._status_nodes)]
                await bootstrap.wait_for_nodes(api, names, _NODES_TIMEOUT_S)
            watcher.cancel()
        self._step(f"{len(self._nodes) + len(self._status_nodes)} nodes ready")
        self._ready = True
        self._report(UpProgress(kind="ready"))

    async def _start_prometheus(self, api: Api) -> None:
        await prometheus.apply(api)
        prometheus.prepare(self._paths.prometheus)
        for name, command in prometheus.commands(self._paths.prometheus, self._paths.admin_kubeconfig).items():
            self._processes.start(name, command)

    async def _keep_gpus(self) -> None:
        real = self._config.fleet.with_real_kubelet()
        gpus = {n.name: n.capacity.gpus for n in self._nodes if n.name in real and n.capacity.gpus}
        if gpus:
            async with Api(self._paths.admin_kubeconfig) as api:
                await bootstrap.keep_gpus(api, gpus)

    async def _fail_early(self) -> None:
        """A component that ends while the lab comes up is the reason to give, not a time-out minutes later."""
        while True:
            for process in self._processes.known.values():
                if process.ended is not None:
                    log = self._paths.logs / f"{process.name}.log"
                    tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
                    raise LabError(f"{process.name} ended with exit code {process.exit_code}; its log says:\n{tail}")
            self._processes.changed.clear()
            await self._processes.changed.wait()

    def _start_cluster(self) -> None:
        descriptors = [self._sockets.api.fileno()]
        command = [sys.executable, "-m", "shoal_dev.lab.cluster", f"--api-fd={self._sockets.api.fileno()}"]
        command += [f"--kubeconfig={self._paths.admin_kubeconfig}", f"--nodes={self._paths.node_data}"]
        if self._sockets.dns is not None:
            descriptors.append(self._sockets.dns.fileno())
            command.append(f"--dns-fd={self._sockets.dns.fileno()}")
        for wanted, listener in self._sockets.forwards:
            descriptors.append(listener.fileno())
            command.append(f"--forward={listener.fileno()},{wanted.target()}")
        self._processes.start(CLUSTER, command, descriptors)

    async def _start_node(self, node: NodeSpec) -> None:
        if node.name in self._config.fleet.with_real_kubelet():
            self._start_real_node(node)
            return
        config = self._node_config(node.name, (node,), None)
        await self._start_node_process(f"node-{node.name}", config)

    def _start_real_node(self, node: NodeSpec) -> None:
        if self._config.node_programs is None or node.kubeconfig is None:
            raise LabError(f"node {node.name} has a real kubelet, and its programs were not built")
        paths = self._paths
        made = RealNodeConfig(
            lab=self._config.name,
            node=node,
            kubeconfig=node.kubeconfig,
            programs=self._config.node_programs,
            archives=self._config.fleet.archives,
            serving_cert=paths.pki / "kubelet.crt",
            serving_key=paths.pki / "kubelet.key",
            client_ca=paths.pki / "ca.crt",
            data_dir=paths.node_data / node.name,
            log_dir=paths.logs,
            keep=(paths.state, paths.run, Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2]),
        )
        made.data_dir.mkdir(parents=True, exist_ok=True)
        file = paths.configs / f"node-{node.name}.json"
        file.write_text(made.model_dump_json(indent=2))
        self._processes.start(f"node-{node.name}", [sys.executable, "-m", "shoal_dev.lab.realnode.init", str(file)])

    async def _start_status_nodes(self) -> None:
        if self._status_nodes:
            settings = StatusOnly(ready_delay_seconds=1.0, termination_messages=self._config.fleet.termination_messages)
            config = self._node_config(STATUS_NODES, tuple(self._status_nodes), settings)
            await self._start_node_process(STATUS_NODES, config)

    def _node_config(self, folder: str, nodes: tuple[NodeSpec, ...], status_only: StatusOnly | None) -> NodeConfig:
        own = nodes[0].kubeconfig if status_only is None else None
        return NodeConfig(
            lab=self._config.name,
            nodes=nodes,
            status_only=status_only,
            api_server=controlplane.API_URL,
            # One identity per node (Node authoriser); many in one process need one that may act for all of them.
            kubeconfig=own or self._paths.admin_kubeconfig,
            serving_cert=self._paths.pki / "kubelet.crt",
            serving_key=self._paths.pki / "kubelet.key",
            client_ca=self._paths.pki / "ca.crt",
            log_dir=self._paths.logs / "pods",
            run_dir=self._paths.node_run(folder),
            data_dir=self._paths.node_data / folder,
            bridge=network.BRIDGE,
            gateway=network.GATEWAY,
            pod_prefix=network.POD_PREFIX,
            host_address=network.HOST,
            dns_address=network.DNS,
            service_address=network.API_SERVICE,
            cluster_domain=network.DOMAIN,
            images=self._config.images,
            # Short leases make a dead node show in seconds where the control plane looks for it as often.
            lease_seconds=8.0 if self._config.faults else 40.0,
        )

    async def _start_node_process(self, name: str, config: NodeConfig) -> None:
        for folder in (config.run_dir, config.data_dir, config.log_dir):
            folder.mkdir(parents=True, exist_ok=True)
        file = self._paths.configs / f"{name}.json"
        file.write_text(config.model_dump_json(by_alias=True, indent=2))
        await self._processes.start_node(name, file)

    # --- the control socket -------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer: dict[str, Any]
        try:
            async with asyncio.timeout(30):
                request = orjson.loads(await reader.readline())
                answer = await self._command(request)
        except LabError as error:
            answer = {"error": str(error)}
        except (orjson.JSONDecodeError, KeyError, TypeError, TimeoutError) as error:
            answer = {"error": f"the supervisor did not understand: {type(error).__name__} {error}"}
        with suppress(OSError):
            writer.write(orjson.dumps(answer) + b"\n")
            await writer.drain()
        writer.close()

    async def _command(self, request: dict[str, Any]) -> dict[str, Any]:
        handlers: dict[str, Callable[[str], Coroutine[Any, Any, None]]] = {
            "kill": self._processes.kill,
            "start": self._processes.restart,
            "restart-kubelet": self._processes.hang_up,
            "status": self._nothing,
        }
        handler = handlers.get(request["command"])
        if handler is None:
            raise LabError(f"unknown command {request['command']!r}")
        await handler(str(request.get("process", "")))
        return {
            "ready": self._ready,
            "processes": [
                {
                    "name": p.name,
                    "pid": p.pid,
                    "running": p.running,
                    "exitCode": p.exit_code,
                    "killedByUser": p.killed_by_user,
                    "started": p.started,
                    "ended": p.ended,
                }
                for p in self._processes.known.values()
            ],
        }

    async def _nothing(self, _name: str) -> None:
        return


# --- entry ------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> None:
    """Opens sockets and namespaces, forks, returns in the parent; the child is the lab's PID 1 and never returns."""
    config = SupervisorConfig.model_validate_json(Path(argv[0]).read_bytes())
    paths = Paths.of(config.name)
    try:
        sockets = _open_host_sockets(config)
        unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET)
    except (LabError, OSError) as error:
        text = str(error)
        if isinstance(error, PermissionError):
            text = f"{error}: this environment does not allow new namespaces (in a container: run it privileged)"
        os.write(config.progress_fd, UpProgress(kind="failed", text=text).model_dump_json().encode() + b"\n")
        return
    gate_read, gate_write = os.pipe()
    pid = os.fork()
    if pid:
        # The state file is written by the one who knows the child's pid on the host; the child waits for it.
        os.close(gate_read)
        state = _state(config, sockets, pid)
        temporary = paths.state_file.with_suffix(".new")
        temporary.write_text(state.model_dump_json(by_alias=True, indent=2))
        temporary.rename(paths.state_file)
        os.write(gate_write, state.model_dump_json().encode())
        return
    os.close(gate_write)
    state = LabState.model_validate_json(os.read(gate_read, 1 << 20))
    os.close(gate_read)
    code = 1
    try:
        _become_daemon(config, paths, sockets, state)
        code = 0
    except LabError as error:
        os.write(config.progress_fd, UpProgress(kind="failed", text=str(error)).model_dump_json().encode() + b"\n")
    except BaseException:
        _log.exception("supervisor_failed")
    finally:
        os._exit(code)


def _state(config: SupervisorConfig, sockets: _HostSockets, pid: int) -> LabState:
    return LabState(
        name=config.name,
        pid=pid,
        started=start_time(pid) or 0,
        api_port=sockets.api.getsockname()[1],
        forwards=tuple(forward for forward, _ in sockets.forwards),
        binaries=config.binaries,
        helm=config.helm,
        fleet_digest=config.fleet_digest,
    )


def _become_daemon(config: SupervisorConfig, paths: Paths, sockets: _HostSockets, state: LabState) -> None:
    _mount_own(paths)
    network.set_up()
    addresses = pki.Addresses(
        inside=controlplane.API_URL,
        outside=f"https://127.0.0.1:{state.api_port}",
        api_names=controlplane.API_NAMES,
        node_address=network.HOST,
    )
    pki.write(paths.pki, addresses, [n.name for n in config.fleet.running(paths.pki)], paths.kubeconfig)
    asyncio.run(Supervisor(config, paths, sockets, state).run())


if __name__ == "__main__":
    main(sys.argv[1:])
