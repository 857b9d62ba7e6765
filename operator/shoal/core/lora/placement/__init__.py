"""Which replica of a pool should hold which adapters: one plan per pool, made by the operator.

types.py      input (PoolSnapshot, PoolMemory) and output (Plan)
place.py      the plan, and when gateways may be sent to a next revision
traffic.py    requests per adapter, learned from one plan to the next
wanted.py     how many copies each adapter should have;  fill.py  where they go;  balance.py  moves between replicas
board.py      the replicas while a plan is made
rendezvous.py order of replicas for an adapter, the same for gateways and operators
"""

from shoal.core.lora.placement.place import may_switch, place
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
