"""Adds the ModelRoute that chose a request's model. Requests of before have none."""

import sqlalchemy as sa
from alembic import op

revision = "0005_from_0001"
down_revision = "0004_from_0001"
branch_labels = None
depends_on = None

_COMMENT = "namespace/name of the ModelRoute that chose the model"


def upgrade() -> None:
    """Adds the column."""
    op.add_column("usage", sa.Column("route", sa.String(), nullable=True, comment=_COMMENT))
