"""Why replicas do not serve, from their pods: one cause, the one that a person would fix first."""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from shoal.api import names, reasons
from shoal.core.facts import Container, Deployment, Pod
from shoal.core.podquota import held_by_quota, waits_for_queue

_IMAGE_REASONS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
_CONFIG_REASONS: Final = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_PERMANENT: Final = frozenset(
    {
        reasons.SOURCE_NOT_FOUND,
        reasons.SOURCE_REFUSED,
        reasons.SOURCE_INVALID,
        reasons.TOO_LARGE,
        reasons.SOURCE_CHANGED,
        reasons.GATED,
        reasons.DIGEST_MISMATCH,
        reasons.IMAGE_UNAVAILABLE,
        reasons.ENGINE_FAILED,
        reasons.ADMISSION_REJECTED,
    }
)


_NO_CLAIM: Final = re.compile(r'persistentvolumeclaim "([a-z0-9.-]{1,253})" not found')
"""As the scheduler reports it."""

FAILURES: Final = _PERMANENT | reasons.STAGE_REASONS | {reasons.STAGE_FAILED}
"""Reasons why a replica failed to start; other reasons are steps of a start."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a replica does not serve."""

    reason: str
    message: str
    recovers: bool = False
    """The replica served before, and is restarting."""
    gpu_class: str | None = None
    """The class, if another class may help: the engine exits, or no node of the class could be had."""
    asks_again: bool = False
    """The plan makes the pod anew after a while."""

    @property
    def waits_for_a_person(self) -> bool:
        """Retrying does not help. A source that cannot be reached, or a full cluster, may change without a person."""
        return self.reason in _PERMANENT and not (self.recovers or self.asks_again)


def diagnose(pods: Iterable[Pod], deployments: Iterable[Deployment] = ()) -> Cause | None:
    """The cause to show for these engine pods of a Model's `deployments`; None: nothing is known to be wrong.

    Order: staging, images and container set-up, the engine, claims that are not made, scheduling gates, the scheduler;
    of equals the first pod by name.
    """
    sick = sorted((p for p in pods if not p.ready and not p.deleting and not p.finished), key=lambda p: p.name)
    gate = partial(_gate, rolling={d.gpu_class for d in deployments if d.has_old_pods})
    for find in (_staging, container_cause, _engine, _claim, gate, _scheduling):
        for pod in sick:
            if cause := find(pod):
                return cause
    return None


def _staging(pod: Pod) -> Cause | None:
    stage = pod.container(names.CONTAINER_STAGE)
    if stage is None or stage.exit_code in (None, 0) or (stage.running and stage.restarts == 0):
        return None
    reason, message = _termination(stage)
    return Cause(reason, f"{message} (pod {pod.key}, attempt {stage.restarts + 1})")


def _termination(stage: Container) -> tuple[str, str]:
    """(reason, message) of the stage container's end. A container that is killed writes no message."""
    text = (stage.exit_message or "").strip()
    try:
        written: Any = json.loads(text)
    except (ValueError, RecursionError):
        written = None
    match written:
        case {"reason": str(reason), "message": str(message)} if reason in reasons.STAGE_REASONS:
            return reason, message
        case _:
            pass
    detail = text or stage.exit_reason or "no message"
    return reasons.STAGE_FAILED, f"staging ended with exit code {stage.exit_code}: {detail}"


def container_cause(pod: Pod) -> Cause | None:
    """The cause if a container cannot be set up, because of its image or configuration."""
    for container in pod.containers:
        reason = container.waiting_reason
        message = container.waiting_message or reason
        if reason in _IMAGE_REASONS:
            return Cause(reasons.IMAGE_UNAVAILABLE, f"container {container.name} of pod {pod.key}: {reason}: {message}")
        if reason in _CONFIG_REASONS:
            return Cause(reasons.ENGINE_FAILED, f"container {container.name} of pod {pod.key}: {reason}: {message}")
    return None


def _engine(pod: Pod) -> Cause | None:
    engine = pod.container(names.CONTAINER_ENGINE)
    if engine is None or engine.exit_code is None or engine.ready:
        return None
    last = (engine.exit_message or engine.exit_reason or "no message").strip()
    times = f"{engine.restarts} restart{'' if engine.restarts == 1 else 's'}"
    return Cause(
        reasons.ENGINE_FAILED,
        f"the engine of pod {pod.key} ended with exit code {engine.exit_code} ({times}): {last}",
        # An engine that exits again soon is in back-off. Before that, holding requests for it makes sense.
        recovers=pod.was_ready and engine.waiting_reason != "CrashLoopBackOff",
        gpu_class=pod.gpu_class,
    )


def missing_claim(pod: Pod) -> str | None:
    """Name of a PersistentVolumeClaim that the pod mounts and the scheduler does not find; None: there is none. The
    node cache's claim does not count: the operator makes it."""
    found = _NO_CLAIM.search(pod.unschedulable or "")
    return None if found is None or found[1].startswith(names.CACHE_CLAIM) else found[1]


def _claim(pod: Pod) -> Cause | None:
    found = pod.claim_refusal
    if found is None or pod.node is not None:
        return None
    return Cause(found.reason, f"pod {pod.key} gets no ResourceClaim: {found.message}")


def _gate(pod: Pod, rolling: Collection[str]) -> Cause | None:
    """`rolling`: classes where a rollout is under way. No plan makes a pod anew there."""
    if not pod.gated or not pod.gates:
        return None
    if not waits_for_queue(pod):
        what = f"pod {pod.key} is held back by the scheduling gate {pod.gates[0]}"
        return Cause(reasons.SCHEDULING_GATED, what)
    queue = f"queue {pod.namespace}/{pod.queue}" if pod.queue else "its queue"
    if pod.queue_wait is None:
        return Cause(reasons.QUOTA_WAIT, f"pod {pod.key} waits for quota of {queue}")
    what = {
        reasons.ADMISSION_CHECK: f"has quota of {queue}, which waits for",
        reasons.ADMISSION_REJECTED: f"is not admitted by {queue}",
    }
    reason, said = pod.queue_wait.reason, pod.queue_wait.message
    separator = " " if reason == reasons.ADMISSION_CHECK else ": "
    message = f"pod {pod.key} {what.get(reason, f'waits for quota of {queue}')}{separator}{said}"
    if pod.queue_wait.refusal is not None and pod.gpu_class not in rolling:
        again = f"; a new pod asks again once nodes of {pod.gpu_class} are expected"
        return Cause(reason, message + again, gpu_class=pod.gpu_class, asks_again=True)
    if reason == reasons.ADMISSION_REJECTED:
        message += "; delete the pod to ask again"
    return Cause(reason, message)


def _scheduling(pod: Pod) -> Cause | None:
    if (claim := missing_claim(pod)) is not None:
        what = f"there is no PersistentVolumeClaim {claim} in namespace {pod.namespace}: create it"
        return Cause(reasons.UNSCHEDULABLE, f"pod {pod.key} waits: {what}")
    if not pod.unschedulable:
        return None
    autoscaler = f"; {pod.autoscaler_event}" if pod.autoscaler_event else ""
    return Cause(reasons.UNSCHEDULABLE, f"pod {pod.key}: {pod.unschedulable}{autoscaler}")


def progress(pods: Sequence[Pod]) -> str:
    """The steps of starting replicas, for messages: a count per step, no number that changes all the time."""
    phases = {"waiting for quota": 0, "on nodes that do not answer": 0, "scheduled": 0, "staging": 0, "loading": 0}
    for pod in pods:
        if pod.ready or pod.deleting or pod.finished:
            continue
        engine, stage = pod.container(names.CONTAINER_ENGINE), pod.container(names.CONTAINER_STAGE)
        if held_by_quota(pod):
            phases["waiting for quota"] += 1
        elif engine is not None and all(c.ready for c in pod.containers):
            # The kubelet's last report; the node controller reports the pod as not Ready once the node is silent.
            phases["on nodes that do not answer"] += 1
        elif engine is not None and engine.running:
            phases["loading"] += 1
        elif stage is not None and stage.running:
            phases["staging"] += 1
        elif pod.node:
            phases["scheduled"] += 1
    return ", ".join(f"{count} {phase}" for phase, count in phases.items() if count)
