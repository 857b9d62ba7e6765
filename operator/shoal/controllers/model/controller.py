"""Model: observe, ask core, apply, one status write."""

from typing import Final

import structlog

from shoal.api import names, reasons
from shoal.api.gpuclass import GPUClass
from shoal.api.model import Model, ModelStatus
from shoal.controllers.capacity import Capacity
from shoal.controllers.installkey import InstallKeyError, InstallKeySource
from shoal.controllers.model.apply import Applier, NameTaken, current
from shoal.controllers.status import write_status
from shoal.controllers.world import World
from shoal.core import facts, models, placement
from shoal.core.conditions import Finding, merge
from shoal.core.models import Observed, Problem
from shoal.engine.launch import check_extra_args
from shoal.kube.errors import Forbidden, Invalid, NotFound
from shoal.kube.projections import Child, Custom
from shoal.kube.queue import WorkQueue
from shoal.kube.resources import MODELS, SECRETS
from shoal.manifests.shape import Shape, engine_version

log = structlog.get_logger()

LOOK_AGAIN_SECONDS: Final = 30.0
"""For what no watch tells: a Secret that is missing, a name that is taken, an admission policy that refuses."""
SETTLE_SECONDS: Final = 1.0


class ModelController:
    def __init__(self, world: World, capacity: Capacity, install: InstallKeySource, queue: WorkQueue):
        self._world, self._capacity, self._install, self.queue = world, capacity, install, queue
        self._applier = Applier(world)
        self._waiting: set[str] = set()
        """Models that wait for room, or for a class."""
        world.models.listeners.append(self._model)
        world.classes.listeners.append(self._class)
        world.pods.listeners.append(self._pod)
        for table in (world.deployments, world.budgets, world.policies):
            table.listeners.append(self._child)
        capacity.changed.append(self._room)
        install.changed.append(self.enqueue_all)

    # --- what wakes a Model -----------------------------------------------------------------------------------------

    def _model(self, key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        self.queue.add(key)
        if before is not None and after is not None and before.object is not None and after.object is not None:
            same = before.object.claimed_names == after.object.claimed_names
            if same and after.metadata.deletion_timestamp == before.metadata.deletion_timestamp:
                return
        for custom in (before, after):  # who shares a served name may have won or lost it
            for claim in custom.object.claimed_names if custom and custom.object else ():
                for rival in self._world.models.by("claim", claim):
                    if rival.object is not None:
                        self.queue.add(rival.object.key)

    def _class(self, key: str, before: Custom[GPUClass] | None, after: Custom[GPUClass] | None) -> None:
        if before is not None and after is not None and before.object and after.object:
            same = before.object.spec == after.object.spec
            if same and before.metadata.deletion_timestamp == after.metadata.deletion_timestamp:
                return  # its status
        for custom in self._world.models.values():
            listed = custom.object.spec.variants if custom.object else ()
            if not listed or any(v.gpu_class == key for v in listed):
                self.queue.add(f"{custom.metadata.namespace}/{custom.metadata.name}")

    def _pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        self._wake((after or before or _NOBODY).model_uid)

    def _child(self, _key: str, before: Child | None, after: Child | None) -> None:
        for child in (before, after):
            if child is not None:
                self._wake(child.model_uid)

    def _wake(self, model_uid: str | None) -> None:
        custom = self._world.model_by_uid(model_uid)
        if custom is not None:
            self.queue.add(f"{custom.metadata.namespace}/{custom.metadata.name}")

    def _room(self) -> None:
        for key in self._waiting:
            self.queue.add_after(key, SETTLE_SECONDS)

    def enqueue_all(self) -> None:
        """After a resync, and when the install key changed: compares every Model with the whole world."""
        self._applier.forget_secrets()
        for key in self._world.models.known_keys():
            self.queue.add(key)

    # --- one Model --------------------------------------------------------------------------------------------------

    async def reconcile(self, key: str) -> float | None:
        """Returns seconds after which to look again, or None."""
        world = self._world
        custom = world.models.get(key)
        if custom is None or custom.metadata.deletion_timestamp is not None:
            self._waiting.discard(key)
            return None  # garbage collection removes the children
        if custom.object is None:
            await self._write(custom, _invalid(custom, world))
            return None
        if not custom.status.get("conditions"):
            # Before any work: tools take an object without a Ready condition for ready.
            await self._write(custom, models.first_status(custom.object, world.now()))
            custom = world.models.get(key) or custom
        model = custom.object
        if model is None:
            return None
        missing = await self._missing_secret(model)
        # From here to `assume` nothing is awaited: two Models never count on the same GPU.
        classes = world.accepted_classes()
        problems = models.problems(
            model,
            classes=classes,
            versions=tuple(world.config.engines.versions),
            version=engine_version(model, world.config),
            argument_problems=check_extra_args(engine_version(model, world.config), model.spec.engine.extra_args),
            secret_missing=missing,
        )
        decided = None if problems else self._place(model, classes)
        paused = models.is_paused(model)
        failure: Problem | None = None
        try:
            if decided is not None and not paused:
                self._assume(model, decided)
                failure = await self._apply(model, classes, decided)
        finally:
            self._capacity.settle(model.metadata.uid)
        if decided is not None and decided.missing:
            self._waiting.add(key)
        else:
            self._waiting.discard(key)
        latest = world.models.get(key)
        if latest is None or latest.metadata.uid != custom.metadata.uid:
            return None
        seen = Observed(
            model=model,
            problems=problems,
            served=models.served_names(model, self._rivals(model)),
            placement=decided,
            deployments=tuple(current(world.deployments.by("model", model.metadata.uid)).values()),
            pods=world.pods.by("model", model.metadata.uid),
            failure=failure,
            paused=paused,
        )
        await self._write(latest, models.status(seen, world.now()))
        return LOOK_AGAIN_SECONDS if missing or failure else None

    def _place(self, model: Model, classes: dict[str, GPUClass]) -> placement.Placement:
        offers = {
            name: placement.offer(
                gpu_class, self._capacity.usage(gpu_class), self._capacity.promised(name, but=model.metadata.uid)
            )
            for name, gpu_class in classes.items()
        }
        standing = current(self._world.deployments.by("model", model.metadata.uid))
        return placement.place(
            wanted=models.wanted_replicas(model),
            gpus=model.spec.engine.parallelism.tensor or 1,
            listed=[v.gpu_class for v in model.spec.variants],
            offers=offers,
            current={name: d.replicas for name, d in standing.items()},
        )

    def _assume(self, model: Model, decided: placement.Placement) -> None:
        for plan in decided.variants:
            self._capacity.assume(model.metadata.uid, plan.gpu_class, plan.replicas, plan.gpus)

    async def _apply(self, model: Model, classes: dict[str, GPUClass], decided: placement.Placement) -> Problem | None:
        world, applier = self._world, self._applier
        try:
            install = self._install.keys or await self._install.ensure()
            await applier.keys(model, install)
            await applier.policies(model)
            for plan in decided.variants:
                gpu_class = classes[plan.gpu_class]
                shape = Shape(
                    model=model,
                    gpu_class=gpu_class,
                    gpus=plan.gpus,
                    version=engine_version(model, world.config),
                    config=world.config,
                    install_key=install.fingerprint,
                )
                room = placement.offer(
                    gpu_class,
                    self._capacity.usage(gpu_class),
                    self._capacity.promised(plan.gpu_class, but=model.metadata.uid),
                )
                await applier.variant(shape, plan, may_surge=room.fits(plan.gpus) > 0)
            await applier.drop_variants(model, {v.gpu_class for v in decided.variants})
            in_use = {p.install_key for p in world.pods.by("model", model.metadata.uid)}
            await applier.drop_old_keys(model, install, in_use)
        except InstallKeyError as error:
            return Problem(reasons.REFUSED, str(error))
        except NameTaken as error:
            return Problem(reasons.NAME_TAKEN, str(error))
        except (Forbidden, Invalid) as error:
            log.warning("the API server refuses a child", model=model.key, error=error.message)
            return Problem(reasons.REFUSED, f"the API server refuses what the Model needs: {error.message}")
        return None

    async def _missing_secret(self, model: Model) -> str | None:
        """The sentence about a Secret that does not exist. Its content is never read here."""
        reference = model.spec.source.secret_ref
        if reference is None:
            return None
        try:
            await self._world.client.get_metadata(SECRETS, reference.name, model.metadata.namespace)
        except NotFound:
            where = f"{model.metadata.namespace}/{reference.name}"
            return f"spec.source.secretRef: there is no Secret {where}; create it with the key `token`"
        return None

    def _rivals(self, model: Model) -> list[Model]:
        found = {
            rival.metadata.uid: rival.object
            for claim in model.claimed_names
            for rival in self._world.models.by("claim", claim)
            if rival.object is not None
        }
        return list(found.values())

    async def _write(self, custom: Custom[Model], status: ModelStatus) -> None:
        await write_status(self._world, MODELS, self._world.models, custom, status, manager=names.MANAGER_MODEL)


_NOBODY: Final = facts.Pod("", "", "", None, True, False, False, {}, None)


def _invalid(custom: Custom[Model], world: World) -> ModelStatus:
    message = f"what is stored does not pass this version's validation: {custom.error}"
    findings = [Finding(kind, "False", reasons.INVALID, message) for kind in (reasons.ACCEPTED, reasons.READY)] + [
        Finding(reasons.STALLED, "True", reasons.INVALID, message)
    ]
    try:
        old = ModelStatus.model_validate(custom.status).conditions
    except ValueError:
        old = ()
    generation = custom.metadata.generation
    return ModelStatus(
        conditions=merge(old, findings, generation=generation, now=world.now()), observed_generation=generation
    )
