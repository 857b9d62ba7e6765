"""What a node with a real kubelet runs: kubelet, containerd, CNI plugins, runc."""

import shutil
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from shoal_dev.lab import binaries, gobuild, network
from shoal_dev.lab.gobuild import Announce

RUNTIME: Final = gobuild.Module(
    "containerd",
    (
        "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
        "github.com/containerd/containerd/v2/cmd/ctr",
        "github.com/containernetworking/plugins/plugins/ipam/host-local",
        "github.com/containernetworking/plugins/plugins/main/bridge",
        "github.com/containernetworking/plugins/plugins/main/loopback",
        ".",
        "github.com/containerd/containerd/v2/cmd/containerd",
    ),
    "github.com/containerd/containerd/v2",
    "-s -w -X github.com/containerd/containerd/v2/version.Version={version}",
    6,
    program="containerd",
    tags="no_btrfs,no_devmapper,no_zfs",
)
PAUSE: Final = "noderuntime"
"""The module's own command: what holds a pod's namespaces open."""
_RUNC: Final = {"runc": "runc"}
"""Program -> Debian package. Not built here: it needs a C compiler."""


class Programs(BaseModel):
    """Where they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kubelet: Path
    runtime: Path
    """Folder of containerd, its shim, ctr, the CNI plugins and `PAUSE`."""
    runc: Path

    def path(self, name: str) -> str:
        return str(self.runtime / name)


def find_or_build(found: binaries.Binaries, announce: Announce) -> Programs:
    """Builds what is not cached (about 10 CPU minutes) and has runc installed by apt-get where it is missing.

    A kubelet beside the control plane's programs, as in a folder of the user's, is taken as it is. Raises LabError.
    """
    network.require_programs(announce, _RUNC)
    sources = gobuild.needed_sources()
    own = found.components / "kubelet"
    gobuild.build(sources, (RUNTIME,) if own.exists() else (binaries.KUBELET, RUNTIME), announce)
    kubelet = own if own.exists() else gobuild.cached(sources, binaries.KUBELET) / "kubelet"
    return Programs(kubelet=kubelet, runtime=gobuild.cached(sources, RUNTIME), runc=Path(shutil.which("runc") or ""))
