"""The condition Ready of a Model: the nearest cause if it is not, and further notes if it is."""

from collections.abc import Sequence
from typing import Final

from shoal.api import reasons
from shoal.api.model import Model, VariantStatus
from shoal.core.podquota import refusal
from shoal.core.scaling.messages import count
from shoal.core.status.conditions import LONGEST_MESSAGE, ConditionUpdate, find, holds, shorten
from shoal.core.status.diagnosis import FAILURES, Cause, diagnose, progress
from shoal.core.status.observed import Observed

_QUEUES: Final = (reasons.QUOTA_WAIT, reasons.ADMISSION_CHECK, reasons.ADMISSION_REJECTED)
QUOTAS: Final = (*_QUEUES, reasons.RESOURCE_QUOTA)
"""Causes that end when quota is given back. The Deployment's own deadline does not count meanwhile."""
TRIED_AGAIN: Final = "; at zero now, the next request tries again"
"""End of the message of a Model that went to zero without ever having served."""


def readiness(
    seen: Observed, desired: int, ready: int, cause: Cause | None, shown: Sequence[VariantStatus]
) -> ConditionUpdate:
    """`desired`, `ready`: replicas; `cause`: why some do not serve; `shown`: the status of each class."""
    return _not_ready(seen, desired, ready, cause, shown) or _is_ready(seen, desired, ready, cause)


def unread(seen: Observed) -> tuple[str, str] | None:
    """(reason, message) why the source's facts are unknown; None: they are known."""
    reading = seen.reading
    if reading is None or reading.facts is not None:
        return None
    if reading.failure is not None:
        return reading.failure.reason, reading.failure.message
    return reasons.READING_ARTIFACT, reading.waiting


def cause_of(seen: Observed) -> Cause | None:
    """Why replicas do not serve, as far as pods and Deployments show it."""
    refused = next((d.refused for d in seen.deployments if d.refused), None)
    found = diagnose(seen.pods, seen.deployments)
    if refused and (found is None or found.reason in (reasons.UNSCHEDULABLE, *_QUEUES)):
        quota = refusal(refused)
        return Cause(quota.reason, quota.message) if quota else Cause(reasons.PODS_REFUSED, refused)
    return found


def _not_ready(
    seen: Observed, desired: int, ready: int, cause: Cause | None, shown: Sequence[VariantStatus]
) -> ConditionUpdate | None:
    """Ready with status False, with the nearest cause; None: it is True."""

    def no(reason: str, message: str) -> ConditionUpdate:
        return ConditionUpdate(reasons.READY, "False", reason, message)

    if seen.problems:
        return no(seen.problems[0].reason, _unapplied("; ".join(p.message for p in seen.problems), ready))
    if seen.failure:
        return no(seen.failure.reason, seen.failure.message)
    if (waits := unread(seen)) is not None and not (_serves(seen, desired, ready) and _never_read(seen.model)):
        failed = seen.reading is not None and seen.reading.failure is not None
        return no(waits[0], _unapplied(waits[1], ready) if failed else waits[1])
    if seen.placement is not None and not seen.placement.placed and not (desired and ready >= desired):
        return no(seen.placement.reason, seen.placement.message)
    if not desired and seen.placement is not None:
        failed = _failed_before(seen)
        return no(*failed) if failed else None
    if _serves(seen, desired, ready):
        return None
    if (stalled := _stalled_rollout(seen, ready, desired, cause)) is not None:
        return no(*stalled)
    if cause:
        return no(cause.reason, cause.message)
    where = progress(seen.pods)
    state = f"{ready} of {desired} replicas ready" + (f"; {where}" if where else "")
    if any(d.replacing and not d.surges for d in seen.deployments):
        return no(
            reasons.REPLACING_IN_PLACE,
            f"no GPU was free for one replica more, so each goes before its successor comes; {state}",
        )
    scaling = seen.scaling
    if scaling is not None and scaling.wanted > scaling.before:
        if scaling.before and ready >= max(scaling.before, seen.model.spec.scaling.min_replicas):
            return None  # the former number was enough, and more are starting
        if not scaling.before:
            return no(reasons.WAKING, f"{scaling.message}; {state}")
    steps = {v.step for v in shown if v.desired}
    known = next((reason for reason in (reasons.FETCHING, reasons.LOADING) if reason in steps), reasons.STARTING)
    return no(reasons.STARTING if "Waiting" in steps else known, state)


def _unapplied(message: str, ready: int) -> str:
    """Why the specification is not applied, and whether replicas of the one before it serve meanwhile."""
    if not ready:
        return message
    text = (
        f"; while this lasts no change is applied, and what ran before still serves ({count(ready, 'replica')} ready)"
    )
    return shorten(message, LONGEST_MESSAGE - len(text)) + text


def _serves(seen: Observed, desired: int, ready: int) -> bool:
    """As many replicas as wanted, of the revision that is wanted."""
    # A replica that starts to replace a serving one takes nothing away. Nor does an edit that the Deployment controller
    # has not seen yet: each step of a move scales one Deployment, and Ready would flap.
    last = seen.model.status
    was_ready = last is not None and holds(last.conditions, reasons.READY, seen.model.metadata.generation)
    rolled_out = all(d.rolled_out or (was_ready and d.updated >= d.total) for d in seen.deployments if not d.deleting)
    return ready >= desired and rolled_out and bool(seen.deployments)


def _is_ready(seen: Observed, desired: int, ready: int, cause: Cause | None) -> ConditionUpdate:
    """Ready with status True, and further notes."""
    scaling = seen.scaling
    if not desired and seen.placement is not None:
        before = find(seen.model.status.conditions, reasons.READY) if seen.model.status else None
        if before is not None and before.reason == reasons.SCALED_TO_ZERO:
            return ConditionUpdate(reasons.READY, "True", reasons.SCALED_TO_ZERO, before.message)
        text = scaling.message if scaling is not None else "no replica; the next request wakes one"
        return ConditionUpdate(reasons.READY, "True", reasons.SCALED_TO_ZERO, text)
    serving = f"{ready} of {desired} replicas ready"
    if ready < desired and scaling is not None:
        where = progress(seen.pods)
        text = "; ".join(part for part in (scaling.message, serving, where) if part)
        return ConditionUpdate(reasons.READY, "True", reasons.SCALING_UP, text)
    if cause and cause.reason not in (reasons.UNSCHEDULABLE, *QUOTAS):
        serving = f"{serving}; one that is to replace another does not start: {cause.message}"
    return ConditionUpdate(reasons.READY, "True", reasons.REPLICAS_READY, serving)


def _stalled_rollout(seen: Observed, ready: int, desired: int, cause: Cause | None) -> tuple[str, str] | None:
    """(reason, message) of a revision that does not become ready, with the engine's last output; None: there is
    none."""
    why = cause.message if cause else None
    if cause is not None and cause.reason in QUOTAS:
        return None  # it is not the revision's fault, and no person has to change it
    for deployment in seen.deployments:
        if deployment.replacing and (deployment.overdue or (cause is not None and cause.waits_for_a_person)):
            old = f"the one before goes on serving with {ready} of {desired} replicas" if ready else "nothing serves"
            return (
                reasons.ROLLOUT_STALLED,
                f"the new revision on {deployment.gpu_class} does not become ready, {old}: {why or deployment.overdue}",
            )
        if deployment.overdue and cause is None:
            return reasons.ENGINE_FAILED, f"no replica on {deployment.gpu_class} becomes ready: {deployment.overdue}"
    return None


def _failed_before(seen: Observed) -> tuple[str, str] | None:
    """(reason, message) why the last replicas failed before the Model went to zero; kept until others were tried."""
    last = seen.model.status
    known = find(last.conditions, reasons.READY) if last is not None else None
    if known is None or known.status != "False" or known.observed_generation != seen.model.metadata.generation:
        return None
    if known.message.endswith(TRIED_AGAIN):
        return known.reason, known.message
    if known.reason not in FAILURES:
        return None
    return known.reason, f"{shorten(known.message, LONGEST_MESSAGE - len(TRIED_AGAIN))}{TRIED_AGAIN}"


def _never_read(model: Model) -> bool:
    """The pods are from a version that read no facts: they are still what the Model asks for."""
    return model.status is not None and model.status.artifact is None
