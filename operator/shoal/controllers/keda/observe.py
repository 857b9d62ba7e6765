"""Observation of KEDA for one Model: its ScaledObjects, its HPAs, and whether KEDA polls."""

from collections.abc import Iterable

from shoal.api import names
from shoal.api.model import Driver, Model
from shoal.controllers.keda.targets import Key, ScalerTargets
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.keda import Autoscaler, ScaledObject, ScaledVariant, Seen, Writer, writer
from shoal.core.keda.verdict import silence_timeout
from shoal.kube.kedaviews import slim_autoscaler
from shoal.kube.optional import OptionalKind, OptionalKinds
from shoal.kube.projections import Child
from shoal.kube.resources import HPAS, SCALEDOBJECTS, TRIGGERAUTHENTICATIONS
from shoal.manifests.keda import address

OURS = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY},{names.LABEL_MODEL}"


def kinds(world: World) -> OptionalKinds:
    """What is watched of KEDA. HPAs, of which a cluster may have many that change all the time, only for need."""
    return OptionalKinds(
        world.client,
        SCALEDOBJECTS,
        [
            OptionalKind(SCALEDOBJECTS, world.scaled_objects, OURS),
            OptionalKind(TRIGGERAUTHENTICATIONS, world.trigger_authentications, OURS),
            OptionalKind(HPAS, world.autoscalers, slim=slim_autoscaler, with_need=True),
        ],
    )


class KEDAObserver:
    """Reads the store and the answers to KEDA."""

    def __init__(self, world: World, targets: ScalerTargets, kinds: OptionalKinds) -> None:
        self._world, self._targets, self._kinds = world, targets, kinds
        self._since: dict[str, float] = {}
        """ScaledObject's uid -> when this operator saw it first in its term, on the clock of `ScalerTargets`."""
        self.refused: dict[Key, str] = {}
        """What the API server said to a ScaledObject that it did not take."""

    def begin(self) -> None:
        """A new term: a ScaledObject that KEDA has not polled yet gets its time."""
        self._since.clear()
        self.refused.clear()

    def need(self) -> None:
        """Something has to be known of HPAs."""
        self._kinds.need()

    def driver(self, model: Model) -> Driver:
        """Who is to write the Model's replicas."""
        return model.spec.scaling.driver or self._world.config.scaling.driver

    def scaled(self, key: Key) -> ScaledObject | None:
        found = self._world.scaled_objects.get("/".join(key))
        return found.scaled if found is not None else None

    def hpa(self, key: Key) -> Autoscaler | None:
        """The one that KEDA made for a Deployment."""
        scaled = self.scaled(key)
        made = [h for h in self._world.autoscalers.by("target", "/".join(key)) if h.scaled_object is not None]
        own = [h for h in made if scaled is not None and h.scaled_object == scaled.uid]
        return next(iter(own or made), None)

    def writer(self, driver: Driver, deployment: facts.Deployment) -> Writer:
        """Who writes the Deployment's replicas now."""
        key = (deployment.namespace, deployment.name)
        ours = names.MANAGER_SCALER in deployment.replicas_managers
        asked = self._targets.since(key) is not None
        return writer(driver, self.scaled(key), self.hpa(key), ours=ours, polled=asked)

    def silent(self, key: Key) -> bool | None:
        """KEDA has not asked about a ScaledObject for longer than it should; None: too early to say."""
        scaled = self.scaled(key)
        if scaled is None:
            return None
        now, last = self._targets.clock(), self._targets.since(key)
        began = self._since.setdefault(scaled.uid, now)
        limit = silence_timeout(self._world.config.scaling.keda.polling_seconds, scaled.minimum)
        if now - (began if last is None else last) > limit:
            return True
        return None if last is None else False

    def observed(self, model: Model, problem: str | None) -> Seen:
        """What the condition ScalingActive is made from. `problem`: why this operator cannot answer KEDA."""
        keda = self._world.config.scaling.keda
        return Seen(
            driver=self.driver(model),
            namespace=model.metadata.namespace or "",
            installed=self._kinds.installed,
            address=address(keda, self._world.namespace),
            variants=tuple(self._variants(model)),
            problem=problem,
        )

    def _variants(self, model: Model) -> Iterable[ScaledVariant]:
        driver, uid = self.driver(model), model.metadata.uid
        found = [c.deployment for c in self._world.deployments_of(uid)]
        for deployment in sorted((d for d in found if d is not None and not d.deleting), key=lambda d: d.name):
            key = (deployment.namespace, deployment.name)
            scaled, hpa = self.scaled(key), self.hpa(key)
            yield ScaledVariant(
                deployment=deployment.name,
                writer=self.writer(driver, deployment),
                scaled=scaled,
                hpa=hpa,
                other_hpas=tuple(sorted(h.name for h in self._foreign(key, hpa))),
                silent=self.silent(key),
                refused=self.refused.get(key),
            )

    def _foreign(self, key: Key, own: Autoscaler | None) -> Iterable[Autoscaler]:
        for hpa in self._world.autoscalers.by("target", "/".join(key)):
            if own is None or hpa.uid != own.uid:
                yield hpa

    def is_refused(self, model_uid: str) -> bool:
        """The API server did not take one of the Model's ScaledObjects."""
        if not self.refused:
            return False
        return any((c.namespace, c.name) in self.refused for c in self._world.deployments_of(model_uid))

    def left(self, model_uid: str) -> list[Child]:
        """ScaledObjects of a Model, whether it wants them or not."""
        return list(self._world.scaled_objects.by("model", model_uid))
