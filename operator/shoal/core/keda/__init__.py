"""The answers to KEDA, with which its arithmetic and the HPA's arrive at the numbers of `core/scaling` and
`core/placement`.

types.py       the answer for one variant; observed ScaledObjects and HPAs
arithmetic.py  number -> metric and bounds, so that the HPA can only land on the number; minReplicas and
               maxReplicas over the variants of a Model
writer.py      who writes replicas now: Shoal or KEDA, also while the driver changes
verdict.py     the condition ScalingActive: what is wrong with KEDA, and what to do
"""

from shoal.core.keda.arithmetic import TARGET, Bounds, bounds, ceilings, floors, metric
from shoal.core.keda.types import Autoscaler, ScaledObject, ScalerAnswer
from shoal.core.keda.verdict import ScaledVariant, Seen, judge
from shoal.core.keda.writer import Driver, Writer, has_taken_over, writer

__all__ = [
    "TARGET",
    "Autoscaler",
    "Bounds",
    "Driver",
    "ScaledObject",
    "ScaledVariant",
    "ScalerAnswer",
    "Seen",
    "Writer",
    "bounds",
    "ceilings",
    "floors",
    "has_taken_over",
    "judge",
    "metric",
    "writer",
]
