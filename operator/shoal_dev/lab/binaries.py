"""Finds the programs that the lab runs, or builds them once: Kubernetes' control plane and helm.

In this order: a folder that the user names (official release binaries work), the cache, PATH, a build from
`images/lab/` (see `gobuild`).
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_dev.lab import gobuild
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.gobuild import Announce

BINARIES_ENV: Final = "SHOAL_LAB_BINARIES"
COMPONENTS: Final = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
OLDEST_MINOR: Final = 33
"""Kubernetes 1.33: native sidecar containers, which engine pods use, are generally available from there."""


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


# Without the version in it the server reports v0.0.0-master, and clients take it for a very old one.
_KUBERNETES: Final = (
    "-s -w -X k8s.io/component-base/version.gitVersion={version} -X k8s.io/component-base/version.gitMajor=1 "
    "-X k8s.io/component-base/version.gitMinor={minor} -X k8s.io/component-base/version.gitTreeState=clean "
    "-X k8s.io/client-go/pkg/version.gitVersion={version}"
)
HYPERKUBE: Final = gobuild.Module(
    "hyperkube", (".",), "k8s.io/kubernetes", _KUBERNETES, 12, program="hyperkube", links=COMPONENTS
)
HELM: Final = gobuild.Module(
    "helm",
    ("helm.sh/helm/v4/cmd/helm",),
    "helm.sh/helm/v4",
    "-s -w -X helm.sh/helm/v4/internal/version.version={version} "
    "-X helm.sh/helm/v4/internal/version.gitTreeState=clean",
    2,
    program="helm",
)
KREW: Final = gobuild.Module(
    "krew",
    ("sigs.k8s.io/krew/cmd/krew",),
    "sigs.k8s.io/krew",
    "-s -w -X sigs.k8s.io/krew/internal/version.gitTag={version}",
    1,
    program="krew",
)
"""kubectl's plugin manager, with which the test of a release installs the plugin."""
KUBELET: Final = gobuild.Module(
    "kubelet", (".",), "k8s.io/kubernetes", _KUBERNETES, 4, program="kubelet", folder="hyperkube", tags="node"
)
"""For nodes with a real kubelet: the same module, and the kubelet with it."""


def find(folder: Path | None = None) -> Binaries | None:
    """What is there without a build: from `folder` or SHOAL_LAB_BINARIES, else the cache, else PATH; else None.

    Raises LabError when a named folder does not hold what it should.
    """
    if folder is None and (named := os.environ.get(BINARIES_ENV)):
        folder = Path(named)
    if folder is not None:
        return _from_folder(folder)
    sources = gobuild.sources()
    if sources is not None and gobuild.is_built(sources, HYPERKUBE) and gobuild.is_built(sources, HELM):
        return Binaries(gobuild.cached(sources, HYPERKUBE), gobuild.cached(sources, HELM) / "helm")
    on_path = shutil.which("kube-apiserver")
    if on_path is not None and all((Path(on_path).parent / name).exists() for name in COMPONENTS):
        return _from_folder(Path(on_path).parent)
    return None


def find_or_build(folder: Path | None = None, announce: Announce = print) -> Binaries:
    """Like `find`, and builds what is missing: about 12 CPU minutes and 4 GB of disk when nothing is cached.

    Raises LabError.
    """
    found = find(folder)
    if found is not None:
        return found
    sources = gobuild.needed_sources()
    gobuild.build(sources, (HYPERKUBE, HELM), announce)
    return Binaries(gobuild.cached(sources, HYPERKUBE), gobuild.cached(sources, HELM) / "helm")


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


def minor(binaries: Binaries) -> int:
    """36 of Kubernetes 1.36. Raises LabError."""
    return _kubernetes_version(binaries.path("kube-apiserver"))[1]


def _kubernetes_version(program: Path) -> tuple[int, int]:
    try:
        out = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{program} --version does not run: {error}") from error
    match = re.search(r"v(\d+)\.(\d+)", out)
    if match is None:
        raise LabError(f"{program} --version says {out.strip()!r}, which is no Kubernetes version")
    return int(match[1]), int(match[2])


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
