"""Answer of the operator's `GET /v1/decisions` on OPS_PORT, read by `kubectl shoal why` and `top`."""

from datetime import datetime

from shoal.api.replica import Message


class RuleResult(Message):
    """Result of one scaling rule with its inputs."""

    rule: str
    """Name of the rule, such as kvCache, queue, rate, backlog, held, minimum, idle, stabilization."""
    replicas: int | None
    """Replicas that the rule asks for; None: unknown, because an input is unknown."""
    inputs: dict[str, float | int | str | None]
    """Inputs by name; a name contains the unit, such as kvTokensUsed."""
    sentence: str
    """The result in one sentence, for people."""


class DecisionRecord(Message):
    """One scaling decision. A decision that equals its predecessor is counted instead of stored."""

    time: datetime
    before: int
    """Replicas wanted before."""
    wanted: int
    reason: str
    """A reason from `reasons.py`."""
    layer: str | None = None
    """Layer of the reason, such as L2 or control (docs/why.md); None: of an operator that does not say."""
    message: str
    rules: tuple[RuleResult, ...] = ()
    """Results of all rules, the deciding rule first."""
    alternative: str = ""
    """The rejected alternative and why it was rejected."""
    count: int = 1
    """How often in a row this decision was made."""


class ReplicaStats(Message):
    """Current state of one replica, as the operator sees it. None: unknown."""

    pod: str
    gpu_class: str | None = None
    phase: str | None = None
    age_seconds: float | None = None
    """Age of the agent's last message."""
    running: int | None = None
    waiting: int | None = None
    kv_tokens_used: int | None = None
    kv_tokens_total: int | None = None
    tokens_per_second: float | None = None
    tokens_per_step: float | None = None
    """Of an engine with speculation: the guessed tokens that a step accepts, and one."""


class DrivenVariant(Message):
    """One variant whose replicas are written by KEDA."""

    gpu_class: str
    answered: int | None = None
    """Replicas last answered to KEDA; None: none since this operator became leader."""
    replicas_written: int | None = None
    """`spec.replicas` of the variant's Deployment, as written by KEDA and its HPA."""


class DriverStats(Message):
    """Driver of a Model whose replicas are, or just were, written by KEDA: the condition ScalingActive, and the answers
    to KEDA."""

    driver: str
    """KEDA; BuiltIn while the Model switches back."""
    status: str
    reason: str
    message: str
    variants: tuple[DrivenVariant, ...] = ()


class ModelScaling(Message):
    """Current state of one Model."""

    model: str
    """namespace/name."""
    wanted: int
    """Replicas that scaling decided on. The Model's status has those that are placed on a class, as `desired`."""
    ready_replicas: int
    reason: str
    layer: str | None = None
    """Layer of the reason; None: of an operator that does not say."""
    message: str
    held: int | None = None
    in_flight: int | None = None
    arrivals_per_second: float | None = None
    stale: tuple[str, ...] = ()
    """Stale signal sources: pods of gateways and replicas."""
    driven: DriverStats | None = None
    """None: Shoal writes the replicas."""
    hourly_cost: str | None = None
    currency: str | None = None
    replicas: tuple[ReplicaStats, ...] = ()
    cold_starts: tuple[str, ...] = ()
    """A sentence per class about the stages of its cold starts, with what would shorten them. The command line adds
    them."""
    speculation: str = ""
    """A sentence about what the Model's speculation gives. The command line adds it; "": the Model has none."""
    decisions: tuple[DecisionRecord, ...] = ()
    """Newest first; set only in the answer about one Model."""


class Decisions(Message):
    """The whole answer."""

    operator: str
    """Name of the operator's pod."""
    leads: bool
    """Only the leader makes decisions. Another operator answers 503 and names the leader if known."""
    time: datetime
    models: tuple[ModelScaling, ...] = ()
