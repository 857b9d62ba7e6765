"""The real KEDA in a lab: operator, metrics adapter and admission webhooks as pods, with KEDA's own manifests and RBAC.

Built once from the Go module below `images/lab/keda/`.
"""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from shoal_dev.lab import gobuild
from shoal_dev.lab.errors import LabError
from shoal_dev.lab.gobuild import MANIFESTS, Announce
from shoal_dev.lab.node.config import Bind, ImageConfig

if TYPE_CHECKING:
    from shoal_dev.lab.api import Lab

MODULE: Final = gobuild.Module(
    "keda",
    (
        "github.com/kedacore/keda/v2/cmd/adapter",
        "github.com/kedacore/keda/v2/cmd/webhooks",
        "github.com/kedacore/keda/v2/cmd/operator",
    ),
    "github.com/kedacore/keda/v2",
    "-s -w -X github.com/kedacore/keda/v2/version.Version={number}",
    20,
    program="operator",
    manifests=("config",),
)
NAMESPACE: Final = "keda"
WORKLOADS: Final = ("keda-operator", "keda-metrics-apiserver", "keda-admission")
"""Deployments in NAMESPACE."""
API_SERVICE: Final = "v1beta1.external.metrics.k8s.io"
_PROGRAMS: Final = {
    "keda": ("operator", "/keda"),
    "keda-metrics-apiserver": ("adapter", "/keda-adapter"),
    "keda-admission-webhooks": ("webhooks", "/keda-admission-webhooks"),
}
"""Image repository -> built program, and where the image has it."""
_USER: Final = 1000
"""Of KEDA's images."""
_WAIT_S: Final = 180

Object = dict[str, Any]


def find_or_build(announce: Announce) -> Path:
    """The folder with KEDA's programs and manifests; about 20 CPU minutes and 6 GB of disk when nothing is cached.

    Raises LabError.
    """
    sources = gobuild.needed_sources()
    if not gobuild.is_built(sources, MODULE):
        announce("KEDA is built from source, once, with all of its scalers; that takes long")
    gobuild.build(sources, (MODULE,), announce)
    return gobuild.cached(sources, MODULE)


def images(found: Path) -> dict[str, ImageConfig]:
    """Rows of the image table: `found` as from `find_or_build`."""
    return {
        name: ImageConfig(binds=(Bind(host=found / program, container=path),), user=_USER)
        for name, (program, path) in _PROGRAMS.items()
    }


def adapted(objects: list[Object]) -> list[Object]:
    """KEDA's manifests as they are, but for the first look of its probes: at once, instead of after 20 to 25 s."""
    for each in objects:
        if each["kind"] == "Deployment":
            for container in each["spec"]["template"]["spec"]["containers"]:
                for probe in ("livenessProbe", "readinessProbe"):
                    container[probe] |= {"initialDelaySeconds": 0, "periodSeconds": 1, "failureThreshold": 60}
    return objects


def install(lab: "Lab", found: Path, announce: Announce) -> None:
    """Returns when KEDA answers the API server for external metrics. Raises LabError."""
    begun = time.monotonic()
    text = lab.kubectl("kustomize", str(found / MANIFESTS / "default"))
    objects = adapted([each for each in yaml.safe_load_all(text) if each])
    everything = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    # Server-side: the CRD of ScaledJobs is too large for the annotation that a client-side apply leaves.
    lab.kubectl("apply", "--server-side", "--field-manager=shoal-lab", "-f", "-", stdin=everything, timeout=120)
    wait_until_ready(lab)
    announce(f"KEDA ready after {time.monotonic() - begun:.0f} s")


def wait_until_ready(lab: "Lab", timeout: float = _WAIT_S) -> None:
    """Until all of KEDA's Deployments are available and its APIService is too. Raises LabError."""
    within = f"--timeout={timeout:.0f}s"
    workloads = [f"deployment/{name}" for name in WORKLOADS]
    try:
        lab.kubectl(
            "wait", "--for=condition=Available", "-n", NAMESPACE, *workloads, within, timeout=timeout * 2 + 30
        )  # fmt: skip
        lab.kubectl("wait", "--for=condition=Available", f"apiservice/{API_SERVICE}", within, timeout=timeout + 30)
    except LabError as error:
        pods = lab.kubectl("get", "pods", "-n", NAMESPACE, check=False)
        raise LabError(f"KEDA did not come up ({error}); see `shoal lab logs keda-operator`:\n{pods}") from error
