"""`shoal usage`, `bill`, `credits`, `margin`, `unattributed`, `export` and `prices`: usage and its cost.

usage.py         counted tokens by any dimension
bill.py          a tenant's monthly bill, also at other prices, and credits on it
margin.py        revenue and cost of GPU classes
unattributed.py  tokens that engines counted and that were not billed
export.py        FOCUS
prices.py        checks price lists before they are committed
show.py          tables
"""
