"""The status of a LoRAAdapter, computed from observations.

The status of an adapter on demand does not say where it is loaded: that changes with every request, and twenty thousand
such adapters must cause no writes. `kubectl shoal adapters` shows it.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from shoal.api import reasons
from shoal.api.loraadapter import AdapterRevision, LoRAAdapter, LoRAAdapterStatus
from shoal.api.meta import ConditionStatus
from shoal.core.lora.joining import UNDECIDED
from shoal.core.lora.lifecycle.revisions import FINAL, Revisions
from shoal.core.routing import servednames
from shoal.core.routing.consent import some
from shoal.core.status.conditions import ConditionUpdate, find, merge
from shoal.core.status.observed import ModelProblem, ServedNames


@dataclass(frozen=True, slots=True)
class Held:
    """Where an adapter is loaded and should be. Counted are replicas that are ready and serve adapters."""

    replicas: int = 0
    stale: int = 0
    """Replicas that do not report their adapters."""
    loaded: int = 0
    """Replicas that have loaded the current revision."""
    failure: ModelProblem | None = None
    """Why a replica could not load the current revision."""
    next_failure: ModelProblem | None = None
    """Why a replica could not load the next revision."""
    no_room: ModelProblem | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """The observations that the status is computed from."""

    adapter: LoRAAdapter
    served: ServedNames
    revisions: Revisions
    problem: ModelProblem | None = None
    """Why it is not in its pool."""
    failure: ModelProblem | None = None
    """Why its source cannot be read now; reading is retried."""
    waiting: str = ""
    """What the reading of its source waits for; "" when there is nothing to read."""
    not_granted: tuple[str, ...] = ()
    """Tenants that it lists and that do not grant it."""
    other_base: str = ""
    """The warning that its config names another base than its pool's; "": none."""
    held: Held = Held()


def status(seen: Seen, now: datetime) -> LoRAAdapterStatus:
    """The whole status. Equal observations give an equal status, except for transition times of conditions."""
    adapter, revisions = seen.adapter, seen.revisions
    before = adapter.status.conditions if adapter.status else ()
    current = revisions.current
    # A refusal without a condition would look like a success later: the source is read again instead.
    forgotten = seen.problem is not None and revisions.refused is not None
    return LoRAAdapterStatus(
        conditions=merge(before, _findings(seen), generation=adapter.metadata.generation, now=now),
        observed_generation=adapter.metadata.generation,
        served_names=seen.served.owned,
        revision=current.revision if current else None,
        uri=current.uri if current else None,
        rank=current.rank if current else None,
        size_bytes=current.size_bytes if current else None,
        base=current.base if current else None,
        next=revisions.next,
        read_by=None if forgotten else revisions.read_by,
    )


def short(revision: AdapterRevision) -> str:
    """A revision in a message: the 12 digits that its engine name has."""
    return revision.revision.removeprefix("sha256:")[:12]


def _findings(seen: Seen) -> list[ConditionUpdate]:
    accepted, available, ready = _accepted(seen), _available(seen), _ready(seen)
    findings = [accepted, available, ready]
    if ready.status == "True" and ready.reason != reasons.SWITCHING:
        return findings
    stuck = _stuck(seen, ready)
    findings.append(
        ConditionUpdate(reasons.STALLED if stuck else reasons.RECONCILING, "True", ready.reason, ready.message)
    )
    return findings


def _stuck(seen: Seen, ready: ConditionUpdate) -> bool:
    """Whether a person has to act."""
    if seen.problem is not None:
        return seen.problem.reason != UNDECIDED
    return ready.status == "False" and ready.reason in _FOR_A_PERSON


_FOR_A_PERSON: Final = FINAL | {
    reasons.NO_ROOM,
    reasons.LOAD_FAILED,
    reasons.LOAD_ENDED_ENGINE,
    reasons.SOURCE_CHANGED,
    reasons.SOURCE_NOT_FOUND,
    reasons.GATED,
    reasons.REFUSED,
}


def _accepted(seen: Seen) -> ConditionUpdate:
    kind, revisions = reasons.ACCEPTED, seen.revisions
    if seen.problem is not None:
        return ConditionUpdate(kind, _no(seen.problem), seen.problem.reason, seen.problem.message)
    if (wrong := seen.failure or revisions.refused) is not None:
        return ConditionUpdate(kind, "False", wrong.reason, wrong.message)
    if seen.waiting:
        return ConditionUpdate(kind, "Unknown", reasons.READING_ADAPTER, seen.waiting)
    not_granted = _not_granted(seen)
    if seen.served.lost:
        text = servednames.describe_lost(seen.adapter.key, seen.served)
        return ConditionUpdate(kind, "True", reasons.NAME_CLAIMED, f"{text}. {not_granted}" if not_granted else text)
    if not_granted:
        return ConditionUpdate(kind, "True", reasons.NOT_GRANTED, not_granted)
    if seen.other_base:
        return ConditionUpdate(kind, "True", reasons.BASE_NAME_DIFFERS, seen.other_base)
    return ConditionUpdate(kind, "True", reasons.VALID, "the adapter fits its pool and its base model")


def _not_granted(seen: Seen) -> str:
    if not seen.not_granted:
        return ""
    return (
        f"for {some(seen.not_granted)} it does not exist: a Tenant that is listed has to grant it too, by spec.models "
        "(the pool's Model, from its own namespace) or by spec.adapters"
    )


def _available(seen: Seen) -> ConditionUpdate:
    kind, held, current = reasons.AVAILABLE, seen.held, seen.revisions.current
    if seen.problem is not None:
        return ConditionUpdate(kind, _no(seen.problem), seen.problem.reason, seen.problem.message)
    if current is None:
        reason, message = _why_none(seen)
        return ConditionUpdate(kind, "False", reason, message)
    if held.failure is not None and not held.loaded:
        return ConditionUpdate(kind, "False", held.failure.reason, held.failure.message)
    return ConditionUpdate(
        kind, "True", reasons.VALID, f"revision {short(current)} answers, at once or after being loaded"
    )


def _why_none(seen: Seen) -> tuple[str, str]:
    if (wrong := seen.failure or seen.revisions.refused) is not None:
        return wrong.reason, wrong.message
    return reasons.READING_ADAPTER, seen.waiting or "its source was not read yet"


def _ready(seen: Seen) -> ConditionUpdate:
    kind, revisions, held = reasons.READY, seen.revisions, seen.held
    current = revisions.current
    if seen.problem is not None:
        return ConditionUpdate(kind, _no(seen.problem), seen.problem.reason, seen.problem.message)
    if current is None:
        reason, message = _why_none(seen)
        return ConditionUpdate(kind, "False", reason, message)
    goes_on = f"revision {short(current)} goes on answering"
    if (wrong := seen.failure or revisions.refused) is not None:
        return ConditionUpdate(kind, "False", wrong.reason, f"{wrong.message}; {goes_on}")
    if held.next_failure is not None and revisions.next is not None:
        what = f"revision {short(revisions.next)}: {held.next_failure.message}"
        return ConditionUpdate(kind, "False", held.next_failure.reason, f"{what}; {goes_on}")
    if revisions.next is not None:
        return ConditionUpdate(
            kind, "True", reasons.SWITCHING, f"revision {short(revisions.next)} is loaded to take over; {goes_on}"
        )
    if seen.waiting:
        return ConditionUpdate(kind, "True", reasons.SWITCHING, f"{seen.waiting}; {goes_on}")
    return _residence(seen)


def _residence(seen: Seen) -> ConditionUpdate:
    """Ready, for an adapter whose current revision is the declared one."""
    kind, held, spec = reasons.READY, seen.held, seen.adapter.spec
    if held.failure is not None and not held.loaded:
        return ConditionUpdate(kind, "False", held.failure.reason, held.failure.message)
    if spec.residency == "OnDemand":
        return ConditionUpdate(kind, "True", reasons.ON_DEMAND, "loaded where its requests come")
    if held.no_room is not None:
        return ConditionUpdate(kind, "False", held.no_room.reason, held.no_room.message)
    wanted = min(spec.min_copies, held.replicas)
    if not wanted and held.stale and (last := _last_published(seen.adapter)) is not None:
        return last
    if not wanted:
        text = f"{spec.residency}: the pool has no replica now; the first one loads it"
        return ConditionUpdate(kind, "True", reasons.WAITS_FOR_REPLICA, text)
    if held.loaded >= wanted:
        return ConditionUpdate(kind, "True", reasons.RESIDENT, f"loaded on {_replicas(wanted)}, as it should be")
    if held.stale and (last := _last_published(seen.adapter)) is not None:
        return last
    if held.failure is not None:
        return ConditionUpdate(kind, "False", held.failure.reason, held.failure.message)
    return ConditionUpdate(kind, "False", reasons.LOADING_ADAPTER, f"loaded on {held.loaded} of {_replicas(wanted)}")


def _last_published(adapter: LoRAAdapter) -> ConditionUpdate | None:
    """The last Ready condition, while nothing newer is known; None: it says nothing of replicas."""
    ready = find(adapter.status.conditions, reasons.READY) if adapter.status else None
    if ready is None or ready.reason not in (reasons.RESIDENT, reasons.LOADING_ADAPTER):
        return None
    return ConditionUpdate(ready.type, ready.status, ready.reason, ready.message)


def _no(problem: ModelProblem) -> ConditionStatus:
    return "Unknown" if problem.reason == UNDECIDED else "False"


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"
