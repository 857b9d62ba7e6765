"""Adds units beside tokens: images, audio, and the parts of token counts that engines tell.

Documents were stored per request only and are summed up; hours whose requests are already deleted get zero.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004_from_0001"
down_revision = "0003_from_0001"
branch_labels = None
depends_on = None

_KEY = ("hour", "tenant", "external_id", "key_name", "plan", "model", "adapter", "gpu_class")
_REQUEST = (
    ("images", sa.BigInteger(), None),
    ("audio_ms", sa.BigInteger(), "length of the audio"),
    ("audio_source", sa.String(), None),
    ("image_tokens", sa.BigInteger(), "of input_tokens"),
    ("audio_tokens", sa.BigInteger(), "of input_tokens"),
    ("accepted_tokens", sa.BigInteger(), "of output_tokens: of drafts"),
)
_HOUR = (
    ("documents", None),
    ("images", None),
    ("audio_ms", "length of audio"),
    ("image_tokens", "of input_tokens"),
    ("audio_tokens", "of input_tokens"),
    ("accepted_tokens", "of output_tokens"),
)


def upgrade() -> None:
    """Adds the columns and sums up the documents of stored requests."""
    for name, kind, comment in _REQUEST:
        op.add_column("usage", sa.Column(name, kind, nullable=True, comment=comment))
    for name, comment in _HOUR:
        zero = sa.text("0")
        op.add_column("hours", sa.Column(name, sa.BigInteger(), nullable=False, server_default=zero, comment=comment))
    same = " AND ".join(f"hours.{name} = found.{name}" for name in (*_KEY, "billed"))
    op.execute(
        "UPDATE hours SET documents = found.read FROM ("  # noqa: S608
        "SELECT admitted_at - admitted_at % 3600000 AS hour, tenant, key_name,"
        " coalesce(external_id, '') AS external_id, coalesce(plan, '') AS plan, model,"
        " coalesce(adapter, '') AS adapter, coalesce(gpu_class, '') AS gpu_class,"
        " (attempt = 0 AND count_source <> 'estimated') AS billed, sum(documents) AS read"
        " FROM usage WHERE ended AND count_source <> 'none' AND documents > 0"
        " GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9) AS found"
        f" WHERE {same}"
    )
