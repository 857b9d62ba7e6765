"""Prices and bills: what counted tokens cost, in exact integers.

price.py      which price counts for a request, and what its tokens cost
files.py      reads a price list; problems.py has what is wrong with one, by line
schedule.py   which price list is in force when, and whether lists go together
bill.py       a tenant's month: lines, credits, total
money.py      whole amounts as people read them, and the one rounding
margin.py     what GPU classes brought in beside what they cost
focus.py      usage and its cost as rows of FOCUS 1.2
"""
