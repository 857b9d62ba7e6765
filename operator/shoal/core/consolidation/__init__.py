"""Moves the replicas of a nearly empty node together with others, so that an autoscaler removes the node."""

from shoal.core.consolidation.decide import decide, rested
from shoal.core.consolidation.types import (
    ConsolidationEnd,
    ConsolidationMemory,
    ConsolidationPlan,
    ConsolidationSnapshot,
    EmptiedNode,
    ModelThere,
    NodeThere,
    PendingPod,
    ReplicaThere,
)

__all__ = [
    "ConsolidationEnd",
    "ConsolidationMemory",
    "ConsolidationPlan",
    "ConsolidationSnapshot",
    "EmptiedNode",
    "ModelThere",
    "NodeThere",
    "PendingPod",
    "ReplicaThere",
    "decide",
    "rested",
]
