"""The admission policy on ScaledObjects that Shoal made, on a real API server."""

import copy
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.kube.resources import SCALEDOBJECTS
from tests.e2e.test_policies import LABELS, MASTERS, OPERATOR, PERSON, guarded, send
from tests.support.apiserver import ApiServer
from tests.support.kedastandin import crd

__all__ = ["guarded"]
KEDA = "--as=system:serviceaccount:keda:keda-operator"


@pytest.fixture
def with_keda(guarded: ApiServer) -> Iterator[None]:
    kind = crd(SCALEDOBJECTS, {"type": "object", "x-kubernetes-preserve-unknown-fields": True})
    guarded.apply(kind)
    deadline = time.monotonic() + 30
    while send(guarded, OPERATOR, "create", scaled(2), "--dry-run=server").returncode:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    yield
    guarded.kubectl("delete", "crd", kind["metadata"]["name"])


def scaled(most: int, labels: dict[str, str] = LABELS, advanced: dict[str, Any] | None = None) -> dict[str, Any]:
    metadata = {"name": "m-l4", "namespace": "guarded", "labels": labels}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "m-l4"},
        "minReplicaCount": 1,
        "maxReplicaCount": most,
        "cooldownPeriod": 0,
        "advanced": {
            "restoreToOriginalReplicaCount": False,
            "horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}},
        }
        | (advanced or {}),
        "triggers": [{"type": "external-push", "metadata": {"scalerAddress": "shoal-scaler.shoal-system.svc:9666"}}],
    }
    return {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": metadata, "spec": spec}


def written_by_keda(found: dict[str, Any]) -> dict[str, Any]:
    """As KEDA's operator writes it back with its finalizer: the whole object, as its Go types have it. A false that may
    be left out is left out, and a struct that is no pointer is there."""
    found = copy.deepcopy(found)
    found["metadata"]["finalizers"] = ["finalizer.keda.sh"]
    found["metadata"]["labels"]["scaledobject.keda.sh/name"] = "m-l4"
    advanced = found["spec"]["advanced"]
    del advanced["restoreToOriginalReplicaCount"]
    advanced["scalingModifiers"] = {}
    return found


@pytest.mark.apiserver
@pytest.mark.usefixtures("with_keda")
def test_nobody_but_shoal_says_how_many_replicas_a_scaled_object_may_have(guarded: ApiServer) -> None:
    assert send(guarded, OPERATOR, "create", scaled(2)).returncode == 0
    restored, computed = {"restoreToOriginalReplicaCount": True}, {"scalingModifiers": {"formula": "0"}}
    for verb, one in (
        ("apply", scaled(1)),
        ("delete", scaled(2)),
        ("replace", scaled(2, {"x": "y"})),
        ("replace", scaled(2, advanced=restored)),
        ("replace", scaled(2, advanced=computed)),
        ("replace", scaled(2, advanced={"horizontalPodAutoscalerConfig": {"name": "another"}})),
    ):
        done = send(guarded, PERSON, verb, one)
        assert done.returncode != 0
        assert "m-l4 belongs to a Model: change the Model instead. Shoal would undo this." in done.stderr

    # Pausing it, and what KEDA itself notes on it, stays possible; so does what frees it where KEDA is away.
    paused = "autoscaling.keda.sh/paused=true"
    assert guarded.run("annotate", "-n=guarded", "scaledobject/m-l4", paused, PERSON, MASTERS).returncode == 0
    found = json.loads(guarded.kubectl("get", "scaledobject", "m-l4", "-n=guarded", "-o", "json"))
    noted = send(guarded, KEDA, "replace", written_by_keda(found))
    assert noted.returncode == 0, noted.stderr
    held = json.loads(guarded.kubectl("get", "scaledobject", "m-l4", "-n=guarded", "-o", "json"))
    assert held["metadata"]["finalizers"] == ["finalizer.keda.sh"]
    free = ("patch", "-n=guarded", "scaledobject/m-l4", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    assert guarded.run(*free, PERSON, MASTERS).returncode == 0

    assert send(guarded, OPERATOR, "apply", scaled(3), "--server-side", "--force-conflicts").returncode == 0
    assert send(guarded, OPERATOR, "delete", scaled(3)).returncode == 0
