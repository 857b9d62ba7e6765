"""How many replicas a Model needs: from what agents and gateways say, as a pure function with reasons.

types.py    what is read (Snapshot, Memory) and said (Decision)
"""

from shoal.core.scaling.types import Decision, Demand, Load, Memory, Policy, Replica, Rule, Snapshot, Variant, Voice

__all__ = ["Decision", "Demand", "Load", "Memory", "Policy", "Replica", "Rule", "Snapshot", "Variant", "Voice"]
