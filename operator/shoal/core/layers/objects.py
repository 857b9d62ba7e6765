"""What conditions of Shoal's objects show."""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final, cast

from pydantic import ValidationError

from shoal.api import reasons
from shoal.api.gpuclass import DEFAULT_RESOURCE, Toleration
from shoal.core.layers import faults, texts
from shoal.core.layers.advice import State
from shoal.core.layers.candidates import Candidate, Level, age
from shoal.core.layers.faults import advice
from shoal.core.layers.texts import Phrase
from shoal.core.layers.types import ConditionView, Evidence, ObjectView, WhyNode
from shoal.core.placement.messages import LAST_CHOICE
from shoal.core.status.readiness import TRIED_AGAIN

ASIDE: Final = (
    reasons.SCALING_ACTIVE,
    reasons.LOGGING_READY,
    reasons.BUDGET_READY,
    reasons.SIGNALS_UNKNOWN,
    reasons.CLASS_GARBLED,
)
"""Conditions of something beside serving."""
_ATTENTION: Final = (reasons.SIGNALS_UNKNOWN, reasons.QUOTA_WAIT, reasons.SHARED_GPUS, reasons.CLASS_GARBLED)
"""Conditions whose status True is the bad one."""
_REPEATS: Final = (reasons.STALLED, reasons.RECONCILING)
"""Conditions that repeat the reason of Ready."""
DERIVED: Final = reasons.STAGE_REASONS | {
    reasons.ENGINE_FAILED, reasons.IMAGE_UNAVAILABLE, reasons.UNSCHEDULABLE, reasons.STARTING, reasons.FETCHING,
    reasons.LOADING, reasons.NO_REPLICA, reasons.ROLLOUT_STALLED, reasons.REPLACING_IN_PLACE, reasons.WAKING,
    reasons.SCALING_UP, reasons.SIGNALS_UNKNOWN, reasons.SIGNALS_STALE, reasons.NO_CAPACITY, reasons.STAGE_FAILED,
    reasons.LOADING_ADAPTER, reasons.LOAD_FAILED, reasons.LOAD_HANGS, reasons.LOAD_ENDED_ENGINE, reasons.NO_NODES,
    reasons.ENGINE_NOT_READY, reasons.ENGINE_RESTARTED, reasons.SLOTS_FULL, reasons.PENDING, faults.OUT_OF_DATE,
    faults.TARGET_NOT_SERVING,
}  # fmt: skip
"""Reasons that describe what pods and nodes show: a cause found there explains them."""
_POD: Final = re.compile(r"\bpod ([a-z0-9][a-z0-9.-]{0,252}/[a-z0-9][a-z0-9.-]{0,252})")
_GRANTS: Final = ("models", "adapters", "routes")


def candidates(seen: ObjectView, now: datetime) -> Iterator[Candidate]:
    """What an object's conditions say."""
    if seen.deleting is not None:
        yield _deletion(seen, seen.deleting, now)
    for condition in seen.conditions:
        if condition.type not in _REPEATS and (found := _condition(seen, condition, now)) is not None:
            yield found
    if not seen.conditions:
        text = f"{seen.text} has no status: no operator has reconciled it"
        yield Candidate(reasons.PENDING, text, Level.OBJECT, (Evidence("no conditions", seen.text, None),))
    elif seen.observed_generation is not None and seen.observed_generation < seen.generation and not seen.deleting:
        text = f"{seen.text}: the status describes generation {seen.observed_generation}, the spec is {seen.generation}"
        proof = Evidence(f"observedGeneration {seen.observed_generation} of {seen.generation}", seen.text, None)
        yield Candidate(faults.OUT_OF_DATE, text, Level.OBJECT, (proof,))
    if seen.paused and not any(c.reason == reasons.PAUSED for c in seen.conditions):
        proof = Evidence("annotation shoal.dev/paused", seen.text, None)
        yield Candidate(reasons.PAUSED, f"{seen.text} is paused", Level.OBJECT, (proof,))
    if seen.kind == "tenant" and not any(seen.spec.get(field) for field in _GRANTS):
        text = f"{seen.text} may use nothing: every request gets 404"
        proof = Evidence("spec.models, spec.adapters and spec.routes are empty", seen.text, None)
        yield Candidate(faults.NOTHING_GRANTED, text, Level.OBJECT, (proof,))


def _deletion(seen: ObjectView, since: datetime, now: datetime) -> Candidate:
    """An object that is going: a step that ends by itself, unless a finalizer of another controller holds it."""
    waited = age(now, since) or 0
    # Kubernetes' own are of no domain, and end with what belongs to the object.
    foreign = [each for each in seen.finalizers if "/" in each]
    held = f"finalizers {', '.join(seen.finalizers)}" if seen.finalizers else "no finalizer"
    text = f"{seen.text} has been going for {waited} s, with {held}: it serves nobody, and nothing is done for it"
    proof = Evidence(f"deletionTimestamp, {held}", f"metadata of {seen.text}", waited)
    hangs = bool(foreign) and waited >= _DELETION_SECONDS
    return Candidate(
        faults.DELETION_HELD, text, Level.OBJECT, (proof,), reached="fault" if hangs else "waits", everywhere=True
    )


_DELETION_SECONDS: Final = 10


def _condition(seen: ObjectView, condition: ConditionView, now: datetime) -> Candidate | None:
    row = advice(condition.reason)
    bad = condition.status != ("False" if condition.type in _ATTENTION else "True")
    if row.state == "fine" and not bad:
        return None
    known = faults.layer_of(condition.reason) is not None
    if not known and not bad:
        return None
    reason = condition.reason if known else faults.UNKNOWN_REASON
    phrase = refine(reason, condition.message)
    found = phrase.reason if phrase is not None else reason
    state: State | None = None
    if not bad and row.state in ("fault", "waits"):
        state = "note"  # a reason of a fault on a condition that is True is worth knowing
    elif bad and not known:
        state = "fault"
    elif bad and seen.kind == "class" and condition.type == reasons.READY and row.state == "note":
        state = "fault"  # a note where others remain; here the class has no GPU
    elif condition.reason == reasons.PAUSED and _held_by_pause(seen):
        state = "fault"
    elif bad and row.state == "fine":
        state = "waits"
    said = f"{condition.type} is {condition.status}: {condition.reason}"
    message = f"{seen.text}: {texts.shorten(condition.message or condition.reason, texts.LONGEST_CONDITION)}"
    proof = Evidence(f"{said}: {texts.brief(condition.message)}" if condition.message else said,
                     f"condition of {seen.text}", age(now, condition.since))  # fmt: skip
    return Candidate(
        found,
        message,
        Level.OBJECT,
        (proof,),
        frozenset(_POD.findall(condition.message)),
        _tried(seen, condition),
        (f"{row.layer.label} {condition.reason}",) if found != condition.reason and known else (),
        state,
        aside=condition.type in ASIDE,
    )


def _held_by_pause(seen: ObjectView) -> bool:
    """Whether something decided waits for the end of the pause: it would wait for ever."""
    return any(
        (c.type, c.reason) == (reasons.STALLED, reasons.PAUSED) or (c.reason == reasons.PENDING and c.status != "True")
        for c in seen.conditions
    )


def refine(reason: str, message: str) -> Phrase | None:
    """The cause that the message of a condition names; None: it is the reason itself."""
    match reason:
        case reasons.PODS_REFUSED | reasons.REFUSED:
            return texts.admission(message)
        case reasons.UNSCHEDULABLE:
            return texts.scheduler(message)
        case reasons.IMAGE_UNAVAILABLE:
            return texts.pull(message)
        case reasons.LOAD_FAILED if (found := texts.engine(message) or texts.adapter(message)) is not None:
            return found
        case reasons.ENGINE_FAILED | reasons.ROLLOUT_STALLED | reasons.LOAD_FAILED:
            return texts.engine(message) or texts.setup(message) or texts.ended(message) or texts.about(message)
        case reasons.READING_ARTIFACT:
            # Its Job's pod: an image that cannot be pulled, or no node for it.
            return (texts.pull(message) if "pull" in message.lower() else None) or texts.scheduler(message)
        case reasons.SOURCE_NOT_FOUND if "PersistentVolumeClaim" in message:
            return Phrase(faults.VOLUME_MISSING, texts.shorten(message))
        case reasons.SOURCE_UNREACHABLE:
            return texts.source(message)
        case reasons.STAGE_FAILED if "OOMKilled" in message:
            return Phrase(faults.OUT_OF_MEMORY, texts.shorten(message))
        case reasons.STAGE_FAILED if "DeadlineExceeded" not in message:
            return texts.fetch(message)
        case reasons.NO_NODES if "device plugin" in message:
            return Phrase(faults.DEVICE_PLUGIN_MISSING, texts.shorten(message))
        case _:
            return None


def _tried(seen: ObjectView, condition: ConditionView) -> tuple[str, ...]:
    """What the status says was done about it."""
    found: list[str] = []
    if condition.message.endswith(TRIED_AGAIN):
        found.append("Shoal gave the GPUs back; the next request starts a replica again")
    if condition.reason == reasons.ROLLOUT_STALLED:
        found.append("Shoal keeps the old revision running")
    variants: list[dict[str, Any]] = seen.status.get("variants") or []
    if seen.kind == "model" and condition.type == reasons.READY and condition.status != "True":
        for variant in variants:
            excluded = str(variant.get("excluded") or "")
            if excluded.endswith(LAST_CHOICE):
                found.append(f"Shoal uses class {variant.get('class')} last for a while: {texts.shorten(excluded)}")
    return tuple(found)


def ready_replicas(model: ObjectView) -> int:
    """Replicas of a Model that serve, by its status."""
    counts = cast("dict[str, int]", model.status.get("replicas") or {})
    return counts.get("ready") or 0


def resource_of(gpu_class: ObjectView) -> str | None:
    """The extended resource of a GPUClass; None: its GPUs are devices of a DRA driver, which nodes do not list."""
    if gpu_class.spec.get("device"):
        return None
    return str(gpu_class.spec.get("resourceName") or DEFAULT_RESOURCE)


def tolerations(gpu_class: ObjectView) -> tuple[Toleration, ...]:
    """What a GPUClass's pods tolerate; entries that are none are left out."""
    found: list[Toleration] = []
    given = gpu_class.spec.get("tolerations")
    for each in cast("list[Any]", given) if isinstance(given, list) else []:
        try:
            found.append(Toleration.model_validate(each))
        except ValidationError:
            continue
    return tuple(found)


def selects(gpu_class: ObjectView, labels: dict[str, str]) -> bool:
    """Whether the nodeSelector of a GPUClass selects a node with these labels. One with `device` may have none."""
    selector = cast("dict[str, str]", gpu_class.spec.get("nodeSelector") or {})
    return bool(selector) and all(labels.get(name) == value for name, value in selector.items())


def has_node(gpu_class: ObjectView, node: WhyNode, devices: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether a node is one of a GPUClass: by its labels, or by `devices` of the class that are there
    (`WhySnapshot`)."""
    return node.name in devices.get(gpu_class.name, ()) or selects(gpu_class, dict(node.labels))
