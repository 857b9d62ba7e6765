"""The cgroups in which a lab's real nodes run their containers: the only thing of a lab that no namespace takes along.

Both layouts: one hierarchy (cgroup 2), or one for each controller.
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_CONTROLLERS: Final = ("cpuset", "cpu", "io", "memory", "hugetlb", "pids")
_REMOVE_SECONDS: Final = 10.0


def parent(lab: str, node: str) -> str:
    """Path of a node's cgroup in each hierarchy."""
    return f"/shoal-lab-{lab}/{node}"


def _hierarchies() -> list[Path]:
    if (_ROOT / "cgroup.controllers").exists():
        return [_ROOT]
    return [folder for folder in _ROOT.iterdir() if folder.is_dir() and not folder.is_symlink()]


def make(lab: str, node: str) -> None:
    """Makes the node's cgroup in every hierarchy. Raises OSError."""
    for hierarchy in _hierarchies():
        above = hierarchy
        for name in parent(lab, node).strip("/").split("/"):
            if (above / "cgroup.subtree_control").exists():
                for controller in _CONTROLLERS:
                    with suppress(OSError):  # not every kernel has each
                        (above / "cgroup.subtree_control").write_text(f"+{controller}")
            folder = above / name
            folder.mkdir(exist_ok=True)
            for setting in ("cpuset.cpus", "cpuset.mems"):
                if (hierarchy / setting).exists() and not (folder / setting).read_text().strip():
                    # A new cpuset of the old layout is empty, and takes no process.
                    (folder / setting).write_text((above / setting).read_text())
            above = folder


def remove(lab: str) -> None:
    """Removes what `make` made and what a kubelet made below it, once their last processes are gone. A cgroup that
    stays busy is left: it holds nothing but its name."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    for hierarchy in _hierarchies():
        top = hierarchy / parent(lab, "x").split("/")[1]
        while top.exists() and time.monotonic() < deadline:
            for folder in sorted((p for p in top.rglob("*") if p.is_dir()), reverse=True):
                with suppress(OSError):
                    folder.rmdir()
            try:
                top.rmdir()
            except OSError:
                time.sleep(0.1)
