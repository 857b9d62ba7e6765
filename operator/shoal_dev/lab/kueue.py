"""The real Kueue, for tests of Models whose pods wait for a queue's quota. Built once from the Go module below
`images/lab/kueue/`."""

from pathlib import Path
from typing import Final

from shoal_dev.lab import gobuild
from shoal_dev.lab.gobuild import Announce

MODULE: Final = gobuild.Module(
    "kueue",
    ("sigs.k8s.io/kueue/cmd/kueue",),
    "sigs.k8s.io/kueue",
    "-s -w -X sigs.k8s.io/kueue/pkg/version.GitVersion={version}",
    8,
    program="kueue",
    manifests=("config/components",),
    others=(("k8s.io/autoscaler/cluster-autoscaler/apis", "config/crd"),),  # ProvisioningRequests
)


def find_or_build(announce: Announce) -> Path:
    """The folder with the program and its manifests. Raises LabError."""
    sources = gobuild.needed_sources()
    gobuild.build(sources, (MODULE,), announce)
    return gobuild.cached(sources, MODULE)
