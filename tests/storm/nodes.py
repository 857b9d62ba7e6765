"""Nodes that come and go in a storm: a class whose nodes an autoscaler adds for pending replicas, two Models on it, and
what must hold of them.

Nodes come because replicas are pending, and for no other reason; they go when they are empty, or when a spot machine is
taken away. Whatever comes and goes, no request is lost. `tests.storm.provider` is the autoscaler.

| somebody saw | verdict |
|---|---|
| no node that came, or none that went because it was empty | broken |
| no request that was answered by a replica on such a node | broken |
| a fault of nodes that never found a node to take away | broken |
| no stock, and no replica that waited, or no word of the autoscaler in the status of a Model | broken |

Most of these are what a storm needs to be one: a fault that finds nothing to break would pass for a good result.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from shoal.api.meta import GROUP
from tests.storm.journals import Journals, NodeEvent, lines

MODEL: Final = "storm-spot"
"""On the class alone. At zero while nobody asks: its nodes go, and come with the next burst."""
EITHER: Final = "storm-either"
"""On the class, and on another one where no node comes."""
CLASS: Final = "spot-48gb"
PREFIX: Final = "spot-"
"""Of the nodes' names."""
GPUS_PER_NODE: Final = 2
MOST: Final = 3
"""Nodes at a time."""
NAMES: Final = 6
"""Machines that can be switched on: one that was taken away does not come back under its name at once."""
PROVISION_SECONDS: Final = 20
REPLICAS: Final = 4
"""Most of the Model: more than a node takes."""
FILE: Final = "nodes.jsonl"
_POOL: Final = {f"storm.{GROUP}/pool": "spot"}
GROUP_OF_NODES: Final[Mapping[str, Any]] = {
    "name": f"{PREFIX}{{n}}",
    "count": NAMES,
    "gpus": GPUS_PER_NODE,
    "gpuProduct": "NVIDIA-RTX-6000-Ada-Generation",
    "gpuMemoryMiB": 49140,
    "labels": _POOL,
}

Event = Literal[
    "begins", "asked", "came", "noticed", "gone", "stock", "refused", "placed", "fault", "quoted", "emptying", "kept"
]  # fmt: skip


def gpu_class(consolidate_after: int | None = None) -> dict[str, Any]:
    """Cheaper than the class of the other Models. `consolidate_after`: seconds without a request after which Shoal may
    empty a node."""
    autoscaled: dict[str, Any] = {"max": MOST, "gpusPerNode": GPUS_PER_NODE, "provisionSeconds": PROVISION_SECONDS}
    if consolidate_after is not None:
        autoscaled["consolidate"] = {"afterSeconds": consolidate_after}
    spec = {
        "nodeSelector": _POOL,
        "nodes": {"autoscaled": autoscaled},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "interruptible": True,
        "memoryPerGPU": "48Gi",
        "memoryBandwidthGBps": 960,
        "computeCapability": "8.9",
        "hourlyCost": {"amount": "0.30"},
    }
    return {"apiVersion": f"{GROUP}/v1alpha1", "kind": "GPUClass", "metadata": {"name": CLASS}, "spec": spec}


def read_events(path: Path) -> list[NodeEvent]:
    return [
        NodeEvent(each["at"], each["event"], each["node"], tuple(each["pods"]), each["why"], each["good"])
        for each in lines(path)
    ]


def violations(journals: Journals) -> list[str]:
    """Nothing where no nodes were to come."""
    events = sorted(journals.nodes, key=lambda event: event.at)
    return [f"nodes: {text}" for text in (*_idle(journals, events), *_unquoted(events))] if events else []


def line(journals: Journals) -> str:
    """What came and went, in one line."""
    events = journals.nodes
    waits = sorted(_waits(events))
    told = f" (asked for {waits[0]:.0f} to {waits[-1]:.0f} s before)" if waits else ""
    taken = [event for event in events if event.event == "gone" and event.why in ("notice", "power")]
    cut = sum(len(event.pods) for event in taken)
    moved = sum(len(event.pods) for event in events if event.event == "noticed") - sum(
        len(event.pods) for event in taken if event.why == "notice"
    )
    outs = [event for event in events if event.event == "stock" and not event.good]
    parts = (
        f"nodes that came {_count(events, 'came')}{told}, went empty {_count(events, 'gone', 'empty')}, were taken "
        f"away {len(taken)} ({moved} replicas left in time, {cut} were cut off)",
        f"without stock {len(outs)} times, said of {_count(events, 'refused')} pending replicas, in a Model's status "
        f"{_count(events, 'quoted')} times",
        f"answers from such nodes {len(_answered(journals))}",
    )
    return "; ".join(parts)


def _count(events: Iterable[NodeEvent], event: Event, why: str | None = None) -> int:
    return sum(each.event == event and why in (None, each.why) for each in events)


def _waits(events: Iterable[NodeEvent]) -> Iterable[float]:
    """From the decision for a node to the node that is Ready."""
    asked: dict[str, float] = {}
    for each in events:
        if each.event == "asked":
            asked[each.node] = each.at
        elif each.event == "came" and each.node in asked:
            yield each.at - asked.pop(each.node)


def _answered(journals: Journals) -> list[str]:
    """Requests that a replica on a node that came has answered."""
    placed = {pod for event in journals.nodes if event.event == "placed" for pod in event.pods}
    return [
        row.request
        for row in journals.rows
        if row.kind == "final"
        and row.outcome == "answered"
        and row.replica is not None
        and row.replica.rpartition("/")[2] in placed
    ]


def _idle(journals: Journals, events: list[NodeEvent]) -> Iterable[str]:
    """What did not happen at all."""
    waited = {pod for event in events if event.event == "asked" for pod in event.pods}
    if not _count(events, "came"):
        yield f"no node came; {len(waited)} replicas asked for one"
        return
    if not _count(events, "gone", "empty"):
        yield f"{_count(events, 'came')} came, and none went because it was empty"
    if not _answered(journals):
        yield "no request was answered by a replica on a node that came"
    played = {event.why for event in events if event.event == "fault"}
    done = {event.why for event in events if event.event == "fault" and event.good}
    for fault in sorted(played - done):
        yield f"{fault} never found a node to take away"


def _unquoted(events: list[NodeEvent]) -> Iterable[str]:
    """Times without stock of which no Model's status says anything."""
    since: float | None = None
    for event in events:
        if event.event != "stock":
            continue
        if event.good and since is not None:
            within = [each for each in events if since <= each.at <= event.at]
            if not _count(within, "refused"):
                yield f"for {event.at - since:.0f} s no node could be had, and no replica waited for one"
            elif not _count(within, "quoted"):
                yield (
                    f"for {event.at - since:.0f} s no node could be had, {_count(within, 'refused')} replicas waited, "
                    "and no Model's status quoted the autoscaler"
                )
        since = None if event.good else event.at
