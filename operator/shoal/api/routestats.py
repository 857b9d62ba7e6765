"""Answer of the gateway's `GET /v1/routestats` on OPS_PORT, read by other gateways, `kubectl shoal top routes` and
`explain route`: what became of the requests to ModelRoutes in the last minute, whether external targets
answer, and whether targets have prices."""

from typing import Annotated, Final, Literal

from pydantic import Field

from shoal.api.replica import Id, Message, Sentence, Tally

MOST_ROWS: Final = 65_536
MOST_BOUNDS: Final = 64
MOST_TARGETS: Final = 512
"""Of one route: 16 rules with 16 targets, a canary and 4 fallbacks have fewer."""
Window = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]
"""Seconds."""


class TargetStats(Message):
    """A target of a route at one gateway."""

    route: Id
    """namespace/name of the ModelRoute."""
    target: Id
    """namespace/name of the Model or the adapter; of an external target namespace/route/name."""
    role: Literal["target", "canary", "fallback"]
    """What the target was in the rule of these requests."""
    gateway: Id
    window_seconds: Window
    """For so long requests were counted."""
    requests: Tally
    """Accepted requests that ended in the window."""
    failed: Tally
    """Of these, answers of 5xx, requests that no replica took, and answers that broke off."""
    output_tokens: Tally
    first_bytes: Annotated[tuple[Tally, ...], Field(max_length=MOST_BOUNDS)]
    """Streams by their time to the first byte: bounds are those of `TTFT_BOUNDS` in core/routing/routestats.py."""


class ExternalStats(Message):
    """An external target at one gateway."""

    target: Id
    """namespace/route/name."""
    gateway: Id
    state: Literal["Unused", "NotAsked", "Answers", "Fails"]
    """Unused: its host is not allowed, or its key is not here. NotAsked: not since the gateway started. Else what its
    last request came to."""
    reason: Id | None = None
    """With Fails: outcome of `shoal_gateway_external_requests_total`. With Unused: what is missing."""
    seconds_ago: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Since then."""
    rests: bool = False
    """It gets no requests now, since it failed repeatedly or asked for a pause."""
    running: Tally = 0
    """Requests there now."""


class RoutePrices(Message):
    """What one gateway knows of the prices of a route that has conditions on costs."""

    route: Id
    """namespace/name of the ModelRoute."""
    gateway: Id
    currency: Id | None = None
    """Of the price list in force; None: the gateway knows no price list."""
    unpriced: Annotated[tuple[Id, ...], Field(max_length=MOST_TARGETS)] = ()
    """Targets in rules with such conditions that have no price for any plan."""


class RouteStatsPage(Message):
    """The whole answer."""

    gateways: Annotated[tuple[Id, ...], Field(max_length=4096)] = ()
    """Gateways that have answered."""
    targets: Annotated[tuple[TargetStats, ...], Field(max_length=MOST_ROWS)] = ()
    externals: Annotated[tuple[ExternalStats, ...], Field(max_length=MOST_ROWS)] = ()
    prices: Annotated[tuple[RoutePrices, ...], Field(max_length=MOST_ROWS)] = ()
    missing: tuple[Sentence, ...] = ()
    """Gateways that did not answer, and why."""
