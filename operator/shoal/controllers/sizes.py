"""The classes that each Model may use, with the sums of a replica there."""

from collections.abc import Callable, Mapping
from typing import Literal

import structlog

from shoal.api import reasons
from shoal.api.gpuclass import GPUClass
from shoal.controllers.calibration import Calibration
from shoal.controllers.isolation import internal_error
from shoal.controllers.placementrequest import PlacementRequest
from shoal.controllers.state import FleetState, SizedModel
from shoal.controllers.world import World
from shoal.core import candidates, quantity
from shoal.core.budget import TooExpensive
from shoal.core.candidates import Considered
from shoal.core.placement import Rejected
from shoal.core.proven import keep_what_runs
from shoal.core.sizing import GPU, Sized, Tuning
from shoal.core.status.observed import ModelProblem
from shoal.engine.kinds import kind_of
from shoal.manifests.shape import engine_row

log = structlog.get_logger()


class Sizes:
    """Kept in each Model's record until its request is another one, or the fleet is: `refresh` first."""

    def __init__(self, world: World, state: FleetState, calibration: Calibration) -> None:
        self._world, self._state, self._calibration = world, state, calibration
        self._gpus: dict[str, GPU] = {}
        self._costs: dict[str, object] = {}
        self._fleet = 0
        """Grows when a class is another one, as far as sizing and prices see it."""

    def refresh(self, classes: Mapping[str, GPUClass]) -> None:
        """Whether the fleet is another one."""
        gpus = self._state.gpus.gpus()
        costs: dict[str, object] = {
            name: (c.spec.hourly_cost, c.spec.interruptible, c.spec.tolerations) for name, c in classes.items()
        }
        if gpus != self._gpus or costs != self._costs:
            self._gpus, self._costs = gpus, costs
            self._fleet += 1

    def computed(self, request: PlacementRequest, classes: Mapping[str, GPUClass]) -> Considered:
        """By the sums alone."""
        record = self._state.record(request.model.metadata.uid)
        known = record.sized
        if known is not None and known.fleet == self._fleet and known.request.same(request):
            return known.considered
        try:
            found = candidates.consider(request.model, request.facts, classes, self._gpus, self._tune(request))
        except TooExpensive as error:
            found = Considered((), (), {}, ModelProblem(reasons.TOO_EXPENSIVE, str(error)))
        except (ValueError, ArithmeticError) as error:
            # A figure that nobody foresaw is this Model's problem, not that of the fleet.
            log.warning("a Model cannot be sized", model=request.model.key, error=str(error))
            why = f"the sums of this model do not work out: {error}"
            found = Considered((), tuple(Rejected(name, reasons.SIZE_UNKNOWN, why) for name in sorted(classes)), {})
        except Exception as error:
            log.exception("a Model cannot be sized; it keeps what it has", model=request.model.key)
            found = Considered((), (), {}, internal_error(error, "on the sums of this Model"))
        record.sized = SizedModel(request, self._fleet, found)
        return found

    def proven(self, request: PlacementRequest, classes: Mapping[str, GPUClass]) -> Considered:
        """An engine's own figure wins over what is computed: see `keep_what_runs`."""
        uid, considered = request.model.metadata.uid, self.computed(request, classes)
        told = self._state.record(uid).kv_tokens
        if not told or considered.problem is not None:
            return considered
        spec = request.model.spec
        named = {v.gpu_class for v in spec.variants if v.tensor}
        said = {
            name: tokens
            for name, tokens in told.items()
            if name not in named and spec.engine.parallelism.tensor is None and name in classes
        }
        if not said:
            return considered
        prices = {n: c.spec.hourly_cost for n in said if (c := classes[n])}
        return keep_what_runs(
            considered,
            self._state.replica_states(uid),
            said,
            context_length=spec.engine.context_length or (request.facts.context_length if request.facts else None),
            hourly_cost={n: quantity.parse(p.amount) if p else None for n, p in prices.items()},
            max_replicas={v.gpu_class: v.max_replicas for v in spec.variants},
            interruptible={n: classes[n].spec.interruptible for n in said},
        )

    def predicted(self, model_uid: str, gpu_class: str) -> int | None:
        """KV tokens of one replica, as computed."""
        found = self.sized(model_uid, gpu_class)
        return found[0].kv_tokens if found else None

    def sized(self, model_uid: str, gpu_class: str) -> tuple[Sized, Tuning] | None:
        """The sums of a replica, and the engine's arguments that they are of."""
        known = self._state.record(model_uid).sized
        sized = known.considered.sized.get(gpu_class) if known else None
        if known is None or sized is None:
            return None
        spec = known.request.model.spec
        variant = next((v for v in spec.variants if v.gpu_class == gpu_class), None)
        of_variant = variant.quantization if variant else None
        return sized, self._tune(known.request)(of_variant or spec.engine.quantization.weights)

    def measure(self) -> None:
        """Compares what engines say with the sums."""
        self._calibration.measure(self._gpus, self.sized)

    def _tune(self, request: PlacementRequest) -> Callable[[Literal["FP8"] | None], Tuning]:
        model = request.model
        try:
            row = engine_row(model, self._world.config)
            platform, set_there = row.args, row.env
        except KeyError:  # a version that is not in the table: the Model is not accepted
            platform, set_there = (), ()
        env = {e.name: e.value for e in (*set_there, *model.spec.pod.env)}
        return lambda quantization: kind_of(model).pod.tuning(
            model.spec.engine.extra_args,
            platform_args=platform,
            quantization=quantization,
            env=env,
            pool=request.pool,
            facts=request.facts,
            engine=model.spec.engine,
        )
