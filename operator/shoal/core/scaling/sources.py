"""Who is not heard, said of a Model only once it has held for a while: what comes and goes is no news, and each change
of a status is a write."""

from dataclasses import dataclass

from shoal.core.scaling.messages import names
from shoal.core.scaling.types import Policy, ScalingDecision

STEADY_SECONDS = 30.0
"""For so long it must have been the same before it is told, and gone before it is taken back."""


@dataclass(frozen=True, slots=True)
class Steady:
    """What is told, and what would be if it stayed as it is."""

    published: str | None = None
    latest: str | None = None
    since: float = float("-inf")
    """From when on `latest` has held."""


def describe_stale(decision: ScalingDecision, policy: Policy) -> str | None:
    """Which voices are missing, where replicas could go down if they were not; None: nothing is held up."""
    if not decision.stale or decision.wanted <= policy.minimum:
        return None
    return f"no live signals from {names(tuple(sorted(decision.stale)))}: nothing scales down"


def steady(known: Steady, latest: str | None, now: float) -> Steady:
    """Takes what holds at `now` (monotonic seconds); None: there is nothing to say."""
    since = known.since if latest == known.latest else now
    return Steady(latest if now - since >= STEADY_SECONDS else known.published, latest, since)


def due(known: Steady, now: float) -> float | None:
    """Seconds until something else is told, if nothing changes until then; None: nothing else is."""
    return None if known.published == known.latest else max(0.0, known.since + STEADY_SECONDS - now)
