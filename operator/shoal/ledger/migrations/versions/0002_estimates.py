"""Adds the estimated tokens of each hour, which were stored per request only.

Hours whose requests are already deleted get zero.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002_from_0001"
down_revision = "0001"
branch_labels = None
depends_on = None

_KEY = ("hour", "tenant", "external_id", "key_name", "plan", "model", "adapter", "gpu_class")


def upgrade() -> None:
    """Adds the column and sums up the stored requests."""
    op.add_column(
        "hours",
        sa.Column(
            "estimated_input",
            sa.BigInteger(),
            nullable=False,
            server_default=sa.text("0"),
            comment="of input_tokens: prompts that an engine took and of which it said nothing; never billed",
        ),
    )
    same = " AND ".join(f"hours.{name} = found.{name}" for name in _KEY)
    op.execute(
        "UPDATE hours SET estimated_input = found.input FROM ("  # noqa: S608
        "SELECT admitted_at - admitted_at % 3600000 AS hour, tenant, key_name,"
        " coalesce(external_id, '') AS external_id, coalesce(plan, '') AS plan, model,"
        " coalesce(adapter, '') AS adapter, coalesce(gpu_class, '') AS gpu_class,"
        " sum(coalesce(input_tokens, 0)) AS input FROM usage WHERE ended AND count_source = 'estimated'"
        " GROUP BY 1, 2, 3, 4, 5, 6, 7, 8) AS found"
        f" WHERE {same} AND NOT hours.billed"
    )
