"""The ledger's answer to `GET /v1/unattributed`: tokens that engines counted and that were not billed
(docs/reconciliation.md)."""

from typing import Literal, get_args

from pydantic import Field

from shoal.api.replica import Message

UnattributedBy = Literal["model", "class", "hour", "day", "month", "engine"]
UNATTRIBUTED_BY: tuple[UnattributedBy, ...] = get_args(UnattributedBy)
"""Dimensions of the rows. `engine`: one row per engine process, over its whole lifetime."""


class UnattributedRow(Message):
    """The engines' counters compared with billed usage, in tokens. Input includes cached tokens, output includes
    reasoning.

    unattributed = engine - billed. `notBilled` is the part of unattributed that the ledger has records of. None: no
    engine reported, so the value is unknown.
    """

    hour: str | None = None
    day: str | None = None
    month: str | None = None
    model: str | None = None
    """namespace/name."""
    gpu_class: str | None = Field(None, alias="class")
    engine: str | None = None
    """Boot id of the engine's process."""
    replica: str | None = None
    """With `engine`: namespace/name of the pod."""
    last_report: str | None = None
    """With `engine`: time of its last report. Tokens that it counted later are not included."""
    engine_input: int | None = None
    engine_output: int | None = None
    billed_input: int = 0
    billed_output: int = 0
    not_billed_input: int = 0
    """Attempts whose response reached no client, and estimates."""
    not_billed_output: int = 0
    estimated_input: int | None = None
    """Part of `notBilledInput`: prompts that an engine accepted and did not report usage for."""
    unattributed_input: int | None = None
    unattributed_output: int | None = None
    share: float | None = None
    """Unattributed tokens as a fraction of the engines' count; None: that count is zero or unknown."""


class UnattributedPage(Message):
    """Answer to `GET /v1/unattributed`."""

    start: str = Field(alias="from")
    end: str = Field(alias="to")
    by: tuple[UnattributedBy, ...] = ()
    rows: tuple[UnattributedRow, ...] = ()
    total: UnattributedRow
    watching: bool
    """Whether the ledger knows the list of engines."""
    live: int
    """Engine pods whose agents report their counters now."""
    stale: tuple[str, ...] = ()
    """namespace/name of the other running engine pods, at most 100: their counters are as old as their last report."""
