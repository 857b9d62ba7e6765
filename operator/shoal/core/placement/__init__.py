"""Where replicas run: one plan over the whole fleet, from a snapshot.

types.py      what the planner reads (Demand, ClassSupply) and says (Placement)
plan.py       the pass over the fleet
fill.py       what one Model gets;  outrank.py  who has to go for it;  moves.py  to cheaper classes;
              leaving.py  whose pods go first
room.py       the GPUs of a class, each given away once;  fragments.py  which node to take
setbacks.py   classes on which a Model had no luck
packing.py    the same offline;  steering.py  what pods tell the scheduler
words.py      reasons and messages, of phrases.py;  rivals.py  for whom a Model waits
"""

from shoal.core.placement.packing import ClassUse, Packing, pack
from shoal.core.placement.plan import parts, plan
from shoal.core.placement.steering import Steering, steering
from shoal.core.placement.types import (
    Candidate,
    ClassSupply,
    Demand,
    Excluded,
    Held,
    Moves,
    NodeRoom,
    Placement,
    Rejected,
    Standing,
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
    "NodeRoom",
    "Packing",
    "Placement",
    "Rejected",
    "Standing",
    "Steering",
    "Unplannable",
    "VariantPlan",
    "pack",
    "parts",
    "plan",
    "steering",
]
