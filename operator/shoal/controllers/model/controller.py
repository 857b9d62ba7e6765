"""Model: observe, ask core, have the Executor apply, one status write."""

from typing import Final

from shoal.api import names, reasons
from shoal.api.gpuclass import GPUClass
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model, ModelStatus
from shoal.api.tenant import Tenant
from shoal.artifacts import secret_advice
from shoal.controllers.artifacts import Artifacts
from shoal.controllers.children.inferencepools import gateway_changed
from shoal.controllers.claims import claimants, claims_changed, granted_otherwise, models_claiming
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.executor import Executor
from shoal.controllers.isolation import isolated
from shoal.controllers.keda.driver import Driver
from shoal.controllers.model.messages import emit_placement, invalid
from shoal.controllers.modelqueue import ModelQueue
from shoal.controllers.placementrequest import PlacementDecision, PlacementRequest
from shoal.controllers.scaling.stalesignals import StaleSignals
from shoal.controllers.state import FleetState
from shoal.controllers.status import write_status
from shoal.controllers.world import World
from shoal.core import facts, scaling
from shoal.core.artifacts import SourceReading
from shoal.core.routing.servednames import served_names
from shoal.core.status import canaryanswers, modelstatus
from shoal.core.status.healthstatus import out_of_use
from shoal.core.status.modelstatus import ModelProblem, Observed
from shoal.engine.kinds import kind_of
from shoal.engine.wires import differences_of
from shoal.kube.errors import NotFound
from shoal.kube.projections import Child, Custom
from shoal.kube.resources import MODELS, SECRETS
from shoal.manifests.pool import applied
from shoal.manifests.shape import engine_problems, engine_table, engine_version

RECHECK_SECONDS: Final = 30.0
"""For what no watch tells: a Secret that is missing, a Job that gets no pod, a name that is taken, an admission policy
that refuses, a node that does not come for a rollout."""


class ModelController:
    """What a Model needs is validated and found out here, and its status is written. The Executor writes the rest."""

    def __init__(
        self,
        world: World,
        state: FleetState,
        stale_signals: StaleSignals,
        executor: Executor,
        driver: Driver,
        cold: ColdStarts,
        models: ModelQueue,
    ):
        self._world, self._state, self._stale_signals, self._executor = world, state, stale_signals, executor
        self._driver, self._cold, self._models, self.queue = driver, cold, models, models.work
        self.artifacts = Artifacts(world, models.add)

    # --- what wakes a Model -----------------------------------------------------------------------------------------

    def on_model(self, key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        self.queue.add(key)
        self._renamed(before, after)

    def _renamed(
        self,
        before: Custom[Model] | Custom[LoRAAdapter] | None,
        after: Custom[Model] | Custom[LoRAAdapter] | None,
    ) -> None:
        """Who shares a served name may have won or lost it."""
        for contender in models_claiming(self._world, claims_changed(before, after)):
            self.queue.add(contender)

    def on_adapter(self, _key: str, before: Custom[LoRAAdapter] | None, after: Custom[LoRAAdapter] | None) -> None:
        self._renamed(before, after)

    def on_tenant(self, _key: str, before: Custom[Tenant] | None, after: Custom[Tenant] | None) -> None:
        """Objects that one tenant may use contend for names: with another grant the contenders differ."""
        changed = granted_otherwise(before, after)
        for key in changed[0] if changed is not None else ():
            if self._world.models.get(key) is not None:
                self.queue.add(key)

    def on_class(self, key: str, before: Custom[GPUClass] | None, after: Custom[GPUClass] | None) -> None:
        if before is not None and after is not None and before.object and after.object:
            same = before.object.spec == after.object.spec and not _claims_differ(before.object, after.object)
            if same and before.metadata.deletion_timestamp == after.metadata.deletion_timestamp:
                return  # its status
        for custom in self._world.models.values():
            listed = custom.object.spec.variants if custom.object else ()
            if not listed or any(v.gpu_class == key for v in listed):
                self.queue.add(f"{custom.metadata.namespace}/{custom.metadata.name}")

    def on_pool(self, _key: str, before: Custom[LoRAPool] | None, after: Custom[LoRAPool] | None) -> None:
        if before is not None and after is not None and before.object and after.object:
            same = before.object.spec == after.object.spec
            if same and before.metadata.deletion_timestamp == after.metadata.deletion_timestamp:
                return  # its status
        for custom in (before, after):
            if custom is not None and custom.object is not None:
                self.queue.add(custom.object.model_key)

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        pod = after or before
        if pod is None or pod.model_uid is None:
            return
        self._models.add_uid(pod.model_uid)

    def on_child(self, _key: str, before: Child | None, after: Child | None) -> None:
        for child in (before, after):
            if child is not None:
                self._models.add_uid(child.model_uid)

    def on_gateway(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        if self._world.config.ext_proc.enabled and gateway_changed(before, after):
            for key in self._world.models.known_keys():
                self.queue.add(key)

    def enqueue_all(self) -> None:
        """After a resync, and when the install key changed: compares every Model with the whole world."""
        self._executor.compare()
        for key in self._world.models.known_keys():
            self.queue.add(key)

    # --- one Model --------------------------------------------------------------------------------------------------

    async def reconcile(self, key: str) -> float | None:
        """Returns seconds after which to look again, or None."""
        world = self._world
        return await isolated(world, MODELS, world.models, key, self._reconcile, manager=names.MANAGER_MODEL)

    async def _reconcile(self, key: str) -> float | None:
        world = self._world
        custom = world.models.get(key)
        if custom is None or custom.metadata.deletion_timestamp is not None:
            return None  # garbage collection removes the children
        if custom.object is None:
            await self._write(custom, invalid(custom, world.now()))
            return None
        if not custom.status.get("conditions"):
            # Before any work: tools take an object without a Ready condition for ready.
            await self._write(custom, modelstatus.first_status(custom.object, world.now()))
            custom = world.models.get(key) or custom
        model = custom.object
        if model is None:
            return None
        missing = await self._missing_secret(model)
        version = engine_version(model, world.config)
        classes = world.accepted_classes()
        problems = modelstatus.problems(
            model,
            classes=classes,
            versions=tuple(engine_table(model, world.config).versions),
            version=version,
            argument_problems=kind_of(model).pod.extra_args_problems(version, model.spec.engine.extra_args),
            engine_problems=engine_problems(model, world.config, model.status.artifact if model.status else None),
            secret_missing=missing,
        )
        reading = None if problems else await self.artifacts.read(model)
        paused = modelstatus.is_paused(model)
        known = reading.facts if reading is not None else None
        pool = applied(world.pool_of(model.key), model, known, world.config)
        request = PlacementRequest(model, known, "frozen" if paused or known is None else "placed", pool)
        if self._now(custom) is None:
            return None  # gone while it was asked about: its request would keep GPUs from others for ever
        self._state.enter(request)
        decided, failure = self._state.decided(request), self._state.record(model.metadata.uid).failure
        if known is not None and decided is None and failure is None:
            return None  # the planner wakes it
        not_looked_at = decided.considered.problem if decided is not None else None
        if not_looked_at is not None and not_looked_at.reason == reasons.TOO_EXPENSIVE:
            problems = (*problems, not_looked_at)
        else:
            failure = failure or not_looked_at
        if known is not None and decided is not None and not paused and not problems and failure is None:
            await self._publish_waiting(key, custom, reading, decided)
            failure = await self._executor.run(model, classes, request, decided)
        else:
            self._driver.hold(model)
        latest = self._now(custom)
        if latest is None or latest.object is None:
            return None
        if problems or known is None:
            decided = None  # what stands is shown
        status = self._status(latest.object, reading, decided, problems=problems, failure=failure)
        await self._write(latest, status)
        emit_placement(world.recorder, latest, status)
        unsettled = (
            missing
            or failure
            or self._driver.conditions.refused(model)
            or (reading is not None and reading.silent)
            or self._surges(model)
        )
        return RECHECK_SECONDS if unsettled else None

    def _surges(self, model: Model) -> bool:
        """Whether a rollout has one replica more, for which an autoscaler may add a node, or not."""
        found = (child.deployment for child in self._world.deployments_of(model.metadata.uid))
        return any(each is not None and each.replacing and each.surges for each in found)

    def _now(self, custom: Custom[Model]) -> Custom[Model] | None:
        """It, as it is now; None: deleted since, or something that this version does not understand."""
        found = self._world.models.get(f"{custom.metadata.namespace}/{custom.metadata.name}")
        if found is None or found.object is None or found.metadata.uid != custom.metadata.uid:
            return None
        return found if found.metadata.deletion_timestamp is None else None

    def _status(
        self,
        model: Model,
        reading: SourceReading | None,
        decided: PlacementDecision | None,
        *,
        problems: tuple[ModelProblem, ...] = (),
        failure: ModelProblem | None = None,
    ) -> ModelStatus:
        world, uid = self._world, model.metadata.uid
        seen = Observed(
            model=model,
            problems=problems,
            served=served_names(model, claimants(world, model)),
            placement=decided.placement if decided else None,
            wanted=decided.wanted if decided else None,
            untried=decided.untried if decided else frozenset(),
            differences=differences_of(model.spec.engine.type),
            scaling=self._decision(uid, decided),
            deployments=tuple(_current(world.deployments_of(uid)).values()),
            pods=world.pods.by("model", uid),
            reading=reading,
            sized=decided.considered.sized if decided else {},
            tokens=self._state.record(uid).kv_tokens,
            cold_starts=self._cold.of(model),
            node_waits=self._cold.node_waits(model),
            outages=frozenset(self._state.outages),
            start_stages=self._cold.stages(model),
            canaries={**canaryanswers.stored(model), **self._state.record(uid).canaries},
            stale_signals=self._stale_signals.message(model),
            driven=self._driver.conditions.finding(model),
            prefetch=self._state.record(uid).prefetch,
            failure=failure,
            paused=modelstatus.is_paused(model),
            scaled_by=self._driver.conditions.scaled_by(model) if modelstatus.is_paused(model) else "",
        )
        return modelstatus.status(seen, world.now())

    def _decision(self, uid: str, decided: PlacementDecision | None) -> scaling.ScalingDecision | None:
        """Why there are as many replicas as the placement says; None where another number is on its way already."""
        scaling = self._state.record(uid).scaling
        decision = scaling.decision if scaling is not None else None
        return decision if decision is not None and decided is not None and decision.wanted == decided.wanted else None

    async def _publish_waiting(
        self, key: str, custom: Custom[Model], reading: SourceReading | None, decided: PlacementDecision
    ) -> None:
        """A replica that waits for GPUs is reported before its pod is made, so that no count of GPUs shows a
        surplus."""
        model = custom.object
        if model is None or not decided.placement.waiting:
            return
        told = {v.gpu_class: v.waiting or 0 for v in (model.status.variants if model.status else ())}
        if any(v.waiting > told.get(v.gpu_class, 0) for v in decided.placement.variants):
            await self._write(custom, self._status(model, reading, decided))

    async def _missing_secret(self, model: Model) -> str | None:
        """The sentence about a Secret that does not exist. Its content is never read here."""
        reference = model.spec.source.secret_ref
        if reference is None:
            return None
        try:
            await self._world.client.get_metadata(SECRETS, reference.name, model.metadata.namespace)
        except NotFound:
            where = f"{model.metadata.namespace}/{reference.name}"
            try:
                what = secret_advice(model.spec.source.uri)
            except ValueError:  # reported as a problem of its own
                what = "create it"
            return f"spec.source.secretRef: there is no Secret {where}; {what}"
        return None

    async def _write(self, custom: Custom[Model], status: ModelStatus) -> None:
        await write_status(self._world, MODELS, self._world.models, custom, status, manager=names.MANAGER_MODEL)


def _current(deployments: tuple[Child, ...]) -> dict[str, facts.Deployment]:
    """A Model's Deployments by class."""
    return {d.gpu_class: d for c in deployments if (d := c.deployment) is not None and not d.deleting}


def _claims_differ(before: GPUClass, after: GPUClass) -> bool:
    """Engine pods of a class with devices claim others than those that are out of use."""
    return after.spec.device is not None and out_of_use(before) != out_of_use(after)
