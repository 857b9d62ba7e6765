"""Answer of the gateway's `GET /v1/routestats` on OPS_PORT, read by other gateways and `kubectl shoal top routes`: what
became of the requests to ModelRoutes in the last minute."""

from typing import Annotated, Final, Literal

from pydantic import Field

from shoal.api.replica import Id, Message, Sentence, Tally

MOST_ROWS: Final = 65_536
MOST_BOUNDS: Final = 64
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


class RouteStatsPage(Message):
    """The whole answer."""

    gateways: Annotated[tuple[Id, ...], Field(max_length=4096)] = ()
    """Gateways that have answered."""
    targets: Annotated[tuple[TargetStats, ...], Field(max_length=MOST_ROWS)] = ()
    missing: tuple[Sentence, ...] = ()
    """Gateways that did not answer, and why."""
