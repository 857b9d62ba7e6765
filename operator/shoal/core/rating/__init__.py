"""Prices and bills: what counted tokens cost, in exact integers.

price.py      which price counts for a request, and what its tokens cost
"""
