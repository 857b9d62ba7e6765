"""The real Karpenter with its kwok provider, whose machines are Node objects: for tests of nodes that an autoscaler
adds. Built once from the Go module below `images/lab/karpenter/`."""

from pathlib import Path
from typing import Final

from shoal_dev.lab import gobuild
from shoal_dev.lab.gobuild import Announce

MODULE: Final = gobuild.Module(
    "karpenter",
    ("sigs.k8s.io/karpenter/kwok",),
    "sigs.k8s.io/karpenter",
    "-s -w -X sigs.k8s.io/karpenter/pkg/operator.Version={number}",
    8,
    program="karpenter",
    manifests=("pkg/apis/crds", "kwok/apis/crds"),
)


def find_or_build(announce: Announce) -> Path:
    """The folder with the program and its CRDs. Raises LabError."""
    sources = gobuild.needed_sources()
    gobuild.build(sources, (MODULE,), announce)
    return gobuild.cached(sources, MODULE)
