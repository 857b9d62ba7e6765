"""LoRA adapters and the replicas of their pool, as pure functions with reasons.

Placement, by the operator:
types.py      what is read (Snapshot, Memory) and said (Plan)
place.py      the plan: what each replica should hold;  switch.py  when gateways may be sent to a newer revision
traffic.py    from one plan to the next: how much each adapter is asked for
wanted.py     how many copies each should have;  fill.py  where they go;  balance.py  what moves between replicas
board.py      the replicas while a plan is made;  rendezvous.py  whose turn it is, for gateways and operators alike

What an adapter is, and whether it fits (facts Job, operator and agent):
peft.py, layers.py, check.py, facts.py, sources.py, pool.py

What their objects say (operator):
joining.py, owner.py, revisions.py, held.py, adapterstatus.py, poolstatus.py

What an agent does about those of its engine:
registry.py, turn.py, staging.py, leases.py, claims.py, say.py
"""

from shoal.core.adapters.place import place
from shoal.core.adapters.switch import may_switch
from shoal.core.adapters.types import Adapter, Entry, Limits, Memory, Plan, Replica, Revision, Snapshot, Switch, Voice

__all__ = [
    "Adapter",
    "Entry",
    "Limits",
    "Memory",
    "Plan",
    "Replica",
    "Revision",
    "Snapshot",
    "Switch",
    "Voice",
    "may_switch",
    "place",
]
