"""What stands in the way of a Model's first replica."""

from shoal.api import reasons
from shoal.api.meta import Condition
from shoal.api.model import Model
from shoal.core.layers.faults import advice
from shoal.core.status.conditions import find
from shoal.core.status.readiness import TRIED_AGAIN


def obstacle(model: Model) -> Condition | None:
    """The condition Ready of a Model that no replica serves, where it names a fault; None: nothing is known, or the
    next request tries again."""
    status = model.status
    if status is None or (status.replicas is not None and status.replicas.ready):
        return None
    ready = find(status.conditions, reasons.READY)
    if ready is None or ready.status != "False" or ready.observed_generation not in (None, model.metadata.generation):
        return None
    return ready if advice(ready.reason).state == "fault" and not ready.message.endswith(TRIED_AGAIN) else None
