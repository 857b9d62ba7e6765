"""Devices of GPUClasses, kept up to date: what ResourceSlices publish, less what ResourceClaims have and what
DeviceTaintRules keep pods off."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

import structlog

from shoal.api import names
from shoal.api.gpuclass import devices_of
from shoal.controllers.world import World
from shoal.core.devices import (
    ClassDevices,
    DeviceFacts,
    DeviceId,
    DevicePool,
    KnownDevices,
    MatchCache,
    RuleTaints,
    current,
    facts_of,
    last_known,
    match,
    offered,
)
from shoal.core.status.healthstatus import out_of_use
from shoal.kube.optional import OptionalKind, OptionalKinds
from shoal.kube.resources import (
    DEVICECLASSES,
    DEVICETAINTRULES,
    DEVICETAINTRULES_BETA,
    RESOURCECLAIMS,
    RESOURCECLAIMTEMPLATES,
    RESOURCESLICES,
)

log = structlog.get_logger()

FIRST_LIST_SECONDS: Final = 20.0
"""How long devices that are not listed yet are waited for after a start."""
OURS: Final = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY},{names.LABEL_MODEL}"
Held = Mapping[tuple[str, str], int]
"""(node, resource) -> GPUs."""


def kinds(world: World) -> OptionalKinds:
    """What is watched of DRA: Kubernetes has it from 1.34 on. What others make, only once a GPUClass has a `device`."""
    return OptionalKinds(
        world.client,
        RESOURCESLICES,
        [
            OptionalKind(RESOURCECLAIMTEMPLATES, world.claim_templates, OURS),
            OptionalKind(RESOURCESLICES, world.resource_slices, with_need=True),
            OptionalKind(RESOURCECLAIMS, world.resource_claims, with_need=True),
            OptionalKind(DEVICECLASSES, world.device_classes, with_need=True),
        ],
    )


def taint_rules(world: World) -> tuple[OptionalKinds, ...]:
    """DeviceTaintRules: a cluster may lack either version of their API, and both."""
    tables = (DEVICETAINTRULES, world.taint_rules), (DEVICETAINTRULES_BETA, world.taint_rules_beta)
    return tuple(OptionalKinds(world.client, kind, [OptionalKind(kind, table)]) for kind, table in tables)


async def until_listed(
    kinds: OptionalKinds, rules: Sequence[OptionalKinds] = (), seconds: float = FIRST_LIST_SECONDS
) -> None:
    """Waits until devices and the rules that taint them are listed, or it is known that the API server has none, for at
    most `seconds`: without them nothing is known of the GPUs, and a plan would be made for other ones. An API server
    that does not let them be listed ends no operator."""
    try:
        async with asyncio.timeout(seconds):
            await kinds.listed()
            for each in rules:
                await each.known.wait()
    except TimeoutError:
        log.warning("devices are not listed yet", waited_seconds=seconds)


_Revisions = tuple[object, ...]
_View = tuple[tuple[DevicePool, ...], dict[str, ClassDevices], dict[str, DeviceFacts]]
_Offers = tuple[dict[str, dict[str, tuple[int, int]]], dict[tuple[str, str], int]]


class FleetDevices:
    """Reads the store, and computes again only what has changed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cache = MatchCache()
        self._taints = RuleTaints()
        self._known: dict[str, KnownDevices] = {}
        self._view: tuple[_Revisions, _View] | None = None
        self._offers: tuple[_Revisions, _Offers] | None = None

    @property
    def used(self) -> bool:
        """A GPUClass has devices."""
        return any(c.spec.device is not None for c in self._world.accepted_classes().values())

    def classes(self) -> Mapping[str, ClassDevices]:
        """GPUClass -> its devices, of those with a `device`."""
        return self._matched()[1]

    def facts(self) -> Mapping[str, DeviceFacts]:
        """GPUClass -> what its devices say of themselves, of those that have any. Devices whose slices are gone for now
        say what they said last."""
        return self._matched()[2] if self.used else {}

    def offers(self, revision: int, held: Held) -> tuple[Mapping[str, Mapping[str, tuple[int, int]]], Held]:
        """Class -> node -> (devices, those of them that pods have or may have); and what claims of others have, by node
        and resource. `held`: devices that engine pods have; `revision`: grows with it.

        A device that an engine pod has, and that no slice names any more, still counts: a driver that is replaced takes
        its slices away and publishes them again. One that several claims may share does not count for being held.
        """
        world = self._world
        out = self._out_of_use()
        now = (*self._revisions(), world.resource_claims.revision, revision, *sorted(out.items()))
        if self._offers is not None and self._offers[0] == now:
            return self._offers[1]
        pools, classes, _ = self._matched()
        allocated, own = self._allocated()
        found: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in classes}
        others: dict[tuple[str, str], int] = {}
        shared: dict[tuple[str, str], int] = {}
        for name, devices in classes.items():
            counts = offered(devices, pools, allocated, own.get(name, set()), out.get(name, frozenset()))
            for node, count in counts.items():
                found[name][node] = (count.capacity, count.offered + count.taken)
                if count.taken:
                    others[node, devices_of(name)] = count.taken
                if count.shared:
                    shared[node, devices_of(name)] = count.shared
        names_of = {devices_of(name): name for name in classes}
        for (node, resource), amount in held.items():
            if (name := names_of.get(resource)) is not None:
                at = node, resource
                least = max(0, amount - shared.get(at, 0)) + others.get(at, 0)
                capacity, offer = found[name].get(node, (0, 0))
                found[name][node] = (max(capacity, least), max(offer, least))
        self._offers = (now, (found, others))
        return found, others

    def whole(self, name: str) -> Mapping[str, int]:
        """Node -> devices of a class that pods have or may have, whether or not they are out of use."""
        pools, classes, _ = self._matched()
        devices = classes.get(name)
        if devices is None:
            return {}
        allocated, own = self._allocated()
        counts = offered(devices, pools, allocated, own.get(name, set()))
        return {node: count.offered + count.taken for node, count in counts.items()}

    def kept_off(self, name: str) -> frozenset[str]:
        """Names of a class's devices that have a taint and that no claim has."""
        devices = self._matched()[1].get(name)
        if devices is None:
            return frozenset()
        tainted = [matched for matched in devices.devices if not matched.device.offered]
        allocated = self._allocated()[0] if tainted else set[DeviceId]()
        return frozenset(str(matched.id) for matched in tainted if matched.id not in allocated)

    def _out_of_use(self) -> dict[str, frozenset[str]]:
        """Class -> names of its devices on which nothing is placed."""
        accepted = self._world.accepted_classes()
        units = {name: out_of_use(c) for name, c in accepted.items() if c.spec.device is not None}
        return {name: frozenset(unit.device for unit in out if unit.device) for name, out in units.items() if out}

    def _revisions(self) -> _Revisions:
        """Of what decides which devices a class has. Of classes not the table's, which grows with each status."""
        world = self._world
        rules = (world.taint_rules, world.taint_rules_beta)
        tables = (world.resource_slices, *rules, world.device_classes, world.nodes)
        classes = sorted(
            (c.metadata.name, c.metadata.uid, c.metadata.generation)
            for c in world.accepted_classes().values()
            if c.spec.device is not None
        )
        return (*(table.revision for table in tables), *classes)

    def _matched(self) -> _View:
        world, now = self._world, self._revisions()
        if self._view is None or self._view[0] != now:
            rules = (*world.taint_rules.values(), *world.taint_rules_beta.values())
            pools, incomplete = current(self._taints.add(world.resource_slices.values(), rules))
            labels = {node.name: node.labels for node in world.nodes.values()}
            device_classes = {each.name: each for each in world.device_classes.values()}
            accepted = world.accepted_classes()
            found = match(accepted.values(), device_classes, pools, incomplete, labels, self._cache)
            selections = {
                name: (accepted[name].metadata.uid or "", accepted[name].metadata.generation) for name in found
            }
            published = {(pool.driver, pool.name) for pool in pools}
            self._known = last_known(self._known, found, selections, published, labels)
            told = {name: facts_of((m.id.driver, m.device) for m in of.matched) for name, of in self._known.items()}
            facts = {name: of for name, of in told.items() if of is not None}
            self._view = (now, (pools, found, facts))
        return self._view[1]

    def _allocated(self) -> tuple[set[DeviceId], dict[str, set[DeviceId]]]:
        """All devices that claims have, and by class those that its own engine pods have."""
        allocated: set[DeviceId] = set()
        own: dict[str, set[DeviceId]] = {}
        for claim in self._world.resource_claims.values():
            allocated.update(claim.devices)
            for name, uid in claim.pods:
                pod = self._world.pods.get(f"{claim.namespace}/{name}")
                if pod is not None and pod.uid == uid and pod.model_uid is not None and pod.gpu_class is not None:
                    own.setdefault(pod.gpu_class, set()).update(claim.devices)
        return allocated, own
