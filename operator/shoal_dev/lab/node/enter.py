"""Ways into a running container from the machine: the argv that runs a command in it, and its first process."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class NotRunning(Exception):
    """No such container runs. The message lists those that do."""


def first_process(run_dir: Path, namespace: str, pod: str, container: str | None) -> int:
    """The container's PID 1, by its number out here. Raises NotRunning."""
    return _running(run_dir, namespace, pod, container)[1]


def argv(run_dir: Path, namespace: str, pod: str, container: str | None, command: Sequence[str]) -> list[str]:
    """`run_dir` is the node's (`NodeConfig.run_dir`). Needs root. Raises NotRunning."""
    made, pid = _running(run_dir, namespace, pod, container)
    groups = ["--groups", ",".join(map(str, made["groups"]))] if made["groups"] else ["--clear-groups"]
    return [
        *(
            "nsenter",
            "--target",
            str(pid),
            "--mount",
            "--net",
            "--uts",
            "--ipc",
            "--pid",
            "--root",
            f"--wdns={made['cwd']}",
        ),
        *("setpriv", "--reuid", str(made["uid"]), "--regid", str(made["gid"]), *groups, "--"),
        *("env", "-i", *(f"{name}={value}" for name, value in made["env"].items()), *command),
    ]


def _running(run_dir: Path, namespace: str, pod: str, container: str | None) -> tuple[dict[str, Any], int]:
    """What the node wrote down of the container, and its first process."""
    folder = run_dir / "containers"
    prefix = f"{namespace}_{pod}_"
    files = {path.stem.removeprefix(prefix): path for path in sorted(folder.glob(f"{prefix}*.json"))}
    if container is None and len(files) == 1:
        container = next(iter(files))
    if container is None or container not in files:
        known = ", ".join(files) or "none"
        raise NotRunning(f"{namespace}/{pod}:{container or ''}: no such running container; running here: {known}")
    made: dict[str, Any] = json.loads(files[container].read_text())
    pid = _first_process(made["mountNamespace"])
    if pid is None:
        raise NotRunning(f"{namespace}/{pod}:{container} has just ended")
    return made, pid


def _first_process(mount_namespace: str) -> int | None:
    """The container's PID 1, by its number in the caller's pid namespace."""
    for entry in sorted((name for name in os.listdir("/proc") if name.isdigit()), key=int):
        try:
            if os.readlink(f"/proc/{entry}/ns/mnt") != mount_namespace:
                continue
            status = Path(f"/proc/{entry}/status").read_text()
        except OSError:
            continue  # it ended meanwhile
        numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
        if numbers[-1] == "1":
            return int(entry)
    return None
