"""Models whose replicas KEDA writes: what is seen of KEDA, what KEDA is answered, what the status says of it.

What is written of it to the cluster is in `children/scaledobjects.py`.
"""

from collections.abc import Callable

from shoal.api.model import Model
from shoal.controllers.keda.answers import ScalerEndpoint
from shoal.controllers.keda.conditions import Conditions
from shoal.controllers.keda.observe import KEDAObserver, kinds
from shoal.controllers.keda.targets import Key, ScalerTargets
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.keda import Autoscaler
from shoal.kube.projections import Child, Custom

Target = Callable[[], int]
"""Replicas that a Deployment shall have, asked right before they are written or answered."""


class Driver:
    """`run` while this operator leads; `watch` always. Writes nothing to the cluster."""

    def __init__(
        self,
        world: World,
        targets: ScalerTargets,
        endpoint: ScalerEndpoint,
        wake: Callable[[str], None],
    ) -> None:
        """`wake` is called with the uid of a Model that must be reconciled again."""
        self._world, self._endpoint, self._wake = world, endpoint, wake
        self.targets = targets
        self.kinds = kinds(world)
        self.observer = KEDAObserver(world, self.targets, self.kinds)
        self.conditions = Conditions(world, self.observer, self.targets, endpoint, wake)

    async def watch(self) -> None:
        """Follows KEDA's objects, where there are any, until cancelled."""
        await self.kinds.run()

    async def run(self) -> None:
        """Tells who has fallen silent, until cancelled."""
        await self.conditions.run()

    def begin(self) -> None:
        """A new term: nothing is answered before it is decided anew, and a ScaledObject that KEDA has not
        polled yet gets its time."""
        self.targets.begin()
        self.observer.begin()
        self.conditions.begin()

    def drives(self, model: Model) -> bool:
        """KEDA is to write the Model's replicas."""
        return self.observer.driver(model) == "KEDA"

    def is_out(self, model: Model, gpu_class: str) -> bool:
        """Whether KEDA has nothing to do with a variant: Shoal is to write its replicas, and no ScaledObject and no HPA
        is left. Then KEDA gets no answer any more."""
        live = self._world.deployment_of(model.metadata.uid, gpu_class)
        if self.observer.driver(model) != "BuiltIn" or live is None or live.deployment is None:
            return False
        key = (live.deployment.namespace, live.deployment.name)
        if self.observer.scaled(key) is not None or self.observer.hpa(key) is not None:
            return False
        self.targets.drop(key)
        return True

    @property
    def ca(self) -> str | None:
        """PEM of the CA by which KEDA knows the external scaler; "": KEDA needs none; None: there is no certificate."""
        return self._endpoint.ca if self._world.config.scaling.keda.tls else ""

    # --- what KEDA is answered --------------------------------------------------------------------------------------

    def answer(self, key: Key, found: facts.Deployment, target: Target) -> None:
        """From now on KEDA is answered this number for the ScaledObject of a Deployment."""
        self.targets.set(key, found.model_uid, found.gpu_class, found.gpus_per_replica, target())

    def hold(self, model: Model) -> None:
        """Nothing is carried out of what is decided on the Model: it is paused, or not accepted. KEDA is answered what
        stands."""
        if not self.drives(model):
            return
        for child in self._world.deployments_of(model.metadata.uid):
            found = child.deployment
            if found is not None and self.targets.number((found.namespace, found.name)) is None:
                standing = found.replicas
                self.answer((found.namespace, found.name), found, lambda n=standing: n)

    # --- events -----------------------------------------------------------------------------------------------------

    def on_model(self, _key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        if before is not None and (after is None or after.metadata.uid != before.metadata.uid):
            self.targets.drop_model(before.metadata.uid)
        if after is not None and after.object is not None and self.drives(after.object):
            self._endpoint.need()

    def on_deployment(self, _key: str, before: Child | None, after: Child | None) -> None:
        was, now = (bool(c and c.deployment and c.deployment.replicas) for c in (before, after))
        child = after or before
        if child is None:
            return
        key = (child.namespace, child.name)
        if after is None:
            self.targets.drop(key)
        elif was != now and self.targets.number(key) is not None:
            self.targets.notify(key)

    def on_scaled(self, _key: str, before: Child | None, after: Child | None) -> None:
        for child in (before, after):
            if child is not None:
                self.kinds.need()
                self._wake(child.model_uid)

    def on_autoscaler(self, _key: str, before: Autoscaler | None, after: Autoscaler | None) -> None:
        for hpa in (before, after):
            child = self._world.deployments.get(hpa.target_key) if hpa is not None else None
            if child is not None:
                self._wake(child.model_uid)
