"""Projections of engine pods and GPU classes: the fields that the ledger reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pydantic
import structlog

from shoal.api import names
from shoal.api.gpuclass import GPUClass
from shoal.api.meta import JsonObject
from shoal.core import quantity
from shoal.core.reconcile import Held, Price, price
from shoal.kube.projections import engine_requests

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EnginePod:
    """One engine pod. Times are milliseconds since 1970 (UTC)."""

    uid: str
    key: str
    """namespace/name."""
    model: str
    """namespace/name."""
    model_uid: str
    gpu_class: str
    """'' if it has none."""
    node: str
    """'' until it is scheduled."""
    ip: str | None
    gpus: Mapping[str, int]
    """Extended resources that it holds once it is scheduled."""
    since: int | None
    """When it was scheduled; None: it was not."""
    finished: bool
    """Succeeded or Failed: it holds no GPUs any more."""
    ended: int | None
    """When its last container ended, if it is finished and the kubelet reports it."""
    mtls: bool = False
    """Whether its agent uses mutual TLS."""

    def held(self, resource: str | None, until: int | None) -> Held | None:
        """The GPUs that it holds; None: none. `resource` is the extended resource of its class (None: the class is
        unknown); `until` is when it released them, None while it holds them."""
        gpus = sum(self.gpus.values()) if resource is None else self.gpus.get(resource, 0)
        if self.since is None or not gpus:
            return None
        return Held(self.uid, self.model, self.gpu_class, gpus, self.since, until)


@dataclass(frozen=True, slots=True)
class GPUPrice:
    """Resource name and price of a GPUClass."""

    name: str
    resource: str
    price: Price | None
    """None: it has no price."""


def project_pod(raw: JsonObject) -> EnginePod | None:
    """Projects an engine pod."""
    metadata: Mapping[str, Any] = raw["metadata"]
    labels: Mapping[str, str] = metadata.get("labels") or {}
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    spec: JsonObject = raw.get("spec") or {}
    status: Mapping[str, Any] = raw.get("status") or {}
    model = labels.get(names.LABEL_MODEL)
    if model is None:
        return None
    finished = status.get("phase") in ("Succeeded", "Failed")
    containers: list[Mapping[str, Any]] = status.get("containerStatuses") or []
    ends = [_finished_at(container) for container in containers]
    return EnginePod(
        uid=metadata["uid"],
        key=f"{metadata['namespace']}/{metadata['name']}",
        model=f"{metadata['namespace']}/{model}",
        model_uid=labels.get(names.LABEL_MODEL_UID, ""),
        gpu_class=labels.get(names.LABEL_GPU_CLASS, ""),
        node=spec.get("nodeName") or "",
        ip=status.get("podIP") or None,
        gpus=engine_requests(metadata, spec),
        since=_since(metadata, status) if spec.get("nodeName") else None,
        finished=finished,
        ended=max((end for end in ends if end is not None), default=None) if finished else None,
        mtls=annotations.get(names.ANNOTATION_TRANSPORT) == names.TRANSPORT_MTLS,
    )


def project_class(raw: JsonObject) -> GPUPrice | None:
    """Projects a GPUClass; None: it does not validate."""
    name: str = raw["metadata"]["name"]
    try:
        found = GPUClass.model_validate({"metadata": raw["metadata"], "spec": raw.get("spec")})
        cost = found.spec.hourly_cost
        priced = None if cost is None else price(quantity.parse(cost.amount), cost.currency)
    except (pydantic.ValidationError, ValueError) as error:
        log.warning("a GPUClass is left out: it does not validate", name=name, kind=type(error).__name__)
        return None
    return GPUPrice(name, found.resource, priced)


def _since(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> int | None:
    conditions: list[Mapping[str, Any]] = status.get("conditions") or []
    for condition in conditions:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "True":
            return _ms(condition.get("lastTransitionTime"))
    return _ms(metadata.get("creationTimestamp"))


def _finished_at(container: Mapping[str, Any]) -> int | None:
    state: Mapping[str, Any] = container.get("state") or {}
    terminated: Mapping[str, Any] = state.get("terminated") or {}
    return _ms(terminated.get("finishedAt"))


def _ms(text: str | None) -> int | None:
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000) if text else None
    except ValueError:
        return None
