"""Run by alembic on the ledger's connection."""

from alembic import context
from sqlalchemy import Connection

from shoal.ledger import schema

connection: Connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=schema.metadata)
with context.begin_transaction():
    context.run_migrations()
