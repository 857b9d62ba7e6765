"""What the status of a GPUClass says of GPUs that are out of use: the list, and the condition GPUsHealthy."""

from collections.abc import Iterable, Mapping
from typing import Final

from shoal.api import reasons
from shoal.api.gpuclass import GPUClass, QuarantinedGPUs
from shoal.core.health import HealthPlan, Quarantine, Unit
from shoal.core.health.decide import holding
from shoal.core.layers.texts import shorten
from shoal.core.status.conditions import ConditionUpdate

_NAMED: Final = 4
_LONGEST: Final = 200
_LONGEST_STORED: Final = 512


def stored(gpu_class: GPUClass) -> tuple[Quarantine, ...]:
    """The quarantines that stand in the status."""
    return tuple(
        Quarantine(
            Unit(each.node, each.device or ""),
            each.reason,
            each.message,
            each.since,
            state=each.state,
            until=each.until,
            by=each.by,
            times=each.times,
            model=each.model,
            monitor=each.monitor,
        )
        for each in (gpu_class.status.quarantined if gpu_class.status is not None else ())
    )


def out_of_use(gpu_class: GPUClass) -> frozenset[Unit]:
    """Units of a class on which nothing is placed: GPUs that are not healthy, and a node that is being emptied."""
    status = gpu_class.status
    if status is None or not (status.quarantined or status.consolidation):
        return frozenset()
    emptied = {Unit(status.consolidation.node)} if status.consolidation is not None else frozenset[Unit]()
    return holding(stored(gpu_class)) | emptied


def shown(quarantined: Iterable[Quarantine], uuids: Mapping[str, str]) -> tuple[QuarantinedGPUs, ...]:
    """For the status. `uuids`: device -> its attribute `uuid`, of devices that have one."""
    return tuple(
        QuarantinedGPUs(
            node=each.unit.node,
            device=each.unit.device or None,
            uuid=uuids.get(each.unit.device),
            state=each.state,
            reason=each.reason,
            message=shorten(each.message, _LONGEST_STORED),
            by=each.by,
            since=each.since,
            until=each.until,
            times=each.times,
            model=each.model,
            monitor=each.monitor,
        )
        for each in quarantined
    )


def condition(plan: HealthPlan, problems: Iterable[str], unmeasured: str = "") -> ConditionUpdate | None:
    """None: nothing is to be said. `problems`: what is wrong with the annotations; `unmeasured`: of which GPUs a
    monitor says nothing, and why."""
    staying = {each.signal.unit for each in plan.withheld}
    out = [_quarantined(each) for each in plan.quarantined if each.unit not in staying]
    left = [
        f"{each.signal.unit} stays in use, since {each.why} "
        f"({each.signal.reason}: {shorten(each.signal.message, _LONGEST)})"
        for each in plan.withheld
    ]
    wrong = list(problems)
    if not out and not left and not wrong:
        return ConditionUpdate(reasons.GPUS_HEALTHY, "Unknown", reasons.GPU_METRICS, unmeasured) if unmeasured else None
    reason = reasons.QUARANTINE_WITHHELD if left else reasons.GPUS_QUARANTINED if out else reasons.CORDON_INVALID
    text = "; ".join(part for part in (_listing(left), _listing(wrong), _listing(out), unmeasured) if part)
    return ConditionUpdate(reasons.GPUS_HEALTHY, "False", reason, text)


def _quarantined(each: Quarantine) -> str:
    what = "is out of use" if each.state == "Quarantined" else "is on probation: the next replica there is tested"
    until = f" until {each.until:%Y-%m-%dT%H:%M:%SZ}" if each.until is not None and each.state == "Quarantined" else ""
    return f"{each.unit} {what}{until} ({each.reason}: {shorten(each.message, _LONGEST)})"


def _listing(parts: list[str]) -> str:
    more = [f"and {len(parts) - _NAMED} more"] if len(parts) > _NAMED else []
    return "; ".join([*parts[:_NAMED], *more])
