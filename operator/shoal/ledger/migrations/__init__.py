"""The tables' history, applied by the ledger at its start (`database.migrate`)."""
