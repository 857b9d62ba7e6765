"""GPUs that are not to be used: what others found out about them, and what only a fleet of replicas shows.

types.py     a unit (a node's GPUs, or one of them), signals about it, a quarantine
signals.py   conditions of nodes, taints of devices, what kubelets say of a pod's devices -> signals
dcgm.py      metrics of NVIDIA's DCGM exporter -> signals, and which GPUs are measured
requests.py  what people ask for: the annotations of `shoal cordon` and `uncordon`
decide.py    signals + quarantines + time -> quarantines: evidence, bounds, release
slow.py      replicas far slower than the others of their Model and class
canary.py    what healthy GPUs answer to greedy requests, and replicas that answer otherwise
"""

from shoal.core.health.decide import HealthMemory, HealthPlan, HealthSnapshot, decide
from shoal.core.health.types import HealthSignal, Quarantine, Unit, Withheld

__all__ = [
    "HealthMemory",
    "HealthPlan",
    "HealthSignal",
    "HealthSnapshot",
    "Quarantine",
    "Unit",
    "Withheld",
    "decide",
]
