"""Placement: which GPU classes a Model's replicas run on. One plan over the whole fleet, from a snapshot.

types.py      input of the planner (Demand, ClassSupply) and its output (Placement)
plan.py       the pass over the fleet
fill.py       the replicas of one Model, by class (modelplan.py: its part of the plan so far);  preemption.py  which
              Models lose replicas;  moves.py  moves to cheaper classes;  leaving.py  which pods are deleted first
classcapacity.py  the GPUs of a class, each given away once;  fragments.py  which node to take
backoff.py    classes on which a Model's replicas failed to start
outages.py    classes of which no further node comes, for whatever Model
steering.py   affinity and topology spread of the pods
messages.py   reasons and messages, built from phrases.py;  contenders.py  for which Models a Model waits
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
