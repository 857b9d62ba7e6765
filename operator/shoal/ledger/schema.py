"""The ledger's tables, for SQLite and PostgreSQL. `migrations/` creates them.

Raw counts are immutable and contain no prices: prices are applied by queries. A request counts in the hour in which it
was admitted, which is the same in every copy of its record. Times are whole milliseconds since 1970 (UTC); an hour is
identified by its first millisecond; amounts are integers in 10^-12 of a currency.
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
"""Final and attempt rows, each once, until the retention: a row is added to `usage` and `hours` only if it is new here.
Open rows and checkpoints are only in `usage` until their request has ended."""

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
    Column("documents", BigInteger, nullable=False, server_default=text("0")),
    Column("images", BigInteger, nullable=False, server_default=text("0")),
    Column("audio_ms", BigInteger, nullable=False, server_default=text("0"), comment="length of audio"),
    Column("image_tokens", BigInteger, nullable=False, server_default=text("0"), comment="of input_tokens"),
    Column("audio_tokens", BigInteger, nullable=False, server_default=text("0"), comment="of input_tokens"),
    Column("accepted_tokens", BigInteger, nullable=False, server_default=text("0"), comment="of output_tokens"),
    PrimaryKeyConstraint(
        "hour", "tenant", "external_id", "key_name", "plan", "model", "adapter", "gpu_class", "billed"
    ),
    Index("hours_tenant", "tenant", "hour"),
)
"""Sums of ended requests, updated in the transaction that ends them. '' means none, because primary keys cannot be
NULL."""

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
"""The part of each gateway's counters since its start that is in `hours`, billed rows only, for `GET /v1/totals`. The
only table with computed costs: a gateway's counters are not recomputed with new prices either."""

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
"""Credits. Records and prices are never changed."""

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
"""Token counters of engines."""

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
"""Increase of the counters in `engines` per hour, and the time and cost of their GPUs."""

gpu_pods: Final = Table(
    "gpu_pods",
    metadata,
    Column("pod", String, primary_key=True, comment="its uid"),
    Column("model", String, nullable=False),
    Column("gpu_class", String, nullable=False),
    Column("counted_until", BigInteger, nullable=False, comment="how far its GPU time is in engine_hours"),
)
"""Position up to which the GPU time of each engine pod was counted: a restart continues there and counts nothing
twice."""

aside: Final = Table(
    "aside",
    metadata,
    Column("digest", String, primary_key=True, comment="SHA-256 of the body: sent again, it is the same"),
    Column("received_at", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
)
"""Quarantined records: they do not validate, or arrived after the retention."""

price_lists: Final = Table(
    "price_lists",
    metadata,
    Column("file", String, primary_key=True),
    Column("text", Text, nullable=False, comment="the file's content, YAML"),
)
"""The price lists that were accepted last, all together. A ledger that starts while its files are refused uses them."""
