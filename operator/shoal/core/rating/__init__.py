"""Prices and bills: the cost of counted usage, in exact integers.

price.py      the price that applies to a request, and the cost of its tokens and other units
units.py      units beside tokens: documents, images, seconds of audio
files.py      reads a price list; problems.py: its mistakes, by line
schedule.py   which price list is in force when, and whether lists fit together
bill.py       a tenant's month: lines, credits, total
money.py      amounts as text, and the only rounding
margin.py     revenue and cost of GPU classes
focus.py      usage and its cost as rows of FOCUS 1.2
"""
