"""GPU counts kept up to date event by event: no reconcile walks over all pods of a cluster."""

from collections.abc import Callable

from shoal.api.gpuclass import GPUClass
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.gpus import Usage, held_by_node, usage
from shoal.kube.projections import Child


class Capacity:
    """What nodes offer, what pods hold, and what is promised to replicas that no node holds yet."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held: dict[tuple[str, str], int] = {}
        self._usage: dict[str, tuple[int, GPUClass, Usage]] = {}
        self._revision = 0
        self._bound: dict[tuple[str, str], int] = {}
        """(model uid, class) -> replicas that a node holds."""
        self._wanted: dict[tuple[str, str], tuple[int, int]] = {}
        """(model uid, class) -> (replicas, GPUs of each), as the Deployments say."""
        self._assumed: dict[tuple[str, str], tuple[int, int]] = {}
        """The same, decided and not yet seen in a Deployment."""
        self._promised: dict[str, dict[str, int]] = {}
        """class -> model uid -> GPUs."""
        self.changed: list[Callable[[], None]] = []
        world.nodes.listeners.append(self._node)
        world.pods.listeners.append(self._pod)
        world.deployments.listeners.append(self._deployment)

    def usage(self, gpu_class: GPUClass) -> Usage:
        name = gpu_class.metadata.name
        known = self._usage.get(name)
        if known is not None and known[0] == self._revision and known[1] is gpu_class:
            return known[2]
        found = usage(gpu_class.spec, self._world.nodes.values(), self._held)
        self._usage[name] = (self._revision, gpu_class, found)
        return found

    def promised(self, gpu_class: str, *, but: str) -> int:
        """GPUs promised to replicas of all Models but this one (by uid)."""
        entries = self._promised.get(gpu_class, {})
        return sum(entries.values()) - entries.get(but, 0)

    def assume(self, model_uid: str, gpu_class: str, replicas: int, gpus: int) -> None:
        """A decision that no Deployment shows yet: others must not count on the same GPUs."""
        self._assumed[model_uid, gpu_class] = (replicas, gpus)
        self._recount(model_uid, gpu_class)

    def settle(self, model_uid: str) -> None:
        """The Model's decisions stand in its Deployments, or have failed."""
        for key in [k for k in self._assumed if k[0] == model_uid]:
            del self._assumed[key]
            self._recount(*key)

    def _node(self, _key: str, before: facts.Node | None, after: facts.Node | None) -> None:
        self._tell()

    def _pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        held = False
        for pod, sign in ((before, -1), (after, 1)):
            if pod is None:
                continue
            for place, amount in held_by_node([pod]).items():
                held = True
                self._held[place] = self._held.get(place, 0) + sign * amount
                if not self._held[place]:
                    del self._held[place]
            if pod.model_uid and pod.gpu_class and pod.node and not pod.finished and not pod.deleting:
                key = (pod.model_uid, pod.gpu_class)
                self._bound[key] = self._bound.get(key, 0) + sign
                if not self._bound[key]:
                    del self._bound[key]
        for pod in (before, after):
            if pod is not None and pod.model_uid and pod.gpu_class:
                self._recount(pod.model_uid, pod.gpu_class)
        if held and (before is None or after is None or held_by_node([before]) != held_by_node([after])):
            self._tell()

    def _deployment(self, _key: str, before: Child | None, after: Child | None) -> None:
        for child, present in ((before, False), (after, True)):
            if child is None or child.deployment is None:
                continue
            found = child.deployment
            key = (found.model_uid, found.gpu_class)
            if present and not found.deleting:
                self._wanted[key] = (found.replicas, found.gpus_per_replica)
            else:
                self._wanted.pop(key, None)
            self._recount(*key)

    def _recount(self, model_uid: str, gpu_class: str) -> None:
        key = (model_uid, gpu_class)
        most = max(self._wanted.get(key, (0, 0)), self._assumed.get(key, (0, 0)))
        gpus = max(0, most[0] - self._bound.get(key, 0)) * most[1]
        entries = self._promised.setdefault(gpu_class, {})
        if gpus:
            entries[model_uid] = gpus
        else:
            entries.pop(model_uid, None)

    def _tell(self) -> None:
        self._revision += 1
        for listener in self.changed:
            listener()
