"""What may not be written into a request log, and how it is taken out of it first.

patterns.py  Shoal's own patterns: secrets, e-mail addresses, cards, IP addresses, phone numbers
rules.py     a tenant's rules: which are refused and why, what they make of a text
content.py   what of a request and its answer is logged: walked, redacted, bounded
"""
