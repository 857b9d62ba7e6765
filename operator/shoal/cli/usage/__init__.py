"""`shoal usage`, `bill`, `credits`, `margin`, `unattributed`, `export` and `prices`: what was used, and what it costs.

usage.py     counted tokens, by anything
bill.py      a tenant's month, also at other prices
credits.py   entries of their own
margin.py    what GPU classes brought in and cost
unattributed.py  what engines counted beside what was billed
export.py    FOCUS
prices.py    checks price lists before they are committed
show.py      tables
"""
