"""The InferencePool of a Model, with the Service and the EndpointSlice that lead to the gateways: where proxies carry
requests (docs/other-doors.md) and the cluster has the kind."""

from shoal.api import names
from shoal.api.model import Model
from shoal.controllers.children.objects import Children
from shoal.controllers.world import World
from shoal.core import facts
from shoal.kube.errors import NotFound
from shoal.kube.optional import OptionalKind, OptionalKinds
from shoal.kube.resources import ENDPOINTSLICES, INFERENCEPOOLS, SERVICES
from shoal.manifests import inferencepool as manifests

OURS = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY},{names.LABEL_MODEL}"


def kinds(world: World) -> OptionalKinds:
    """What is watched of it. An installation without proxies does not ask, and has no right to."""
    return OptionalKinds(
        world.client,
        INFERENCEPOOLS,
        [
            OptionalKind(INFERENCEPOOLS, world.inference_pools, OURS),
            OptionalKind(SERVICES, world.picker_services, OURS),
            OptionalKind(ENDPOINTSLICES, world.picker_slices, OURS),
        ],
    )


class InferencePoolWriter:
    """Writes them as `shoal-model`. They go with the Model."""

    def __init__(self, world: World, kinds: OptionalKinds) -> None:
        self._world, self._kinds = world, kinds
        self._children = Children(world)

    async def write(self, model: Model) -> None:
        """Raises NameTaken."""
        if not self._world.config.ext_proc.enabled or not self._kinds.installed:
            return
        world, ensure = self._world, self._children.ensure
        await ensure(SERVICES, world.picker_services, model, manifests.service(model))
        await ensure(ENDPOINTSLICES, world.picker_slices, model, manifests.endpoints(model, world.gateways()))
        try:
            await ensure(INFERENCEPOOLS, world.inference_pools, model, manifests.pool(model, world.config))
        except NotFound:
            return  # the kind is just being removed


def gateway_changed(before: facts.Pod | None, after: facts.Pod | None) -> bool:
    """Whether proxies are to be sent to other gateways."""
    return _address(before) != _address(after)


def _address(pod: facts.Pod | None) -> str | None:
    return None if pod is None or not pod.gateway or not pod.ready or pod.deleting else pod.ip
