"""Outages: classes of which no further node comes for now, for any Model. The plan takes their coming nodes last.

An outage is of the class, not of a Model: all nodes that an autoscaler adds to a class have the same labels, GPUs and
terms (`nodeSelector`, `gpusPerNode`, `interruptible`), so what one replica was refused no other one gets. GPUs of nodes
that exist are as good as before. What only one Model's replicas show is a backoff of that Model (`backoff.py`).

| state of a class | becomes | when |
|---|---|---|
| nodes may come | outage, 15 minutes | an autoscaler refuses a replica's node at two looks in a row |
| nodes may come | outage, 15 minutes | the last request for a node of a replica failed, and Kueue has given it up |
| nodes may come | outage, an hour | no node came in twice the provision time, which is not the replica's fault |
| outage | outage, as long again | its time is over, and a replica that still waits there is refused as before |
| outage | nodes may come | its time is over; a node came that was not on its way before; the class's spec changed |

A replica to which a node was announced keeps its place in an outage. A Model that has no other class does too. A
replica that Kueue has given up asks for no node, so its pod is made anew when the outage is over (`fill.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from shoal.api.gpuclass import GPUClass
from shoal.core.placement.backoff import RETRY_SECONDS, ClassBackoff


@dataclass(frozen=True, slots=True)
class NodeOutage:
    """Why and until when no further node of a class is expected."""

    reason: str
    """StockOut, LimitReached, ScaleUpFailed or NoNodeCame."""
    why: str
    since: datetime
    until: datetime
    generation: int
    """Of the class's spec."""


def stored(gpu_class: GPUClass) -> NodeOutage | None:
    """The outage that the status of a class says of its present spec, perhaps one that is over."""
    status = gpu_class.status
    known = status.node_outage if status is not None else None
    if status is None or known is None or status.observed_generation != gpu_class.metadata.generation:
        return None
    return NodeOutage(known.reason, known.message, known.since, known.until, gpu_class.metadata.generation)


def own(found: Mapping[str, ClassBackoff]) -> dict[str, ClassBackoff]:
    """Of what a Model's pods show: the backoffs of this Model."""
    return {name: each for name, each in found.items() if not each.no_nodes}


def decide(
    known: Mapping[str, NodeOutage],
    found: Iterable[Mapping[str, ClassBackoff]],
    classes: Mapping[str, GPUClass],
    *,
    now: datetime,
    newest_node: Callable[[str], datetime | None],
) -> dict[str, NodeOutage]:
    """Class -> its outage at `now`.

    `found`: what the pods of each Model show (`backoff.observe`). `newest_node`: class -> when its newest node was
    made.
    """
    second = now.replace(microsecond=0)
    # The clock of a former leader may have been ahead.
    latest = second + timedelta(seconds=RETRY_SECONDS)
    outages = {
        name: replace(each, since=min(each.since, second), until=min(each.until, latest))
        for name, each in known.items()
        if _lasts(each, classes.get(name), newest_node(name), now)
    }
    for of_model in found:
        for name, each in of_model.items():
            gpu_class = classes.get(name)
            if not each.no_nodes or name in outages or gpu_class is None:
                continue
            before, until = known.get(name), each.until.replace(microsecond=0)
            if before is not None and before.reason == each.no_nodes and before.until <= now:
                outages[name] = replace(before, until=until)  # as before: nothing else is to be said
            else:
                generation = gpu_class.metadata.generation
                outages[name] = NodeOutage(each.no_nodes, each.why, second, until, generation)
    return outages


def _lasts(outage: NodeOutage, gpu_class: GPUClass | None, newest_node: datetime | None, now: datetime) -> bool:
    autoscaled = gpu_class.spec.nodes.autoscaled if gpu_class is not None else None
    if gpu_class is None or autoscaled is None or gpu_class.metadata.generation != outage.generation:
        return False
    # A node that had been ordered before the outage may come within the usual time.
    on_its_way = outage.since + timedelta(seconds=autoscaled.provision_seconds)
    # Nodes have the time of the API server, whose clock may be ahead.
    return now < outage.until and (newest_node is None or min(newest_node, now) <= on_its_way)
