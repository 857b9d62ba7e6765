"""What a tenant may still use, over all gateways: requests and tokens per minute, requests at a time, and the month's
budget. `account.py` has one tenant at one gateway; `share.py` how gateways share, and how far they may overshoot.

Enforcement is approximate, quick and corrects itself. What is billed is another matter: the ledger's.
"""
