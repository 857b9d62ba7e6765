"""What is known of a Model's source: the facts that a small Job read, or why there are none yet."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, get_args

from pydantic import ValidationError

from shoal.api import reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Model
from shoal.api.sources import BucketScheme
from shoal.core import children
from shoal.core.facts import MetadataJob, Pod
from shoal.core.status.conditions import find
from shoal.core.status.diagnosis import Cause, container_cause, missing_claim

CONTAINER: Final = "facts"
NO_POD_SECONDS: Final = 10.0
"""A Job that has no pod after so long is refused one: a quota, an admission policy."""


@dataclass(frozen=True, slots=True)
class SourceReading:
    """The state of reading one source. Exactly one of the three is set."""

    facts: ArtifactFacts | None = None
    failure: Cause | None = None
    waiting: str = ""
    """What it waits for, for people."""
    needs_job: bool = False
    """Nothing reads the source now: a Job has to be made."""
    silent: bool = False
    """The Job has no pod yet, and no event tells when it is refused one: look again."""


def stage_words(message: str) -> str:
    """What the termination message of a stage container says to a person."""
    try:
        written: Any = json.loads(message)
    except (ValueError, RecursionError):
        return message.strip().rpartition("\n")[2]
    match written:
        case {"reason": str(reason), "message": str(text)}:
            return f"{reason}: {text}"
        case _:
            return message.strip()


def source_key(model: Model) -> str:
    """Name of the Job that reads this Model's source; also tells for which source facts were read."""
    source = model.spec.source
    secret = source.secret_ref.name if source.secret_ref else None
    return children.facts_job(source.uri, source.digest, secret, identity(model))


def identity(model: Model) -> str | None:
    """The ServiceAccount as whose cloud identity the source is read; None: as none, or the source knows none."""
    known = model.spec.source.uri.partition("://")[0] in get_args(BucketScheme)
    return model.spec.pod.service_account_name if known else None


def known(model: Model) -> ArtifactFacts | None:
    """The facts that the Model's own status has, if they are of the source that it names now."""
    facts = model.status.artifact if model.status else None
    return facts if facts is not None and facts.read_by == source_key(model) else None


def read(
    model: Model,
    *,
    same_source: Iterable[Model],
    job: MetadataJob | None,
    pods: Iterable[Pod],
    now: datetime,
    reported: ArtifactFacts | None = None,
) -> SourceReading:
    """What is known of the source at `now`.

    `reported` are facts that its Job reported before the Job was deleted, `same_source` are Models of the namespace
    that name the same source, `job` and `pods` those of its Job. Facts never change: once a Model has them, nothing is
    read again, until its source is another one.
    """
    if (facts := known(model)) is not None:
        return SourceReading(facts)
    for other in sorted(same_source, key=lambda m: m.metadata.uid):
        if (facts := known(other)) is not None:
            return SourceReading(facts)
    key = source_key(model)
    if reported is not None:
        return SourceReading(reported.model_copy(update={"read_by": key}))
    tries = sorted(pods, key=lambda p: (p.created is not None, p.created, p.name), reverse=True)
    for pod in tries:
        if (facts := facts_of(pod)) is not None:
            return SourceReading(facts.model_copy(update={"read_by": key}))
    failure = next((cause for pod in tries if (cause := _failure(pod)) is not None), None)
    failure = failure or next((cause for pod in tries if (cause := _no_claim(pod, model)) is not None), None)
    running = job is not None and job.active and not job.deleting
    if failure is not None:
        return SourceReading(failure=failure, needs_job=job is None)
    if job is not None and job.failed is not None:
        message = (
            f"reading the source's metadata: Job {job.key} failed: {job.failed}; it is tried again, and kubectl "
            f"describe job -n {job.namespace} {job.name} says more"
        )
        return SourceReading(failure=Cause(reasons.STAGE_FAILED, message))
    if (before := _last_failure(model)) is not None:
        # It is tried again from time to time; until that ends, what is known is why it failed.
        return SourceReading(failure=before, needs_job=job is None)
    if job is None:
        return SourceReading(waiting="reads the source's metadata", needs_job=True)
    why = next((text for pod in tries if (text := _waits(pod))), "")
    since = now - job.created if job.created else timedelta()
    if running and not tries and since.total_seconds() >= NO_POD_SECONDS:
        why = f"it has no pod yet; where that stays, see kubectl describe job -n {job.namespace} {job.name}"
        if (account := identity(model)) is not None:
            why += f" (spec.pod.serviceAccountName: is there a ServiceAccount {account} in namespace {job.namespace}?)"
    state = f"Job {job.name} reads the source's metadata" if running else f"waits for Job {job.name} to be gone"
    return SourceReading(waiting=f"{state}: {why}" if why else state, silent=running and not tries)


def _no_claim(pod: Pod, model: Model) -> Cause | None:
    """The cause if the source is a PersistentVolumeClaim that does not exist. The pod starts once it is created."""
    scheme, _, rest = model.spec.source.uri.partition("://")
    claim = rest.partition("/")[0]
    if scheme != "pvc" or missing_claim(pod) != claim:
        return None
    where = f"in namespace {model.metadata.namespace}"
    message = f"spec.source.uri: there is no PersistentVolumeClaim {claim} {where}; create it, or name another one"
    return Cause(reasons.SOURCE_NOT_FOUND, message)


def _last_failure(model: Model) -> Cause | None:
    placed = find(model.status.conditions, reasons.PLACED) if model.status else None
    if placed is None or placed.observed_generation != model.metadata.generation:
        return None
    told = placed.status == "Unknown" and placed.reason in (reasons.STAGE_FAILED, *reasons.STAGE_REASONS)
    return Cause(placed.reason, placed.message) if told else None


def _termination(pod: Pod) -> tuple[int, str] | None:
    container = pod.container(CONTAINER)
    if container is None or container.exit_code is None:
        return None
    return container.exit_code, (container.exit_message or "").strip()


def facts_of(pod: Pod) -> ArtifactFacts | None:
    """The facts that this pod of a Job left; None: it has not ended, or failed."""
    ended = _termination(pod)
    if ended is None or ended[0] != 0:
        return None
    try:
        return ArtifactFacts.model_validate(json.loads(ended[1])["facts"])
    except (ValueError, KeyError, TypeError, RecursionError):  # a ValidationError is a ValueError
        return None


def _failure(pod: Pod) -> Cause | None:
    ended = _termination(pod)
    if ended is None:
        return None
    code, text = ended
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    match content:
        case {"reason": str(reason), "message": str(message)} if reason in reasons.STAGE_REASONS:
            return Cause(reason, message)
        case {"facts": found} if code == 0:
            return Cause(reasons.STAGE_FAILED, f"the source's facts are not understood: {_problem(found)}")
        case _:
            pass
    container = pod.container(CONTAINER)
    detail = text or (container.exit_reason if container else None) or "no message"
    return Cause(reasons.STAGE_FAILED, f"reading the source's metadata ended with exit code {code}: {detail}")


def _problem(found: object) -> str:
    try:
        ArtifactFacts.model_validate(found)
    except ValidationError as error:
        return "; ".join(f"{'.'.join(map(str, e['loc']))[:128]}: {e['msg'][:256]}" for e in error.errors()[:3])
    return "no message"


def _waits(pod: Pod) -> str:
    """Why a pod that has not ended does not: the scheduler's sentence, or an image that cannot be pulled."""
    if pod.unschedulable:
        return pod.unschedulable
    cause = container_cause(pod)
    return cause.message if cause else ""
