"""What pods show: their phase, conditions, containers and events."""

import json
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final

from shoal.api import names, reasons
from shoal.core.layers import faults, texts
from shoal.core.layers.candidates import Candidate, Level, age
from shoal.core.layers.nodes import EVENT_SECONDS
from shoal.core.layers.types import ConditionView, ContainerView, EventView, Evidence, WhyPod
from shoal.core.podquota import CLAIM_EVENT

_PULLS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
_SETUPS: Final = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"})
_HOOK: Final = "PostStartHook"
"""In the reasons of a container whose hook failed, and of the event."""
_OURS: Final = frozenset({names.CONTAINER_ENGINE, names.CONTAINER_AGENT, names.CONTAINER_STAGE, names.CONTAINER_TLS})
"""Containers of an engine's pod. Others were injected."""
_KILLED: Final = (137, 143)
"""Exit codes of SIGKILL and SIGTERM."""
_CRASHED: Final = {132: faults.WRONG_ARCHITECTURE, 134: faults.ENGINE_CRASHED, 135: faults.NO_SPACE,
                   136: faults.ENGINE_CRASHED, 139: faults.ENGINE_CRASHED}  # fmt: skip
"""Exit codes of SIGILL (an instruction that the processor lacks), SIGABRT, SIGBUS (memory that is not there, such as a
full /dev/shm), SIGFPE and SIGSEGV."""
_DISRUPTED: Final = {
    "PreemptionByScheduler": faults.PREEMPTED,
    "DeletionByTaintManager": faults.TAINT,
    "DeletionByDeviceTaintManager": faults.GPU_UNHEALTHY,
    "EvictionByEvictionAPI": faults.EVICTED_BY_REQUEST,
    "DeletionByPodGC": faults.NODE_GONE,
    "TerminationByKubelet": faults.EVICTED,
}
"""Reason of the condition DisruptionTarget -> what it means."""
_TAKEN: Final = {"Preempted": faults.PREEMPTED, "TaintManagerEviction": faults.TAINT}
"""Events of replicas that have gone -> why."""
_ENDS_SECONDS: Final = 60
"""A kubelet ends a pod within its grace period, and removes it soon after."""
_NOT_FOUND: Final = 127
"""Exit code of a shell that does not find the program."""
_MOUNTS: Final = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_STOPS: Final = re.compile(r"(?!FailedScheduling|FailedToRetrieveImagePullSecret|FailedScaleUp|Failed$"
                           rf"|{CLAIM_EVENT})"
                           r"(Failed|[A-Z]\w*(Error|Refused|Denied|Rejected)$)")  # fmt: skip
"""Reasons of warnings that may keep a pod from starting. Those of the scheduler, of pulls and of claims are read
elsewhere."""
_AUTOSCALERS: Final = ("TriggeredScaleUp", "NotTriggerScaleUp", "Nominated", "FailedScaleUp")
_REMOVED: Final = {
    "Evicted": faults.EVICTED,
    "Preempting": faults.PREEMPTED,
    "NodeShutdown": faults.NODE_SHUTS_DOWN,
    "Terminated": faults.NODE_SHUTS_DOWN,
    "NodeAffinity": faults.AFFINITY,
    "UnexpectedAdmissionError": faults.DEVICE_ALLOCATION,
    "OutOfcpu": faults.TOO_FEW_RESOURCES,
    "OutOfmemory": faults.TOO_FEW_RESOURCES,
    "OutOfpods": faults.TOO_FEW_RESOURCES,
}
"""Reason of a pod that its kubelet refused or ended -> what it means."""
_UNSEEN_SECONDS: Final = 60
"""A scheduler looks at a new pod within seconds."""
_SLOW_SECONDS: Final = 1800
"""An engine that has not been ready for so long after its weights were there hangs: large models load for minutes."""


def candidates(pod: WhyPod, events: Iterable[EventView], now: datetime) -> Iterator[Candidate]:
    """What is wrong with a pod; nothing while it is ready."""
    if pod.ready and not any(c.unhealthy_devices for c in pod.containers):
        return
    mine = [e for e in events if e.kind == "Pod" and e.namespace == pod.namespace and e.name == pod.name]
    recent = [e for e in mine if (seconds := age(now, e.at)) is not None and seconds <= EVENT_SECONDS]
    where = f"pod {pod.key}"
    if (held := _held(pod, now)) is not None:
        yield held
    if (disrupted := _disrupted(pod, now)) is not None:
        yield disrupted
    elif pod.phase == "Failed" and (removed := _removed(pod)) is not None:
        text = pod.message or pod.reason
        yield _of(pod, removed, f"{where} was removed from its node: {texts.shorten(text)}",
                  Evidence(f"{pod.reason}: {texts.shorten(text)}", where, age(now, _changed(pod))))  # fmt: skip
    if pod.node is None:
        yield from _unscheduled(pod, recent, now)
    for container in pod.containers:
        yield from _container(pod, container, recent, now)
    if not any(c.state == "running" or c.exit_code is not None for c in pod.containers):
        yield from _start(pod, recent, now)
    yield from _runs(pod, recent, now)


def _disrupted(pod: WhyPod, now: datetime) -> Candidate | None:
    """What takes a pod away, in the words of the one that does."""
    target = next((c for c in pod.conditions if c.type == "DisruptionTarget" and c.status == "True"), None)
    reason = _DISRUPTED.get(target.reason) if target is not None else None
    if target is None or reason is None:
        return None
    if reason == faults.EVICTED:
        reason = _removed(pod) or reason
    text = texts.shorten(target.message or pod.message or target.reason)
    proof = Evidence(f"{target.reason}: {text}", f"DisruptionTarget of pod {pod.key}", age(now, target.since))
    return _of(pod, reason, f"pod {pod.key} was taken from its node: {text}", proof)


def _held(pod: WhyPod, now: datetime) -> Candidate | None:
    """A pod whose time to end has passed."""
    late = age(now, pod.ends)
    if late is None or late < _ENDS_SECONDS:
        return None
    if pod.finalizers:
        reason, why = faults.DELETION_HELD, f"finalizers {', '.join(pod.finalizers)} hold it"
    else:
        reason, why = faults.POD_STAYS, f"the kubelet of node {pod.node} has not ended it" if pod.node else "it stays"
    text = f"pod {pod.key} should have ended {late} s ago: {why}"
    return _of(pod, reason, text, Evidence("deletionTimestamp", f"metadata of pod {pod.key}", late))


def taken(pods: Iterable[WhyPod], events: Iterable[EventView], now: datetime) -> Iterator[Candidate]:
    """Why former replicas have gone for which successors find no node now. Only events are left of them."""
    waiting = {pod.owner: pod for pod in pods if pod.node is None and pod.owner}
    for event in events:
        seconds = age(now, event.at)
        pod = waiting.get(event.name.rpartition("-")[0]) if event.kind == "Pod" else None
        reason = _TAKEN.get(event.reason)
        if pod is None or reason is None or event.namespace != pod.namespace:
            continue
        if seconds is None or seconds > EVENT_SECONDS:
            continue
        said = texts.shorten(event.message)
        text = f"pod {event.namespace}/{event.name}, whose successor waits, was taken from its node: {said}"
        proof = Evidence(said, f"event of pod {event.namespace}/{event.name}", seconds)
        # Before what the scheduler says of the successor.
        yield Candidate(reason, text, Level.NODE, (proof,), frozenset({pod.key}))


def _removed(pod: WhyPod) -> str | None:
    """What ended a pod as a whole; None: nothing did."""
    if pod.reason.startswith("OutOf") and "/" in pod.reason:
        return faults.TOO_FEW_GPUS
    if pod.reason == "Evicted" and texts.own_limit(pod.message):
        return faults.NO_SPACE
    if pod.reason == "Evicted" and (short := texts.evicted(pod.message)) is not None:
        return short.reason
    if pod.reason == "UnexpectedAdmissionError" and (sick := texts.gpu(pod.message)) is not None:
        return sick.reason
    # Only a kubelet gives a whole pod a reason with its phase Failed.
    return _REMOVED.get(pod.reason, faults.POD_REJECTED if pod.reason else None)


def _runs(pod: WhyPod, events: Iterable[EventView], now: datetime) -> Iterator[Candidate]:
    """An engine that runs and is not ready: it hangs, or has stopped answering."""
    engine = next((c for c in pod.containers if c.name == names.CONTAINER_ENGINE), None)
    if engine is None or engine.state != "running" or engine.ready or engine.exit_code is not None:
        return
    where = f"container {engine.name} of pod {pod.key}"
    if engine.started:
        failed = next((e for e in events if e.reason == "Unhealthy" and "readiness" in e.message.lower()), None)
        if failed is not None:
            said = texts.shorten(failed.message)
            yield _of(pod, faults.UNRESPONSIVE, f"{where} was ready, runs, and is not ready any more: {said}",
                      Evidence(said, f"event of pod {pod.key}", age(now, failed.at)))  # fmt: skip
        return
    begun = next((c.since for c in pod.conditions if c.type == "Initialized" and c.status == "True"), None)
    seconds = age(now, begun)
    if seconds is not None and seconds > _SLOW_SECONDS:
        yield _of(pod, faults.LOADS_TOO_LONG, f"{where} has been loading for {seconds // 60} min and is not ready",
                  Evidence("running, not ready", where, seconds))  # fmt: skip


def _of(pod: WhyPod, reason: str, message: str, *evidence: Evidence, tried: tuple[str, ...] = ()) -> Candidate:
    return Candidate(reason, message, Level.POD, evidence, frozenset({pod.key}), tried)


def _changed(pod: WhyPod) -> datetime | None:
    return max((c.since for c in pod.conditions if c.since is not None), default=pod.created)


def _unscheduled(pod: WhyPod, events: Iterable[EventView], now: datetime) -> Iterator[Candidate]:
    waits: ConditionView | None = next(
        (c for c in pod.conditions if c.type == "PodScheduled" and c.status == "False"), None
    )
    if pod.lacks_claim and (unclaimed := _unclaimed(pod, waits, events, now)) is not None:
        yield unclaimed
        if waits is None or waits.reason != reasons.SCHEDULING_GATED:
            return
    if waits is None:
        waited = age(now, pod.created)
        unseen = not any(c.type == "PodScheduled" for c in pod.conditions)
        if unseen and pod.phase == "Pending" and waited is not None and waited > _UNSEEN_SECONDS:
            yield _of(pod, faults.SCHEDULER_AWAY, f"pod {pod.key} was created {waited} s ago, and no scheduler has "
                      "looked at it", Evidence("no condition PodScheduled", f"pod {pod.key}", waited))  # fmt: skip
        return
    if waits.reason == reasons.SCHEDULING_GATED:
        queue = f" of queue {pod.queue}" if pod.queue else ""
        held = f"pod {pod.key} waits for quota{queue}" if pod.queue_managed else f"pod {pod.key} is held back by a gate"
        yield _of(
            pod,
            reasons.QUOTA_WAIT if pod.queue_managed else reasons.SCHEDULING_GATED,
            f"{held}: {texts.shorten(waits.message or waits.reason)}",
            Evidence(texts.shorten(waits.message), f"PodScheduled of pod {pod.key}", age(now, waits.since)),
        )
        return
    phrase = texts.scheduler(waits.message)
    tried = tuple(
        f"{e.source or 'autoscaler'}: {texts.shorten(e.message)} ({e.reason})"
        for e in events
        if e.reason in _AUTOSCALERS
    )
    yield _of(
        pod,
        phrase.reason if phrase is not None else reasons.UNSCHEDULABLE,
        f"pod {pod.key} finds no node: {texts.shorten(waits.message or waits.reason)}",
        Evidence(texts.shorten(waits.message or waits.reason), f"PodScheduled of pod {pod.key}", age(now, waits.since)),
        tried=tried,
    )


def _unclaimed(
    pod: WhyPod, waits: ConditionView | None, events: Iterable[EventView], now: datetime
) -> Candidate | None:
    """Why a pod lacks its ResourceClaim. Its events say it; until then the scheduler says nothing, or that it waits."""
    said = [e for e in events if e.reason == CLAIM_EVENT]
    if said:
        last = min(said, key=lambda e: age(now, e.at) or 0)
        text, phrase = texts.shorten(last.message), texts.admission(last.message)
        reason = phrase.reason if phrase is not None else reasons.CLAIM_NOT_CREATED
        return _of(pod, reason, f"pod {pod.key} gets no ResourceClaim: {text}",
                   Evidence(text, f"event of pod {pod.key}", age(now, last.at)),
                   tried=("kube-controller-manager goes on trying, at growing intervals",))  # fmt: skip
    waited = age(now, pod.created)
    if waited is None or waited <= _UNSEEN_SECONDS or (waits is not None and waits.reason == reasons.SCHEDULING_GATED):
        return None
    proof = Evidence("no ResourceClaim", f"status of pod {pod.key}", waited)
    text = f"pod {pod.key} was created {waited} s ago, and has no ResourceClaim: no event says why"
    return _of(pod, reasons.CLAIM_NOT_CREATED, text, proof)


def _container(
    pod: WhyPod, container: ContainerView, events: Iterable[EventView], now: datetime
) -> Iterator[Candidate]:
    where = f"container {container.name} of pod {pod.key}"
    if container.unhealthy_devices:
        names_ = ", ".join(container.unhealthy_devices[:4])
        yield _of(pod, faults.GPU_UNHEALTHY, f"{where} holds a device that is not healthy: {names_}",
                  Evidence(f"Unhealthy: {names_}", f"the kubelet's status of {where}", None))  # fmt: skip
    since = age(now, _changed(pod))
    message = container.message or container.reason
    if container.state == "waiting" and container.reason in _PULLS:
        phrase = texts.pull(f"{container.reason}: {_pull_message(message, pod, events)}")
        reason = phrase.reason if phrase else reasons.IMAGE_UNAVAILABLE
        proofs = [Evidence(f"{container.reason}: {texts.shorten(message)}", where, since)]
        text = texts.shorten(message)
        absent = next((e for e in events if e.reason == "FailedToRetrieveImagePullSecret"), None)
        if absent is not None and reason in (faults.IMAGE_DENIED, faults.IMAGE_NOT_FOUND, reasons.IMAGE_UNAVAILABLE):
            # Registries deny an image, or say that it is not there, to who shows no credentials.
            reason, text = faults.PULL_SECRET_MISSING, f"{texts.shorten(absent.message)}; {text}"
            proofs.insert(0, Evidence(f"{absent.reason}: {texts.shorten(absent.message)}", f"event of pod {pod.key}",
                                      age(now, absent.at)))  # fmt: skip
        yield _of(pod, reason, f"{where}: {container.reason}: {text}", *proofs,
                  tried=("the kubelet goes on trying to pull the image",))  # fmt: skip
        return
    if container.state == "waiting" and _HOOK in container.reason:
        yield _of(pod, faults.HOOK_FAILED, f"{where}: {container.reason}: {texts.shorten(message)}",
                  Evidence(f"{container.reason}: {texts.shorten(message)}", where, since))  # fmt: skip
        return
    if container.state == "waiting" and container.reason in _SETUPS:
        phrase = texts.setup(message)
        unknown = faults.CONTAINER_CONFIG if container.reason == "CreateContainerConfigError" else faults.RUNTIME_FAULT
        yield _of(pod, phrase.reason if phrase else unknown,
                  f"{where}: {container.reason}: {texts.shorten(message)}",
                  Evidence(f"{container.reason}: {texts.shorten(message)}", where, since))  # fmt: skip
        return
    if container.exit_code is None or (container.exit_code == 0 and container.init) or container.ready:
        return
    yield _ended(pod, container, events, now)


def _pull_message(message: str, pod: WhyPod, events: Iterable[EventView]) -> str:
    """With the back-off the status forgets why; the event of the failed pull has it."""
    failed = [e.message for e in events if e.reason == "Failed" and "pull" in e.message.lower()]
    return "\n".join([message, *failed])


def _ended(pod: WhyPod, container: ContainerView, events: Iterable[EventView], now: datetime) -> Candidate:
    where = f"container {container.name} of pod {pod.key}"
    text = container.exit_message
    injected = pod.component == names.COMPONENT_ENGINE and container.name not in _OURS
    if injected:
        # Its words are its own: an engine's phrases, and advice about an engine's memory, do not hold for it.
        phrase = texts.setup(container.exit_message)
        reason, quote = (phrase.reason, phrase.quote) if phrase is not None else (faults.INJECTED_FAILED, "")
    else:
        reason, quote = _why_ended(container, [e for e in events if e.reason in ("Killing", "Unhealthy")])
    tried: list[str] = []
    if container.restarts:
        times = "once" if container.restarts == 1 else f"{container.restarts} times"
        tried.append(f"the kubelet restarted {where} {times}")
    if container.reason == "CrashLoopBackOff":
        tried.append(f"the kubelet waits before it restarts {where} again (CrashLoopBackOff)")
    seen = f"exit code {container.exit_code}" + (f" ({container.exit_reason})" if container.exit_reason else "")
    said = quote or texts.shorten(texts.raised(text) or text[-texts.LONGEST :].strip().rpartition("\n")[2])
    ended = age(now, container.ended)
    return _of(pod, reason, f"{where} ended with {seen}: {said or 'it wrote nothing'}",
               Evidence(f"{seen}: {said}" if said else seen, where, ended), tried=tuple(tried))  # fmt: skip


def _why_ended(container: ContainerView, killed: list[EventView]) -> tuple[str, str]:
    """(reason, the line that says it)."""
    if container.exit_reason == "OOMKilled":
        return faults.OUT_OF_MEMORY, ""
    text = container.exit_message
    if container.name == names.CONTAINER_STAGE:
        return _stage(text)
    if (phrase := texts.engine(text) or texts.setup(text)) is not None:
        return phrase.reason, phrase.explained
    liveness = next((e for e in killed if "liveness" in e.message.lower()), None)
    started = next((e for e in killed if e.reason == "Killing" and "startup probe" in e.message.lower()), None)
    engine = container.name == names.CONTAINER_ENGINE
    if engine and started is not None:
        return faults.START_TIMEOUT, texts.shorten(started.message)
    if engine and liveness is not None:
        return faults.ENGINE_STALLED, texts.shorten(liveness.message)
    if container.exit_code in _CRASHED:
        return _CRASHED[container.exit_code], ""
    if container.exit_code == _NOT_FOUND:
        return faults.IMAGE_INCOMPLETE, ""
    # What a killed engine leaves is its log up to then (the kubelet falls back to it), and not a reason.
    if engine and container.exit_code in _KILLED:
        return faults.ENGINE_STOPPED, ""
    if engine and (phrase := texts.about(text)) is not None:
        return phrase.reason, phrase.explained
    return (reasons.ENGINE_FAILED if engine else faults.CONTAINER_FAILED), ""


def _stage(text: str) -> tuple[str, str]:
    try:
        written: Any = json.loads(text)
    except (ValueError, RecursionError):
        written = None
    match written:
        case {"reason": str(reason), "message": str(message)} if reason in reasons.STAGE_REASONS:
            phrase = texts.source(message) if reason == reasons.SOURCE_UNREACHABLE else None
            return phrase.reason if phrase is not None else reason, texts.shorten(message)
        case _:
            phrase = texts.fetch(text)
            return (phrase.reason, phrase.quote) if phrase is not None else (reasons.STAGE_FAILED, "")


def _start(pod: WhyPod, events: Iterable[EventView], now: datetime) -> Iterator[Candidate]:
    """Why no container of a scheduled pod has started: only events say it."""
    for event in events:
        text = f"{event.reason}: {event.message}"
        if event.reason in _MOUNTS:
            phrase = texts.mount(event.message)
            reason = phrase.reason if phrase is not None else faults.MOUNT_FAILED
        elif event.reason == "FailedCreatePodSandBox":
            phrase = texts.setup(event.message)
            reason = phrase.reason if phrase is not None else faults.SANDBOX_FAILED
        elif pod.node is not None and event.type == "Warning" and _STOPS.match(event.reason):
            phrase = texts.setup(f"{event.reason}: {event.message}")
            unknown = faults.HOOK_FAILED if _HOOK in event.reason else faults.START_FAILED
            reason = phrase.reason if phrase is not None else unknown
        else:
            continue
        yield _of(pod, reason, f"pod {pod.key} does not start: {texts.shorten(event.message)}",
                  Evidence(texts.shorten(text), f"event of pod {pod.key}", age(now, event.at)))  # fmt: skip
