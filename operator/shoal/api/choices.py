"""Answer of a gateway's `GET /v1/choices?request=ID` on OPS_PORT, read by `kubectl shoal why request/ID`."""

from datetime import datetime

from shoal.api.replica import Message


class ReplicaCost(Message):
    """What a request costs at one replica."""

    replica: str
    """`namespace/name` of its pod."""
    seconds: float
    terms: dict[str, float] = {}
    """Seconds by term; docs/routing.md explains them."""


class ChoiceRecord(Message):
    """Why one attempt of a request went to a replica."""

    time: datetime
    gateway: str
    """Name of the gateway's pod."""
    model: str
    """`namespace/name`."""
    attempt: int
    replica: str
    """`namespace/name` of its pod."""
    message: str
    """In one sentence, for people."""
    chosen: ReplicaCost | None = None
    """None: the replica was not chosen by predicted seconds."""
    runner_up: ReplicaCost | None = None
    prompt_tokens: int | None = None
    """Estimated from bytes."""
    cached_tokens: float | None = None
    """Probably in the replica's prefix cache."""
    failure: str | None = None
    """Why another replica was tried, as `shoal_gateway_retries_total` counts it; `core/layers/attempts.py` has what it
    means. None: the attempt did not fail so, or a gateway of an earlier version."""


class FallbackRecord(Message):
    """Why a request left a target of its route."""

    time: datetime
    gateway: str
    """Name of the gateway's pod."""
    left: str
    """Key of the target that it left."""
    target: str
    """Key of the fallback that it went to."""
    message: str
    """In one sentence, for people."""


class StayRecord(Message):
    """Why a request stayed with the target of its route, although the route has conditions on costs."""

    time: datetime
    gateway: str
    """Name of the gateway's pod."""
    target: str
    """Key of the target."""
    message: str
    """In one sentence, for people."""


class RefusalRecord(Message):
    """The error with which a gateway answered a request. `core/layers/refusals.py` has what a code means."""

    time: datetime
    gateway: str
    """Name of the gateway's pod."""
    status: int
    code: str | None = None
    param: str | None = None
    """Field of the request that it is about."""
    model: str | None = None
    """`namespace/name` of the Model that the request was for at the end. None: none was chosen, an external target, or
    a gateway of an earlier version."""
    limit: str | None = None
    """Whose limit ended the request, for people: of a ModelRoute, a Model, or the gateways. None: another error, or a
    gateway of an earlier version."""
    subject: str | None = None
    """`adapter/NAMESPACE/NAME` or `route/NAMESPACE/NAME`: whose state explains the error. None: that of `model`, or
    none."""
    outcome: str | None = None
    """What became of the request at an external target; None: another error."""
    seconds: float | None = None
    """After so long the client left, before the answer had ended; None: the gateway ended the request."""


class RequestChoices(Message):
    """The attempts of one request, the first one first, the targets that it left, and its error."""

    request: str
    choices: tuple[ChoiceRecord, ...] = ()
    fallbacks: tuple[FallbackRecord, ...] = ()
    stays: tuple[StayRecord, ...] = ()
    refusals: tuple[RefusalRecord, ...] = ()
    remembered: int = 0
    """Requests whose choices or errors the gateways remember."""
    missing: tuple[str, ...] = ()
    """Gateways that did not answer, and why."""
