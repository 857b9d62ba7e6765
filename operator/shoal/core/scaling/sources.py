"""Stale signal sources of a Model, published only once they have been stale for a while: short gaps are normal, and
each change of a status is a write."""

from dataclasses import dataclass

from shoal.core.scaling.messages import names
from shoal.core.scaling.types import Policy, ScalingDecision

STEADY_SECONDS = 30.0
"""Seconds for which a message must hold before it is published, and be gone before it is withdrawn."""


@dataclass(frozen=True, slots=True)
class Steady:
    """The published message, and the latest one, which is published if it stays."""

    published: str | None = None
    latest: str | None = None
    since: float = float("-inf")
    """Monotonic seconds since which `latest` has held."""


def describe_stale(decision: ScalingDecision, policy: Policy) -> str | None:
    """Which sources are stale, where replicas might go down otherwise; None: nothing is held up."""
    if not decision.stale or decision.wanted <= policy.minimum:
        return None
    return f"no live signals from {names(tuple(sorted(decision.stale)))}: nothing scales down"


def steady(known: Steady, latest: str | None, now: float) -> Steady:
    """Takes the message that holds at `now` (monotonic seconds); None: there is none."""
    since = known.since if latest == known.latest else now
    return Steady(latest if now - since >= STEADY_SECONDS else known.published, latest, since)


def due(known: Steady, now: float) -> float | None:
    """Seconds until the published message changes, if nothing else changes; None: it will not."""
    return None if known.published == known.latest else max(0.0, known.since + STEADY_SECONDS - now)
