"""The owners of an engine pod, as the controllers of a cluster make them."""

from typing import Any

from shoal.api import names
from shoal.core import children
from shoal.core.ownership import Link
from shoal.kube.ownership import Ownership


class LabelsSuffice(Ownership):
    """For tests that are about something else: every pod is the Model's that its labels name."""

    def pod(self, pod: Link) -> bool:
        return bool(pod.model_uid)


def _reference(kind: str, name: str, uid: str, version: str) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "name": name, "uid": uid, "controller": True}


def owned(pod: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The pod with its owner, its ReplicaSet and its Deployment; the Model is the one that the labels name."""
    metadata = pod["metadata"]
    labels: dict[str, str] = metadata["labels"]
    model, uid = labels[names.LABEL_MODEL], labels[names.LABEL_MODEL_UID]
    deployment = children.deployment(model, labels.get(names.LABEL_GPU_CLASS, ""))
    at = {"namespace": metadata["namespace"], "labels": labels}
    made = (
        ("ReplicaSet", f"{deployment}-1", f"uid-{deployment}-1", "apps/v1"),
        ("Deployment", deployment, f"uid-{deployment}", "apps/v1"),
        ("Model", model, uid, "shoal.dev/v1alpha1"),
    )
    above = [[_reference(kind, name, of, version)] for kind, name, of, version in made]
    own, replica_set = made[0], made[1]
    return (
        {**pod, "metadata": {**metadata, "ownerReferences": above[0]}},
        {"metadata": {**at, "name": own[1], "uid": own[2], "ownerReferences": above[1]}},
        {"metadata": {**at, "name": replica_set[1], "uid": replica_set[2], "ownerReferences": above[2]}},
    )
