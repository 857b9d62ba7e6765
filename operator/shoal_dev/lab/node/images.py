"""From an image's name to how its containers run here."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal_dev.lab.node.config import ImageConfig

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DISK_FILE_SYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "nfs", "nfs4", "virtiofs", "9p"}


class UnknownImage(Exception):
    """The image table has no such repository. The message is what a kubelet's pull error would be."""


def repository(image: str) -> str:
    """Without tag and digest: `host:5000/a/b:v1@sha256:...` is `host:5000/a/b`."""
    name = image.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return head + slash + last.partition(":")[0]


def find(images: Mapping[str, ImageConfig], image: str) -> str:
    """The row's name: the whole repository name, else its last parts. Raises UnknownImage."""
    name = repository(image)
    while name:
        if name in images:
            return name
        name = name.partition("/")[2]
    known = ", ".join(sorted(images)) or "none"
    raise UnknownImage(
        f'Failed to pull image "{image}": the lab\'s image table has no such repository; it has: {known}'
    )


def passable_folders(image: ImageConfig) -> list[str]:
    """Folders above the image's programs, so that any user can reach them. A virtual environment's `python` is a link
    into another tree, perhaps in a home folder of mode 0700; hence links are followed."""
    starts = [Path(folder) for folder in image.path_prepend] + [Path(bind.container) for bind in image.binds]
    found: set[Path] = set()
    for start in starts:
        found |= _ancestors([start, start.resolve()])
        if start.is_dir():
            with os.scandir(start) as entries:
                found |= _ancestors([Path(entry.path).resolve() for entry in entries if entry.is_symlink()])
    return sorted(str(folder) for folder in found if folder.is_dir())


def _ancestors(paths: Iterable[Path]) -> set[Path]:
    return {parent for path in paths for parent in path.parents if parent != Path("/")}


def host_mounts(exclude: Iterable[Path]) -> list[str]:
    """Mount points of this machine's disks below /, which an overlay over / shows as empty folders."""
    skip = tuple(str(path) for path in exclude)
    found: list[str] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4]
        if point == "/" or after.split(" ")[0] not in _DISK_FILE_SYSTEMS or "\\" in point:
            continue
        # the folders that every container has its own of
        if not point.startswith(("/proc", "/sys", "/dev", "/run", "/tmp", *skip)):  # noqa: S108
            found.append(point)
    return found
