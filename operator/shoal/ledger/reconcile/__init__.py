"""Reconciliation: engines' own counters against billed usage, and the cost of their GPUs (docs/reconciliation.md; the
arithmetic is in `core/reconcile.py`).

    pods.py        projections of engine pods and GPU classes
    readings.py    readings from the agents' streams, until they are stored
    keep.py        stores readings and GPU time, exactly once
    watch.py       runs it: watches, streams, periodic rounds
    compare.py     compares engines' counters with billed usage
    comparisonmetrics.py  the comparison as metrics
    routes.py      GET /v1/unattributed
"""
