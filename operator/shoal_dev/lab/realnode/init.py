"""`python -m shoal_dev.lab.realnode.init CONFIG`: a node with a real kubelet, until it is killed.

The process that the lab starts only waits; its child is PID 1 of the node's namespaces and starts containerd and the
kubelet. Whichever of the two dies, the node dies with all its containers; but SIGHUP restarts the kubelet alone, as
`systemctl restart kubelet` does, and containers run on.

A kubelet insists on a few paths and settings of the machine. Those are the node's own here: /run, /var/lib and /var/log
are its, and the kernel settings that it would change are files which say what it wants to read.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from shoal_dev.lab import network
from shoal_dev.lab.node import linux
from shoal_dev.lab.realnode import archive, cgroups, config
from shoal_dev.lab.realnode.config import RealNodeConfig
from shoal_dev.lab.realnode.programs import PAUSE

_OWN: Final = ("/run", "/var/lib", "/var/log")
_KUBELET_ROOT: Final = "/var/lib/kubelet"
_SETTINGS: Final = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""What a kubelet sets at its start, for the whole machine. It writes only where it reads something else."""
_CONTAINERD_SECONDS: Final = 60.0
_IMPORT_SECONDS: Final = 300
_RESTART_SECONDS: Final = 0.5


def main(argv: Sequence[str]) -> int:
    """Runs the node; returns when it has ended."""
    node = RealNodeConfig.read(Path(argv[0]))
    linux.unshare(linux.CLONE_NEWPID | linux.CLONE_NEWNS)
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_SLAVE)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            linux.die_with_parent()
            NodeInit(node).run()
            code = 0
        except (OSError, subprocess.SubprocessError) as error:
            print(f"the node ended: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: os.kill(pid, got))
    _, status = os.waitpid(pid, 0)
    return max(os.waitstatus_to_exitcode(status), 0)


class NodeInit:
    """PID 1 of a node."""

    def __init__(self, node: RealNodeConfig) -> None:
        self._config = node
        self._kubelet = 0
        self._restarting = False

    def run(self) -> None:
        """Until containerd or the kubelet ends by itself. Raises OSError."""
        signal.signal(signal.SIGHUP, self._restart)
        signal.signal(signal.SIGTERM, _leave)
        config.write(self._config)
        _own_world(self._config)
        containerd = self._start_containerd()
        self._import()
        self._kubelet = self._start_kubelet()
        while True:
            ended, status = os.waitpid(-1, 0)  # orphans of containers too: this is PID 1
            if ended == containerd:
                raise OSError(f"containerd ended with {os.waitstatus_to_exitcode(status)}")
            if ended == self._kubelet:
                if not self._restarting:
                    raise OSError(f"the kubelet ended with {os.waitstatus_to_exitcode(status)}")
                time.sleep(_RESTART_SECONDS)
                self._restarting = False
                self._kubelet = self._start_kubelet()

    def _restart(self, _number: int, _frame: FrameType | None) -> None:
        if self._kubelet and not self._restarting:
            self._restarting = True
            os.kill(self._kubelet, signal.SIGKILL)

    def _start(self, name: str, command: Sequence[str]) -> int:
        with (self._config.log_dir / f"{name}-{self._config.node.name}.log").open("ab") as log:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
        _KEPT.append(child)
        return child.pid

    def _start_containerd(self) -> int:
        made = self._config
        command = [made.programs.path("containerd"), "--config", f"{made.data_dir}/containerd.toml"]
        # It finds its shim on PATH.
        os.environ["PATH"] = f"{made.programs.runtime}:{os.environ.get('PATH', '')}"
        pid = self._start("containerd", command)
        deadline = time.monotonic() + _CONTAINERD_SECONDS
        while self._ctr("version", seconds=10).returncode != 0:
            if time.monotonic() > deadline:
                raise OSError(f"containerd does not answer after {_CONTAINERD_SECONDS:.0f} s")
            time.sleep(0.1)
        return pid

    def _ctr(self, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
        command = [self._config.programs.path("ctr"), "--address", config.SOCKET, "--namespace", "k8s.io"]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=seconds, check=False)

    def _import(self) -> None:
        with tempfile.TemporaryDirectory(dir=self._config.data_dir) as folder:
            root = Path(folder, "root")
            root.mkdir()
            (root / "pause").write_bytes(Path(self._config.programs.path(PAUSE)).read_bytes())
            (root / "pause").chmod(0o755)
            pause = Path(folder, "pause.tar")
            archive.write(root, config.SANDBOX_IMAGE, pause, ["/pause"])
            for image in (pause, *self._config.archives):
                result = self._ctr("images", "import", "--local", str(image), seconds=_IMPORT_SECONDS)
                if result.returncode != 0:
                    raise OSError(f"{image} cannot be imported: {result.stderr.strip()[-500:]}")

    def _start_kubelet(self) -> int:
        made = self._config
        command = [
            str(made.programs.kubelet),
            f"--config={made.data_dir}/kubelet.yaml",
            f"--kubeconfig={made.kubeconfig}",
            f"--hostname-override={made.node.name}",
            "--node-ip=" + network.HOST,
            f"--root-dir={_KUBELET_ROOT}",
            f"--cert-dir={made.data_dir}/certificates",
            f"--node-labels={config.labels(made)}",
            "--v=2",
        ]
        return self._start("kubelet", command)


_KEPT: Final[list[subprocess.Popen[bytes]]] = []
"""Never waited for by the subprocess module: `run` is the only one to collect exits."""


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(0)  # PID 1: the kernel ends the rest


def _own_world(node: RealNodeConfig) -> None:
    """Mounts and cgroups. Raises OSError."""
    linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    cgroups.make(node.lab, node.node.name)
    stage = node.data_dir / "own"
    stage.mkdir(exist_ok=True)
    linux.mount("tmpfs", str(stage), "tmpfs", linux.MS_NODEV, "mode=0755")
    for folder in _OWN:
        fresh = stage / folder.strip("/")
        fresh.mkdir(parents=True)
        for kept in node.keep:
            if kept.is_relative_to(folder) and kept.exists():
                inside = stage / str(kept).strip("/")
                inside.mkdir(parents=True, exist_ok=True)
                linux.bind(str(kept), str(inside))
    settings = stage / "settings"
    for name, value in _SETTINGS.items():
        file, real = settings / name, Path("/proc/sys", name)
        if real.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")
            linux.bind(str(file), str(real))
    for folder in _OWN:
        linux.bind(str(stage / folder.strip("/")), folder)
    for name, place in (("kubelet", _KUBELET_ROOT), ("pods-log", "/var/log/pods")):
        on_disk = node.data_dir / name
        on_disk.mkdir(exist_ok=True)
        Path(place).mkdir(parents=True, exist_ok=True)
        linux.bind(str(on_disk), place)
    with suppress(OSError):
        Path("/var/log/containers").mkdir()
    # What a kubelet mounts for a pod has to be seen by the container runtime, and volumes may be shared.
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_SHARED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
