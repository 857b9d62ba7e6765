"""The status of a Model, computed from observations."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from shoal.api import names, reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.gpuclass import GPUClass
from shoal.api.meta import ConditionStatus
from shoal.api.model import Model, ModelStatus, ReplicaCounts, VariantStatus
from shoal.api.sources import parse_source
from shoal.core.candidates import NO_SUCH_CLASS
from shoal.core.enginedifferences import EngineDifferences
from shoal.core.facts import Deployment
from shoal.core.placement import Placement
from shoal.core.routing import servednames
from shoal.core.routing.resolve import listed_capabilities, served_model
from shoal.core.status import canaryanswers
from shoal.core.status.conditions import ConditionUpdate, merge
from shoal.core.status.diagnosis import Cause
from shoal.core.status.observed import ModelProblem, Observed, ServedNames
from shoal.core.status.quotawait import quota_wait
from shoal.core.status.readiness import QUOTAS, cause_of, readiness, unread
from shoal.core.status.variants import variants

__all__ = [
    "ModelProblem",
    "Observed",
    "ServedNames",
    "first_status",
    "first_wanted",
    "is_paused",
    "minimum",
    "problems",
    "status",
]

_FOR_A_PERSON: Final = (
    reasons.ROLLOUT_STALLED,
    reasons.NO_FIT,
    reasons.NO_CLASS,
    reasons.SIZE_UNKNOWN,
    reasons.INVALID,
)
"""Reasons of Ready that need a person."""


def first_wanted(model: Model) -> int:
    """Replicas of a Model before its first request: one at least, so that a fault shows at once."""
    return max(1, model.spec.scaling.min_replicas)


def minimum(model: Model) -> int:
    """Replicas that only a Model of higher priority may take away."""
    return max(1, model.spec.scaling.min_replicas)


def is_paused(model: Model) -> bool:
    return model.metadata.annotations.get(names.ANNOTATION_PAUSED) == "true"


def problems(
    model: Model,
    *,
    classes: Mapping[str, GPUClass],
    versions: Sequence[str],
    version: str,
    argument_problems: Sequence[str],
    engine_problems: Sequence[ModelProblem] = (),
    secret_missing: str | None,
) -> tuple[ModelProblem, ...]:
    """Why the Model cannot be accepted; empty when it can.

    `version`: its engine version; `versions`: those in the engine table; `argument_problems`: what the engine layer
    found in extraArgs; `engine_problems`: what else it found; `secret_missing`: the sentence about a Secret that does
    not exist.
    """
    found: list[ModelProblem] = []
    try:
        parse_source(model.spec.source.uri)
    except ValueError as error:
        found.append(ModelProblem(reasons.SOURCE_INVALID, f"spec.source.uri: {error}"))
    missing = [v.gpu_class for v in model.spec.variants if v.gpu_class not in classes]
    if missing and len(missing) == len(model.spec.variants):  # else the others are used
        have = ", ".join(sorted(classes)) or "none"
        found.append(
            ModelProblem(
                reasons.CLASS_NOT_FOUND,
                f"spec.variants: there is no GPUClass {' or '.join(repr(m) for m in missing)}; there are: {have}",
            )
        )
    if model.spec.engine.image is None and version not in versions:
        have = ", ".join(sorted(versions))
        found.append(
            ModelProblem(
                reasons.VERSION_UNKNOWN,
                f"spec.engine.version: {version!r} is not in the engine table, which has: {have}; "
                "set spec.engine.image to use another image",
            )
        )
    if argument_problems:
        found.append(ModelProblem(reasons.ARGUMENTS_REFUSED, "spec.engine.extraArgs: " + "; ".join(argument_problems)))
    found += engine_problems
    if secret_missing:
        found.append(ModelProblem(reasons.SECRET_NOT_FOUND, secret_missing))
    return tuple(found)


def first_status(model: Model, now: datetime) -> ModelStatus:
    """The status before any work: without it, tools take a Model without a Ready condition for ready."""
    waiting = "seen, not yet worked on"
    findings = [
        *(
            ConditionUpdate(kind, "Unknown", reasons.PENDING, waiting)
            for kind in (reasons.ACCEPTED, reasons.PLACED, reasons.AVAILABLE, reasons.READY)
        ),
        ConditionUpdate(reasons.RECONCILING, "True", reasons.PENDING, waiting),
    ]
    return ModelStatus(
        conditions=merge((), findings, generation=model.metadata.generation, now=now),
        observed_generation=model.metadata.generation,
    )


def status(seen: Observed, now: datetime) -> ModelStatus:
    """The whole status. Equal observations give an equal status, except for transition times of conditions."""
    model, before = seen.model, seen.model.status
    shown = variants(
        seen.placement,
        deployments=seen.deployments,
        pods=seen.pods,
        sized=seen.sized,
        tokens=seen.tokens,
        cold_starts=seen.cold_starts,
        node_waits=seen.node_waits,
        start_stages=seen.start_stages,
        canaries=seen.canaries,
    )
    desired = _desired(seen, shown)
    ready = min(desired, sum(v.ready for v in shown))
    facts = seen.reading.facts if seen.reading else None
    artifact = facts or (before.artifact if before else None)
    return ModelStatus(
        conditions=merge(
            before.conditions if before else (),
            _findings(seen, desired, ready, shown),
            generation=model.metadata.generation,
            now=now,
        ),
        observed_generation=model.metadata.generation,
        served_names=seen.served.owned,
        artifact=artifact,
        capabilities=_capabilities(model, artifact, seen.differences),
        variants=shown,
        replicas=ReplicaCounts(desired=desired, ready=ready),
        cold_start_seconds=_cold_start(shown, seen.outages),
        prefetch=seen.prefetch,
    )


def _capabilities(model: Model, artifact: ArtifactFacts | None, differences: EngineDifferences) -> tuple[str, ...]:
    """As gateways list them, by the facts of this status."""
    known = (model.status or ModelStatus()).model_copy(update={"artifact": artifact})
    return listed_capabilities(served_model(model.model_copy(update={"status": known}), differences))


def _cold_start(shown: Sequence[VariantStatus], outages: frozenset[str]) -> int | None:
    """The longest cold start of the classes in use; at zero of all that were ever used, for clients that wait. At zero
    the next replica waits for no node of a class in `outages` where there is another class."""
    in_use = [v for v in shown if v.desired]
    known = {v.gpu_class: v for v in in_use or shown if v.cold_start_seconds is not None}
    passed = outages if not in_use and not known.keys() <= outages else frozenset[str]()
    each = ((v.cold_start_seconds or 0) + (0 if n in passed else v.node_wait_seconds or 0) for n, v in known.items())
    return max(each, default=None)


def _desired(seen: Observed, shown: Sequence[VariantStatus]) -> int:
    if seen.placement is None:
        return sum(v.desired for v in shown)
    return first_wanted(seen.model) if seen.wanted is None else seen.wanted


def _findings(seen: Observed, desired: int, ready: int, shown: Sequence[VariantStatus]) -> list[ConditionUpdate]:
    accepted = _accepted(seen)
    placed = _placed(seen)
    cause = cause_of(seen)
    serving = f"{ready} of {desired} replicas ready"
    if ready:
        available = ConditionUpdate(reasons.AVAILABLE, "True", reasons.REPLICAS_READY, serving)
    elif cause:
        available = ConditionUpdate(reasons.AVAILABLE, "False", cause.reason, cause.message)
    else:
        available = ConditionUpdate(reasons.AVAILABLE, "False", reasons.NO_REPLICA, "no replica is ready")
    summary = readiness(seen, desired, ready, cause, shown)
    if seen.paused:
        applied = f"replicas are those of {seen.scaled_by}" if seen.scaled_by else "nothing applied"
        note = f"annotation {names.ANNOTATION_PAUSED} is set: decided, {applied}. {summary.message}"
        summary = ConditionUpdate(reasons.READY, summary.status, reasons.PAUSED, note)
    findings = [accepted, placed, available, summary]
    if summary.status != "True" or seen.failure:
        not_read = seen.reading.failure if seen.reading else None
        stuck = (
            seen.problems
            or seen.failure
            or (seen.paused and not seen.scaled_by)  # an autoscaler may wake it: then requests at zero are held
            or summary.reason in _FOR_A_PERSON
            or (
                not (cause is not None and cause.reason in QUOTAS)
                and any(_gives_up(seen, d, cause) for d in seen.deployments)
            )
            or (cause is not None and cause.waits_for_a_person and not _moves_on(seen, cause.gpu_class))
            or (not_read is not None and not_read.waits_for_a_person)
        )
        findings.append(
            ConditionUpdate(reasons.STALLED if stuck else reasons.RECONCILING, "True", summary.reason, summary.message)
        )
    if (quota := quota_wait(seen.pods, seen.deployments)) is not None:
        findings.append(quota)
    if seen.driven:
        findings.append(seen.driven)
    if seen.stale_signals:
        findings.append(ConditionUpdate(reasons.SIGNALS_UNKNOWN, "True", reasons.SIGNALS_STALE, seen.stale_signals))
    if garbled := canaryanswers.garbled(shown):
        text = "; ".join(each.text for each in garbled)
        findings.append(ConditionUpdate(reasons.CLASS_GARBLED, "True", reasons.CLASS_GARBLED, text))
    return findings


def _gives_up(seen: Observed, deployment: Deployment, cause: Cause | None) -> bool:
    """Whether its replicas are not ready after three cold starts, and no other class is about to be tried."""
    if not (deployment.overdue and deployment.replicas):
        return False
    return cause is not None or not _moves_on(seen, deployment.gpu_class)


def _moves_on(seen: Observed, gpu_class: str | None) -> bool:
    """Whether replicas that do not start on a class make the Model use another one, in this plan or the next. If it
    were stalled for that moment, clients that wait would give up."""
    if gpu_class is None or seen.placement is None:
        return False
    left = not any(v.replicas for v in seen.placement.variants if v.gpu_class == gpu_class)
    goes_elsewhere = left and any(v.replicas for v in seen.placement.variants)
    return goes_elsewhere or (gpu_class in seen.untried and len(seen.untried) > 1)


def _accepted(seen: Observed) -> ConditionUpdate:
    if seen.problems:
        text = "; ".join(p.message for p in seen.problems)
        return ConditionUpdate(reasons.ACCEPTED, "False", seen.problems[0].reason, text)
    if seen.served.lost:
        text = servednames.describe_lost(seen.model.key, seen.served)
        return ConditionUpdate(reasons.ACCEPTED, "True", reasons.NAME_CLAIMED, text)
    if gone := _classes_gone(seen.placement):
        text = (
            f"spec.variants: there is no GPUClass {' or '.join(map(repr, gone))}; the others that are listed are used"
        )
        return ConditionUpdate(reasons.ACCEPTED, "True", reasons.CLASS_NOT_FOUND, text)
    return ConditionUpdate(reasons.ACCEPTED, "True", reasons.VALID, "the specification is valid")


def _classes_gone(placement: Placement | None) -> list[str]:
    """Listed classes that do not exist, beside others that do."""
    if placement is None:
        return []
    unused = {e.gpu_class for e in placement.excluded if e.reason == reasons.CLASS_NOT_FOUND}
    serving = {v.gpu_class for v in placement.variants if v.why == NO_SUCH_CLASS}
    return sorted(unused | serving)


def _placed(seen: Observed) -> ConditionUpdate:
    if seen.problems:
        return ConditionUpdate(reasons.PLACED, "Unknown", reasons.PENDING, "not looked at until the Model is accepted")
    if (waits := unread(seen)) is not None:
        return ConditionUpdate(reasons.PLACED, "Unknown", waits[0], waits[1])
    placement = seen.placement
    if placement is None:
        return ConditionUpdate(reasons.PLACED, "Unknown", reasons.PENDING, "not decided yet")
    status: ConditionStatus = "True" if placement.placed else "False"
    return ConditionUpdate(reasons.PLACED, status, placement.reason, placement.message)
