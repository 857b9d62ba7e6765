"""Who writes to the cluster what was decided: the Executor, and nobody else.

A reconciler validates, gathers facts and writes status. The Executor writes the children of Models and their replicas.
It has two entries. They may run at the same time for one Model: each reads the target right before it writes replicas.

| entry | called by | what it writes |
|---|---|---|
| `run` | `model/controller.py` | everything that a Model's plan needs, in the order below |
| `wake` | `scaling/wake.py` | replicas of one Deployment from zero, ahead of the plan |

`run` writes in this order; the part is a module of `children/`, but for `transport.py`:

| what | part | field manager |
|---|---|---|
| Secret with the engine's key | workload | shoal-model |
| Secret with the engine's certificate; it is also renewed while the Model is paused | transport | shoal-model |
| PodDisruptionBudget, NetworkPolicy | workload | shoal-model |
| ConfigMap and TriggerAuthentication for KEDA | scaledobjects | shoal-model |
| of each class with devices: its ResourceClaimTemplate | workload | shoal-model |
| of each class: the Deployment; `replicas` only until another manager has the field | workload | shoal-model |
| of each class: deletion cost of the pods that go first | replicas | shoal-scaler |
| of each class: its ScaledObject and what KEDA is answered, where KEDA scales | scaledobjects | shoal-model |
| of each class: `replicas` by `/scale`, where Shoal scales | replicas | shoal-scaler |
| Service, EndpointSlice and InferencePool for proxies, where they carry requests | inferencepools | shoal-model |
| deleted: what is on classes that are not used any more, old ResourceClaimTemplates and keys | the same | |

What else the operator writes (status, Jobs that read sources, volumes of the node cache, the installation's own
Secrets and the ConfigMap with its CA) is listed in `tests/unit/test_house.py`, which fails on any other writer.
"""

from collections.abc import Callable, Mapping
from typing import Final

import structlog

from shoal.api import reasons
from shoal.api.gpuclass import GPUClass
from shoal.api.model import Model
from shoal.controllers.children.inferencepools import InferencePoolWriter
from shoal.controllers.children.objects import NameTaken
from shoal.controllers.children.replicas import Loads, ScaleWriter
from shoal.controllers.children.scaledobjects import ScaledObjectWriter
from shoal.controllers.children.workload import WorkloadWriter
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.installkey import InstallKeyError, InstallKeys, InstallKeySource
from shoal.controllers.keda.driver import Driver
from shoal.controllers.placementrequest import PlacementDecision, PlacementRequest
from shoal.controllers.state import FleetState
from shoal.controllers.transport import CertificateIssuer
from shoal.controllers.world import World
from shoal.core import facts, keda, rollout
from shoal.core.disruption import waits_for_another
from shoal.core.placement import VariantPlan
from shoal.core.status.observed import ModelProblem
from shoal.engine.kinds import kind_of
from shoal.kube.errors import Forbidden, KubeError, ObjectInvalid
from shoal.kube.optional import OptionalKinds
from shoal.manifests.shape import VariantShape, engine_version
from shoal.net.pki import CertificateUnusable

log = structlog.get_logger()

_REFUSED: Final = "the API server refuses what the Model needs"


class Executor:
    """The only writer of Models' children and replicas. Only the leader calls it."""

    def __init__(
        self,
        world: World,
        state: FleetState,
        driver: Driver,
        install: InstallKeySource,
        transport: CertificateIssuer,
        cold: ColdStarts,
        loads: Loads,
        proxies: OptionalKinds,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """`loads`: the load of a pod, which tells which pods are cheap to lose. `proxies`: whether there are
        InferencePools. `leads`: whether this process is
        certain to lead, asked right before each write of replicas."""
        self._world, self._state, self._install, self._transport = world, state, install, transport
        self._workload = WorkloadWriter(world, cold)
        self._scales = ScaleWriter(world, loads, leads)
        self._driver = driver
        self._scaled = ScaledObjectWriter(world, state, self._scales, driver)
        self._pools = InferencePoolWriter(world, proxies)

    # --- the two entries --------------------------------------------------------------------------------------------

    async def run(
        self, model: Model, classes: Mapping[str, GPUClass], request: PlacementRequest, decided: PlacementDecision
    ) -> ModelProblem | None:
        """Brings a Model's children and replicas to what was `decided` for its `request`, with as few writes as there
        are differences. `classes`: the accepted GPU classes by name. While it runs, the plan's GPUs are reserved.

        Returns what the Model's status has to say of a write that was refused; None: everything stands as decided.
        Raises KubeError for what passes by itself: a Conflict, or an API server that does not answer.
        """
        uid, plans = model.metadata.uid, decided.placement.variants
        self._state.begin_apply(uid, [(v.gpu_class, v.replicas, v.gpus) for v in plans])
        try:
            if (problem := await self._unprotected(model)) is not None:
                return problem
            await self._apply(model, classes, request, decided)
        except (InstallKeyError, CertificateUnusable) as error:
            return ModelProblem(reasons.REFUSED, str(error))
        except NameTaken as error:
            return ModelProblem(reasons.NAME_TAKEN, str(error))
        except (Forbidden, ObjectInvalid) as error:
            log.warning("the API server refuses a child", model=model.key, error=error.message)
            return ModelProblem(reasons.REFUSED, f"{_REFUSED}: {error.message}")
        finally:
            self._state.end_apply(uid)
            self._state.replan()
        return None

    async def wake(self, model: Model, gpu_class: str) -> None:
        """Raises a Deployment from zero to the replicas that are reserved for the wake. The reservation is marked as
        written, or released where the API server refuses the write: then the plan wakes the Model."""
        uid = model.metadata.uid
        try:
            await self._scaled.wake(model, gpu_class, lambda: self._state.target(uid, gpu_class, 0))
            self._state.wake_written(uid)
        except KubeError as error:
            log.warning("not woken at once; the plan does it", model=uid, gpu_class=gpu_class, error=error.message)
            self._state.release_wake(uid)

    def compare(self) -> None:
        """The next run of each Model also checks objects that no watch reports: one may have been deleted."""
        self._workload.forget_secrets()
        self._transport.forget_secrets()
        self._scaled.forget_certificates()

    async def _unprotected(self, model: Model) -> ModelProblem | None:
        """An engine that needs mutual TLS waits until every process that calls it speaks it: a pod without would be
        open. What stands, stays."""
        kind = kind_of(model)
        if kind.pod.needs_mtls is None or await self._transport.wanted():
            return None
        return ModelProblem(
            reasons.ENGINE_NEEDS_MTLS,
            f"{kind.type} waits until all gateways, operators and the ledger speak mutual TLS: {kind.pod.needs_mtls}",
        )

    # --- one Model, in the order of the table -----------------------------------------------------------------------

    async def _apply(
        self, model: Model, classes: Mapping[str, GPUClass], request: PlacementRequest, decided: PlacementDecision
    ) -> None:
        uid, plans = model.metadata.uid, decided.placement.variants
        install = self._install.keys or await self._install.ensure()
        await self._workload.keys(model, install)
        if mtls := await self._transport.wanted():
            await self._transport.model(model)
        await self._policies(model, classes, plans)
        await self._scaled.prepare(model)
        floors = keda.floors(model.spec.scaling.min_replicas, {p.gpu_class: p.replicas for p in plans})
        for plan in plans:
            gpu_class = classes.get(plan.gpu_class)
            if gpu_class is not None and not plan.retired:
                shape = self._shape(model, gpu_class, request, plan, install, mtls=mtls)
                await self._workload.claims(shape)
                waits = await self._workload.deployment(
                    shape, lambda d, p=plan: self._begin_rollout(uid, p, decided, d)
                )
                self._state.lack_surge(uid, plan.gpu_class, lacks=waits)
                if not waits:
                    self._state.template_written(uid, plan.gpu_class, request)
            await self._replicas(model, plan, floors[plan.gpu_class])
        await self._drop(model, plans, install)
        # Last: a name that another object has must not keep the Model from its replicas.
        await self._pools.write(model)

    async def _policies(self, model: Model, classes: Mapping[str, GPUClass], plans: tuple[VariantPlan, ...]) -> None:
        uid = model.metadata.uid
        deployments = (child.deployment for child in self._world.deployments_of(uid))
        waits = waits_for_another(
            self._world.pods.by("model", uid),
            {plan.gpu_class: plan.replicas for plan in plans},
            backoffs=self._state.dead_ends(uid),
            refused={found.gpu_class for found in deployments if found is not None and found.refused},
            interruptible={name for name, each in classes.items() if each.spec.interruptible},
        )
        await self._workload.policies(model, sum(plan.replicas for plan in plans), waits=waits)

    def _shape(
        self,
        model: Model,
        gpu_class: GPUClass,
        request: PlacementRequest,
        plan: VariantPlan,
        install: InstallKeys,
        *,
        mtls: bool,
    ) -> VariantShape:
        config = self._world.config
        return VariantShape(
            model=model,
            gpu_class=gpu_class,
            gpus=plan.gpus,
            version=engine_version(model, config),
            config=config,
            install_key=install.fingerprint,
            facts=request.facts,
            pool=request.pool,
            mtls=mtls,
        )

    def _begin_rollout(
        self, uid: str, plan: VariantPlan, decided: PlacementDecision, standing: facts.Deployment
    ) -> rollout.Beginning:
        deployments = (child.deployment for child in self._world.deployments_of(uid))
        return rollout.begin(
            standing,
            plan,
            serving=sum(each.ready for each in deployments if each is not None),
            others=len(decided.considered.candidates) > 1,
            known=plan.gpu_class in decided.lacks_surge,
            reserve_surge=lambda: self._state.reserve_surge(uid, plan.gpu_class, plan.gpus),
        )

    async def _replicas(self, model: Model, plan: VariantPlan, floor: int) -> None:
        """The pods that go first are marked before the number falls. `floor`: the class's part of minReplicas. Raises
        Conflict, NameTaken."""
        uid, gpu_class = model.metadata.uid, plan.gpu_class
        marked = self._state.latest(uid, plan)
        await self._scales.mark(model, marked)

        # A number that was decided while an earlier write was under way counts: the target is read before each write.
        def target() -> int:
            return self._state.target_as_marked(uid, marked)

        if self._driver.is_out(model, gpu_class):
            await self._scales.scale(model, gpu_class, target)
        else:
            await self._scaled.scale(model, gpu_class, target, floor=floor)

    async def _drop(self, model: Model, plans: tuple[VariantPlan, ...], install: InstallKeys) -> None:
        """Deletes what the Model has on classes that it does not use any more, and keys that no pod carries."""
        world, uid, keep = self._world, model.metadata.uid, {plan.gpu_class for plan in plans}
        await self._scaled.drop_variants(model, keep)
        await self._workload.drop_variants(model, keep)
        await self._workload.drop_old_claims(model)
        engines = (*world.pods.by("model", uid), *world.pods.by("claims", uid))
        await self._workload.drop_old_keys(model, install, {pod.install_key for pod in engines})
