"""Queries on the sums: usage, bills, credits, margin, FOCUS.

times.py        parameters from, to and month of every query
dimensions.py   dimensions by which usage is summed and filtered
sums.py         GET /v1/usage
aggregation.py  shared SQL
rated.py        sums per period of constant prices
bills.py        GET and POST /v1/bill
creditbook.py   GET and POST /v1/credits
margins.py      GET /v1/margin
focus.py        GET /v1/focus
routes.py       all routes, with their roles
"""
