"""What a release is called and where it goes."""

import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPOSITORY: Final = "https://github.com/shoal-dev/shoal"
REGISTRY: Final = "ghcr.io/shoal-dev"
IMAGE: Final = f"{REGISTRY}/shoal"
CHARTS: Final = ("shoal-crds", "shoal")
"""In the order in which they are installed."""
CHART_REGISTRY: Final = f"oci://{REGISTRY}/charts"


class ReleaseError(Exception):
    """The message is for the maintainer: what is wrong, and what to do."""


@dataclass(frozen=True, slots=True, order=True)
class Platform:
    """A platform by the names that Go, and so krew, gives to it."""

    os: str
    arch: str

    def __str__(self) -> str:
        return f"{self.os}/{self.arch}"


PLATFORMS: Final = tuple(Platform(system, arch) for system in ("linux", "darwin") for arch in ("amd64", "arm64"))
"""Those of the kubectl plugin. Not Windows: uvloop does not exist for it."""
_MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


def this_platform() -> Platform:
    machine = platform.machine()
    return Platform(sys.platform, _MACHINES.get(machine, machine))


def root() -> Path:
    """The checkout that this package lies in. Raises ReleaseError without one."""
    found = Path(__file__).resolve().parents[3]
    if not (found / "pyproject.toml").is_file() or not (found / "charts").is_dir():
        raise ReleaseError("a release is built in a checkout of Shoal only")
    return found


def version(checkout: Path) -> str:
    """The version in pyproject.toml, which all other files repeat."""
    return tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def uv() -> str:
    """The uv that started this process, the one on PATH, or the private one of the Makefile."""
    private = root() / ".venv-uv" / "bin" / "uv"
    found = os.environ.get("UV") or shutil.which("uv") or (str(private) if private.exists() else None)
    if found is None:
        raise ReleaseError("uv is not there: run `make setup`")
    return found


def run(
    command: Sequence[str | Path],
    *,
    folder: Path,
    timeout: float = 600,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Runs a program and returns what it wrote, both streams together. Raises ReleaseError with its last lines."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReleaseError(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        lines = "\n".join(done.stdout.splitlines()[-20:])
        raise ReleaseError(f"`{' '.join(str(part) for part in command)}` failed:\n{lines}")
    return done.stdout


def commit_time(checkout: Path) -> int:
    """Seconds since 1970 of the checked-out commit: files in archives get this time, so that two builds are equal."""
    try:
        return int(run(["git", "log", "-1", "--format=%ct"], folder=checkout, timeout=30))
    except (ReleaseError, ValueError) as error:
        raise ReleaseError(f"the commit's time is unknown: {error}") from error
