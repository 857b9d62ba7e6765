"""The one status write of a reconcile: only on change, with an event where a condition changed its mind."""

from collections.abc import Collection, Iterable
from typing import Any

from shoal.api import reasons
from shoal.api.meta import CustomResource, JsonObject
from shoal.api.meta import Object as ApiObject
from shoal.controllers.world import World
from shoal.kube.errors import NotFound, UnknownField
from shoal.kube.events import Event
from shoal.kube.projections import Custom
from shoal.kube.resources import Resource
from shoal.kube.store import Table

_EVENT_CONDITIONS = (
    reasons.READY,
    reasons.ACCEPTED,
    reasons.PLACED,
    reasons.SIGNALS_UNKNOWN,
    reasons.CLASS_GARBLED,
    reasons.LOGGING_READY,
    reasons.BUDGET_READY,
    reasons.ADAPTERS_READY,
    reasons.GPUS_HEALTHY,
    reasons.NODES_AVAILABLE,
)
"""Conditions whose changes are events; Available goes with Ready."""
_WARNING_REASONS = (
    reasons.NAME_CLAIMED,
    reasons.BASE_NAME_DIFFERS,
    reasons.LABELS_DISAGREE,
    reasons.SIGNALS_STALE,
    reasons.CLASS_GARBLED,
    reasons.CANARY_HALTED,
)
"""Reasons of a condition that is True and still needs a person's attention."""
_QUIET_REASONS = (
    reasons.PENDING,
    reasons.VALID,
    reasons.READING_ARTIFACT,
    reasons.STARTING,
    reasons.FETCHING,
    reasons.LOADING,
    reasons.SCALED_TO_ZERO,
    reasons.SCALING_UP,
    reasons.SCALING_DOWN,
    reasons.WAKING,
    reasons.READING_ADAPTER,
    reasons.NOT_GRANTED,
    reasons.LOADING_ADAPTER,
    reasons.ON_DEMAND,
    reasons.WAITS_FOR_REPLICA,
    reasons.RESIDENT,
    reasons.SWITCHING,
    reasons.ROLLING,
    reasons.PRICES_UNKNOWN,
    reasons.GPUS_QUARANTINED,  # an event per GPU says it
)
"""On the way to being ready: the condition tells it, an event would only be one more write. The scaler tells of its
decisions itself."""


async def write_status(
    world: World,
    resource: Resource,
    table: Table[Any],
    custom: Custom[Any],
    status: ApiObject,
    *,
    manager: str,
    quiet: Collection[str] = (),
) -> bool:
    """Applies the whole status if it differs from what is stored. Returns whether it wrote. `quiet`: further reasons
    that are no events of this kind."""
    whole: JsonObject = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    wanted = world.installed_status.known(resource, whole)
    if wanted == custom.status:
        return False
    metadata = custom.metadata
    body: JsonObject = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        # The uid is a precondition: a namesake made meanwhile is another object.
        "metadata": {"name": metadata.name, "uid": metadata.uid},
        "status": wanted,
    }
    if metadata.namespace:
        body["metadata"]["namespace"] = metadata.namespace
    since = table.mark()
    try:
        try:
            answer = await world.client.apply_status(resource, body, manager=manager)
        except UnknownField as error:
            wanted = await world.installed_status.refused(resource, wanted, error)
            answer = await world.client.apply_status(resource, {**body, "status": wanted}, manager=manager)
    except NotFound:
        return False  # deleted meanwhile
    table.upsert(answer, since=since)
    before: list[JsonObject] = custom.status.get("conditions") or []
    after: list[JsonObject] = wanted.get("conditions") or []
    for event in _events(resource, custom, before, after, quiet):
        world.recorder.emit(event)
    return True


def _events(
    resource: Resource,
    custom: Custom[CustomResource],
    before: Iterable[JsonObject],
    after: Iterable[JsonObject],
    quiet: Collection[str],
) -> Iterable[Event]:
    known = {c["type"]: (c["status"], c["reason"]) for c in before}
    said: set[str] = set()
    for condition in after:
        kind, now = condition["type"], (condition["status"], condition["reason"])
        if (
            kind not in _EVENT_CONDITIONS
            or known.get(kind) == now
            or condition["reason"] in (*_QUIET_REASONS, *quiet, *said)
        ):
            continue
        said.add(condition["reason"])  # Accepted, Placed and Ready often have the same cause
        good = condition["status"] == "True" and condition["reason"] not in _WARNING_REASONS
        yield Event(
            resource,
            custom.metadata,
            "Normal" if good else "Warning",
            condition["reason"],
            condition["message"],
            "Reconcile",
        )
