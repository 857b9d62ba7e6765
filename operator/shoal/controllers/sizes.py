"""The classes that each Model may use, with the sums of a replica there."""

from collections.abc import Callable, Mapping
from typing import Literal

import structlog

from shoal.api import reasons
from shoal.api.gpuclass import GPUClass
from shoal.controllers.calibration import Calibration
from shoal.controllers.capacity import Capacity
from shoal.controllers.isolation import internal_error
from shoal.controllers.standing import Standings
from shoal.controllers.wishes import Wish
from shoal.controllers.world import World
from shoal.core import candidates, quantity
from shoal.core.budget import TooExpensive
from shoal.core.candidates import Considered
from shoal.core.observed import Problem
from shoal.core.placement import Rejected
from shoal.core.proven import keep_what_runs
from shoal.core.sizing import GPU, Sized, Tuning
from shoal.engine.launch import pool_args
from shoal.engine.tuning import tuning_of
from shoal.manifests.shape import engine_row

log = structlog.get_logger()


class Sizes:
    """Kept per Model until its wish is another one, or the fleet is: `look` at it first."""

    def __init__(self, world: World, capacity: Capacity, standings: Standings, calibration: Calibration) -> None:
        self._world, self._capacity, self._standings, self._calibration = world, capacity, standings, calibration
        self._known: dict[str, tuple[Wish, int, Considered]] = {}
        self._gpus: dict[str, GPU] = {}
        self._costs: dict[str, object] = {}
        self._fleet = 0
        """Grows when a class is another one, as far as sizing and prices see it."""

    def forget(self, model_uid: str) -> None:
        """The Model is gone."""
        self._known.pop(model_uid, None)

    def look(self, classes: Mapping[str, GPUClass]) -> None:
        """Whether the fleet is another one."""
        gpus = self._capacity.gpus()
        costs: dict[str, object] = {
            name: (c.spec.hourly_cost, c.spec.interruptible, c.spec.tolerations) for name, c in classes.items()
        }
        if gpus != self._gpus or costs != self._costs:
            self._gpus, self._costs = gpus, costs
            self._fleet += 1

    def computed(self, wish: Wish, classes: Mapping[str, GPUClass]) -> Considered:
        """By the sums alone."""
        uid = wish.model.metadata.uid
        known = self._known.get(uid)
        if known is not None and known[1] == self._fleet and known[0].same(wish):
            return known[2]
        try:
            found = candidates.consider(wish.model, wish.facts, classes, self._gpus, self._tune(wish))
        except TooExpensive as error:
            found = Considered((), (), {}, Problem(reasons.TOO_EXPENSIVE, str(error)))
        except (ValueError, ArithmeticError) as error:
            # A figure that nobody foresaw is this Model's problem, not that of the fleet.
            log.warning("a Model cannot be sized", model=wish.model.key, error=str(error))
            why = f"the sums of this model do not work out: {error}"
            found = Considered((), tuple(Rejected(name, reasons.SIZE_UNKNOWN, why) for name in sorted(classes)), {})
        except Exception as error:
            log.exception("a Model cannot be sized; it keeps what it has", model=wish.model.key)
            found = Considered((), (), {}, internal_error(error, "on the sums of this Model"))
        self._known[uid] = (wish, self._fleet, found)
        return found

    def proven(self, wish: Wish, classes: Mapping[str, GPUClass]) -> Considered:
        """An engine's own figure wins over what is computed: see `keep_what_runs`."""
        uid, considered = wish.model.metadata.uid, self.computed(wish, classes)
        told = self._calibration.tokens(uid)
        if not told or considered.problem is not None:
            return considered
        spec = wish.model.spec
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
            self._standings.of(uid),
            said,
            context_length=spec.engine.context_length or (wish.facts.context_length if wish.facts else None),
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
        known = self._known.get(model_uid)
        sized = known[2].sized.get(gpu_class) if known else None
        if known is None or sized is None:
            return None
        variant = next((v for v in known[0].model.spec.variants if v.gpu_class == gpu_class), None)
        return sized, self._tune(known[0])(variant.quantization if variant else None)

    def measure(self) -> None:
        """Compares what engines say with the sums."""
        self._calibration.measure(self._gpus, self.sized)

    def _tune(self, wish: Wish) -> Callable[[Literal["FP8"] | None], Tuning]:
        model = wish.model
        args = [*pool_args(wish.pool), *model.spec.engine.extra_args]
        try:
            platform = engine_row(model, self._world.config).args
        except KeyError:  # a version that is not in the table: the Model is not accepted
            platform = ()
        env = {e.name: e.value for e in model.spec.pod.env}
        return lambda quantization: tuning_of(args, platform_args=platform, quantization=quantization, env=env)
