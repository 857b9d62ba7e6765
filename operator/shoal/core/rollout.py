"""How the rollout of one class begins: with one replica more, in place, or not yet. Pure."""

from collections.abc import Callable
from datetime import datetime
from typing import Literal

from shoal.api import reasons
from shoal.core.facts import Deployment, Pod
from shoal.core.placement import VariantPlan
from shoal.core.placement.backoff import PROVISION_FACTOR

Beginning = Literal["surge", "in place", "wait"]
"""`surge`: the successor starts before the replica goes; `in place`: the replica goes first; `wait`: the pod template
stays as it is for now."""


def begin(
    standing: Deployment,
    planned: VariantPlan,
    *,
    serving: int,
    others: bool,
    known: bool,
    reserve_surge: Callable[[], bool],
) -> Beginning:
    """Decides it for a Deployment whose pod template is to change.

    `planned`: what it is to have. `serving`: ready replicas of the Model, on whatever class. `others`: the Model may
    also run on another class. `known`: the plan knew that there is no GPU for one replica more, so it has looked for
    one on another class. `reserve_surge`: takes the GPUs of one replica more; False: there are none.
    """
    if not standing.replicas:
        return "surge"  # nothing is replaced
    if planned.relocated or not planned.replicas:
        return "wait"  # it goes, and the next pod of the Deployment is of the new revision
    if reserve_surge():
        return "surge"
    only = standing.replicas == standing.ready == serving == 1
    return "wait" if only and others and not known else "in place"


def no_node_came(pods: list[Pod], provision_seconds: float | None, now: datetime) -> bool:
    """Whether the replica more of a rollout waits in vain for a node of an autoscaler. `pods`: of the Deployment;
    `provision_seconds`: in which an autoscaler adds one; None: none does. An autoscaler that refuses it repeatedly is
    not waited for, nor one that has refused it by Kueue's request."""
    if provision_seconds is None:
        return False
    limit = PROVISION_FACTOR * provision_seconds
    return any(_in_vain(pod, limit, now) for pod in pods if pod.node is None and not pod.deleting)


def _in_vain(pod: Pod, limit: float, now: datetime) -> bool:
    if pod.gated:
        wait = pod.queue_wait
        if wait is None or wait.reason != reasons.ADMISSION_CHECK:
            return wait is not None and wait.refusal is not None
    if pod.created is None:
        return False
    return (now - pod.created).total_seconds() >= limit or (pod.node_refusal is not None and pod.node_refusal.repeated)
