"""A node's own disk: what its hostPath and `local` volumes are folders of.

Each node has one, below the lab's state folder, so that what a DaemonSet keeps on a node is that node's alone. It
outlives the node's switch and goes when the node is replaced. Where a hostPath names something that only this machine
has (its /etc, its /sys), the pod gets that, read-only: a lab changes nothing on the machine.
"""

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal_dev.lab.node.rootfs import inside

Json = dict[str, Any]
Report = Callable[[str, str], None]
"""A warning event about the pod: reason and message."""


class DiskError(Exception):
    """The folder is not as the volume wants it. The message is a kubelet's."""


def root_of(data_dir: Path) -> Path:
    """The disk of the node whose `NodeConfig.data_dir` this is."""
    return data_dir / "disk"


class NodeDisk:
    """Remembers which pods have a `local` volume mounted, because only the first one's fsGroup counts."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._users: dict[str, set[str]] = {}
        """PersistentVolume -> uids of the pods on this node that have it."""

    def find(self, path: str) -> Path:
        """Where the node's `path` is on this machine; links on the disk do not lead off it."""
        return Path(inside(str(self._root), path))

    def host_path(self, source: Mapping[str, Any]) -> tuple[Path, bool]:
        """A hostPath volume's folder or file, and whether it is read-only. Raises DiskError, OSError."""
        kind, path = source.get("type") or "", source["path"]
        own, machine = self.find(path), Path(path)
        if kind == "DirectoryOrCreate" or (kind == "" and not own.exists() and not machine.exists()):
            # A container runtime makes the folder that an untyped hostPath lacks.
            own.mkdir(0o755, parents=True, exist_ok=True)
        elif kind == "FileOrCreate" and not own.exists():
            if not own.parent.is_dir():
                raise DiskError(f"hostPath type check failed: the folder of {path} does not exist")
            own.touch(0o644)
        found, read_only = (own, False) if own.exists() else (machine, True)
        if kind.startswith("Directory") and not found.is_dir():
            raise DiskError(f"hostPath type check failed: {path} is not a directory")
        if kind.startswith("File") and not found.is_file():
            raise DiskError(f"hostPath type check failed: {path} is not a file")
        if not found.exists():
            raise DiskError(f"path {path} does not exist")
        return found, read_only

    def local(self, name: str, path: str, pod: str, group: int | None, report: Report) -> Path:
        """A `local` volume's folder, given to the pod's fsGroup (None: as it is) if this is its only user on the node.

        A kubelet does the same: changing the group below another pod's feet would take its files from it.
        Raises DiskError, OSError.
        """
        folder = self.find(path)
        if not folder.exists():
            raise DiskError(f'path "{path}" does not exist')
        users = self._users.setdefault(name, set())
        if group is not None:
            owner = folder.stat().st_gid
            if not users - {pod}:
                _give_to_group(folder, group)
            elif owner != group:
                text = f"The requested fsGroup is {group}, but the volume {name} has GID {owner}."
                report("AlreadyMountedVolume", f"{text} The volume may not be shareable.")
        users.add(pod)
        return folder

    def release(self, pod: str) -> None:
        """The pod has no volumes any more."""
        for users in self._users.values():
            users.discard(pod)


def usage(folder: Path) -> int:
    """Bytes of disk below the folder; files that go meanwhile do not count. Raises nothing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except OSError:
                continue
    return total


def _give_to_group(folder: Path, group: int) -> None:
    """fsGroup on a volume of its own: group, group-writable, setgid. Once: the top tells whether it was done."""
    top = folder.stat()
    if top.st_gid == group and top.st_mode & stat.S_ISGID:
        return
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = os.path.join(root, name)
            if not os.path.islink(path):
                os.chown(path, -1, group)
                os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | 0o660)
        os.chown(root, -1, group)
        os.chmod(root, stat.S_IMODE(os.stat(root).st_mode) | 0o2770)  # noqa: S103 - what a kubelet does for fsGroup
