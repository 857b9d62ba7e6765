"""Where a lab keeps its things, and what is known of a running one.

On disk, in `$XDG_STATE_HOME/shoal/lab/NAME/`: `kubeconfig`, `state.json`, `pki/`, `logs/`, `nodes/`, etcd's data.
Short-lived, in `/run/shoal-lab/NAME/`: the supervisor's socket and the mount point of the lab's own tmpfs. Everything
else (network, mounts, processes) lives in namespaces that end with the supervisor.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from shoal_dev.lab.errors import LabError
from shoal_dev.lab.node import disk

_RUN_ROOT: Final = Path("/run/shoal-lab")
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?")


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class LabForward(_Model):
    """A port on the host's loopback that leads to a Service in the lab."""

    namespace: str
    service: str
    port: int
    host_port: int = 0
    """0: any free port."""

    def target(self) -> str:
        return f"{self.namespace}/{self.service}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "LabForward":
        """From NAMESPACE/SERVICE:PORT[=HOSTPORT]. Raises LabError."""
        match = re.fullmatch(r"([-a-z0-9]+)/([-a-z0-9]+):(\d{1,5})(?:=(\d{1,5}))?", text)
        if match is None or not 0 < int(match[3]) < 65536 or int(match[4] or 0) > 65535:
            raise LabError(f"--forward {text!r}: expected NAMESPACE/SERVICE:PORT or NAMESPACE/SERVICE:PORT=HOSTPORT")
        return cls(namespace=match[1], service=match[2], port=int(match[3]), host_port=int(match[4] or 0))


class LabState(_Model):
    """`state.json`: what commands on the host need to reach a lab. Written before anything is started."""

    name: str
    pid: int
    """Of the supervisor, as the host sees it; PID 1 of the lab."""
    started: int
    """Clock ticks since boot at which it began: pid and this name one process for ever."""
    api_port: int
    """On the host's loopback."""
    forwards: tuple[LabForward, ...]
    binaries: Path
    helm: Path
    fleet_digest: str
    """Of what `up` was asked for, to tell the user when a second `up` asks for something else."""

    def alive(self) -> bool:
        return start_time(self.pid) == self.started


@dataclass(frozen=True, slots=True)
class Paths:
    """Every file of one lab."""

    name: str
    state: Path
    run: Path

    @classmethod
    def of(cls, name: str) -> "Paths":
        """Raises LabError for a name that could not be a folder, a host name and a part of a Unix socket's path."""
        if not _NAME.fullmatch(name):
            raise LabError(f"{name!r} is no lab name: at most 32 of a-z, 0-9 and '-', not first or last a '-'")
        return cls(name, state_root() / name, _RUN_ROOT / name)

    @property
    def state_file(self) -> Path:
        return self.state / "state.json"

    @property
    def kubeconfig(self) -> Path:
        """For the host: leads to the API server's forwarder."""
        return self.state / "kubeconfig"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def admin_kubeconfig(self) -> Path:
        """For programs inside the lab's network."""
        return self.pki / "admin.kubeconfig"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def etcd(self) -> Path:
        return self.state / "etcd"

    @property
    def prometheus(self) -> Path:
        """Configuration and data of the lab's Prometheus, where it has one."""
        return self.state / "prometheus"

    @property
    def node_data(self) -> Path:
        return self.state / "nodes"

    def node_disk(self, node: str) -> Path:
        """Where hostPath and `local` volumes of a node are."""
        return disk.root_of(self.node_data / node)

    def node_run(self, node: str) -> Path:
        """Small state of a node that `shoal lab exec` reads from the host."""
        return self.node_runs / node

    @property
    def node_runs(self) -> Path:
        return self.run / "nodes"

    @property
    def configs(self) -> Path:
        return self.state / "config"

    @property
    def socket(self) -> Path:
        return self.run / "supervisor.sock"

    @property
    def lock(self) -> Path:
        """Held by `up` and `down`, one at a time; beside `run`, which `down` removes."""
        return self.run.with_suffix(".lock")

    @property
    def work(self) -> Path:
        """The lab's own tmpfs; an empty folder as seen from the host."""
        return self.run / "work"

    def read(self) -> LabState | None:
        """None when there is no such lab, or only the remains of one whose `up` was cut short."""
        try:
            return LabState.model_validate_json(self.state_file.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None


def state_root() -> Path:
    """`$XDG_STATE_HOME/shoal/lab`; see the XDG base directory specification for the default."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "shoal" / "lab"


def known_labs() -> Iterator[str]:
    """Names of labs that have a state folder, running or not."""
    root = state_root()
    if root.is_dir():
        yield from sorted(p.name for p in root.iterdir() if _NAME.fullmatch(p.name))


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which the process began; None when there is no such process, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
