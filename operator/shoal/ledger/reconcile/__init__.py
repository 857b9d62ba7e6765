"""What engines counted themselves, and what their GPUs cost (docs/reconciliation.md; the arithmetic is
`core/reconcile.py`).

pods.py        engine pods and GPU classes, as far as they are read here
readings.py    what the agents' streams say, until it is kept
keep.py        readings and GPU time into the tables, exactly once
watch.py       the whole: watches, streams, a round every few seconds
compare.py     the engines' counters beside what was billed, out of the tables
routes.py      GET /v1/unattributed
"""
