"""The admission policy on ScaledObjects that Shoal made, on a real API server."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.kube.resources import SCALEDOBJECTS
from tests.e2e.test_policies import LABELS, MASTERS, OPERATOR, PERSON, guarded, send
from tests.support.apiserver import ApiServer
from tests.support.kedastandin import crd

__all__ = ["guarded"]


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


def scaled(most: int, labels: dict[str, str] = LABELS) -> dict[str, Any]:
    metadata = {"name": "m-l4", "namespace": "guarded", "labels": labels}
    return {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": metadata} | {
        "spec": {"minReplicaCount": 1, "maxReplicaCount": most, "triggers": [{"type": "external-push"}]}
    }


@pytest.mark.apiserver
@pytest.mark.usefixtures("with_keda")
def test_nobody_but_shoal_says_how_many_replicas_a_scaled_object_may_have(guarded: ApiServer) -> None:
    assert send(guarded, OPERATOR, "create", scaled(2)).returncode == 0
    for verb, one in (("apply", scaled(1)), ("delete", scaled(2)), ("replace", scaled(2, {"x": "y"}))):
        done = send(guarded, PERSON, verb, one)
        assert done.returncode != 0
        assert "m-l4 belongs to a Model: change the Model instead. Shoal would undo this." in done.stderr

    # Pausing it, and what KEDA itself notes on it, stays possible; so does what frees it where KEDA is away.
    paused = "autoscaling.keda.sh/paused=true"
    assert guarded.run("annotate", "-n=guarded", "scaledobject/m-l4", paused, PERSON, MASTERS).returncode == 0
    note = ("label", "-n=guarded", "scaledobject/m-l4", "scaledobject.keda.sh/name=m-l4")
    assert guarded.run(*note, "--as=system:serviceaccount:keda:keda-operator", MASTERS).returncode == 0
    free = ("patch", "-n=guarded", "scaledobject/m-l4", "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    assert guarded.run(*free, PERSON, MASTERS).returncode == 0

    assert send(guarded, OPERATOR, "apply", scaled(3), "--server-side", "--force-conflicts").returncode == 0
    assert send(guarded, OPERATOR, "delete", scaled(3)).returncode == 0
