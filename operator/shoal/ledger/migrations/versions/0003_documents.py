"""Adds the documents of a request that ranks or scores several texts. Requests of before had none."""

import sqlalchemy as sa
from alembic import op

revision = "0003_from_0001"
down_revision = "0002_from_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the column."""
    op.add_column(
        "usage", sa.Column("documents", sa.BigInteger(), nullable=True, comment="of /v1/rerank; items of /v1/score")
    )
