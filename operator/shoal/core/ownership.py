"""Whether a pod is a replica of a Model: by the chain of its owners, never by its labels alone.

    pod -> ReplicaSet -> Deployment -> Model

Each link names the next as its controller by uid. All are in the Model's namespace, say the same Model and GPU class in
their labels, and the Deployment has the name that Shoal gives it. Anybody may write labels; in another namespace nobody
can write an owner with the right uid.

Who may create pods in the Model's own namespace can still copy an ownerReference: that is what the admission policy
`shoal-children` is for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from shoal.api import names
from shoal.api.meta import GROUP
from shoal.core import children

_APPS: Final = "apps"


@dataclass(frozen=True, slots=True)
class Owner:
    """The controller that an object names in its ownerReferences."""

    group: str
    kind: str
    uid: str


@dataclass(frozen=True, slots=True)
class Link:
    """What the chain needs of a pod, a ReplicaSet or a Deployment. Labels that are missing are ''."""

    uid: str
    namespace: str
    name: str
    model: str
    """The Model's name, as the label says."""
    model_uid: str
    gpu_class: str
    owner: Owner | None

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def labels(self) -> tuple[str, str, str]:
        return self.model, self.model_uid, self.gpu_class


@dataclass(frozen=True, slots=True)
class OwnershipVerdict:
    """`unknown`: an object of the chain was not seen yet, or is gone."""

    outcome: Literal["proven", "unknown", "refused"]
    reason: str = ""
    through: tuple[str, ...] = ()
    """Uids that were asked for: with a change of one of them the verdict may be another."""


def link(raw: Mapping[str, Any]) -> Link:
    """Of a raw object, or of its metadata only."""
    metadata: Mapping[str, Any] = raw["metadata"]
    labels: Mapping[str, str] = metadata.get("labels") or {}
    references: list[Mapping[str, Any]] = metadata.get("ownerReferences") or []
    controller = next((r for r in references if r.get("controller")), None)
    return Link(
        uid=str(metadata.get("uid", "")),
        namespace=str(metadata.get("namespace", "")),
        name=str(metadata.get("name", "")),
        model=labels.get(names.LABEL_MODEL, ""),
        model_uid=labels.get(names.LABEL_MODEL_UID, ""),
        gpu_class=labels.get(names.LABEL_GPU_CLASS, ""),
        owner=None if controller is None else _owner(controller),
    )


def verdict(
    pod: Link, replica_sets: Mapping[str, Link], deployments: Mapping[str, Link], models: Mapping[str, str]
) -> OwnershipVerdict:
    """`replica_sets` and `deployments` by uid; `models`: `namespace/name` by uid."""
    owner = pod.owner
    if owner is None or (owner.group, owner.kind) != (_APPS, "ReplicaSet"):
        return OwnershipVerdict("refused", "no ReplicaSet controls it")
    replica_set = replica_sets.get(owner.uid)
    if replica_set is None:
        return _unless_elsewhere(pod, models, f"its ReplicaSet {owner.uid} is not known", owner.uid)
    through = (owner.uid,)
    if (differs := _differs(pod, replica_set, "ReplicaSet")) is not None:
        return OwnershipVerdict("refused", differs, through)
    owner = replica_set.owner
    if owner is None or (owner.group, owner.kind) != (_APPS, "Deployment"):
        return OwnershipVerdict("refused", "no Deployment controls its ReplicaSet", through)
    through = (*through, owner.uid)
    deployment = deployments.get(owner.uid)
    if deployment is None:
        return _unless_elsewhere(pod, models, f"its Deployment {owner.uid} is not known", *through)
    if (differs := _differs(pod, deployment, "Deployment")) is not None:
        return OwnershipVerdict("refused", differs, through)
    owner = deployment.owner
    if owner is None or owner != Owner(GROUP, "Model", pod.model_uid):
        return OwnershipVerdict(
            "refused", "its Deployment is not controlled by the Model that its labels name", through
        )
    if not _named_by_shoal(deployment):
        return OwnershipVerdict("refused", "its Deployment has not the name that Shoal gives", through)
    through = (*through, owner.uid)
    if owner.uid not in models:
        return OwnershipVerdict("unknown", f"its Model {owner.uid} is not known", through)
    return (
        _unless_elsewhere(pod, models, "", *through) if models[owner.uid] != _model(pod) else OwnershipVerdict("proven")
    )


def is_variant(deployment: Link, model: str, model_uid: str) -> bool:
    """Whether a Deployment is one that Shoal makes for the Model `namespace/name` with this uid."""
    ours = deployment.owner == Owner(GROUP, "Model", model_uid) and deployment.model_uid == model_uid
    return ours and _model(deployment) == model and _named_by_shoal(deployment)


def _named_by_shoal(deployment: Link) -> bool:
    return deployment.name == children.deployment(deployment.model, deployment.gpu_class)


def _unless_elsewhere(pod: Link, models: Mapping[str, str], unknown: str, *through: str) -> OwnershipVerdict:
    known = models.get(pod.model_uid)
    asked = (*through, pod.model_uid)
    if known is not None and known != _model(pod):
        return OwnershipVerdict(
            "refused", "the Model with the uid of its labels is another, or in another namespace", asked
        )
    return OwnershipVerdict("unknown", unknown, asked)


def _model(labelled: Link) -> str:
    return f"{labelled.namespace}/{labelled.model}"


def _differs(pod: Link, other: Link, kind: str) -> str | None:
    if other.namespace != pod.namespace:
        return f"its {kind} is in another namespace"
    if other.labels != pod.labels:
        return f"its labels and those of its {kind} name different Models or GPU classes"
    return None


def _owner(reference: Mapping[str, Any]) -> Owner:
    group = str(reference.get("apiVersion", "")).rpartition("/")[0]
    return Owner(group, str(reference.get("kind", "")), str(reference.get("uid", "")))
