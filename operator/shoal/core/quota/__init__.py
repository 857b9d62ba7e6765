"""Quota: what a tenant may still use, over all gateways: requests and tokens per minute, concurrent requests, and the
month's budget. `account.py`: one tenant at one gateway; `share.py`: how gateways share a limit, and by how much they
may exceed it.

Enforcement is approximate, fast and corrects itself. Billing is separate: the ledger does it.
"""
