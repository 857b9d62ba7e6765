"""Messages to people about a Model, besides its ordinary status."""

from collections.abc import Mapping
from datetime import datetime

from shoal.api import reasons
from shoal.api.model import Model, ModelStatus
from shoal.controllers.isolation import stored
from shoal.core.status.conditions import ConditionUpdate, merge
from shoal.kube.events import Event, Recorder
from shoal.kube.projections import Custom
from shoal.kube.resources import MODELS


def emit_placement(recorder: Recorder, custom: Custom[Model], status: ModelStatus) -> None:
    """An event for each change of what runs where; the conditions' own events tell of their reasons only."""
    before = custom.object.status if custom.object else None
    had = {v.gpu_class: v.desired for v in (before.variants if before else ()) if v.desired}
    has = {v.gpu_class: v.desired for v in status.variants if v.desired}
    if had and had != has:
        note = f"{_counts(had)} -> {_counts(has)}"
        recorder.emit(Event(MODELS, custom.metadata, "Normal", reasons.PLACED_ON, note, "Place"))


def _counts(replicas: Mapping[str, int]) -> str:
    return ", ".join(f"{count} on {name}" for name, count in sorted(replicas.items())) or "nowhere"


def invalid(custom: Custom[Model], now: datetime) -> ModelStatus:
    """The status of an object that this version does not understand."""
    message = f"what is stored does not pass this version's validation: {custom.error}"
    findings = [
        ConditionUpdate(kind, "False", reasons.INVALID, message) for kind in (reasons.ACCEPTED, reasons.READY)
    ] + [ConditionUpdate(reasons.STALLED, "True", reasons.INVALID, message)]
    old = stored(ModelStatus, custom).conditions
    generation = custom.metadata.generation
    return ModelStatus(conditions=merge(old, findings, generation=generation, now=now), observed_generation=generation)
