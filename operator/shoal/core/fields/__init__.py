"""Which fields of a request reach an engine, within which bounds, and why. All of them are in `table.py`."""
