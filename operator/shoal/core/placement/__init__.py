"""Where replicas run: one plan over the whole fleet, from a snapshot.

types.py      what the planner reads (Demand, ClassSupply) and says (Placement)
plan.py       the pass over the fleet
fill.py       what one Model gets (modelplan.py: its part of the plan so far);  preemption.py  which Models give way;
              moves.py  to cheaper classes;  leaving.py  whose pods go first
classcapacity.py  the GPUs of a class, each given away once;  fragments.py  which node to take
backoff.py    classes on which a Model's replicas failed to start
steering.py    what pods tell the scheduler
messages.py   reasons and messages, of phrases.py;  contenders.py  for which Models a Model waits
"""

from shoal.core.placement.plan import parts, plan
from shoal.core.placement.steering import Steering, steering
from shoal.core.placement.types import (
    Candidate,
    ClassSupply,
    ClassUse,
    Demand,
    Excluded,
    Held,
    Moves,
    NodeSupply,
    Placement,
    Rejected,
    ReplicaState,
    Unplannable,
    VariantPlan,
)

__all__ = [
    "Candidate",
    "ClassSupply",
    "ClassUse",
    "Demand",
    "Excluded",
    "Held",
    "Moves",
    "NodeSupply",
    "Placement",
    "Rejected",
    "ReplicaState",
    "Steering",
    "Unplannable",
    "VariantPlan",
    "parts",
    "plan",
    "steering",
]
