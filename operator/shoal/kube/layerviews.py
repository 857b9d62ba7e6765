"""From raw objects to what `core/layers` reads. A field of another shape than the API's counts as absent."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, Literal, cast

from shoal.api import names
from shoal.api.billing import BillStatement
from shoal.api.gpuclass import devices_of
from shoal.api.meta import JsonObject
from shoal.api.routestats import RouteStatsPage
from shoal.core import quantity
from shoal.core.devices import ClassDevices
from shoal.core.facts import Taint
from shoal.core.layers.types import (
    AutoscalerView,
    BudgetView,
    ClaimView,
    ConditionView,
    ContainerView,
    EventView,
    ExplainedKind,
    ExternalTargetView,
    GPUHolder,
    ObjectView,
    OperatorLease,
    PolicyView,
    WhyNode,
    WhyPod,
)
from shoal.kube import deviceviews, projections

_LONGEST: Final = 8192
"""Characters of a text that are kept."""
_MOST: Final = 128
"""Conditions and containers of one object that are read."""
_LEASE_SECONDS: Final = 15


def conditions(status: Mapping[str, Any]) -> tuple[ConditionView, ...]:
    return tuple(
        ConditionView(
            type=_text(c.get("type")),
            status=_text(c.get("status")) or "Unknown",
            reason=_text(c.get("reason")),
            message=_text(c.get("message")),
            since=time_of(c.get("lastTransitionTime")),
        )
        for c in _seq(status, "conditions")
    )


def shoal_object(kind: ExplainedKind, raw: JsonObject) -> ObjectView:
    """One of Shoal's own kinds."""
    metadata, status = _map(raw, "metadata"), _map(raw, "status")
    observed = status.get("observedGeneration")
    return ObjectView(
        kind=kind,
        namespace=metadata.get("namespace"),
        name=_text(metadata.get("name")),
        generation=_number(metadata.get("generation")) or 0,
        observed_generation=_number(observed),
        conditions=conditions(status),
        paused=_map(metadata, "annotations").get(names.ANNOTATION_PAUSED) == "true",
        deleting=time_of(metadata.get("deletionTimestamp")),
        finalizers=tuple(_texts(metadata.get("finalizers"))),
        spec=_map(raw, "spec"),
        status=status,
    )


def pod(raw: JsonObject) -> WhyPod:
    metadata, spec, status = _map(raw, "metadata"), _map(raw, "spec"), _map(raw, "status")
    labels = _map(metadata, "labels")
    return WhyPod(
        namespace=_text(metadata.get("namespace")),
        name=_text(metadata.get("name")),
        node=spec.get("nodeName") or None,
        phase=_text(status.get("phase")),
        reason=_text(status.get("reason")),
        message=_text(status.get("message")),
        deleting="deletionTimestamp" in metadata,
        created=time_of(metadata.get("creationTimestamp")),
        conditions=conditions(status),
        containers=(
            *(_container(c, init=True) for c in _seq(status, "initContainerStatuses")),
            *(_container(c, init=False) for c in _seq(status, "containerStatuses")),
        ),
        model=labels.get(names.LABEL_MODEL),
        gpu_class=labels.get(names.LABEL_GPU_CLASS),
        component=labels.get(names.LABEL_COMPONENT),
        queue=_text(labels.get(names.LABEL_QUEUE)) or None,
        queue_managed=labels.get(names.LABEL_QUEUE_MANAGED) == "true",
        labels={name: _text(value) for name, value in labels.items()},
        address=_text(status.get("podIP")) or None,
        lacks_claim=projections.lacks_claim(spec, status),
        owner=next((_text(o.get("name")) for o in _seq(metadata, "ownerReferences") if o.get("controller")), ""),
        ends=time_of(metadata.get("deletionTimestamp")),
        finalizers=tuple(_texts(metadata.get("finalizers"))),
        claims=tuple(
            name
            for volume in _seq(spec, "volumes")
            if (name := _text(_map(volume, "persistentVolumeClaim").get("claimName")))
        ),
    )


def node(raw: JsonObject) -> WhyNode:
    metadata, spec, status = _map(raw, "metadata"), _map(raw, "spec"), _map(raw, "status")
    return WhyNode(
        name=_text(metadata.get("name")),
        conditions=conditions(status),
        cordoned=spec.get("unschedulable") is True,
        capacity=_devices(_map(status, "capacity")),
        allocatable=_devices(_map(status, "allocatable")),
        labels=_map(metadata, "labels"),
        deleting="deletionTimestamp" in metadata,
        taints=tuple(
            Taint(_text(t.get("key")), _text(t.get("value")), _text(t.get("effect")))
            for t in _seq(spec, "taints")
            if t.get("effect") in ("NoSchedule", "NoExecute")
        ),
    )


def event(raw: JsonObject) -> EventView:
    """An event of `events.k8s.io/v1`. Reporters that use the older API are in the deprecated fields."""
    about = _map(raw, "regarding")
    at = (
        _map(raw, "series").get("lastObservedTime")
        or raw.get("deprecatedLastTimestamp")
        or raw.get("eventTime")
        or _map(raw, "metadata").get("creationTimestamp")
    )
    return EventView(
        kind=_text(about.get("kind")),
        namespace=_text(about.get("namespace")),
        name=_text(about.get("name")),
        type=_text(raw.get("type")),
        reason=_text(raw.get("reason")),
        message=_text(raw.get("note")),
        at=time_of(at),
        source=_text(raw.get("reportingController")) or _text(_map(raw, "deprecatedSource").get("component")),
    )


def policy(raw: JsonObject) -> PolicyView:
    """A NetworkPolicy."""
    metadata = _map(raw, "metadata")
    return PolicyView(_text(metadata.get("namespace")), _text(metadata.get("name")), _map(raw, "spec"))


def claim(raw: JsonObject) -> ClaimView:
    """A PersistentVolumeClaim."""
    metadata = _map(raw, "metadata")
    return ClaimView(
        f"{_text(metadata.get('namespace'))}/{_text(metadata.get('name'))}",
        _text(_map(raw, "status").get("phase")),
        _text(_map(raw, "spec").get("storageClassName")),
        time_of(metadata.get("creationTimestamp")),
    )


def autoscaler(raw: JsonObject) -> AutoscalerView | None:
    """A HorizontalPodAutoscaler; None: it scales no Deployment, or KEDA made it for a ScaledObject."""
    metadata, target = _map(raw, "metadata"), _map(_map(raw, "spec"), "scaleTargetRef")
    keda = any(owner.get("kind") == "ScaledObject" for owner in _seq(metadata, "ownerReferences"))
    if keda or target.get("kind") != "Deployment":
        return None
    return AutoscalerView(
        _text(metadata.get("namespace")),
        _text(metadata.get("name")),
        _text(target.get("name")),
        time_of(metadata.get("creationTimestamp")),
    )


def holder(raw: JsonObject) -> GPUHolder | None:
    """A pod of others with extended resources; None: another pod, or one that holds nothing any more."""
    found = projections.pod(raw)
    if found is None or found.node is None or found.finished or found.model_uid is not None or not found.requests:
        return None
    return GPUHolder(f"{found.namespace}/{found.name}", found.node, found.requests)


def device_holders(raw: JsonObject, devices: Mapping[str, ClassDevices]) -> Iterator[GPUHolder]:
    """Who has devices that count, of these classes, by a claim. Claims of engine pods are left out."""
    claim = deviceviews.resource_claim(raw)
    if claim is None or names.LABEL_MODEL_UID in _map(raw["metadata"], "labels"):
        return
    pods = [f"{claim.namespace}/{name}" for name, _ in claim.pods]
    who = pods[0] if pods else f"{claim.namespace}/{claim.name} (a ResourceClaim that no pod uses)"
    had = frozenset(claim.devices)
    for gpu_class, of in devices.items():
        for node, matched in of.by_node.items():
            if count := sum(each.id in had and not each.device.shared for each in matched):
                yield GPUHolder(who, node, {devices_of(gpu_class): count})


def budget(tenant: ObjectView, bill: BillStatement) -> BudgetView | None:
    """A Tenant's budget with what a bill says of its month; None: it has none that can be compared with the bill."""
    given = _map(tenant.spec, "budget")
    try:
        if tokens := given.get("tokens"):
            lines = (*bill.lines, *bill.unpriced)
            used = sum(each.input_tokens + each.output_tokens for each in lines)
            return BudgetView(Decimal(used), quantity.parse(tokens), "tokens", bill.month)
        if not given.get("amount") or bill.total is None or bill.currency != given.get("currency"):
            return None
        return BudgetView(Decimal(bill.total), quantity.parse(given["amount"]), bill.currency or "", bill.month)
    except (ValueError, ArithmeticError):
        return None


def externals(route: ObjectView, page: RouteStatsPage) -> tuple[ExternalTargetView, ...]:
    """A route's external targets whose last request failed, by gateway."""
    return tuple(
        ExternalTargetView(
            each.target,
            each.gateway,
            each.reason or "",
            None if each.seconds_ago is None else int(each.seconds_ago),
            each.rests,
        )
        for each in page.externals
        if each.state == "Fails" and each.target.startswith(f"{route.key}/")
    )


def lease(raw: JsonObject) -> OperatorLease:
    spec = _map(raw, "spec")
    return OperatorLease(
        holder=_text(spec.get("holderIdentity")),
        renewed=time_of(spec.get("renewTime")),
        seconds=_number(spec.get("leaseDurationSeconds")) or _LEASE_SECONDS,
    )


def time_of(value: object) -> datetime | None:
    """A time of the API. Users write some of them too: what is no time is unknown."""
    if not isinstance(value, str):
        return None
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _container(status: JsonObject, *, init: bool) -> ContainerView:
    state, last = _map(status, "state"), _map(status, "lastState")
    waiting = _map(state, "waiting")
    ended = _map(state, "terminated") or _map(last, "terminated")
    return ContainerView(
        name=_text(status.get("name")),
        init=init,
        ready=status.get("ready") is True,
        restarts=_number(status.get("restartCount")) or 0,
        state=_state(state),
        reason=_text(waiting.get("reason")),
        message=_text(waiting.get("message")),
        exit_code=_number(ended.get("exitCode")),
        exit_reason=_text(ended.get("reason")),
        exit_message=_text(ended.get("message")),
        ended=time_of(ended.get("finishedAt")),
        unhealthy_devices=tuple(_unhealthy(status)),
        started=status.get("started") is True,
    )


def _state(state: Mapping[str, Any]) -> Literal["waiting", "running", "terminated", "unknown"]:
    for name in ("waiting", "running", "terminated"):
        if name in state:
            return name
    return "unknown"


def _unhealthy(status: JsonObject) -> Iterable[str]:
    for resource in _seq(status, "allocatedResourcesStatus"):
        for device in _seq(resource, "resources"):
            if device.get("health") == "Unhealthy":
                yield _text(device.get("resourceID")) or _text(resource.get("name"))


def _devices(amounts: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, amount in amounts.items():
        if "/" in name:
            try:
                found[name] = quantity.count(amount)
            except (ValueError, ArithmeticError):
                continue
    return found


def _text(value: object) -> str:
    return value[-_LONGEST:] if isinstance(value, str) else ""


def _texts(value: object) -> list[str]:
    listed = cast("list[object]", value)[:_MOST] if isinstance(value, list) else []
    return [text for each in listed if (text := _text(each))]


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _map(obj: Mapping[str, Any], field: str) -> JsonObject:
    value: Any = obj.get(field)
    return cast("JsonObject", value) if isinstance(value, dict) else {}


def _seq(obj: Mapping[str, Any], field: str) -> list[JsonObject]:
    value: Any = obj.get(field)
    listed = cast("list[Any]", value)[:_MOST] if isinstance(value, list) else []
    return [cast("JsonObject", each) for each in listed if isinstance(each, dict)]
