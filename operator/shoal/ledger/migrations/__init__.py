"""Migrations of the tables, applied when the ledger starts (`database.migrate`)."""
