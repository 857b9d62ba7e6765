"""Redaction: what must not be written into a request log, and how it is removed first.

patterns.py  built-in patterns: secrets, e-mail addresses, cards, IP addresses, phone numbers
rules.py     a tenant's rules: which are refused and why; applying them to a text
content.py   the content of a request and its answer: selected, redacted, bounded
"""
