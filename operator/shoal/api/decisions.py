"""What the operator tells of its decisions on scaling: `GET /v1/decisions`, read by `kubectl shoal why` and `top`."""

from datetime import datetime

from shoal.api.replica import Message


class RuleResult(Message):
    """What one rule asks for, and from what."""

    rule: str
    """Such as kvCache, queue, rate, backlog, held, minimum, idle, stabilization."""
    replicas: int | None
    """None: it could not be computed, an input is unknown."""
    inputs: dict[str, float | int | str | None]
    """The figures that went in, by name with their unit, such as kvTokensUsed."""
    sentence: str
    """For a person."""


class DecisionRecord(Message):
    """One decision. Only those that differ from the one before are kept."""

    time: datetime
    before: int
    """Replicas wanted before."""
    wanted: int
    reason: str
    """A reason of `reasons.py`."""
    message: str
    rules: tuple[RuleResult, ...] = ()
    """All rules, the deciding one first."""
    alternative: str = ""
    """What was not done, and why."""
    count: int = 1
    """How often in a row this was decided."""


class ReplicaFigures(Message):
    """One replica as the operator hears it. None: unknown."""

    pod: str
    gpu_class: str | None = None
    phase: str | None = None
    age_seconds: float | None = None
    """Of what was heard."""
    running: int | None = None
    waiting: int | None = None
    kv_tokens_used: int | None = None
    kv_tokens_total: int | None = None
    tokens_per_second: float | None = None


class DrivenVariant(Message):
    """One variant whose replicas KEDA writes."""

    gpu_class: str
    answered: int | None = None
    """Replicas that KEDA was told; None: nothing yet in this operator's term."""
    replicas_written: int | None = None
    """That its Deployment asks for: what KEDA and its HPA made of it."""


class DriverFigures(Message):
    """Of a Model whose replicas KEDA writes, or just did: the condition ScalingActive, and what KEDA is answered."""

    driver: str
    """KEDA, or BuiltIn on the way back."""
    status: str
    reason: str
    message: str
    variants: tuple[DrivenVariant, ...] = ()


class ModelFigures(Message):
    """One Model now."""

    model: str
    """namespace/name."""
    wanted: int
    ready: int
    reason: str
    message: str
    held: int | None = None
    in_flight: int | None = None
    arrivals_per_second: float | None = None
    stale: tuple[str, ...] = ()
    """Voices that are not fresh: pods of gateways and replicas."""
    driven: DriverFigures | None = None
    """None: Shoal writes the replicas itself."""
    hourly_cost: str | None = None
    currency: str | None = None
    replicas: tuple[ReplicaFigures, ...] = ()
    decisions: tuple[DecisionRecord, ...] = ()
    """Newest first; only in the answer about one Model."""


class Decisions(Message):
    """The whole answer."""

    operator: str
    """Name of the operator's pod."""
    leads: bool
    """Only the leader decides; another one answers 503 and names the leader where it knows it."""
    time: datetime
    models: tuple[ModelFigures, ...] = ()
