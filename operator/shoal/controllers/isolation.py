"""An error that nobody foresaw stays with the object that brought it up: the object says so, and others go on."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, cast

from shoal.api import reasons
from shoal.api.gpuclass import GPUClass, GPUClassStatus
from shoal.api.loraadapter import LoRAAdapter, LoRAAdapterStatus
from shoal.api.lorapool import LoRAPool, LoRAPoolStatus
from shoal.api.meta import Condition, Object
from shoal.api.model import Model, ModelStatus
from shoal.api.modelroute import ModelRoute, ModelRouteStatus
from shoal.api.tenant import Tenant, TenantStatus
from shoal.controllers.status import write_status
from shoal.controllers.world import World
from shoal.core.status.conditions import ConditionUpdate, merge
from shoal.core.status.observed import ModelProblem
from shoal.kube.errors import KubeError
from shoal.kube.projections import Custom
from shoal.kube.resources import Resource
from shoal.kube.store import Table

StatusType = TypeVar("StatusType", bound=Object)

_STATUS: Final[dict[str, type[Object]]] = {
    GPUClass.kind_name: GPUClassStatus,
    LoRAAdapter.kind_name: LoRAAdapterStatus,
    LoRAPool.kind_name: LoRAPoolStatus,
    Model.kind_name: ModelStatus,
    ModelRoute.kind_name: ModelRouteStatus,
    Tenant.kind_name: TenantStatus,
}
_PASSING: Final = (KubeError, OSError, TimeoutError)
"""The cluster's errors, which are no fault of Shoal's and are tried again."""


def internal_error(error: BaseException, doing: str) -> ModelProblem:
    """The message for the object's status: the place of the error and not its text, which may hold anything."""
    frame, place = error.__traceback__, ""
    while frame is not None:
        name = frame.tb_frame.f_globals.get("__name__", "")
        if name.startswith("shoal."):
            place = f" at {name}:{frame.tb_lineno}"
        frame = frame.tb_next
    kind = type(error).__name__
    return ModelProblem(
        reasons.INTERNAL_ERROR,
        f"Shoal itself failed {doing}: {kind}{place}. What runs stays as it is, and other objects are not concerned. "
        "Please report it with the operator's log of this moment; it is tried again",
    )


async def isolated(
    world: World,
    resource: Resource,
    table: Table[Any],
    key: str,
    reconcile: Callable[[str], Awaitable[float | None]],
    *,
    manager: str,
) -> float | None:
    """Reconciles, and leaves an error that nobody foresaw as a condition. Raises it again: the queue backs off."""
    try:
        return await reconcile(key)
    except _PASSING:
        raise
    except Exception as error:
        custom = table.get(key)
        if custom is not None and custom.metadata.deletion_timestamp is None:
            problem = internal_error(error, "on this object")
            status = _failed(custom, problem, resource, world)
            await write_status(world, resource, table, custom, status, manager=manager)
        raise


def stored(kind: type[StatusType], custom: Custom[Any]) -> StatusType:
    """The status as it was written last; an empty one where that is not understood."""
    try:
        return kind.model_validate(custom.status)
    except ValueError:
        return kind()


def _failed(custom: Custom[Any], problem: ModelProblem, resource: Resource, world: World) -> Object:
    """What the status said before, but for its conditions."""
    before = stored(_STATUS[resource.kind], custom)
    findings = [
        ConditionUpdate(reasons.READY, "False", problem.reason, problem.message),
        ConditionUpdate(reasons.STALLED, "True", problem.reason, problem.message),
    ]
    generation, old = custom.metadata.generation, cast("tuple[Condition, ...]", getattr(before, "conditions", ()))
    kept = [c for c in old if c.type not in (reasons.READY, reasons.STALLED, reasons.RECONCILING)]
    conditions = (*kept, *merge(old, findings, generation=generation, now=world.now()))
    return before.model_copy(update={"conditions": conditions, "observed_generation": generation})
