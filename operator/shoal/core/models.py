"""What the status of a Model says, decided from what was observed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from shoal.api import names, reasons
from shoal.api.gpuclass import GPUClass
from shoal.api.meta import ConditionStatus
from shoal.api.model import Model, ModelStatus, ReplicaCounts, VariantStatus
from shoal.api.sources import parse_source
from shoal.core.artifacts import Reading
from shoal.core.conditions import LONGEST_MESSAGE, Finding, find, holds, merge, shorten
from shoal.core.diagnosis import FAILURES, Cause, diagnose, progress
from shoal.core.facts import Deployment, Pod
from shoal.core.placement import Placement
from shoal.core.scaling import Decision
from shoal.core.sizing import Sized
from shoal.core.variants import variants

_FAR: Final = datetime.max.replace(tzinfo=UTC)
TRIED_AGAIN: Final = "; at zero now, the next request tries again"
"""Ends the message of a Model that went to zero without ever having served."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a Model is not accepted."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ServedNames:
    """The short names that a Model asked for."""

    owned: tuple[str, ...]
    lost: tuple[tuple[str, str], ...]
    """(name, key of the older Model that has it)."""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that the status is computed from."""

    model: Model
    problems: tuple[Problem, ...]
    served: ServedNames
    placement: Placement | None
    """None while nothing is decided."""
    deployments: tuple[Deployment, ...]
    pods: tuple[Pod, ...]
    """The Model's own engine pods."""
    reading: Reading | None = None
    """What is known of the source; None while the Model is not accepted."""
    sized: Mapping[str, Sized] = field(default_factory=dict[str, Sized])
    """class -> the sums of a replica."""
    tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """class -> KV tokens of one replica, as its engine says."""
    cold_starts: Mapping[str, int] = field(default_factory=dict[str, int])
    """class -> seconds that the last replica took from its creation to Ready."""
    wanted: int | None = None
    """Replicas that were decided on; None while nothing is."""
    scaling: Decision | None = None
    """Why there are so many, while that number does not serve yet; at zero, why it is zero."""
    failure: Problem | None = None
    """What went wrong when the plan was applied."""
    paused: bool = False


def first_wanted(model: Model) -> int:
    """Replicas of a Model that nobody has asked for yet: one at least, so that a fault shows at once."""
    return max(1, model.spec.scaling.min_replicas)


def minimum(model: Model) -> int:
    """Replicas that only a Model of higher priority may take away."""
    return max(1, model.spec.scaling.min_replicas)


def is_paused(model: Model) -> bool:
    return model.metadata.annotations.get(names.ANNOTATION_PAUSED) == "true"


def served_names(model: Model, others: Iterable[Model]) -> ServedNames:
    """A short name belongs to its oldest claimant: creation time, then uid. `others` may include the Model itself."""
    claimants: dict[str, list[Model]] = {name: [] for name in model.claimed_names}
    for other in others:
        if other.metadata.uid != model.metadata.uid and other.metadata.deletion_timestamp is None:
            for name in other.claimed_names:
                if name in claimants:
                    claimants[name].append(other)
    owned: list[str] = []
    lost: list[tuple[str, str]] = []
    for name, rivals in claimants.items():
        oldest = min([model, *rivals], key=age)
        if oldest is model:
            owned.append(name)
        else:
            lost.append((name, oldest.key))
    return ServedNames(tuple(owned), tuple(lost))


def age(model: Model) -> tuple[datetime, str]:
    return (model.metadata.creation_timestamp or _FAR, model.metadata.uid)


def problems(
    model: Model,
    *,
    classes: Mapping[str, GPUClass],
    versions: Sequence[str],
    version: str,
    argument_problems: Sequence[str],
    secret_missing: str | None,
) -> tuple[Problem, ...]:
    """Why the Model cannot be accepted as it stands; empty when it can.

    `version` is the engine version that it gets, `versions` the rows of the engine table, `argument_problems` what the
    engine layer says about extraArgs, `secret_missing` the sentence about a Secret that does not exist.
    """
    found: list[Problem] = []
    try:
        parse_source(model.spec.source.uri)
    except ValueError as error:
        found.append(Problem(reasons.SOURCE_INVALID, f"spec.source.uri: {error}"))
    missing = [v.gpu_class for v in model.spec.variants if v.gpu_class not in classes]
    if missing:
        have = ", ".join(sorted(classes)) or "none"
        found.append(
            Problem(
                reasons.CLASS_NOT_FOUND,
                f"spec.variants: there is no GPUClass {' or '.join(repr(m) for m in missing)}; there are: {have}",
            )
        )
    if model.spec.engine.image is None and version not in versions:
        have = ", ".join(sorted(versions))
        found.append(
            Problem(
                reasons.VERSION_UNKNOWN,
                f"spec.engine.version: {version!r} is not in the engine table, which has: {have}; "
                "set spec.engine.image to use another image",
            )
        )
    if argument_problems:
        found.append(Problem(reasons.ARGUMENTS_REFUSED, "spec.engine.extraArgs: " + "; ".join(argument_problems)))
    if secret_missing:
        found.append(Problem(reasons.SECRET_NOT_FOUND, secret_missing))
    return tuple(found)


def first_status(model: Model, now: datetime) -> ModelStatus:
    """What is written before any work: without it, tools take a Model without a Ready condition for ready."""
    waiting = "seen, not yet worked on"
    findings = [
        *(
            Finding(kind, "Unknown", reasons.PENDING, waiting)
            for kind in (reasons.ACCEPTED, reasons.PLACED, reasons.AVAILABLE, reasons.READY)
        ),
        Finding(reasons.RECONCILING, "True", reasons.PENDING, waiting),
    ]
    return ModelStatus(
        conditions=merge((), findings, generation=model.metadata.generation, now=now),
        observed_generation=model.metadata.generation,
    )


def status(seen: Observed, now: datetime) -> ModelStatus:
    """The whole status. Equal observations give an equal status, apart from the times of conditions that flipped."""
    model, before = seen.model, seen.model.status
    shown = variants(
        seen.placement,
        deployments=seen.deployments,
        pods=seen.pods,
        sized=seen.sized,
        tokens=seen.tokens,
        cold_starts=seen.cold_starts,
    )
    desired = _desired(seen, shown)
    ready = min(desired, sum(v.ready for v in shown))
    facts = seen.reading.facts if seen.reading else None
    return ModelStatus(
        conditions=merge(
            before.conditions if before else (),
            _findings(seen, desired, ready, shown),
            generation=model.metadata.generation,
            now=now,
        ),
        observed_generation=model.metadata.generation,
        served_names=seen.served.owned,
        artifact=facts or (before.artifact if before else None),
        variants=shown,
        replicas=ReplicaCounts(desired=desired, ready=ready),
        cold_start_seconds=_cold_start(shown),
    )


def _cold_start(shown: Sequence[VariantStatus]) -> int | None:
    """The longest of the classes in use; at zero of all that were ever used: whoever waits has to know."""
    in_use = [v for v in shown if v.desired] or shown
    return max((v.cold_start_seconds for v in in_use if v.cold_start_seconds is not None), default=None)


def _desired(seen: Observed, shown: Sequence[VariantStatus]) -> int:
    if seen.placement is None:
        return sum(v.desired for v in shown)
    return first_wanted(seen.model) if seen.wanted is None else seen.wanted


def _findings(seen: Observed, desired: int, ready: int, shown: Sequence[VariantStatus]) -> list[Finding]:
    accepted = _accepted(seen)
    placed = _placed(seen)
    cause = _cause(seen)
    serving = f"{ready} of {desired} replicas ready"
    if ready:
        available = Finding(reasons.AVAILABLE, "True", reasons.REPLICAS_READY, serving)
    elif cause:
        available = Finding(reasons.AVAILABLE, "False", cause.reason, cause.message)
    else:
        available = Finding(reasons.AVAILABLE, "False", reasons.NO_REPLICA, "no replica is ready")
    summary = _not_ready(seen, desired, ready, cause, shown) or _is_ready(seen, desired, ready, cause)
    if seen.paused:
        note = f"annotation {names.ANNOTATION_PAUSED} is set: decided, nothing applied. {summary.message}"
        summary = Finding(reasons.READY, summary.status, reasons.PAUSED, note)
    findings = [accepted, placed, available, summary]
    if summary.status != "True" or seen.failure:
        unread = seen.reading.failure if seen.reading else None
        stuck = (
            seen.problems
            or seen.failure
            or seen.paused
            or summary.reason in (reasons.ROLLOUT_STALLED, reasons.NO_FIT, reasons.SIZE_UNKNOWN)
            or any(d.overdue for d in seen.deployments)
            or any(why is not None and why.waits_for_a_person for why in (cause, unread))
        )
        findings.append(
            Finding(reasons.STALLED if stuck else reasons.RECONCILING, "True", summary.reason, summary.message)
        )
    return findings


def _accepted(seen: Observed) -> Finding:
    if seen.problems:
        text = "; ".join(p.message for p in seen.problems)
        return Finding(reasons.ACCEPTED, "False", seen.problems[0].reason, text)
    if seen.served.lost:
        text = "; ".join(f"served name '{name}' belongs to the older Model {key}" for name, key in seen.served.lost)
        return Finding(
            reasons.ACCEPTED, "True", reasons.NAME_CLAIMED, f"{text}; '{seen.model.key}' always means this one"
        )
    return Finding(reasons.ACCEPTED, "True", reasons.VALID, "the specification is valid")


def _placed(seen: Observed) -> Finding:
    if seen.problems:
        return Finding(reasons.PLACED, "Unknown", reasons.PENDING, "not looked at until the Model is accepted")
    if (unread := _unread(seen)) is not None:
        return Finding(reasons.PLACED, "Unknown", unread[0], unread[1])
    placement = seen.placement
    if placement is None:
        return Finding(reasons.PLACED, "Unknown", reasons.PENDING, "not decided yet")
    status: ConditionStatus = "True" if placement.placed else "False"
    return Finding(reasons.PLACED, status, placement.reason, placement.message)


def _unread(seen: Observed) -> tuple[str, str] | None:
    """Why the source's facts are not known: a reason and a sentence. None when they are."""
    reading = seen.reading
    if reading is None or reading.facts is not None:
        return None
    if reading.failure is not None:
        return reading.failure.reason, reading.failure.message
    return reasons.READING_ARTIFACT, reading.waiting


def _cause(seen: Observed) -> Cause | None:
    refused = next((d.refused for d in seen.deployments if d.refused), None)
    found = diagnose(seen.pods)
    if refused and (found is None or found.reason == reasons.UNSCHEDULABLE):
        return Cause(reasons.PODS_REFUSED, refused)
    return found


def _not_ready(
    seen: Observed, desired: int, ready: int, cause: Cause | None, shown: Sequence[VariantStatus]
) -> Finding | None:
    """Why Ready is not True, the nearest cause first; None when it is."""

    def no(reason: str, message: str) -> Finding:
        return Finding(reasons.READY, "False", reason, message)

    if seen.problems:
        return no(seen.problems[0].reason, "; ".join(p.message for p in seen.problems))
    if seen.failure:
        return no(seen.failure.reason, seen.failure.message)
    if (unread := _unread(seen)) is not None and not (_serves(seen, desired, ready) and _never_read(seen.model)):
        return no(*unread)
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
    words = seen.scaling
    if words is not None and words.wanted > words.before:
        if words.before and ready >= max(words.before, seen.model.spec.scaling.min_replicas):
            return None  # more than were enough so far: on their way, and nothing is missing
        if not words.before:
            return no(reasons.WAKING, f"{words.message}; {state}")
    steps = {v.step for v in shown if v.desired}
    known = next((reason for reason in (reasons.FETCHING, reasons.LOADING) if reason in steps), reasons.STARTING)
    return no(reasons.STARTING if "Waiting" in steps else known, state)


def _serves(seen: Observed, desired: int, ready: int) -> bool:
    """As many replicas as wanted, of the revision that is wanted."""
    # A replica that starts in order to replace one that serves takes nothing away. Nor does an edit that a Deployment's
    # controller has not seen yet: each step of a move scales one, and Ready would blink.
    last = seen.model.status
    was_ready = last is not None and holds(last.conditions, reasons.READY, seen.model.metadata.generation)
    rolled_out = all(d.rolled_out or (was_ready and d.updated >= d.total) for d in seen.deployments if not d.deleting)
    return ready >= desired and rolled_out and bool(seen.deployments)


def _is_ready(seen: Observed, desired: int, ready: int, cause: Cause | None) -> Finding:
    """Ready, and what else there is to say."""
    words = seen.scaling
    if not desired and seen.placement is not None:
        before = find(seen.model.status.conditions, reasons.READY) if seen.model.status else None
        if before is not None and before.reason == reasons.SCALED_TO_ZERO:
            return Finding(reasons.READY, "True", reasons.SCALED_TO_ZERO, before.message)
        text = words.message if words is not None else "no replica; the next request wakes one"
        return Finding(reasons.READY, "True", reasons.SCALED_TO_ZERO, text)
    serving = f"{ready} of {desired} replicas ready"
    if ready < desired and words is not None:
        where = progress(seen.pods)
        text = "; ".join(part for part in (words.message, serving, where) if part)
        return Finding(reasons.READY, "True", reasons.SCALING_UP, text)
    if cause and cause.reason != reasons.UNSCHEDULABLE:
        serving = f"{serving}; one that is to replace another does not start: {cause.message}"
    return Finding(reasons.READY, "True", reasons.REPLICAS_READY, serving)


def _stalled_rollout(seen: Observed, ready: int, desired: int, cause: Cause | None) -> tuple[str, str] | None:
    """A revision that does not become ready: a reason and a sentence, with the engine's last words where it has any."""
    why = cause.message if cause else None
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
    """What kept the last replicas from starting, when they went to zero: not forgotten until others were tried."""
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
    """What runs was made by a version that read no facts: it is still what the Model asks for."""
    return model.status is not None and model.status.artifact is None
