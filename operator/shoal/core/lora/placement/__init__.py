"""Which replica of a pool should hold which adapters: one plan per pool, by the operator.

types.py      what is read (PoolSnapshot, PoolMemory) and said (Plan)
place.py      the plan
traffic.py    from one plan to the next: how much each adapter is asked for
wanted.py     how many copies each should have;  fill.py  where they go;  balance.py  what moves between replicas
board.py      the replicas while a plan is made
rendezvous.py which replica comes first, the same for gateways and operators
"""

from shoal.core.lora.lifecycle.switch import may_switch
from shoal.core.lora.placement.place import place
from shoal.core.lora.placement.types import (
    Adapter,
    AdapterSignalSource,
    Limits,
    Plan,
    PlannedAdapter,
    PoolMemory,
    PoolSnapshot,
    Replica,
    Revision,
    Switch,
)

__all__ = [
    "Adapter",
    "AdapterSignalSource",
    "Limits",
    "Plan",
    "PlannedAdapter",
    "PoolMemory",
    "PoolSnapshot",
    "Replica",
    "Revision",
    "Switch",
    "may_switch",
    "place",
]
