"""What `GET /v1/unattributed` of the ledger says (docs/reconciliation.md)."""

from typing import Literal, get_args

from pydantic import Field

from shoal.api.replica import Message

UnattributedBy = Literal["model", "class", "hour", "day", "month", "engine"]
UNATTRIBUTED_BY: tuple[UnattributedBy, ...] = get_args(UnattributedBy)
"""What rows can be told apart by. `engine`: one row per process of an engine, over its whole life."""


class UnattributedRow(Message):
    """The engines' own counters beside what was billed. Tokens; input includes cached ones, output reasoning ones.

    unattributed = engine - billed; `notBilled` is the part of it that the ledger has records of. None: no engine was
    heard, so it is not known.
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
    """With `engine`: namespace/pod."""
    last_report: str | None = None
    """With `engine`: when it was heard last. What it counted after that is nowhere."""
    engine_input: int | None = None
    engine_output: int | None = None
    billed_input: int = 0
    billed_output: int = 0
    not_billed_input: int = 0
    """Tries whose answer nobody got, and estimates."""
    not_billed_output: int = 0
    estimated_input: int | None = None
    """Of `notBilledInput`, prompts that an engine took and of which it said nothing."""
    unattributed_input: int | None = None
    unattributed_output: int | None = None
    share: float | None = None
    """Unattributed tokens as a part of what the engines counted; None where that is nothing or unknown."""


class UnattributedPage(Message):
    """The answer."""

    start: str = Field(alias="from")
    end: str = Field(alias="to")
    by: tuple[UnattributedBy, ...] = ()
    rows: tuple[UnattributedRow, ...] = ()
    total: UnattributedRow
    watching: bool
    """The ledger knows which engines there are."""
    live: int
    """Engine pods whose agents report their counters now."""
    stale: tuple[str, ...] = ()
    """namespace/pod of the others that run, at most 100: their counters are as old as their last reading."""
