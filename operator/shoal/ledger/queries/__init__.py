"""Answers out of the sums: usage, bills, credits, margin, FOCUS.

times.py    from, to and month, as every question words them
dimensions.py  by what usage can be summed and filtered
sums.py     GET /v1/usage
aggregation.py  SQL that they share
rated.py    sums in the grain in which prices change
bills.py    GET and POST /v1/bill
creditbook.py  GET and POST /v1/credits
margins.py  GET /v1/margin
focus.py    GET /v1/focus
routes.py   all of them, with their roles
"""
