"""What the external scaler answers for one variant of one Model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """One ScaledObject at one moment."""

    active: bool
    """Replicas are wanted here: KEDA goes from zero, and does not go to zero."""
    replicas: int
    """As decided for this variant."""
    metric: float
    """Value of the external metric, an average over replicas: the HPA asks for ceil(metric / target) of them."""
    target: float
    """Its target."""
