"""From a Model and the fleet to what the planner is given: one path for the operator and for `shoal explain`.

classes + nodes          -> members, gpus_of, supplies   (once per change of the fleet)
Model + facts + gpus     -> Considered                   (once per change of the Model, its facts or the gpus)
Model + Considered + ... -> Demand                       (once per plan)
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType
from typing import Final, Literal

from shoal.api import reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.gpuclass import GPUClass
from shoal.api.model import Model, Variant
from shoal.core import quantity
from shoal.core.budget import SIZING_STEPS, StepBudget
from shoal.core.devices.say import DeviceFacts
from shoal.core.facts import Node
from shoal.core.gpus import takes_pods
from shoal.core.placement import Candidate, ClassSupply, Demand, NodeSupply, Rejected, ReplicaState
from shoal.core.sharing import without_shared
from shoal.core.sizing import GPU, Misfit, Sized, Tuning, gpu_of, size, tries
from shoal.core.status.observed import ModelProblem

Tune = Callable[[Literal["FP8"] | None], Tuning]
"""What the engine's arguments mean for its memory, given a variant's quantization."""
NO_SUCH_CLASS: Final = "there is no GPUClass of this name"
MEMORY_UNKNOWN: Final = "neither its devices nor the class say how much memory a GPU has"


@dataclass(frozen=True, slots=True)
class Considered:
    """Every class that a Model may use, looked at."""

    candidates: tuple[Candidate, ...]
    """Classes on which a replica fits."""
    rejected: tuple[Rejected, ...]
    """Classes on which none fits, with the sum that does not work out, and listed ones that do not exist."""
    sized: Mapping[str, Sized]
    """class -> the sums of a replica, for the candidates."""
    problem: ModelProblem | None = None
    """Why no class was looked at: it would take too long, or ends in an error of Shoal's own. The Model keeps what it
    has."""


Offers = Mapping[str, Mapping[str, tuple[int, int]]]
"""class with devices -> node -> (its devices there, those of them that pods may have)."""


def members(
    classes: Iterable[GPUClass], nodes: Iterable[Node], offers: Offers = MappingProxyType({})
) -> dict[str, tuple[Node, ...]]:
    """class -> its nodes. A node that several classes select by its labels counts for the first by name. One whose
    GPUs are shared has none. A class with
    devices has the nodes in `offers`, each with the devices among what it has."""
    ordered = sorted(classes, key=lambda c: c.metadata.name)
    found: dict[str, list[Node]] = {c.metadata.name: [] for c in ordered}
    with_devices = [c for c in ordered if c.spec.device is not None]
    ordered = [c for c in ordered if c.spec.device is None]
    for node in nodes:
        for gpu_class in with_devices:
            if (offer := offers.get(gpu_class.metadata.name, {}).get(node.name)) is not None:
                found[gpu_class.metadata.name].append(_with_devices(node, gpu_class.resource, *offer))
        for gpu_class in ordered:
            if gpu_class.spec.node_selector.items() <= node.labels.items():
                found[gpu_class.metadata.name].append(without_shared(node, gpu_class.resource))
                break
    return {name: tuple(of) for name, of in found.items()}


def counted_twice(
    gpu_class: GPUClass, classes: Iterable[GPUClass], members: Mapping[str, tuple[Node, ...]]
) -> dict[str, str]:
    """Nodes whose GPUs a device plugin hands out for `gpu_class`, and which have devices of another class -> that
    class. Where both are the same GPUs, each counts twice: nothing that a node says tells whether they are."""
    if gpu_class.spec.device is not None:
        return {}
    having = {
        node.name: each.metadata.name
        for each in classes
        if each.spec.device is not None
        for node in members.get(each.metadata.name, ())
        if node.capacity.get(each.resource, 0)
    }
    return {
        node.name: having[node.name]
        for node in members.get(gpu_class.metadata.name, ())
        if node.name in having and node.capacity.get(gpu_class.resource, 0)
    }


def _with_devices(node: Node, resource: str, capacity: int, offered: int) -> Node:
    return replace(
        node,
        capacity={**node.capacity, resource: capacity},
        allocatable={**node.allocatable, resource: offered},
    )


def gpus_of(
    classes: Iterable[GPUClass],
    nodes: Mapping[str, tuple[Node, ...]],
    devices: Mapping[str, DeviceFacts] = MappingProxyType({}),
) -> dict[str, GPU]:
    """class -> one of its GPUs, as sizing sees it. `nodes` are the members; `devices` are what the devices of a class
    say of themselves.

    Raises ValueError for a quantity that does not parse.
    """
    return {c.metadata.name: gpu_of(c, nodes.get(c.metadata.name, ()), devices.get(c.metadata.name)) for c in classes}


def supplies(
    classes: Iterable[GPUClass],
    nodes: Mapping[str, tuple[Node, ...]],
    held: Mapping[tuple[str, str], int],
    releasing: Mapping[tuple[str, str], int] = MappingProxyType({}),
) -> tuple[ClassSupply, ...]:
    """What the classes have, by name. `nodes` are the members; `held` is (node, resource) -> GPUs that bound pods hold
    (`gpus.held_by_node`), `releasing` how many of them terminating pods hold.

    A node that takes no pods (cordoned, not Ready, tainted) counts as matching and offers nothing.
    """

    def supply(gpu_class: GPUClass) -> ClassSupply:
        resource, autoscaled = gpu_class.resource, gpu_class.spec.nodes.autoscaled
        own = nodes.get(gpu_class.metadata.name, ())
        return ClassSupply(
            gpu_class.metadata.name,
            tuple(
                NodeSupply(
                    node.name,
                    free=node.allocatable.get(resource, 0) - held.get((node.name, resource), 0),
                    allocatable=node.allocatable.get(resource, 0),
                    releasing=releasing.get((node.name, resource), 0),
                )
                for node in own
                if takes_pods(node, gpu_class.spec.tolerations)
            ),
            matching=len(own),
            capacity=sum(node.capacity.get(resource, 0) for node in own),
            # A node that is being added has no GPUs yet: until it has them, its pods count on a coming node.
            coming=max(0, autoscaled.max - sum(_exists(node, resource) for node in own)) if autoscaled else 0,
            coming_gpus=autoscaled.gpus_per_node if autoscaled else 0,
        )

    return tuple(supply(c) for c in sorted(classes, key=lambda c: c.metadata.name))


def _exists(node: Node, resource: str) -> bool:
    """Whether a node counts towards the most nodes of an autoscaler: it has its GPUs, whether or not it takes pods. One
    that is not Ready may be on its way in or out."""
    return node.ready and node.capacity.get(resource, 0) > 0


def consider(
    model: Model,
    facts: ArtifactFacts | None,
    classes: Mapping[str, GPUClass],
    gpus: Mapping[str, GPU],
    tune: Tune,
) -> Considered:
    """Sizes a replica on every class that the Model lists (none listed: on all), in that order.

    A listed class that does not exist is rejected as one on which the Model does not fit. Raises TooExpensive where
    there are too many classes to look at.
    """
    budget = StepBudget(
        SIZING_STEPS,
        f"sizing the Model on {len(model.spec.variants) or len(classes)} classes",
        "list in `spec.variants` the classes that it may use, or set `spec.engine.parallelism.tensor`",
    )
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    sized: dict[str, Sized] = {}
    listed = model.spec.variants or tuple(Variant.model_validate({"class": name}) for name in sorted(classes))
    for variant in listed:
        gpu_class = classes.get(variant.gpu_class)
        if gpu_class is None:
            rejected.append(Rejected(variant.gpu_class, reasons.CLASS_NOT_FOUND, NO_SUCH_CLASS))
            continue
        if not gpus[variant.gpu_class].memory_bytes:
            rejected.append(Rejected(variant.gpu_class, reasons.SIZE_UNKNOWN, MEMORY_UNKNOWN))
            continue
        tensor = variant.tensor or model.spec.engine.parallelism.tensor
        budget.spend(tries(gpus[variant.gpu_class], tensor))
        found = size(
            facts,
            gpus[variant.gpu_class],
            tensor=tensor,
            context_length=model.spec.engine.context_length,
            overrides=model.spec.sizing,
            tuning=tune(variant.quantization or model.spec.engine.quantization.weights),
        )
        if isinstance(found, Misfit):
            rejected.append(Rejected(variant.gpu_class, found.reason, found.why))
            continue
        cost = gpu_class.spec.hourly_cost
        sized[variant.gpu_class] = found
        candidates.append(
            Candidate(
                gpu_class=variant.gpu_class,
                gpus=found.gpus,
                hourly_cost=quantity.parse(cost.amount) * found.gpus if cost else None,
                max_replicas=variant.max_replicas,
                interruptible=gpu_class.spec.interruptible,
                kv_tokens=found.kv_tokens,
            )
        )
    return Considered(tuple(candidates), tuple(rejected), sized)


def demand(
    model: Model,
    considered: Considered,
    *,
    wanted: int,
    minimum: int,
    created: datetime | None = None,
    replica_states: Mapping[str, ReplicaState] = MappingProxyType({}),
    backoffs: Mapping[str, str] = MappingProxyType({}),
    crashes: frozenset[str] = frozenset(),
    lacks_surge: frozenset[str] = frozenset(),
    frozen: bool = False,
) -> Demand:
    """What a Model asks of the planner. `created` counts where the object has no age; `replica_states`: what runs of it
    now, by class; `backoffs`: classes that are its last choice for now; `crashes`: of these, where its engine ends
    again and again; `lacks_surge`: classes where a rollout waits for a GPU; `frozen`: it keeps what it has, since it is
    paused or its facts are not known yet."""
    return Demand(
        key=model.key,
        uid=model.metadata.uid or model.key,
        wanted=wanted,
        candidates=considered.candidates,
        minimum=minimum,
        priority=model.spec.priority,
        created=model.metadata.creation_timestamp or created,
        rejected=considered.rejected,
        replica_states=replica_states,
        backoffs=backoffs,
        crashes=crashes,
        interruptible_percent=model.spec.interruptible_percent,
        drain_seconds=model.spec.drain_seconds,
        lacks_surge=lacks_surge,
        frozen=frozen or considered.problem is not None,
    )
