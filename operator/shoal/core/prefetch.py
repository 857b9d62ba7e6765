"""Which node caches fetch a Model's weights before a replica needs them (`Model.spec.prefetch`).

Decided for all Models together: the weights that are prefetched onto one node take at most a share of its cache, so
that what replicas ask for still finds room without evicting them. Models of higher priority come first, then older
ones. A cache evicts what it was not asked for longest; every Job's end is followed by another Job an hour later, which
asks again, so that prefetched weights stay.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Literal

SHARE_PERCENT: Final = 75
"""Of a node's cache, for weights that are prefetched."""
MOST_AT_ONCE: Final = 4
"""Fetches of one Model that run at the same time: they share the source and its network."""
MOST_JOBS: Final = 64
"""Fetches of the fleet that run at the same time."""

JobState = Literal["active", "done", "failed"]
_FAR: Final = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class PrefetchDemand:
    """A Model that asks for prefetched weights."""

    uid: str
    nodes: int
    """Of each class."""
    classes: Sequence[str]
    size: int | None
    """Bytes of the weights' files; None: not known yet."""
    manifest: str | None
    """Digest of what is fetched: weights with another one share nothing, as far as is known."""
    priority: int = 0
    created: datetime | None = None
    replicas_on: Collection[str] = ()
    """Nodes with a ready replica: their cache has the weights."""
    jobs: Mapping[str, JobState] = field(default_factory=dict[str, JobState])
    """Node -> its Job for these weights."""


@dataclass(frozen=True, slots=True)
class ClassPrefetch:
    """What was decided for one class of a Model."""

    gpu_class: str
    nodes: tuple[str, ...]
    ready: int
    failed: tuple[str, ...] = ()
    short: str = ""
    """Why there are fewer nodes than asked for; empty: there are enough."""


@dataclass(frozen=True, slots=True)
class ModelPrefetch:
    """What was decided for one Model."""

    classes: tuple[ClassPrefetch, ...]
    start: tuple[tuple[str, str], ...]
    """(class, node): Jobs to make now."""


def decide(
    demands: Sequence[PrefetchDemand], nodes: Mapping[str, Sequence[str]], cache_bytes: int
) -> dict[str, ModelPrefetch]:
    """uid -> nodes whose cache shall have the Model's weights, and the Jobs to start.

    `nodes`: class -> its nodes that take pods and have a cache. `cache_bytes`: size of each node's cache.
    """
    budget = cache_bytes * SHARE_PERCENT // 100
    used: dict[str, dict[str, int]] = {}
    """Node -> weights -> bytes: Models with the same weights share them."""
    running = sum(state == "active" for demand in demands for state in demand.jobs.values())
    found: dict[str, ModelPrefetch] = {}
    for demand in sorted(demands, key=lambda d: (-d.priority, d.created or _FAR, d.uid)):
        started: list[tuple[str, str]] = []
        active = sum(state == "active" for state in demand.jobs.values())
        classes: list[ClassPrefetch] = []
        for name in demand.classes:
            chosen, full = _choose(demand, nodes.get(name, ()), used, budget)
            ready = [n for n in chosen if n in demand.replicas_on or demand.jobs.get(n) == "done"]
            classes.append(
                ClassPrefetch(
                    name,
                    tuple(chosen),
                    len(ready),
                    tuple(n for n in chosen if demand.jobs.get(n) == "failed" and n not in demand.replicas_on),
                    "" if len(chosen) == demand.nodes else _short(demand, len(nodes.get(name, ())), full, budget),
                )
            )
            for node in chosen:
                if node in ready or node in demand.jobs or demand.size is None:
                    continue
                if active < MOST_AT_ONCE and running < MOST_JOBS and (name, node) not in started:
                    started.append((name, node))
                    active += 1
                    running += 1
        found[demand.uid] = ModelPrefetch(tuple(classes), tuple(started))
    return found


def _choose(
    demand: PrefetchDemand, nodes: Sequence[str], used: dict[str, dict[str, int]], budget: int
) -> tuple[list[str], int]:
    """(nodes, how many have no room). First those that have the weights, then by a hash, which spreads Models over the
    nodes and chooses the same ones again."""
    key, size = demand.manifest or demand.uid, demand.size or 0

    def order(node: str) -> tuple[bool, bool, str]:
        digest = hashlib.sha256(f"{key}\0{node}".encode()).hexdigest()
        return (node not in demand.replicas_on, node not in demand.jobs, digest)

    chosen: list[str] = []
    full = 0
    for node in sorted(nodes, key=order):
        if len(chosen) == demand.nodes:
            break
        there = used.setdefault(node, {})
        if key not in there and sum(there.values()) + size > budget:
            full += 1
            continue
        there[key] = size
        chosen.append(node)
    return chosen, full


def _short(demand: PrefetchDemand, nodes: int, full: int, budget: int) -> str:
    if full:
        return f"{full} of {nodes} nodes have no room: prefetched weights take at most {budget} bytes of a cache"
    return f"the class has {nodes} of {demand.nodes} nodes" if nodes else "no node of the class takes pods"
