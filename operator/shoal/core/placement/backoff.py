"""Backoff per class: classes on which a Model's replicas did not become ready, or found no node for lack of something
other than GPUs. For a while the plan takes such a class last (`Demand.backoffs`).

Without backoff, the next plan would ask for the replica that was just given up again.

A backoff for an engine that crashes, or was not ready in time, belongs to the revision of that engine
(`EngineRevision`): once the Model asks for another one, the backoff does not count. It is remembered nevertheless. It
counts again if the user goes back to that revision, and while the class is rolled out to the next revision it tells
that no replica worked there before.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Final

from shoal.api import names
from shoal.api.reasons import NO_NODE_CAME
from shoal.core.enginerevision import EngineRevision
from shoal.core.facts import Pod

UNSCHEDULABLE_SECONDS: Final = 300.0
"""Seconds in which a node with more CPU or memory may come, where the class names no autoscaler."""
PROVISION_FACTOR: Final = 2
"""Provision times of an autoscaler after which a pending replica is given up."""
CRASHES: Final = 3
"""Exits of an engine that was never ready, after which another class is tried: the engine may need more memory than the
class has."""
RETRY_SECONDS: Final = 3600.0
"""Seconds after which the backoff ends."""
REFUSED_SECONDS: Final = 900.0
"""Seconds after which a class is tried again whose nodes an autoscaler has refused. To ask again takes a minute, once
for the whole fleet; a stock-out often lasts for minutes."""

_MISSING: Final = re.compile(r"(\d+) Insufficient ([^\s,]+?)[,.]?(?=\s|$)")


@dataclass(frozen=True, slots=True)
class ClassBackoff:
    """Why and until when a Model uses a class only as its last choice."""

    why: str
    until: datetime
    no_nodes: str = ""
    """Reason for which no node of the class comes for any Model: it is an outage of the class (`outages.py`), and no
    backoff. "": the cause is this Model's."""
    revision: EngineRevision | None = None
    """The revision whose replica had a node and did not become ready. None: a replica found no node, of whatever
    revision."""
    template: str = ""
    """Of `revision`: hash of the replica's pod template."""
    crashes: bool = False
    """The engine of `revision` ended there again and again."""


def counting(
    known: Mapping[str, ClassBackoff], revision: Callable[[str], EngineRevision | None]
) -> dict[str, ClassBackoff]:
    """Those of `known` that concern a Model whose engines run `revision`, by class. An engine that does not start says
    nothing of another revision; what a cluster refuses, it refuses to all of them."""
    return {n: each for n, each in known.items() if each.revision is None or each.revision == revision(n)}


def observe(
    known: Mapping[str, ClassBackoff],
    pods: Iterable[Pod],
    *,
    now: datetime,
    timeout: Callable[[str], float],
    rolling: Collection[str] = (),
    provision: Callable[[str], float | None] = lambda _name: None,
    admitted: Mapping[str, datetime] = MappingProxyType({}),
    newest_node: Callable[[str], datetime | None] = lambda _name: None,
    without_node: Mapping[str, datetime] = MappingProxyType({}),
    applied: Mapping[str, EngineRevision] = MappingProxyType({}),
) -> dict[str, ClassBackoff]:
    """Class -> backoff: those of `known` that have not expired, and what the Model's `pods` show at `now`.

    `timeout`: class -> seconds after which a replica that was never ready is given up (three cold starts). `rolling`:
    classes with a rollout under way; a replica that does not start there has a new revision, so the class is not at
    fault. `provision`: class -> seconds in which an autoscaler adds a node; None: none does.
    `admitted`: uid of a pod -> when it was last seen to wait for a quota: its age counts from then. A class with a
    ready replica of the Model gets no backoff for replicas that do not start. `newest_node`: class -> when its newest
    node was made. `without_node`: uid of a pod -> until when no node was expected for it: a node that is announced to
    it after that gets its whole time. `applied`: class -> what its Deployment's pod template runs. On a class that is
    not in it, replicas with a node are not judged: nobody knows which revision does not start.

    Where the revision before did not start, a rollout is no excuse for its successor: the class has not worked.

    A replica without a node is given up before its time where an autoscaler refuses the node repeatedly.
    """
    found = {name: backoff for name, backoff in known.items() if backoff.until > now}
    mine = [pod for pod in pods if pod.gpu_class and not pod.deleting and not pod.finished]
    works = {pod.gpu_class for pod in mine if pod.ready}
    until = now + timedelta(seconds=RETRY_SECONDS)
    for pod in sorted(mine, key=lambda pod: pod.name):
        name = pod.gpu_class or ""
        if pod.ready or pod.was_ready or pod.created is None:
            continue
        if (before := found.get(name)) is not None and before.revision in (None, applied.get(name)):
            continue  # it is in backoff
        if name in rolling and (before is None or pod.node is None or pod.template in ("", before.template)):
            continue
        if pod.gated:
            # A quota holds it back, which is no fault of the class, unless the quota is there and no node.
            if (seconds := provision(name)) is not None:
                found |= _not_admitted(pod, name, now, seconds, newest_node(name))
            continue
        # A pod waited before it was bound, perhaps for a quota or for GPUs of others: its start began then.
        since = max(pod.created, pod.scheduled or pod.created, admitted.get(pod.uid, pod.created))
        age = (now - since).total_seconds()
        if pod.node is None:
            lacks = other_than_gpus(pod.unschedulable or "")
            seconds = provision(name)
            limit = None if seconds is None else PROVISION_FACTOR * seconds
            refusal = pod.node_refusal if limit is not None else None
            refused = refusal is not None and refusal.repeated
            waits = age if not pod.node_announced else min(age, _seconds(without_node.get(pod.uid), now))
            if lacks and (refused or waits >= (UNSCHEDULABLE_SECONDS if limit is None else limit)):
                event = f"; {pod.autoscaler_event}" if pod.autoscaler_event else ""
                why = f"for {_minutes(age)} no node there had room for a replica: {lacks}{event}"
                found[name] = ClassBackoff(why, until)
            elif refusal is not None and refused:
                why = f"for {_minutes(age)} no autoscaler added a node for a replica there: {refusal.message}"
                if refusal.everyone:
                    again = now + timedelta(seconds=REFUSED_SECONDS)
                    found[name] = ClassBackoff(why, again, no_nodes=refusal.reason)
                else:
                    found[name] = ClassBackoff(why, until)
            elif not lacks and limit is not None and waits >= limit:
                made = newest_node(name)
                # A node that came meanwhile, or words that nobody knows, may mean that only this replica gets none.
                alone = (made is not None and made > since) or (bool(pod.autoscaler_event) and not pod.node_late)
                why = pod.autoscaler_event or (
                    f"there is no event of one at pod {pod.key}; is one installed, with a node pool that has the "
                    "class's labels?"
                )
                found[name] = ClassBackoff(
                    f"for {_minutes(age)} no autoscaler added a node for a replica there: {why}",
                    until,
                    no_nodes="" if alone else NO_NODE_CAME,
                )
        elif name not in works and (revision := applied.get(name)) is not None:
            if (ended := _crashes(pod)) is not None:
                found[name] = ClassBackoff(ended, until, revision=revision, template=pod.template, crashes=True)
            elif age >= timeout(name):
                why = f"a replica there was not ready after {_minutes(age)}, three cold starts"
                found[name] = ClassBackoff(why, until, revision=revision, template=pod.template)
    return found


def _not_admitted(
    pod: Pod, gpu_class: str, now: datetime, provision_seconds: float, newest_node: datetime | None
) -> dict[str, ClassBackoff]:
    """What a replica shows that Kueue does not admit since no node could be had. It counts from the failure on, and
    only once: Kueue asks for no other node for this pod."""
    wait = pod.queue_wait
    refused, at = (wait.refusal, wait.refused_at) if wait is not None and pod.gates else (None, None)
    if refused is None or at is None:
        return {}
    until = at + timedelta(seconds=REFUSED_SECONDS if refused.everyone else RETRY_SECONDS)
    # A node that had been ordered before may come within the usual time.
    if until <= now or (newest_node is not None and newest_node > at + timedelta(seconds=provision_seconds)):
        return {}
    why = f"Kueue got no node for a replica there: {refused.message}"
    return {gpu_class: ClassBackoff(why, until, no_nodes=refused.reason if refused.everyone else "")}


def _crashes(pod: Pod) -> str | None:
    """How the engine of a pod keeps exiting; None: it restarted fewer than CRASHES times."""
    engine = pod.container(names.CONTAINER_ENGINE)
    if engine is None or engine.exit_code is None or engine.restarts < CRASHES:
        return None
    lines = (engine.exit_message or engine.exit_reason or "").strip().splitlines()
    last = f": {lines[-1].strip()}" if lines else ""
    return f"the engine of a replica there ended {engine.restarts} times with exit code {engine.exit_code}{last}"


def other_than_gpus(sentence: str) -> str | None:
    """What nodes with enough GPUs lack, quoted from the scheduler's message; None: GPUs are what is missing.

    Extended resources, such as GPUs, have a slash in their names. A node that lacks both is counted under both.
    """
    gpus, others = 0, dict[str, int]()
    for count, resource in _MISSING.findall(sentence.partition("preemption:")[0]):
        if "/" in resource:
            gpus = max(gpus, int(count))
        else:
            others[resource] = int(count)
    lacking = [f"Insufficient {name} on {count} node(s)" for name, count in sorted(others.items()) if count > gpus]
    return ", ".join(lacking) or None


def _seconds(since: datetime | None, now: datetime) -> float:
    return (now - since).total_seconds() if since is not None else math.inf


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
