"""Adds the price lists that were accepted last. They are written when the next ledger has read its files."""

import sqlalchemy as sa
from alembic import op

revision = "0006_from_0001"
down_revision = "0005_from_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates the table."""
    op.create_table(
        "price_lists",
        sa.Column("file", sa.String(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False, comment="the file's content, YAML"),
        sa.PrimaryKeyConstraint("file"),
    )
