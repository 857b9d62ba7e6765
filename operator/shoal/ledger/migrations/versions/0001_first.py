"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates every table of `schema.py`."""
    op.create_table(
        "aside",
        sa.Column("digest", sa.String(), nullable=False, comment="SHA-256 of the body: sent again, it is the same"),
        sa.Column("received_at", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_table(
        "credits",
        sa.Column(
            "id", sa.String(), nullable=False, comment="given by who makes it, so that a repeated call makes one"
        ),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("month", sa.String(), nullable=False, comment="2026-11: the bill that it is taken from"),
        sa.Column(
            "amount", sa.BigInteger(), nullable=False, comment="10^-12 of the currency; positive is for the tenant"
        ),
        sa.Column("currency", sa.String(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("made_at", sa.BigInteger(), nullable=False),
        sa.Column("made_by", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "engine_hours",
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("gpu_class", sa.String(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("generation_tokens", sa.BigInteger(), nullable=False),
        sa.Column("gpu_seconds", sa.Float(), nullable=False),
        sa.Column("cost", sa.BigInteger(), nullable=False, comment="10^-9 of the class's currency, at its price then"),
        sa.Column("currency", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("hour", "model", "gpu_class", "currency"),
    )
    op.create_table(
        "engines",
        sa.Column("boot", sa.String(), nullable=False, comment="of the engine's process"),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("gpu_class", sa.String(), nullable=False),
        sa.Column("replica", sa.String(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("first_heard", sa.BigInteger(), nullable=False),
        sa.Column("last_heard", sa.BigInteger(), nullable=False),
        sa.Column(
            "prompt_tokens", sa.BigInteger(), nullable=False, comment="the engine's own counter, its last reading"
        ),
        sa.Column("generation_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("boot"),
    )
    op.create_table(
        "gateways",
        sa.Column("gateway", sa.String(), nullable=False, comment="its boot id"),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False, comment="input and output"),
        sa.Column("spent", sa.BigInteger(), nullable=False, comment="10^-12 of the currency, at the prices of then"),
        sa.Column("heard_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("gateway", "tenant"),
    )
    op.create_table(
        "gpu_pods",
        sa.Column("pod", sa.String(), nullable=False, comment="its uid"),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("gpu_class", sa.String(), nullable=False),
        sa.Column("counted_until", sa.BigInteger(), nullable=False, comment="how far its GPU time is in engine_hours"),
        sa.PrimaryKeyConstraint("pod"),
    )
    op.create_table(
        "hours",
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("external_id", sa.String(), nullable=False),
        sa.Column("key_name", sa.String(), nullable=False),
        sa.Column("plan", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("adapter", sa.String(), nullable=False),
        sa.Column("gpu_class", sa.String(), nullable=False),
        sa.Column("billed", sa.Boolean(), nullable=False, comment="false: attempt rows, and estimated counts"),
        sa.Column("requests", sa.BigInteger(), nullable=False, comment="attempt rows count none"),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False, comment="never more than input_tokens"),
        sa.Column(
            "unknown_cached_input",
            sa.BigInteger(),
            nullable=False,
            comment="of input_tokens: those of requests that do not say how much was cached",
        ),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger(), nullable=False),
        sa.Column(
            "unknown_requests",
            sa.BigInteger(),
            nullable=False,
            comment="requests that an engine had and whose tokens are unknown",
        ),
        sa.PrimaryKeyConstraint(
            "hour", "tenant", "external_id", "key_name", "plan", "model", "adapter", "gpu_class", "billed"
        ),
    )
    op.create_index("hours_tenant", "hours", ["tenant", "hour"], unique=False)
    op.create_table(
        "records",
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("request", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("received_at", sa.BigInteger(), nullable=False),
        sa.Column(
            "body", sa.LargeBinary(), nullable=False, comment="the CloudEvent, with all fields that it came with"
        ),
        sa.PrimaryKeyConstraint("source", "id"),
        sqlite_with_rowid=False,
    )
    op.create_index("records_received_at", "records", ["received_at"], unique=False)
    op.create_table(
        "usage",
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("request", sa.String(), nullable=False),
        sa.Column(
            "attempt", sa.Integer(), nullable=False, comment="0: the request itself; else the try that is not billed"
        ),
        sa.Column(
            "step", sa.BigInteger(), nullable=False, comment="how far it is; only a higher one replaces it (parse.py)"
        ),
        sa.Column("ended", sa.Boolean(), nullable=False, comment="false: open, with the counts of its last checkpoint"),
        sa.Column("received_at", sa.BigInteger(), nullable=False, comment="when something was heard of it last"),
        sa.Column("admitted_at", sa.BigInteger(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("external_id", sa.String(), nullable=True),
        sa.Column("key_name", sa.String(), nullable=False),
        sa.Column("plan", sa.String(), nullable=True),
        sa.Column("gateway", sa.String(), nullable=True),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("adapter", sa.String(), nullable=True),
        sa.Column("adapter_revision", sa.String(), nullable=True),
        sa.Column("model_requested", sa.String(), nullable=False),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("count_source", sa.String(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=True),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=True),
        sa.Column("output_tokens", sa.BigInteger(), nullable=True),
        sa.Column("reasoning_tokens", sa.BigInteger(), nullable=True),
        sa.Column("gpu_class", sa.String(), nullable=True),
        sa.Column("node", sa.String(), nullable=True),
        sa.Column("replica", sa.String(), nullable=True),
        sa.Column("engine_boot", sa.String(), nullable=True),
        sa.Column("ttft_ms", sa.Float(), nullable=True),
        sa.Column("hold_ms", sa.Float(), nullable=True),
        sa.Column("duration_ms", sa.Float(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False, comment="replicas that the request was sent to"),
        sa.PrimaryKeyConstraint("source", "request", "attempt"),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "usage_open",
        "usage",
        ["gateway"],
        unique=False,
        sqlite_where=sa.text("NOT ended"),
        postgresql_where=sa.text("NOT ended"),
    )
    op.create_index("usage_tenant_time", "usage", ["tenant", "admitted_at"], unique=False)
    op.create_index("usage_time", "usage", ["admitted_at"], unique=False)
