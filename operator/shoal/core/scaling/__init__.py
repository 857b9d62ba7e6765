"""Scaling: how many replicas a Model needs, from what agents and gateways report. Pure functions, with reasons.

types.py    input (ModelSnapshot, ScalingMemory) and output (ScalingDecision)
decide.py   the scaling decision, with the table of rules;  rules.py  one function per rule;  view.py  their input
load.py     reported load, summed;  fleet.py  replicas in the order in which they are filled and kept
learn.py    what one decision passes to the next: last request, arrival rate, cost of a request, rate of a replica
estimate.py the least that a replica does, before anything was learned
window.py   the most replicas that were enough over the last seconds;  messages.py  numbers in sentences
sources.py  stale signal sources, reported once they have been stale for a while
"""

from shoal.core.scaling.decide import decide
from shoal.core.scaling.sources import Steady, describe_stale, due, steady
from shoal.core.scaling.types import (
    Demand,
    Load,
    ModelSnapshot,
    Policy,
    Replica,
    ScalingDecision,
    ScalingMemory,
    ScalingRule,
    ScalingVariant,
    SignalSource,
)

__all__ = [
    "Demand",
    "Load",
    "ModelSnapshot",
    "Policy",
    "Replica",
    "ScalingDecision",
    "ScalingMemory",
    "ScalingRule",
    "ScalingVariant",
    "SignalSource",
    "Steady",
    "decide",
    "describe_stale",
    "due",
    "steady",
]
