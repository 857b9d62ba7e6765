"""Adapters and the replicas of their pool, as pure functions with reasons.

types.py  what is read (Snapshot, Memory) and said (Plan)
"""
