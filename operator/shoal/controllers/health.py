"""Health of the GPUs of each class: gathers what the store, the probes and DCGM's metrics say, and asks `core/health`.

What is out of use stands in the status of the GPUClass and nowhere else: placement reads it there, and an operator that
starts goes on with it. A node whose GPUs are out of use as a whole gets a label, which engine pods of the class avoid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final, Literal, Protocol

import structlog

from shoal.api import names, reasons
from shoal.api.gpuclass import GPUClass
from shoal.api.meta import JsonObject
from shoal.controllers.capacity import FleetGPUs
from shoal.controllers.replicastates import claimed_devices
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.devices.match import Matched
from shoal.core.gpus import takes_pods
from shoal.core.health import (
    HealthMemory,
    HealthPlan,
    HealthSignal,
    HealthSnapshot,
    Quarantine,
    Unit,
    dcgm,
    decide,
    signals,
)
from shoal.core.health.dcgm import DCGMReading
from shoal.core.health.decide import MOST, Tested
from shoal.core.health.requests import CordonRequest, parse
from shoal.core.status.healthstatus import stored
from shoal.kube.errors import Forbidden, NotFound
from shoal.kube.events import Event
from shoal.kube.resources import GPUCLASSES, NODES

log = structlog.get_logger()

_NAMED: Final = 4
_CONSOLIDATION: Final = "Consolidation"
"""Value of the label on a node that is being emptied."""
_HOSTNAME: Final = "kubernetes.io/hostname"
_NO_RIGHT: Final = "the operator may not label nodes, so the scheduler may still choose {node}: allow it to patch nodes"


@dataclass(frozen=True, slots=True)
class ClassHealth:
    """What was found out about one class."""

    plan: HealthPlan
    uuids: Mapping[str, str]
    """Device -> its attribute `uuid`."""
    problems: tuple[str, ...]
    """What is wrong with the annotations, or with the operator's rights."""
    unmeasured: str = ""
    """Of which GPUs DCGM's metrics say nothing, and why; "": of none, or none are read."""


class GPUMetrics(Protocol):
    """`signals/dcgm.py`, or a test's."""

    @property
    def reading(self) -> DCGMReading | None:
        """The last answer; None: there is none, or it is too old."""
        ...

    @property
    def problem(self) -> str | None:
        """What keeps metrics away now."""
        ...


@dataclass(frozen=True, slots=True)
class _Devices:
    """What the slices say of the devices of a class."""

    by_node: Mapping[str, Sequence[Matched]]
    names: Mapping[str, frozenset[str]]
    uuids: Mapping[str, str]
    of_gpus: Mapping[str, tuple[Unit, ...]]
    """UUID of a GPU -> its device, or its partitions'."""
    signals: tuple[HealthSignal, ...]


class ProbeResults:
    """What the probes (`healthprobes.py`) found out: they write it, and decisions read it."""

    def __init__(self) -> None:
        self.signals: Mapping[str, tuple[HealthSignal, ...]] = {}
        """Class -> what its replicas show themselves."""
        self._tested: dict[tuple[str, Unit], tuple[datetime, Tested]] = {}
        """(class, unit) -> (begin of the quarantine, result)."""

    def clear(self) -> None:
        """Nothing of an earlier term counts."""
        self.signals = {}
        self._tested.clear()

    def put(self, signals: Mapping[str, tuple[HealthSignal, ...]]) -> None:
        """All that replicas show now."""
        self.signals = signals

    def tested(self, gpu_class: str, unit: Unit, since: datetime, result: Tested) -> None:
        """A replica on a unit on probation was tested. An answer without a verdict takes none back."""
        if result != "answered" or not self.is_tested(gpu_class, unit):
            self._tested[gpu_class, unit] = since, result

    def is_tested(self, gpu_class: str, unit: Unit) -> bool:
        """With a verdict."""
        _, result = self._tested.get((gpu_class, unit), (None, "answered"))
        return result != "answered"

    def results(self, gpu_class: str, quarantined: tuple[Quarantine, ...]) -> Mapping[Unit, Tested]:
        """Each result counts once: a unit that fails is tested again on its next probation."""
        on_probation = {each.unit: each.since for each in quarantined if each.state == "Probation"}
        found: dict[Unit, Tested] = {}
        for (name, unit), (since, result) in list(self._tested.items()):
            if name == gpu_class:
                if on_probation.get(unit) == since:
                    found[unit] = result
                else:
                    del self._tested[name, unit]
        return found


class FleetHealth:
    """Remembers evidence, of this term only. Only the leader calls `decide`."""

    def __init__(self, world: World, gpus: FleetGPUs) -> None:
        self._world, self._gpus = world, gpus
        self.metrics: GPUMetrics | None = None
        """None: no metrics of GPUs are read."""
        self._memory: dict[str, HealthMemory] = {}
        """Uid of the class."""
        self._known: dict[str, _Devices] = {}
        self._refused: set[str] = set()
        """Nodes that could not be labelled."""
        self.found = ProbeResults()

    def begin_term(self) -> None:
        """What was seen before, perhaps long ago, is no evidence."""
        self._memory.clear()
        self._refused.clear()

    def decide(self, gpu_class: GPUClass) -> ClassHealth:
        """Which GPUs of the class are out of use from now on."""
        name, annotations = gpu_class.metadata.name, gpu_class.metadata.annotations
        nodes = self._gpus.all_members().get(name, ())
        by_node = self._gpus.devices.classes()[name].by_node if self._with_devices(gpu_class) else None
        cordons, wrong = parse(annotations.get(names.ANNOTATION_CORDON))
        uncordons, also_wrong = parse(annotations.get(names.ANNOTATION_UNCORDON))
        before = stored(gpu_class)
        devices = self._devices(name, by_node)
        memory = self._memory.get(gpu_class.metadata.uid)
        hosts = {label: node.name for node in nodes for label in _labels(node)}
        taking = [node for node in nodes if takes_pods(node, gpu_class.spec.tolerations)]
        # A node offers its devices that are in use.
        whole: Mapping[str, int] = {}
        if devices is not None and any(each.unit.device for each in before):
            whole = self._gpus.devices.whole(name)
        seen = HealthSnapshot(
            capacity={node.name: node.capacity.get(gpu_class.resource, 0) for node in taking},
            usable={node.name: whole.get(node.name, node.allocatable.get(gpu_class.resource, 0)) for node in taking},
            nodes=frozenset(node.name for node in nodes),
            devices=None if devices is None else devices.names,
            quarantined=before,
            signals=(
                *signals.of_nodes(nodes),
                *(devices.signals if devices is not None else ()),
                *signals.of_pods(self._world.pods.by("broken", name), name, partial(claimed_devices, self._world)),
                *self.found.signals.get(name, ()),
                *self._measured_sick(hosts, devices),
            ),
            silent=self._silent(gpu_class, {node.name: node for node in nodes}, devices, before, memory),
            cordons=cordons,
            uncordons=uncordons,
            tested=self.found.results(name, before),
            hosts=frozenset(each.unit.node for each in before if self._world.nodes.get(each.unit.node) is not None),
            tainted=self._gpus.devices.kept_off(name) if devices is not None else frozenset(),
        )
        uid = gpu_class.metadata.uid
        plan, self._memory[uid] = decide(seen, memory, self._world.now())
        self._tell(gpu_class, before, plan)
        return ClassHealth(
            plan,
            devices.uuids if devices is not None else {},
            tuple(self._problems(seen, plan, {names.ANNOTATION_CORDON: wrong, names.ANNOTATION_UNCORDON: also_wrong})),
            self._unmeasured(nodes),
        )

    def held_down(self, gpu_class: str, unit: Unit) -> str:
        """Why the clocks of a GPU are held down; "": they are not, or nobody says so."""
        read = self.metrics.reading if self.metrics is not None else None
        known = self._known.get(gpu_class)
        uuid = known.uuids.get(unit.device, "") if known is not None else unit.device
        return read.held_down(uuid) if read is not None else ""

    def _measured_sick(self, hosts: Mapping[str, str], devices: _Devices | None) -> tuple[HealthSignal, ...]:
        read = self.metrics.reading if self.metrics is not None else None
        if read is None:
            return ()
        if devices is not None:
            return tuple(dcgm.of_devices(read, hosts, devices.of_gpus))
        return tuple(dcgm.of_nodes(read, hosts, self._node_of))

    def _silent(
        self,
        gpu_class: GPUClass,
        nodes: Mapping[str, facts.Node],
        devices: _Devices | None,
        before: Sequence[Quarantine],
        memory: HealthMemory | None,
    ) -> frozenset[Unit]:
        """Units whose evidence or quarantine rests on metrics that are not there now."""
        if self.metrics is None:
            return frozenset()
        rests = {each.unit for each in before if each.monitor is not None}
        if memory is not None:
            rests |= {unit for (unit, _), each in memory.evidence.items() if each.monitor is not None}
        read = self.metrics.reading
        if read is None:
            return frozenset(rests)
        if devices is not None:
            there = {unit for uuid in read.by_uuid for unit in devices.of_gpus.get(uuid, ())} if rests else set[Unit]()
            return frozenset(rests - there)
        found: set[Unit] = set()
        for unit in rests:
            node = nodes.get(unit.node)
            # A GPU that fell off the bus is not measured, and the others are. Partitions are more than there are GPUs.
            gpus = 1 if "/mig-" in gpu_class.resource else node.capacity.get(gpu_class.resource, 0) if node else 0
            if node is None or not dcgm.measured(read, _labels(node), gpus):
                found.add(unit)
        return frozenset(found)

    def _unmeasured(self, nodes: Sequence[facts.Node]) -> str:
        if self.metrics is None:
            return ""
        read, problem = self.metrics.reading, self.metrics.problem
        if problem is not None:
            return f"DCGM's metrics in Prometheus are not known: {problem}"
        bare = [node.name for node in nodes if read is not None and not dcgm.measured(read, _labels(node), 1)]
        more = f" and {len(bare) - _NAMED} more" if len(bare) > _NAMED else ""
        where = f"{', '.join(sorted(bare)[:_NAMED])}{more}"
        return f"Prometheus has no fresh metrics of DCGM of the GPUs on {where}" if bare else ""

    def _node_of(self, pod: str) -> str | None:
        found = self._world.pods.get(pod)
        return found.node if found is not None and not found.finished else None

    def forget(self, live: set[str]) -> None:
        """Keeps what is remembered of the classes with these uids."""
        self._memory = {uid: memory for uid, memory in self._memory.items() if uid in live}

    def labelled(self) -> set[str]:
        """Names of the classes whose engine pods avoid some node."""
        prefix = names.QUARANTINE_PREFIX
        labels = (label for node in self._world.nodes.values() for label in node.labels)
        return {label.removeprefix(prefix) for label in labels if label.startswith(prefix)}

    def is_labelled(self, name: str, node: str) -> bool:
        """Whether engine pods of the class avoid the node."""
        found = self._world.nodes.get(node)
        return found is not None and f"{names.QUARANTINE_PREFIX}{name}" in found.labels

    async def label(self, name: str, plan: HealthPlan | None, emptied: str | None = None) -> bool:
        """Labels the nodes whose GPUs are out of use as a whole, and takes the label from others; None: the class is
        gone. `emptied`: a node that is being emptied. Returns whether a node could not be labelled that could
        before."""
        key = f"{names.QUARANTINE_PREFIX}{name}"
        wanted = {emptied: _CONSOLIDATION} if emptied is not None else dict[str, str]()
        wanted |= {
            each.unit.node: each.reason
            for each in (plan.quarantined if plan is not None else ())
            if each.state == "Quarantined" and not each.unit.device
        }
        refused = False
        for node in list(self._world.nodes.values()):
            value = wanted.get(node.name)
            if node.labels.get(key) == value:
                continue
            body: JsonObject = {"metadata": {"labels": {key: value}}}
            since = self._world.nodes.mark()
            try:
                answer = await self._world.client.merge_patch(
                    NODES, node.name, None, body, manager=names.MANAGER_GPUCLASS
                )
            except NotFound:
                continue
            except Forbidden as error:
                log.warning("node not labelled", node=node.name, error=error.message)
                refused = refused or node.name not in self._refused
                self._refused.add(node.name)
                continue
            self._refused.discard(node.name)
            self._world.nodes.upsert(answer, since=since)
        return refused

    def _devices(self, name: str, by_node: Mapping[str, Sequence[Matched]] | None) -> _Devices | None:
        """Thousands of devices are looked at only when their slices have changed."""
        if by_node is None:
            self._known.pop(name, None)
            return None
        known = self._known.get(name)
        if known is None or known.by_node is not by_node:
            uuids = {
                str(matched.id): uuid
                for of in by_node.values()
                for matched in of
                if isinstance(uuid := matched.device.attributes.get(f"{matched.id.driver}/uuid"), str)
            }
            ids = {node: frozenset(str(matched.id) for matched in of) for node, of in by_node.items()}
            of_gpus: dict[str, tuple[Unit, ...]] = {}
            for node, of in by_node.items():
                for matched in of:
                    attributes, driver = matched.device.attributes, matched.id.driver
                    gpu = attributes.get(f"{driver}/parentUUID", attributes.get(f"{driver}/uuid"))
                    if isinstance(gpu, str):
                        of_gpus[gpu] = (*of_gpus.get(gpu, ()), Unit(node, str(matched.id)))
            said = tuple(signals.of_devices(by_node))
            known = self._known[name] = _Devices(by_node, ids, uuids, of_gpus, said)
        return known

    def _with_devices(self, gpu_class: GPUClass) -> bool:
        return gpu_class.spec.device is not None and gpu_class.metadata.name in self._gpus.devices.classes()

    def _problems(self, seen: HealthSnapshot, plan: HealthPlan, wrong: Mapping[str, str | None]) -> list[str]:
        found = [f"the annotation {annotation} {problem}" for annotation, problem in wrong.items() if problem]
        found += [f"the annotation {names.ANNOTATION_CORDON} names {each.unit}, which the class does not have"
                  for each in seen.cordons if self._unknown(seen, each)]  # fmt: skip
        if len(plan.quarantined) >= MOST:
            found.append(f"{MOST} units are out of use or on probation, and no more can be")
        found += [
            _NO_RIGHT.format(node=each.unit)
            for each in plan.quarantined
            if not each.unit.device and each.unit.node in self._refused
        ]
        return found

    def _unknown(self, seen: HealthSnapshot, request: CordonRequest) -> bool:
        unit = request.unit
        return unit.node not in seen.nodes or bool(
            unit.device and seen.devices is not None and unit.device not in seen.devices.get(unit.node, ())
        )

    def _tell(self, gpu_class: GPUClass, before: tuple[Quarantine, ...], plan: HealthPlan) -> None:
        """Events of the class. One per unit: a condition names only some of many."""
        known = {(each.unit, each.state) for each in before}
        for each in plan.quarantined:
            if each.state == "Quarantined" and (each.unit, each.state) not in known:
                text = f"{each.unit} is out of use ({each.reason}): {each.message}"
                self._emit(gpu_class, "Warning", reasons.GPUS_QUARANTINED, text)
        for each, why in plan.released:
            self._emit(gpu_class, "Normal", reasons.QUARANTINE_ENDED, f"{each.unit} is in use again: {why}")

    def _emit(self, gpu_class: GPUClass, kind: Literal["Normal", "Warning"], reason: str, text: str) -> None:
        self._world.recorder.emit(Event(GPUCLASSES, gpu_class.metadata, kind, reason, text, "Quarantine"))


def _labels(node: facts.Node) -> tuple[str, ...]:
    """What metrics may call a node."""
    return tuple(dict.fromkeys((node.name, node.labels.get(_HOSTNAME, node.name))))
