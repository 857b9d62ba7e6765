"""Where replicas run: one plan over the whole fleet, from a snapshot.

types.py   what the planner reads (Demand, ClassSupply) and says (Placement)
"""

from shoal.core.placement.single import Offer, offer, place
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
    VariantPlan,
)

__all__ = [
    "Candidate",
    "ClassSupply",
    "Demand",
    "Excluded",
    "Held",
    "Moves",
    "NodeRoom",
    "Offer",
    "Placement",
    "Rejected",
    "Standing",
    "VariantPlan",
    "offer",
    "place",
]
