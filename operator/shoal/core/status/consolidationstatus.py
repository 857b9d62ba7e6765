"""What the conditions of a GPUClass say of its consolidation: which node is being emptied, or why none is."""

from itertools import islice
from typing import Final

from shoal.api import reasons
from shoal.api.meta import ConditionStatus
from shoal.core.consolidation import ConsolidationPlan
from shoal.core.status.conditions import ConditionUpdate

_NAMED: Final = 3
"""Nodes that a message names."""


def condition(plan: ConsolidationPlan) -> ConditionUpdate:
    """The condition Consolidating, of a class that asks for consolidation or has a node that is being emptied."""
    if (emptied := plan.emptied) is not None:
        return _says("True", reasons.CONSOLIDATING, f"node {emptied.node}: {emptied.message}")
    if (ended := plan.ended) is not None:
        return _says("False", reasons.NOTHING_EMPTIED, f"node {ended.emptied.node} no more: {ended.why}")
    nodes = [f"{node}: {why}" if node else why for node, why in islice(plan.stays.items(), _NAMED)]
    more = [f"and {len(plan.stays) - _NAMED} more"] if len(plan.stays) > _NAMED else []
    return _says("False", reasons.NOTHING_EMPTIED, "; ".join([*nodes, *more]) or "the class has no nodes")


def _says(status: ConditionStatus, reason: str, message: str) -> ConditionUpdate:
    return ConditionUpdate(reasons.CONSOLIDATING, status, reason, message)
