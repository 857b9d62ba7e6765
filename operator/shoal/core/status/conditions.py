"""From findings to conditions, so that an unchanged finding causes no write."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from shoal.api.meta import Condition, ConditionStatus

LONGEST_MESSAGE: Final = 1024


@dataclass(frozen=True, slots=True)
class ConditionUpdate:
    """One condition, as decided now."""

    type: str
    status: ConditionStatus
    reason: str
    message: str


def merge(
    old: Sequence[Condition], findings: Iterable[ConditionUpdate], *, generation: int, now: datetime
) -> tuple[Condition, ...]:
    """The conditions to write: exactly the findings. `lastTransitionTime` changes only with the status."""
    before = {c.type: c for c in old}
    merged: list[Condition] = []
    for finding in findings:
        known = before.get(finding.type)
        if known is not None and known.status == finding.status:
            since = known.last_transition_time
        else:
            since = now.replace(microsecond=0)
        merged.append(
            Condition(
                type=finding.type,
                status=finding.status,
                observed_generation=generation,
                last_transition_time=since,
                reason=finding.reason,
                message=shorten(finding.message),
            )
        )
    return tuple(merged)


def shorten(message: str, longest: int = LONGEST_MESSAGE) -> str:
    """Cuts a long message in the middle: an engine's last lines say why, the beginning says what."""
    if len(message) <= longest:
        return message
    head = longest // 4
    return f"{message[:head]} ... {message[-(longest - head - 5) :]}"


def find(conditions: Iterable[Condition], type: str) -> Condition | None:
    return next((c for c in conditions if c.type == type), None)


def holds(conditions: Iterable[Condition], type: str, generation: int) -> bool:
    """Whether the condition is True for this generation of the spec."""
    known = find(conditions, type)
    return known is not None and known.status == "True" and known.observed_generation == generation
