"""What the external scaler answers for one variant of one Model, and what is seen of KEDA's objects."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScalerAnswer:
    """One ScaledObject at one moment."""

    active: bool
    """Replicas are wanted here: KEDA goes from zero, and does not go to zero."""
    replicas: int
    """As decided for this variant."""
    metric: float
    """Value of the external metric, an average over replicas: the HPA asks for ceil(metric / target) of them."""
    target: float
    """Its target."""
    above_zero: bool = False
    """KEDA has gone from zero already: the Deployment asks for replicas. False also while that is not known."""


@dataclass(frozen=True, slots=True)
class ScaledObject:
    """A ScaledObject of Shoal's as it stands in the cluster."""

    namespace: str
    name: str
    """That of its Deployment."""
    uid: str
    gpu_class: str
    deleting: bool
    minimum: int
    maximum: int
    ready: bool | None
    """KEDA's condition Ready; None: it has not said anything yet."""
    message: str
    """KEDA's own sentence where it is not ready."""
    paused_by: str | None
    """The annotation that pauses it."""
    was_active: bool
    """KEDA has once carried out that replicas are wanted: it knows lastActiveTime."""
    finalizers: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """A HorizontalPodAutoscaler, KEDA's or anybody's."""

    namespace: str
    name: str
    uid: str
    target: str
    """Name of the Deployment that it scales."""
    scaled_object: str | None
    """uid of Shoal's ScaledObject that it belongs to; None: another owner's HPA, made by KEDA or not."""
    exact: bool
    """It stores tolerance 0 both ways: any difference counts. API servers before 1.35 drop the field."""
    active: bool | None
    """Its condition ScalingActive; None: not said yet. At zero replicas it is False, which is no fault: `disabled`."""
    disabled: bool
    """It rests because its target has no replicas."""
    message: str
    """Its own sentence where it is not active."""

    @property
    def target_key(self) -> str:
        return f"{self.namespace}/{self.target}"
