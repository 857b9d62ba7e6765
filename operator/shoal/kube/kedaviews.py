"""KEDA's objects, and HorizontalPodAutoscalers, as decisions know them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, cast

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.core import quantity
from shoal.core.keda import Autoscaler, ScaledObject
from shoal.kube.projections import Child, child

_PAUSES: Final = (
    "autoscaling.keda.sh/paused",
    "autoscaling.keda.sh/paused-replicas",
    "autoscaling.keda.sh/paused-scale-in",
    "autoscaling.keda.sh/paused-scale-out",
)
_FALSE: Final = ("0", "f", "F", "false", "FALSE", "False")
"""What KEDA (Go's ParseBool) reads as off; anything else pauses."""


def scaled_object(raw: JsonObject) -> Child | None:
    """Shoal's own only."""
    kept = child(raw)
    if kept is None:
        return None
    metadata, spec, status = raw["metadata"], _map(raw, "spec"), _map(raw, "status")
    ready = _condition(status, "Ready")
    return replace(
        kept,
        scaled=ScaledObject(
            namespace=kept.namespace,
            name=kept.name,
            uid=kept.uid,
            gpu_class=_map(metadata, "labels").get(names.LABEL_GPU_CLASS, ""),
            deleting="deletionTimestamp" in metadata,
            minimum=spec.get("minReplicaCount") or 0,
            maximum=spec.get("maxReplicaCount") or 0,
            ready=_truth(ready),
            message=str(ready.get("message") or ""),
            paused_by=_paused_by(_map(metadata, "annotations")),
            was_active=bool(status.get("lastActiveTime")),
            finalizers=tuple(metadata.get("finalizers") or ()),
        ),
    )


def autoscaler(raw: JsonObject) -> Autoscaler | None:
    """Of Deployments only."""
    metadata, spec = raw["metadata"], _map(raw, "spec")
    target = _map(spec, "scaleTargetRef")
    if target.get("kind") != "Deployment":
        return None
    active = _condition(_map(raw, "status"), "ScalingActive")
    behavior = _map(spec, "behavior")
    tolerances = [_map(behavior, way).get("tolerance") for way in ("scaleUp", "scaleDown")]
    return Autoscaler(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        target=str(target.get("name", "")),
        # KEDA hands the labels of a ScaledObject on: those of other people's do not have this one.
        scaled_object=next(
            (str(o["uid"]) for o in _seq(metadata, "ownerReferences") if o.get("kind") == "ScaledObject"), None
        )
        if names.LABEL_MODEL_UID in _map(metadata, "labels")
        else None,
        exact=all(t is not None and quantity.parse(str(t)) == 0 for t in tolerances),
        active=_truth(active),
        disabled=active.get("reason") == "ScalingDisabled",
        message=str(active.get("message") or ""),
    )


def slim_autoscaler(raw: JsonObject) -> JsonObject | None:
    """What is kept of an HPA: without its metrics, which change all the time."""
    metadata, spec = raw["metadata"], _map(raw, "spec")
    if _map(spec, "scaleTargetRef").get("kind") != "Deployment":
        return None
    kept = ("namespace", "name", "uid", "resourceVersion", "generation", "labels", "ownerReferences")
    active = _condition(_map(raw, "status"), "ScalingActive")
    return {
        "metadata": {k: metadata[k] for k in kept if k in metadata},
        "spec": {k: spec[k] for k in ("scaleTargetRef", "behavior") if k in spec},
        "status": {"conditions": [active] if active else []},
    }


def _paused_by(annotations: Mapping[str, str]) -> str | None:
    for name in _PAUSES:
        value = annotations.get(name)
        if value is not None and (name.endswith("paused-replicas") or value not in _FALSE):
            return name
    return None


def _truth(condition: JsonObject) -> bool | None:
    return {"True": True, "False": False}.get(condition.get("status", ""))


def _condition(status: JsonObject, kind: str) -> JsonObject:
    found = [c for c in _seq(status, "conditions") if c.get("type") == kind]
    return found[0] if found else {}


def _map(obj: Mapping[str, Any], field: str) -> JsonObject:
    value: Any = obj.get(field)
    return cast("JsonObject", value) if isinstance(value, dict) else {}


def _seq(obj: Mapping[str, Any], field: str) -> list[JsonObject]:
    value: Any = obj.get(field)
    return cast("list[JsonObject]", value) if isinstance(value, list) else []
