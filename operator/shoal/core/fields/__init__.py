"""Which fields of a request reach an engine, within which bounds, and why: `table.py` has them all."""
