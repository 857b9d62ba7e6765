"""The condition ScalingActive of a Model: whether KEDA carries out what is decided, and if not, what to do.

Whatever it says, replicas stay: no case here makes anybody write a lower number.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shoal.api import reasons
from shoal.api.meta import ConditionStatus
from shoal.api.model import Driver
from shoal.core.keda.types import Autoscaler, ScaledObject
from shoal.core.keda.writer import Writer
from shoal.core.status.conditions import ConditionUpdate

SHORTEST_SILENCE_SECONDS: Final = 15.0
HPA_SECONDS: Final = 15.0
"""From one look of an HPA to the next (kube-controller-manager's default). Where at least one replica is kept KEDA asks
only when the HPA does."""
MISSED_POLLS: Final = 3
"""So many may be missed."""
KEDA_FINALIZER: Final = "finalizer.keda.sh"


@dataclass(frozen=True, slots=True)
class ScaledVariant:
    """One variant as the verdict reads it."""

    deployment: str
    writer: Writer
    scaled: ScaledObject | None = None
    hpa: Autoscaler | None = None
    """The ScaledObject's."""
    other_hpas: tuple[str, ...] = ()
    """Other HPAs that scale the same Deployment."""
    silent: bool | None = None
    """KEDA has not asked for longer than it should; None: too early to say."""
    refused: str | None = None
    """What the API server said to the ScaledObject that it did not take."""


@dataclass(frozen=True, slots=True)
class Seen:
    """All that the condition is made from."""

    driver: Driver
    namespace: str
    installed: bool | None
    """The API server knows ScaledObjects; None: it has not been asked yet."""
    address: str
    """Where KEDA finds the operator."""
    variants: tuple[ScaledVariant, ...]
    problem: str | None = None
    """Why this operator cannot answer KEDA, with what to do."""


def silence_timeout(polling_seconds: int, minimum: int) -> float:
    """Seconds without a question after which KEDA is called silent."""
    often = max(polling_seconds, HPA_SECONDS) if minimum else float(polling_seconds)
    return max(SHORTEST_SILENCE_SECONDS, MISSED_POLLS * often)


def judge(seen: Seen) -> ConditionUpdate | None:
    """None: nothing to tell, the driver is Shoal's own and nothing of KEDA's is left."""
    if seen.driver == "BuiltIn":
        return next(_leaving(seen), None)
    if seen.installed is False:
        return _finding(
            "False",
            reasons.KEDA_NOT_INSTALLED,
            "the API server knows no ScaledObjects, so nobody changes replicas: install KEDA (2.18 or later), or set "
            "spec.scaling.driver to BuiltIn",
        )
    if not seen.variants:
        return None  # nothing to scale yet
    if seen.problem is not None:
        return _finding("False", reasons.KEDA_NOT_POLLING, f"the operator cannot answer KEDA: {seen.problem}")
    for problem in (_shared, _refused, _paused, _silent, _unready, _no_metric, _joining):
        found = next((f for v in seen.variants if (f := problem(seen, v)) is not None), None)
        if found is not None:
            return found
    return _finding("True", reasons.DRIVEN_BY_KEDA, "KEDA and its HPA carry out what is decided")


def _finding(status: ConditionStatus, reason: str, message: str) -> ConditionUpdate:
    return ConditionUpdate(reasons.SCALING_ACTIVE, status, reason, message)


def _leaving(seen: Seen) -> Iterator[ConditionUpdate]:
    for variant in seen.variants:
        if variant.scaled is None and variant.hpa is None:
            continue
        name = variant.scaled.name if variant.scaled is not None else variant.deployment
        if variant.scaled is not None and KEDA_FINALIZER in variant.scaled.finalizers and variant.silent:
            yield _finding(
                "False",
                reasons.SWITCHING_DRIVER,
                f"ScaledObject {name} is deleted but stays until KEDA's operator takes its finalizer off, and KEDA is "
                f"not polling; replicas stay until then: start KEDA's operator, or kubectl patch scaledobject {name} "
                f'-n {seen.namespace} --type merge -p \'{{"metadata":{{"finalizers":null}}}}\'',
            )
        yield _finding(
            "Unknown",
            reasons.SWITCHING_DRIVER,
            f"back to BuiltIn: Shoal writes replicas again once ScaledObject {name} and its HPA are gone",
        )


def _refused(_seen: Seen, variant: ScaledVariant) -> ConditionUpdate | None:
    if variant.refused is None:
        return None
    message = f"the API server refuses ScaledObject {variant.deployment}: {variant.refused}"
    return _finding("False", reasons.SCALED_OBJECT_REFUSED, message)


def _paused(seen: Seen, variant: ScaledVariant) -> ConditionUpdate | None:
    scaled = variant.scaled
    if scaled is None or scaled.paused_by is None:
        return None
    message = (
        f"ScaledObject {scaled.name} is paused by its annotation {scaled.paused_by}: kubectl annotate scaledobject "
        f"{scaled.name} -n {seen.namespace} {scaled.paused_by}- lets KEDA go on"
    )
    return _finding("False", reasons.SCALED_OBJECT_PAUSED, message)


def _shared(_seen: Seen, variant: ScaledVariant) -> ConditionUpdate | None:
    if not variant.other_hpas:
        return None
    others = " and ".join(f"HorizontalPodAutoscaler {name}" for name in variant.other_hpas)
    message = f"{others} scales Deployment {variant.deployment} too, and undoes what is decided: delete it"
    return _finding("False", reasons.OTHER_AUTOSCALER, message)


def _silent(seen: Seen, variant: ScaledVariant) -> ConditionUpdate | None:
    if not variant.silent or variant.scaled is None:
        return None
    said = f" It says: {variant.scaled.message}." if variant.scaled.ready is False and variant.scaled.message else ""
    message = (
        f"KEDA does not ask about ScaledObject {variant.scaled.name}; replicas stay.{said} Look whether its operator "
        f"runs and reaches {seen.address} (NetworkPolicy, certificate); if it hangs, restart it"
    )
    return _finding("False", reasons.KEDA_NOT_POLLING, message)


def _unready(_seen: Seen, variant: ScaledVariant) -> ConditionUpdate | None:
    scaled = variant.scaled
    if scaled is None or scaled.ready is not False:
        return None
    message = f"KEDA does not carry out ScaledObject {scaled.name}: {scaled.message or 'it is not Ready'}"
    return _finding("False", reasons.SCALED_OBJECT_REFUSED, message)


def _no_metric(_seen: Seen, variant: ScaledVariant) -> ConditionUpdate | None:
    hpa = variant.hpa
    if hpa is None or hpa.active is not False or hpa.disabled:
        return None
    message = (
        f"HorizontalPodAutoscaler {hpa.name} gets no metric, so replicas stay: look at KEDA's metrics adapter and "
        f"kubectl get apiservice v1beta1.external.metrics.k8s.io. It says: {hpa.message}"
    )
    return _finding("False", reasons.METRICS_UNAVAILABLE, message)


def _joining(_seen: Seen, variant: ScaledVariant) -> ConditionUpdate | None:
    if variant.scaled is not None and variant.hpa is not None and variant.writer == "KEDA":
        return None
    waits = f"ScaledObject {variant.deployment} and its HPA" if variant.hpa is None else "KEDA's first question"
    until = "Shoal writes replicas until then" if variant.writer == "Shoal" else "replicas stay until then"
    return _finding("Unknown", reasons.SWITCHING_DRIVER, f"waits for {waits}; {until}")
