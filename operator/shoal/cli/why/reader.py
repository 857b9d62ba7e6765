"""Reads what explanations need. Each read has a timeout and a bound. A read that fails leaves a note, and the others go
on."""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar, cast

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.cli import gpus
from shoal.cli.client import ServiceError
from shoal.cli.why import readiness
from shoal.core.devices import ClassDevices
from shoal.core.layers import objects, quarantines
from shoal.core.layers.texts import shorten
from shoal.core.layers.types import (
    AutoscalerView,
    ClaimView,
    EventView,
    ExplainedKind,
    GPUHolder,
    ObjectView,
    OperatorLease,
    PolicyView,
    Unread,
    WhyNode,
    WhyPod,
)
from shoal.kube import deviceviews, layerviews
from shoal.kube.client import KubeClient
from shoal.kube.errors import KubeError, NotFound
from shoal.kube.resources import (
    DEVICECLASSES,
    EVENTS,
    GPUCLASSES,
    HPAS,
    LEASES,
    NETWORKPOLICIES,
    NODES,
    PERSISTENTVOLUMECLAIMS,
    PODS,
    RESOURCECLAIMS,
    RESOURCESLICES,
    Resource,
)

T = TypeVar("T")

SECONDS: Final = 10.0
"""Timeout of one read."""
MOST: Final = 2_000
"""Objects of one kind that are read."""
_MOST_EVENTS: Final = 10_000
"""Of one namespace. The API server sorts them by name: without all of them, those of some pods are missing."""
_LONGEST: Final = 500
"""Characters of an error."""
_MOST_CLASSES: Final = 16
_MOST_NODES: Final = 32
"""Nodes that no class selects, read one by one."""
_KINDS: Final = ("Pod", "Node", "Job", "ReplicaSet", "PersistentVolumeClaim")
"""Of objects whose events explain something."""
_NODE_EVENTS: Final = "default"
"""Namespace of events about objects that have none."""


@dataclass(frozen=True, slots=True)
class ClassesDevices:
    """The devices of GPU classes that have a `device`."""

    of: Mapping[str, ClassDevices] = field(default_factory=dict[str, ClassDevices])
    """By class; empty: there is no such class, or they could not be read."""
    nodes: Mapping[str, WhyNode] = field(default_factory=dict[str, WhyNode])
    """Those that have them."""

    @property
    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """As in `WhySnapshot`."""
        return gpus.counts(self.of)


class WhyReader:
    """`unread` fills up with what could not be read."""

    def __init__(self, client: KubeClient) -> None:
        self.client = client
        self.unread: list[Unread] = []

    async def attempt(self, what: str, work: Awaitable[T]) -> T | None:
        """The result; None: it failed, and `unread` says why."""
        try:
            async with asyncio.timeout(SECONDS):
                return await work
        except TimeoutError:
            self.unread.append(Unread(what, f"no answer within {SECONDS:.0f} s"))
        except KubeError as error:
            self.unread.append(Unread(what, shorten(error.message, _LONGEST)))
        except (ServiceError, OSError) as error:
            said = error.said if isinstance(error, ServiceError) else ""
            first = said or str(error).partition("\n")[0] or type(error).__name__
            self.unread.append(Unread(what, shorten(first, _LONGEST)))
        return None

    async def get(self, what: str, kind: ExplainedKind, resource: Resource, name: str, namespace: str | None) \
            -> ObjectView | None:  # fmt: skip
        raw = await self.attempt(what, self.client.get(resource, name, namespace))
        return layerviews.shoal_object(kind, raw) if raw is not None else None

    async def listed(
        self,
        what: str,
        resource: Resource,
        namespace: str | None = None,
        selector: str | None = None,
        *,
        fields: str | None = None,
        most: int = MOST,
    ) -> list[JsonObject] | None:
        """At most `most`; None: they cannot be read."""
        return await self.attempt(what, self._listed(what, resource, namespace, selector, fields, most))

    async def _listed(
        self, what: str, resource: Resource, namespace: str | None, selector: str | None, fields: str | None, most: int
    ) -> list[JsonObject]:
        found: list[JsonObject] = []
        async for each in self.client.list(
            resource, namespace=namespace, label_selector=selector, field_selector=fields
        ):
            if len(found) >= most:
                self.unread.append(Unread(what, f"only the first {most} were read"))
                break
            found.append(each)
        return found

    async def pods(self, namespace: str, model: str) -> tuple[WhyPod, ...]:
        """Engine pods of a Model."""
        selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE},{names.LABEL_MODEL}={model}"
        found = await self.listed(f"pods of Model {namespace}/{model}", PODS, namespace, selector)
        views = [layerviews.pod(raw) for raw in found or ()]
        return tuple(pod for pod in views if not pod.deleting and pod.phase != "Succeeded")

    async def classes(self, wanted: Iterable[str] | None) -> tuple[ObjectView, ...]:
        """GPU classes of these names; None: all."""
        found = await self.listed("GPU classes", GPUCLASSES)
        names_ = None if wanted is None else set(wanted)
        views = [layerviews.shoal_object("class", raw) for raw in found or ()]
        return tuple(view for view in views if names_ is None or view.name in names_)

    async def devices(self, classes: Iterable[ObjectView]) -> ClassesDevices:
        """Those of these classes. All GPU classes are read for it: a device that several select is of one of them."""
        wanted = {view.name for view in classes if objects.resource_of(view) is None}
        if not wanted:
            return ClassesDevices()
        slices = await self.attempt(what := "ResourceSlices", self._published(what, RESOURCESLICES))
        if not slices:
            return ClassesDevices()  # the condition of a class says that no driver publishes any
        of_drivers = await self.attempt(what := "DeviceClasses", self._published(what, DEVICECLASSES))
        every = await self.listed("GPU classes", GPUCLASSES)
        nodes = await self.listed("nodes with devices", NODES, most=gpus.MOST)
        if of_drivers is None or every is None or nodes is None:
            return ClassesDevices()
        matched = gpus.matched(gpus.view(every, nodes, slices, of_drivers))
        found = {name: of for name, of in matched.items() if name in wanted}
        there = {node for of in found.values() for node in of.by_node}
        views = (layerviews.node(raw) for raw in nodes if raw["metadata"]["name"] in there)
        return ClassesDevices(found, {view.name: view for view in views})

    async def _published(self, what: str, resource: Resource) -> list[JsonObject]:
        """None of a kind that the API server does not have."""
        try:
            return await self._listed(what, resource, None, None, None, gpus.MOST)
        except NotFound:
            return []

    async def nodes(
        self, pods: Iterable[WhyPod], classes: Iterable[ObjectView], devices: ClassesDevices
    ) -> tuple[WhyNode, ...]:
        """Nodes of these pods, those that these classes select, and those that have their devices."""
        found: dict[str, WhyNode] = dict(devices.nodes)
        selectors: list[dict[str, str]] = [view.spec.get("nodeSelector") or {} for view in classes]
        for selector in selectors[:_MOST_CLASSES]:
            if selector:
                text = ",".join(f"{name}={value}" for name, value in sorted(selector.items()))
                listed = await self.listed("nodes", NODES, selector=text)
                if listed is None:
                    return ()
                views = (layerviews.node(raw) for raw in listed)
                found |= {node.name: node for node in views if _selected(node.labels, [selector])}
        used = sorted({pod.node for pod in pods if pod.node is not None} - found.keys())
        if len(used) > _MOST_NODES:
            self.unread.append(Unread("nodes of pods", f"only {_MOST_NODES} of {len(used)} were read"))
        for name in used[:_MOST_NODES]:
            node = await self.attempt(f"node {name}", self._node(name))
            if node is None:
                break  # the others would be refused too
            found[name] = node
        return tuple(found.values())

    async def _node(self, name: str) -> WhyNode:
        try:
            return layerviews.node(await self.client.get(NODES, name))
        except NotFound:
            return WhyNode(name, (), False, {}, {}, {}, gone=True)

    async def events(self, namespace: str | None) -> tuple[EventView, ...]:
        """Events of a namespace, and of nodes."""
        spaces = [_NODE_EVENTS] if namespace in (None, _NODE_EVENTS) else [str(namespace), _NODE_EVENTS]
        found: list[EventView] = []
        for space in spaces:
            listed = await self.listed(f"events of namespace {space}", EVENTS, space, most=_MOST_EVENTS)
            found += [layerviews.event(raw) for raw in listed or ()]
        return tuple(event for event in found if event.kind in _KINDS)

    async def gateways(self, namespace: str) -> tuple[WhyPod, ...] | None:
        """Pods of the gateways in Shoal's namespace; None: they cannot be read."""
        selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_GATEWAY}"
        found = await self.listed(f"gateways in namespace {namespace}", PODS, namespace, selector)
        if found is None:
            return None
        pods = [layerviews.pod(raw) for raw in found]
        if any(pod.ready for pod in pods):
            return tuple(pods)
        return tuple(
            [
                replace(pod, not_ready=await readiness.missing(self.client, pod, raw))
                for pod, raw in zip(pods, found, strict=True)
            ]
        )

    async def policies(self, *namespaces: str) -> tuple[PolicyView, ...]:
        """NetworkPolicies of these namespaces."""
        found: list[PolicyView] = []
        for space in dict.fromkeys(namespaces):
            listed = await self.listed(f"NetworkPolicies of namespace {space}", NETWORKPOLICIES, space)
            found += [layerviews.policy(raw) for raw in listed or ()]
        return tuple(found)

    async def claim(self, model: ObjectView) -> ClaimView | None:
        """The PersistentVolumeClaim of a Model's source; None: it has none, or it cannot be read."""
        source: object = model.spec.get("source")
        uri = str(cast("JsonObject", source).get("uri")) if isinstance(source, dict) else ""
        if not uri.startswith("pvc://"):
            return None
        name = uri.removeprefix("pvc://").partition("/")[0]
        what = f"PersistentVolumeClaim {model.namespace}/{name}"
        raw = await self.attempt(what, self._claim(name, model.namespace))
        return layerviews.claim(raw) if raw else None

    async def _claim(self, name: str, namespace: str | None) -> JsonObject:
        try:
            return await self.client.get(PERSISTENTVOLUMECLAIMS, name, namespace)
        except NotFound:
            return {}  # conditions and the scheduler say it

    async def autoscalers(self, namespace: str) -> tuple[AutoscalerView, ...]:
        """Of others, on Deployments of a namespace."""
        found = await self.listed(f"HorizontalPodAutoscalers of namespace {namespace}", HPAS, namespace)
        return tuple(view for raw in found or () if (view := layerviews.autoscaler(raw)) is not None)

    async def holders(
        self, classes: Iterable[ObjectView], nodes: Iterable[WhyNode], devices: ClassesDevices
    ) -> tuple[GPUHolder, ...]:
        """Who else has GPUs of these classes, whose nodes are `nodes`."""
        plugins = [view for view in classes if objects.resource_of(view) is not None]
        found = await self._holders(n for n in nodes if any(objects.selects(c, dict(n.labels)) for c in plugins))
        if not devices.of:
            return found
        claims = await self.listed("ResourceClaims", RESOURCECLAIMS)
        return (*found, *(each for raw in claims or () for each in layerviews.device_holders(raw, devices.of)))

    async def with_devices(self, pods: Iterable[WhyPod], classes: Iterable[ObjectView]) -> tuple[WhyPod, ...]:
        """The pods with the devices that they have by ResourceClaims, where single devices of the classes are not
        healthy."""
        listed = tuple(pods)
        if not quarantines.has_devices(tuple(classes)):
            return listed
        held: dict[tuple[str, str], set[str]] = {}
        whole: set[str] = set()
        """Namespaces whose claims were all read."""
        for space in sorted({pod.namespace for pod in listed if pod.node is not None}):
            found = await self.listed(f"ResourceClaims of namespace {space}", RESOURCECLAIMS, space)
            if found is not None and len(found) < MOST:
                whole.add(space)
            for raw in found or ():
                if (claim := deviceviews.resource_claim(raw)) is not None:
                    for name, _ in claim.pods:
                        held.setdefault((space, name), set()).update(map(str, claim.devices))
        return tuple(
            replace(pod, devices=frozenset(of))
            if (of := held.get((pod.namespace, pod.name))) is not None
            else replace(pod, devices=frozenset[str]())
            if pod.namespace in whole
            else pod
            for pod in listed
        )

    async def _holders(self, nodes: Iterable[WhyNode]) -> tuple[GPUHolder, ...]:
        """Pods of others that hold extended resources of these nodes."""
        names_ = [node.name for node in nodes if not node.gone]
        if len(names_) > _MOST_NODES:
            self.unread.append(Unread("pods of others", f"those of {_MOST_NODES} of {len(names_)} nodes were read"))
        found: list[GPUHolder] = []
        for name in names_[:_MOST_NODES]:
            what = f"pods of others on node {name}"
            listed = await self.listed(what, PODS, fields=f"spec.nodeName={name}")
            if listed is None:
                break  # the others would be refused too
            found += [each for raw in listed if (each := layerviews.holder(raw)) is not None]
        return tuple(found)

    async def lease(self, namespace: str) -> OperatorLease | None:
        """The Lease of the operators in Shoal's namespace."""
        what = f"Lease {names.LEASE_NAME} in namespace {namespace}"
        raw = await self.attempt(what, self.client.get(LEASES, names.LEASE_NAME, namespace))
        return layerviews.lease(raw) if raw is not None else None


def _selected(labels: Mapping[str, str], selectors: Iterable[Mapping[str, str]]) -> bool:
    return any(selector and all(labels.get(k) == v for k, v in selector.items()) for selector in selectors)
