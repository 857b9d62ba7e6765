"""From what gateways remember of a request to why it was refused, or why it needed more than one attempt."""

from collections.abc import Iterator
from datetime import datetime
from typing import Final, NamedTuple

from shoal.api.choices import ChoiceRecord, FallbackRecord, RefusalRecord, RequestChoices
from shoal.core.layers import attempts
from shoal.core.layers.candidates import age
from shoal.core.layers.externals import OUTCOMES
from shoal.core.layers.layer import Layer
from shoal.core.layers.refusals import OF_MODELS, points_at, refusal
from shoal.core.layers.types import KINDS, Evidence, ExplainedKind, Explanation, LayerCause

ATTEMPT_FAILED: Final = "attempt_failed"
"""Reason of the failed attempts of a request that another replica took."""
_SUBJECTS: Final[tuple[ExplainedKind, ...]] = ("adapter", "route")
"""Kinds of objects that a gateway names in an error, beside the Model."""
_WHILE: Final = {
    "client_left_early": "its body was read, or it waited for its tenant's limits",
    "client_left_waiting": "it waited for a replica",
    "client_left_working": "a replica worked on it",
    "client_left_answering": "it was answered",
}


class Subject(NamedTuple):
    """An object whose state explains a request's error."""

    kind: ExplainedKind
    namespace: str
    name: str


def subject_of(found: RequestChoices) -> Subject | None:
    """Whose state explains the request's error; None: no object's does."""
    for each in found.refusals:
        kind, _, key = (each.subject or "").partition("/")
        for known in _SUBJECTS:
            if kind == known and points_at(kind, refusal(each.code)):
                return _subject(known, key)
        if each.code in OF_MODELS:
            if each.model is None and found.choices and not found.fallbacks:
                return _subject("model", found.choices[-1].model)  # of a gateway of an earlier version
            return None if each.model is None else _subject("model", each.model)
    return None


def _subject(kind: ExplainedKind, key: str) -> Subject | None:
    namespace, _, name = key.partition("/")
    return Subject(kind, namespace, name) if name else None


def causes(found: RequestChoices, below: Explanation | None, now: datetime) -> tuple[LayerCause, ...]:
    """What is wrong, the most upstream cause first. `below`: what is wrong now with the object of `subject_of`; None:
    that is not known."""
    of_subject = () if below is None else tuple(each for each in below.causes if each.state in ("fault", "waits"))
    upstream = of_subject[0] if of_subject and of_subject[0].state == "fault" else None
    tried = tuple(_tried(found))
    refused = tuple(_refused(each, tried, upstream, below, now) for each in found.refusals)
    return (*of_subject, *refused) if refused else tuple(_failed_attempts(found, now))


def failure_of(choice: ChoiceRecord) -> tuple[Layer, str] | None:
    """Layer and words of an attempt's failure; None: it did not fail, or the gateway does not tell."""
    return None if choice.failure is None else attempts.FAILURES.get(choice.failure, attempts.UNKNOWN)


def _refused(
    refused: RefusalRecord,
    tried: tuple[str, ...],
    upstream: LayerCause | None,
    below: Explanation | None,
    now: datetime,
) -> LayerCause:
    row = refusal(refused.code, refused.outcome)
    about = f" (field {refused.param})" if refused.param else ""
    said = f"{refused.status} {refused.code or 'without a code'}{about}"
    proof = Evidence(said, f"gateway {refused.gateway}", age(now, refused.time))
    whose = f": the limit is {refused.limit}" if refused.limit else ""
    reason = refused.code or str(refused.status)
    if refused.outcome is not None and refused.outcome in OUTCOMES:
        reason, words = OUTCOMES[refused.outcome]
        whose = f": of its external target, {words}"
    text = f"it was answered with {said}{whose}"
    if refused.seconds is not None:
        text = f"its client left after {refused.seconds:.1f} s, while {_WHILE.get(refused.code or '', 'it ran')}"
    do = row.do
    if upstream is not None and below is not None:
        after = "Then send it again." if points_at(below.kind, row) else do
        begin = f"Begin with what is wrong with {KINDS[below.kind]} {below.key}"
        do = f"{begin}: {upstream.layer.label} {upstream.reason}. {after}"
    return LayerCause(reason, row.layer, "fault", text, do, (proof,), tried)


def _tried(found: RequestChoices) -> Iterator[str]:
    """Attempts at replicas, and fallbacks of the route, in the order in which they came."""
    last = found.choices[-1] if found.choices else None
    for each in sorted((*found.choices, *found.fallbacks), key=lambda each: each.time):
        if isinstance(each, FallbackRecord):
            yield f"it left {each.left} and {each.message}"
        elif (failure := failure_of(each)) is not None:
            layer, words = failure
            yield f"attempt {each.attempt} at {each.replica} failed on {layer.label}: {words}"
        else:
            yield f"attempt {each.attempt} at {each.replica}{', which had it last' if each is last else ''}"


def _failed_attempts(found: RequestChoices, now: datetime) -> Iterator[LayerCause]:
    """Of a request without an error: a note for each kind of failure."""
    failed: dict[tuple[Layer, str], list[ChoiceRecord]] = {}
    for choice in found.choices:
        if (failure := failure_of(choice)) is not None:
            failed.setdefault(failure, []).append(choice)
    tried = tuple(_tried(found))
    for (layer, words), choices in sorted(failed.items(), key=lambda each: each[0][0].order):
        namespace, _, name = choices[0].model.partition("/")
        where = ", ".join(dict.fromkeys(choice.replica for choice in choices))
        yield LayerCause(
            ATTEMPT_FAILED,
            layer,
            "note",
            f"{len(choices)} of its {len(found.choices)} attempts failed, at {where}: {words}",
            f"Nothing, unless it repeats: then run `shoal why model/{name} -n {namespace}`.",
            tuple(
                Evidence(
                    f"attempt {choice.attempt}: {choice.failure}", f"gateway {choice.gateway}", age(now, choice.time)
                )
                for choice in choices
            ),
            tried,
        )
