"""What a container's process does before it becomes the container's program: root file system, user, exec.

Runs in a fork of the spawner, in new mount and pid namespaces. The root is an overlay over this machine's own root, so
an "image" is this machine plus the binds of the image table; what the container writes stays in a tmpfs.
Standard library only, and no logging: an error goes to the spawner as a sentence.
"""

import errno
import os
import stat
from pathlib import Path
from typing import TypedDict

from shoal_dev.lab.node import linux


class Mount(TypedDict):
    source: str
    target: str
    """Absolute path in the container."""
    read_only: bool


class User(TypedDict):
    uid: int
    gid: int
    groups: list[int]
    capabilities: list[str]
    """What a root user keeps, without CAP_; other users have none."""
    no_new_privileges: bool


class ContainerSpec(TypedDict):
    """All that the spawner needs to know of one container. Plain data, because it crosses a socket."""

    sandbox: str
    """Key of the pod's network, host name and IPC namespaces."""
    folder: str
    """On tmpfs: upper and work folders of the overlay, and the merged root."""
    argv: list[str]
    env: dict[str, str]
    cwd: str
    user: User
    mounts: list[Mount]
    """In order; a target below an earlier one is fine."""
    host_mounts: list[str]
    """Other file systems of this machine (such as /home), which an overlay over / does not contain."""
    passable: list[str]
    """Folders that every user may walk through, whatever their mode on this machine (such as /root)."""
    read_only_root: bool


_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}


def build(spec: ContainerSpec) -> None:
    """Builds the root and moves into it. Needs a fresh mount namespace. Raises OSError."""
    folder = spec["folder"]
    upper, work, root = f"{folder}/upper", f"{folder}/work", f"{folder}/root"
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("overlay", root, "overlay", data=f"lowerdir=/,upperdir={upper},workdir={work}")
    for path in spec["passable"]:
        mode = stat.S_IMODE(os.stat(root + path).st_mode)
        if mode & 0o55 != 0o55:  # group too: an image user's group is often 0, the owner of /root
            os.chmod(root + path, mode | 0o55)  # noqa: S103 - in the overlay, not on this machine
    for path in spec["host_mounts"]:
        if os.path.lexists(path):  # somebody may have unmounted and removed it since the node looked
            linux.bind(path, root + path, read_only=True)
    linux.mount("proc", f"{root}/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    linux.bind("/sys", f"{root}/sys", read_only=True)
    linux.mount("tmpfs", f"{root}/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777")  # noqa: S108
    # not this machine's /run: its sockets (a container runtime's, a DBus) are none of the container's business
    linux.mount("tmpfs", f"{root}/run", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755")
    _devices(f"{root}/dev")
    for mount in spec["mounts"]:
        target = inside(root, mount["target"])
        _make_target(Path(mount["source"]), Path(target))
        linux.bind(mount["source"], target, mount["read_only"])
    if spec["read_only_root"]:
        linux.mount("none", root, flags=linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY)
    linux.pivot_root(root)


def inside(root: str, path: str) -> str:
    """`path` below `root`, its symbolic links followed as if `root` were /: an absolute link must not lead outside."""
    done = ""
    left = [part for part in path.split("/") if part not in ("", ".")]
    for _ in range(255):
        if not left:
            break
        part = left.pop(0)
        if part == "..":
            done = done.rpartition("/")[0]
            continue
        candidate = f"{done}/{part}"
        if os.path.islink(root + candidate):
            link = os.readlink(root + candidate)
            if link.startswith("/"):
                done = ""
            left = [piece for piece in link.split("/") if piece not in ("", ".")] + left
        else:
            done = candidate
    return root + (done or "/")


def _make_target(source: Path, target: Path) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()


def _devices(dev: str) -> None:
    linux.mount("tmpfs", dev, "tmpfs", linux.MS_NOSUID, "mode=755")
    for name, (major, minor) in _DEVICES.items():
        os.mknod(f"{dev}/{name}", 0o666 | stat.S_IFCHR, os.makedev(major, minor))
        os.chmod(f"{dev}/{name}", 0o666)  # noqa: S103 - the umask took some away
    for name, target in {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}.items():
        os.symlink(f"/proc/self/{target}", f"{dev}/{name}")
    os.symlink("pts/ptmx", f"{dev}/ptmx")
    os.mkdir(f"{dev}/pts")
    linux.mount(
        "devpts", f"{dev}/pts", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620"
    )
    os.mkdir(f"{dev}/shm")
    linux.mount("tmpfs", f"{dev}/shm", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777,size=64m")


def become(user: User) -> None:
    """Gives up what the container may not have. Raises OSError."""
    os.umask(0o022)
    linux.keep_capabilities(user["capabilities"])
    os.setgroups(user["groups"])
    os.setresgid(user["gid"], user["gid"], user["gid"])
    os.setresuid(user["uid"], user["uid"], user["uid"])
    if user["no_new_privileges"]:
        linux.no_new_privileges()


def run(argv: list[str], env: dict[str, str], cwd: str) -> None:
    """Becomes the program. Raises OSError with a container runtime's wording when it cannot."""
    try:
        os.chdir(cwd)
    except OSError as error:
        raise OSError(error.errno, f'chdir to cwd ("{cwd}") failed: {error.strerror}') from error
    try:
        os.execve(_find(argv[0], env.get("PATH", "")), argv, env)  # noqa: S606 - becoming the program is the point
    except OSError as error:
        why = (error.strerror or str(error)).replace("No such", "no such")
        raise OSError(error.errno, f'exec: "{argv[0]}": {why}') from error


def _find(program: str, path: str) -> str:
    if "/" in program:
        return program
    for folder in path.split(":"):
        candidate = f"{folder}/{program}"
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    raise OSError(errno.ENOENT, "executable file not found in $PATH")
