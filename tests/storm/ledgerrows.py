"""What the ledger has, read back from its own database: rows of requests, sums of hours, what engines counted."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

import orjson
import sqlalchemy as sa

from shoal.ledger import schema


class Tokens(NamedTuple):
    """Of prompts (cached ones included) and of answers."""

    prompt: int = 0
    answer: int = 0

    def plus(self, other: "Tokens") -> "Tokens":
        return Tokens(self.prompt + other.prompt, self.answer + other.answer)

    def minus(self, other: "Tokens") -> "Tokens":
        return Tokens(self.prompt - other.prompt, self.answer - other.answer)

    @property
    def total(self) -> int:
        return self.prompt + self.answer

    @classmethod
    def sum(cls, several: Iterable["Tokens"]) -> Self:
        prompt = answer = 0
        for one in several:
            prompt, answer = prompt + one[0], answer + one[1]
        return cls(prompt, answer)


NOTHING: Final = Tokens()


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One row of `usage`."""

    request: str
    attempt: int
    """0: the request itself; else the try whose answer nobody got."""
    ended: bool
    client_id: str | None
    model: str
    outcome: str | None
    source: str
    """final, continuous, estimated or none."""
    input: int | None
    output: int | None
    replica: str | None = None
    """namespace/pod."""
    route: str | None = None
    """namespace/name of the ModelRoute."""

    @property
    def counted(self) -> bool:
        """Whether its counts are the engine's own."""
        return self.source in ("final", "continuous")

    @property
    def billed(self) -> bool:
        return self.attempt == 0 and self.ended and self.counted

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.input or 0, self.output or 0)


@dataclass(frozen=True, slots=True)
class HourSum:
    """Of `hours`, over everything but who pays."""

    billed: bool
    requests: int
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Reading:
    """What one process of an engine said last of its own counters."""

    replica: str
    boot: str
    model: str
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Booked:
    """What the ledger itself answers when it is asked for it."""

    engines: Tokens
    billed: Tokens
    unattributed: Tokens
    requests: int
    """Of all tenants this month, as it tells gateways; without those whose counts are estimates."""


@dataclass(slots=True)
class LedgerContents:
    """All of it."""

    rows: list[LedgerRow] = field(default_factory=list[LedgerRow])
    hours: list[HourSum] = field(default_factory=list[HourSum])
    readings: list[Reading] = field(default_factory=list[Reading])
    aside: list[str] = field(default_factory=list[str])
    """Why records were kept aside."""
    booked: Booked | None = None
    """None: nobody asked."""


def read(url: str) -> LedgerContents:
    """The books in the database at `url`, which nothing writes to any more."""
    engine = sa.create_engine(url)
    try:
        with engine.connect() as connection:
            return _read(connection)
    finally:
        engine.dispose()


def heard(url: str) -> Tokens:
    """What the ledger has heard of the engines' own counters so far."""
    engine = sa.create_engine(url)
    e = schema.engines.c
    try:
        with engine.connect() as connection:
            prompt, answer = connection.execute(
                sa.select(sa.func.sum(e.prompt_tokens), sa.func.sum(e.generation_tokens))
            ).one()
    finally:
        engine.dispose()
    return Tokens(int(prompt or 0), int(answer or 0))


def _read(connection: sa.Connection) -> LedgerContents:
    clients: dict[str, str | None] = {}
    for request, body in connection.execute(sa.select(schema.records.c.request, schema.records.c.body)):
        clients[request] = orjson.loads(body)["data"].get("clientRequestId") or clients.get(request)
    u, h, e = schema.usage.c, schema.hours.c, schema.engines.c
    rows = connection.execute(
        sa.select(
            u.request,
            u.attempt,
            u.ended,
            u.model,
            u.outcome,
            u.count_source,
            u.input_tokens,
            u.output_tokens,
            u.replica,
            u.route,
        )
    )
    found = [
        LedgerRow(
            request, attempt, ended, clients.get(request), model, outcome, source, input, output, replica, route or None
        )
        for request, attempt, ended, model, outcome, source, input, output, replica, route in rows
    ]
    hours = connection.execute(
        sa.select(
            h.billed, sa.func.sum(h.requests), sa.func.sum(h.input_tokens), sa.func.sum(h.output_tokens)
        ).group_by(h.billed)
    )
    sums = [HourSum(billed, int(n), Tokens(int(prompt), int(answer))) for billed, n, prompt, answer in hours]
    engines = connection.execute(sa.select(e.replica, e.boot, e.model, e.prompt_tokens, e.generation_tokens))
    readings = [Reading(replica, boot, model, Tokens(p, a)) for replica, boot, model, p, a in engines]
    aside = [reason for (reason,) in connection.execute(sa.select(schema.aside.c.reason))]
    return LedgerContents(found, sums, readings, aside)
