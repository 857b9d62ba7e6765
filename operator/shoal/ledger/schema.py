"""The ledger's tables, for SQLite and PostgreSQL alike. `migrations/` makes them; queries are written against these.

Raw counts are immutable and hold no prices: those are applied when a question is asked. A request is counted in the
hour in which it was admitted, which every gateway and every re-ship says the same of. Times are whole milliseconds
since 1970 (UTC), hours are the first such of an hour; amounts are whole 10^-12 of a currency.
"""

from collections.abc import Iterator
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    text,
)

from shoal.metering import record

metadata: Final = MetaData()

_TYPES: Final = {str: String, bool: Boolean, float: Float, int: BigInteger}


def _columns() -> Iterator[Column[Any]]:
    for name, kind, nullable, stored in record.columns():
        yield Column(name, Integer if stored.small else _TYPES[kind], nullable=nullable, comment=stored.comment)


records: Final = Table(
    "records",
    metadata,
    Column("source", String, nullable=False),
    Column("id", String, nullable=False),
    Column("request", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("received_at", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False, comment="the CloudEvent, with all fields that it came with"),
    PrimaryKeyConstraint("source", "id"),
    Index("records_received_at", "received_at"),
    sqlite_with_rowid=False,
)
"""Final and attempt rows, each once, for the retention: who wants to add them to `usage` and `hours` must first get
them in here. Open rows and checkpoints stand in `usage` until their request has ended."""

usage: Final = Table(
    "usage",
    metadata,
    *_columns(),
    PrimaryKeyConstraint("source", "request", "attempt"),
    Index("usage_open", "gateway", sqlite_where=text("NOT ended"), postgresql_where=text("NOT ended")),
    Index("usage_tenant_time", "tenant", "admitted_at"),
    Index("usage_time", "admitted_at"),
    sqlite_with_rowid=False,
)
"""One row per request, and one per attempt row. Its columns are fields of the usage record (`metering/record.py`)."""

hours: Final = Table(
    "hours",
    metadata,
    Column("hour", BigInteger, nullable=False),
    Column("tenant", String, nullable=False),
    Column("external_id", String, nullable=False),
    Column("key_name", String, nullable=False),
    Column("plan", String, nullable=False),
    Column("model", String, nullable=False),
    Column("adapter", String, nullable=False),
    Column("gpu_class", String, nullable=False),
    Column("billed", Boolean, nullable=False, comment="false: attempt rows, and estimated counts"),
    Column("requests", BigInteger, nullable=False, comment="attempt rows count none"),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False, comment="never more than input_tokens"),
    Column(
        "unknown_cached_input",
        BigInteger,
        nullable=False,
        comment="of input_tokens: those of requests that do not say how much was cached",
    ),
    Column("output_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Column(
        "unknown_requests",
        BigInteger,
        nullable=False,
        comment="requests that an engine had and whose tokens are unknown",
    ),
    Column(
        "estimated_input",
        BigInteger,
        nullable=False,
        server_default=text("0"),
        comment="of input_tokens: prompts that an engine took and of which it said nothing; never billed",
    ),
    PrimaryKeyConstraint(
        "hour", "tenant", "external_id", "key_name", "plan", "model", "adapter", "gpu_class", "billed"
    ),
    Index("hours_tenant", "tenant", "hour"),
)
"""Sums of what ended, kept in the transaction that ends it. '' stands for none: a primary key knows no NULL."""

gateways: Final = Table(
    "gateways",
    metadata,
    Column("gateway", String, nullable=False, comment="its boot id"),
    Column("tenant", String, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False, comment="input and output"),
    Column("spent", BigInteger, nullable=False, comment="10^-12 of the currency, at the prices of then"),
    Column("heard_at", BigInteger, nullable=False),
    PrimaryKeyConstraint("gateway", "tenant"),
)
"""What of each gateway's own counters since its start is in `hours`, billed rows only, for `GET /v1/totals`. The one
place with money: a gateway's counters are not rated again either."""

credits: Final = Table(
    "credits",
    metadata,
    Column("id", String, primary_key=True, comment="given by who makes it, so that a repeated call makes one"),
    Column("tenant", String, nullable=False),
    Column("month", String, nullable=False, comment="2026-11: the bill that it is taken from"),
    Column("amount", BigInteger, nullable=False, comment="10^-12 of the currency; positive is for the tenant"),
    Column("currency", String, nullable=False),
    Column("note", Text, nullable=False),
    Column("made_at", BigInteger, nullable=False),
    Column("made_by", String, nullable=False),
)
"""Entries of their own: no record and no price is ever changed."""

engines: Final = Table(
    "engines",
    metadata,
    Column("boot", String, primary_key=True, comment="of the engine's process"),
    Column("model", String, nullable=False),
    Column("gpu_class", String, nullable=False),
    Column("replica", String, nullable=False),
    Column("node", String, nullable=False),
    Column("first_heard", BigInteger, nullable=False),
    Column("last_heard", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False, comment="the engine's own counter, its last reading"),
    Column("generation_tokens", BigInteger, nullable=False),
)
"""What engines counted themselves."""

engine_hours: Final = Table(
    "engine_hours",
    metadata,
    Column("hour", BigInteger, nullable=False),
    Column("model", String, nullable=False),
    Column("gpu_class", String, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("generation_tokens", BigInteger, nullable=False),
    Column("gpu_seconds", Float, nullable=False),
    Column("cost", BigInteger, nullable=False, comment="10^-9 of the class's currency, at its price then"),
    Column("currency", String, nullable=False),
    PrimaryKeyConstraint("hour", "model", "gpu_class", "currency"),
)
"""Growth of those counters, and what the GPUs cost meanwhile."""

gpu_pods: Final = Table(
    "gpu_pods",
    metadata,
    Column("pod", String, primary_key=True, comment="its uid"),
    Column("model", String, nullable=False),
    Column("gpu_class", String, nullable=False),
    Column("counted_until", BigInteger, nullable=False, comment="how far its GPU time is in engine_hours"),
)
"""How far the GPU time of each engine pod has been counted: a restart goes on there and counts nothing twice."""

aside: Final = Table(
    "aside",
    metadata,
    Column("digest", String, primary_key=True, comment="SHA-256 of the body: sent again, it is the same"),
    Column("received_at", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
)
"""Records that cannot be counted: they do not validate, or came after the retention."""
