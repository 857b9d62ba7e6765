"""How many replicas a Model needs: from what agents and gateways report, as a pure function with reasons.

types.py    what is read (ModelSnapshot, ScalingMemory) and said (ScalingDecision)
decide.py   the decision, with the table of rules;  rules.py  one function each;  view.py  what they look at
load.py     reported load, added up;  fleet.py  replicas in the order in which they are filled and kept
learn.py    from one decision to the next: the last request, the arrival rate, what a request costs and a replica can do
estimate.py what a replica does at least, before anything was learned
window.py   the most that was enough over the last seconds;  messages.py  numbers in sentences
sources.py  which signal sources are stale, once that has held for a while
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
