"""Who writes the replicas of a Deployment now: never two; while the driver changes, the old one until the new can."""

from typing import Literal

from shoal.api.model import Driver
from shoal.core.keda.types import Autoscaler, ScaledObject

Writer = Literal["Shoal", "KEDA"]


def writer(driver: Driver, scaled: ScaledObject | None, hpa: Autoscaler | None, *, ours: bool, polled: bool) -> Writer:
    """`hpa`: the one that KEDA made for this Deployment, or what is left of it. `ours`: Shoal wrote the replicas last.
    `asked`: KEDA has asked this operator about the ScaledObject.

    To KEDA: what Shoal wrote before it goes on writing until KEDA has taken over; what it never wrote it leaves alone.
    To Shoal: not before the ScaledObject and its HPA are gone.
    """
    if driver == "BuiltIn":
        return "Shoal" if scaled is None and hpa is None else "KEDA"
    going = hpa is not None if scaled is None else (scaled.deleting or scaled.paused_by is not None)
    if not ours or going:
        return "KEDA"
    return "KEDA" if has_taken_over(scaled, hpa, polled=polled) else "Shoal"


def has_taken_over(scaled: ScaledObject | None, hpa: Autoscaler | None, *, polled: bool) -> bool:
    """KEDA knows the decision and can carry it out. Once it has, a ScaledObject that is not ready for a while (the
    operator restarts, nobody answers KEDA) does not undo it."""
    if scaled is None or hpa is None or hpa.scaled_object != scaled.uid:
        return False
    return scaled.was_active or (scaled.ready is True and (polled or hpa.active is True))
