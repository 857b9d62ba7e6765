"""The arithmetic of the HorizontalPodAutoscaler for one external metric with an average value, after Kubernetes 1.36:
`replica_calculator.go` (GetExternalPerPodMetricReplicas, isWithin) and `horizontal.go` (reconcileAutoscaler, with
behaviour that neither waits nor limits steps), and KEDA's own part, from and to zero (`scale_scaledobjects.go`)."""

import math

from shoal.core.keda import Bounds


def milli(value: float) -> int:
    """As KEDA hands a metric on: GenerateMetricInMili."""
    return int(value * 1000)


def hpa(spec: int, status: int, *, metric: float, target: float, tolerance: float, bounds: Bounds) -> int:
    """Replicas after one look. `spec`: what the Deployment asks for; `status`: pods that exist."""
    minimum, maximum = max(1, bounds.minimum), bounds.maximum
    if spec == 0:
        return 0
    if spec > maximum:
        return maximum
    if spec < minimum:
        return minimum
    usage, per_pod = milli(metric), milli(target)
    share = per_pod * float(status)
    ratio = usage / share if share else (math.inf if usage else math.nan)
    within = (1.0 - tolerance) <= ratio <= (1.0 + tolerance)
    desired = status if within else math.ceil(usage / per_pod)
    return min(max(desired, minimum), maximum)


def keda(spec: int, *, active: bool, failed: bool, bounds: Bounds) -> int:
    """Replicas after one look of KEDA's own loop (no fallback, cooldown over). `failed`: the scaler did not answer."""
    if active:
        return max(1, bounds.minimum) if spec == 0 else spec
    if failed:
        return spec
    if spec and not bounds.minimum:
        return 0
    return max(spec, bounds.minimum)
