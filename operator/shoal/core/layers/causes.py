"""From what was read to the causes, the most upstream first.

A cause hides what it explains: what is of a later layer, or was seen further downstream on the same layer, and affects
the same pods. What is hidden stays in its `consequences`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final, Literal

from shoal.api import reasons
from shoal.core import children
from shoal.core.layers import externals, faults, holders, netpolicies, nodes, objects, pods, quarantines, tenants, texts
from shoal.core.layers.advice import State
from shoal.core.layers.candidates import Candidate, Level, age, merged
from shoal.core.layers.faults import advice
from shoal.core.layers.layer import Layer
from shoal.core.layers.types import Evidence, Explanation, LayerCause, ObjectView, WhyNode, WhyPod, WhySnapshot
from shoal.core.scaling.messages import count

_WANTS_GPUS: Final = (reasons.NO_CAPACITY, reasons.UNSCHEDULABLE, reasons.OUTRANKED, reasons.NO_NODES, reasons.NO_FIT)
"""With these, nodes without the Model's pods matter too."""
_SEVERAL: Final = ("tenant", "route")
"""Kinds that lead to several Models."""
_LONGEST: Final = 700
"""Characters of one text of a cause."""
_LONGEST_MESSAGE: Final = texts.LONGEST_CONDITION + 400
"""Characters of what is wrong: a condition's message as a whole, and the object that has it."""
_STATES: Final = {"fault": 0, "waits": 1, "note": 2, "fine": 3}
_NO_GPUS: Final = (
    reasons.NO_NODES,
    reasons.NO_DEVICES,
    reasons.DRA_UNAVAILABLE,
    reasons.DEVICE_CLASS_NOT_FOUND,
    reasons.SELECTOR_INVALID,
    reasons.SHARED_GPUS,
)
"""Reasons why a GPU class has no GPUs at all."""
_EXPLAINS: Final[Mapping[str, frozenset[str]]] = {
    faults.OPERATOR_AWAY: frozenset({reasons.PENDING, faults.OUT_OF_DATE, reasons.KEDA_NOT_POLLING}),
    # A policy that cuts gateways off often cuts operators off too.
    faults.NETWORK_POLICY: frozenset({reasons.SIGNALS_STALE, reasons.SIGNALS_UNKNOWN}),
    faults.DEVICE_PLUGIN_MISSING: frozenset(
        {reasons.NO_NODES, reasons.NO_CAPACITY, reasons.NO_FIT, reasons.UNSCHEDULABLE, faults.TOO_FEW_GPUS}
    ),
    **dict.fromkeys(
        _NO_GPUS,
        frozenset({reasons.NO_CAPACITY, reasons.NO_FIT, reasons.UNSCHEDULABLE, faults.AFFINITY, faults.TOO_FEW_GPUS}),
    ),
    reasons.NO_CLASS: frozenset({reasons.NO_CAPACITY, reasons.NO_FIT}),
    faults.GPUS_PARTITIONED: frozenset(
        {reasons.NO_NODES, reasons.NO_CAPACITY, reasons.NO_FIT, reasons.UNSCHEDULABLE, faults.TOO_FEW_GPUS}
    ),
    faults.GPUS_HELD: frozenset({reasons.NO_CAPACITY, reasons.OUTRANKED, reasons.UNSCHEDULABLE, faults.TOO_FEW_GPUS}),
    faults.PREEMPTED: frozenset({reasons.NO_CAPACITY, reasons.UNSCHEDULABLE, faults.TOO_FEW_GPUS}),
    faults.VOLUME_UNBOUND: frozenset({reasons.STAGE_FAILED, reasons.READING_ARTIFACT, reasons.UNSCHEDULABLE}),
    faults.DELETION_HELD: frozenset({reasons.PENDING, faults.OUT_OF_DATE}),
    **dict.fromkeys(
        (reasons.DRA_UNAVAILABLE, reasons.DEVICE_CLASS_NOT_FOUND, reasons.SELECTOR_INVALID, reasons.NO_DEVICES),
        frozenset({reasons.NO_CAPACITY, reasons.NO_FIT, reasons.UNSCHEDULABLE, faults.TOO_FEW_GPUS}),
    ),
}
"""What a reason explains of others, also of others on its own layer."""
_UPSTREAM: Final[Mapping[str, tuple[int, int]]] = {
    faults.OPERATOR_AWAY: (Layer.CONTROL.order, -1),
    reasons.NO_CLASS: (Layer.CONTROL.order, -1),
    # What the scheduler says of such a class is a consequence, whatever the layer of the reason.
    **{reason: (min(advice(reason).layer.order, Layer.CONTAINER.order), -1) for reason in _NO_GPUS},
}
"""Reasons with another place among causes than their layer and level give them."""


def causes(seen: WhySnapshot, now: datetime) -> Explanation:
    """Why the subject is as it is."""
    found = merged(_candidates(seen, now))
    shown = [c for c in found if c.state != "fine"]
    hidden = {id(c): next((a for a in shown if a is not c and explains(a, c)), None) for c in shown}
    roots = [c for c in shown if hidden[id(c)] is None]
    explained: dict[int, list[Candidate]] = {}
    for candidate in shown:
        root = candidate
        while (above := hidden[id(root)]) is not None:
            root = above
        if root is not candidate:
            explained.setdefault(id(root), []).append(candidate)
    roots.sort(key=lambda c: (_STATES[c.state], *c.rank, c.reason))
    answer = tuple(_cause(c, explained.get(id(c), [])) for c in roots)
    return Explanation(seen.kind, seen.key, _state(answer, seen), answer, seen.unread)


def wants_gpus(model: ObjectView, pods: Iterable[WhyPod]) -> bool:
    """Whether GPUs may be short for a Model: then who else holds them matters."""
    return any(pod.node is None for pod in pods) or any(c.reason in _WANTS_GPUS for c in model.conditions)


def explains(cause: Candidate, other: Candidate) -> bool:
    """Whether a cause hides another. There are no circles: only faults explain, a fault explains faults of later places
    only (`_place`), and what is no fault explains nothing."""
    if cause.aside or cause.state != "fault":
        return False
    # One class without GPUs says nothing of another that is full.
    one_of_several = cause.reason in _NO_GPUS and not cause.everywhere
    listed = not one_of_several and other.reason in _EXPLAINS.get(cause.reason, ())
    if other.aside and not listed:
        return False
    if other.state == "waits":
        return True
    if _place(cause) >= _place(other):
        return False
    if listed:
        return True
    if other.pods:
        return cause.pods >= other.pods
    return other.reason in objects.DERIVED and (bool(cause.pods) or cause.everywhere)


def _place(candidate: Candidate) -> tuple[int, int]:
    return _UPSTREAM.get(candidate.reason, candidate.rank)


def _candidates(seen: WhySnapshot, now: datetime) -> Iterator[Candidate]:
    views = ([seen.subject] if seen.subject is not None else []) + _dependencies(seen)
    of_objects = [c for view in views for c in objects.candidates(view, now)]
    of_classes = [c for view in seen.related if view.kind == "class" for c in objects.candidates(view, now)]
    # The pod shows only Kueue's gate; the Model's status, why Kueue does not take it off.
    checked = {pod for c in of_objects if c.reason in _CHECKED for pod in c.pods}
    of_pods = [
        c
        for pod in seen.pods
        for c in pods.candidates(pod, seen.events, now)
        if c.reason != reasons.QUOTA_WAIT or not c.pods <= checked
    ]
    short = any(c.reason in _WANTS_GPUS or c.reason in _TOO_FEW for c in (*of_objects, *of_pods))
    yield from of_objects
    yield from of_pods
    yield from pods.taken(seen.pods, seen.events, now)
    if short or seen.kind == "class":
        broken = {view.key for view in seen.related if view.kind == "class" and _unusable(view)}
        none = len(broken) == sum(view.kind == "class" for view in seen.related)
        yield from (replace(c, everywhere=none) if c.reason in _NO_GPUS else c for c in of_classes)
    elif seen.kind in ("model", "pod"):
        # Replicas run on GPUs that would be out of use, if enough of the class were left.
        for each in of_classes:
            if each.reason == reasons.QUARANTINE_WITHHELD and (state := _stays(each.message, seen.pods)):
                yield each if state == "fault" else replace(each, reached="note")
    yield from _nodes(seen, now, all_of_them=short or seen.kind in ("class", "node"))
    if short or seen.kind == "class":
        classes = [view for view in (seen.subject, *seen.related) if view is not None and view.kind == "class"]
        yield from holders.candidates(classes, seen.nodes, seen.holders, seen.devices, short=short)
    if seen.kind == "tenant" and seen.subject is not None:
        yield from tenants.candidates(seen.subject, seen.budget, seen.absent, now)
    yield from externals.candidates(seen.externals)
    yield from _quarantines(seen, now)
    yield from _targets(seen, now)
    yield from _no_pods(seen, now)
    yield from _jobs(seen, now)
    yield from _replica_sets(seen, now)
    yield from _claims(seen, now)
    yield from _autoscalers(seen, now)
    yield from _gateways(seen, now)
    yield from netpolicies.candidates(seen.pods, seen.gateways or (), seen.policies)
    yield from _operator(seen, now)
    yield from _decision(seen, now)


_CHECKED: Final = (reasons.ADMISSION_CHECK, reasons.ADMISSION_REJECTED)
_TOO_FEW: Final = (
    faults.NODE_LEAVES,
    faults.NODE_NOT_SET_UP,
    faults.TOO_FEW_GPUS,
    faults.TAINT,
    faults.AFFINITY,
    faults.NODE_CORDONED,
    faults.TOO_FEW_RESOURCES,
)


def _unusable(view: ObjectView) -> bool:
    return any(c.type == reasons.READY and c.status == "False" and c.reason in _NO_GPUS for c in view.conditions)


def _dependencies(seen: WhySnapshot) -> list[ObjectView]:
    """What the subject cannot serve without. Of the Models of a Tenant or a route, one that does not serve is a note
    (`_targets`)."""
    return [view for view in seen.related if view.kind in ("pool", "model")] if seen.kind not in _SEVERAL else []


def _nodes(seen: WhySnapshot, now: datetime, *, all_of_them: bool) -> Iterator[Candidate]:
    classes = [view for view in (seen.subject, *seen.related) if view is not None and view.kind == "class"]
    used: dict[str, set[str]] = {}
    for pod in seen.pods:
        if pod.node is not None:
            used.setdefault(pod.node, set()).add(pod.key)
    unplaced = frozenset(pod.key for pod in seen.pods if pod.node is None)
    # Where every node is out, that explains why nothing is free, also to a Model that still has replicas there.
    everywhere = (
        all_of_them
        and seen.kind != "node"
        and bool(seen.nodes)
        and all(_out(node, seen, classes, now) for node in seen.nodes)
    )
    for node in seen.nodes:
        if node.name not in used and not all_of_them:
            continue
        affected = frozenset(used.get(node.name, ())) | (unplaced if everywhere else frozenset[str]())
        killed = _killed(seen, node.name, now)
        for found in _of_node(
            node, seen, classes, now, pods=affected, everywhere=everywhere, killed=killed,
            unready=seen.kind in ("class", "node") or any(p.key in affected and not p.ready for p in seen.pods),
        ):  # fmt: skip
            # A node that takes no pods does nothing to those that run there; one that is taken away ends them.
            closed = found.reason in _CLOSED and not (found.reason == faults.NODE_LEAVES and killed)
            yield replace(found, pods=unplaced if everywhere else frozenset()) if closed else found


_CLOSED: Final = (faults.NODE_CORDONED, faults.TAINT, faults.NODE_LEAVES, faults.NODE_NOT_SET_UP)


def _of_node(
    node: WhyNode,
    seen: WhySnapshot,
    classes: Sequence[ObjectView],
    now: datetime,
    *,
    pods: frozenset[str] = frozenset(),
    everywhere: bool = False,
    killed: frozenset[str] = frozenset(),
    unready: bool = True,
) -> Iterator[Candidate]:
    # Of devices of several classes, as partitions of its GPUs may be, pods of any of them can run there.
    having = [c for c in classes if node.name in seen.devices.get(c.name, ())]
    having = having or [c for c in classes if objects.selects(c, dict(node.labels))][:1]
    return nodes.candidates(
        node,
        seen.events,
        now,
        pods=pods,
        resource=_resource(node, classes),
        tolerations=tuple(t for c in having for t in objects.tolerations(c)) if having else None,
        everywhere=everywhere,
        killed=killed,
        unready=unready,
    )


def _killed(seen: WhySnapshot, node: str, now: datetime) -> frozenset[str]:
    """Pods of a node whose engine a signal ended, without a word and below its own limit of memory."""
    return frozenset(
        pod.key
        for pod in seen.pods
        if pod.node == node and any(c.reason == faults.ENGINE_STOPPED for c in pods.candidates(pod, seen.events, now))
    )


def _out(node: WhyNode, seen: WhySnapshot, classes: Sequence[ObjectView], now: datetime) -> bool:
    """Whether nothing can be placed on a node."""
    return any(c.state == "fault" or c.reason in _CLOSED for c in _of_node(node, seen, classes, now))


def _resource(node: WhyNode, classes: Iterable[ObjectView]) -> str | None:
    chosen = next((c for c in classes if objects.selects(c, dict(node.labels))), None)
    if chosen is None or "device" in chosen.spec:
        return None
    return objects.resource_of(chosen)


def _quarantines(seen: WhySnapshot, now: datetime) -> Iterator[Candidate]:
    """GPUs of the classes that are out of use. A replica that is still on one is being replaced."""
    used: dict[str, list[WhyPod]] = {}
    for pod in seen.pods:
        used.setdefault(pod.node or "", []).append(pod)
    shown = {node.name for node in seen.nodes} if seen.kind == "node" else None
    for view in (seen.subject, *seen.related):
        if view is None or view.kind != "class":
            continue
        for each in quarantines.of_class(view):
            if shown is not None and each.node not in shown:
                continue
            there = used.get(each.node, ()) if seen.kind in ("pod", "model") else ()
            here, perhaps = quarantines.having(each.device, there)
            if seen.kind == "pod" and not here and not perhaps:
                continue
            yield quarantines.candidate(view, each, here, now, perhaps=perhaps)


def _stays(message: str, there: Iterable[WhyPod]) -> State | None:
    """What it is to these pods that GPUs stay in use which should not: a fault to one that has them, a note where
    nobody knows; None: nothing."""
    known = perhaps = False
    for device, node in _STAYS.findall(message):
        having = quarantines.having(device, (pod for pod in there if pod.node == node))
        known, perhaps = known or bool(having[0]), perhaps or bool(having[1])
    return "fault" if known else "note" if perhaps else None


def _targets(seen: WhySnapshot, now: datetime) -> Iterator[Candidate]:
    """Models and adapters that a Tenant may use, or that a route leads to, and that do not serve."""
    if seen.kind not in _SEVERAL:
        return
    broken = [
        (view, ready)
        for view in seen.related
        for ready in view.conditions
        if view.kind in ("model", "adapter") and ready.type == reasons.READY and ready.status != "True"
    ]
    for view, ready in broken[:_MOST_TARGETS]:
        text = f"{ready.reason}: {texts.brief(ready.message)}"
        serving = objects.ready_replicas(view)
        does = f"serves with {count(serving, 'replica')}, but not as specified" if serving else "does not serve"
        yield Candidate(
            faults.TARGET_NOT_SERVING,
            f"{view.text} {does}: {text}",
            Level.OBJECT,
            (Evidence(text, f"Ready of {view.text}", age(now, ready.since)),),
            about=view.text,
            do=f"Run `shoal why {view.kind}/{view.name} -n {view.namespace}`.",
        )
    if further := [view.text for view, _ in broken[_MOST_TARGETS:]]:
        text = f"{len(further)} more do not serve, or not as specified"
        proof = Evidence(texts.shorten(", ".join(further)), "their conditions Ready", None)
        yield Candidate(faults.TARGET_NOT_SERVING, text, Level.OBJECT, (proof,))


_MOST_TARGETS: Final = 10
"""Models and adapters of a Tenant or route with a cause of their own."""


def _no_pods(seen: WhySnapshot, now: datetime) -> Iterator[Candidate]:
    """A Model that was placed, whose pods nobody makes and nobody refuses."""
    subject = seen.subject
    if seen.kind != "model" or subject is None or seen.pods or any("pods" in each.what for each in seen.unread):
        return
    known = {c.type: c for c in subject.conditions}
    placed, ready, scaling = (known.get(t) for t in (reasons.PLACED, reasons.READY, reasons.SCALING_ACTIVE))
    if scaling is not None and scaling.status == "False":
        return  # nobody asks for replicas: its driver is away
    if placed is None or placed.status != "True" or ready is None or ready.reason != reasons.STARTING:
        return
    waited = age(now, placed.since)
    if waited is not None and waited > _NO_POD_SECONDS:
        text = f"{subject.text} was placed {waited} s ago, and has no pod"
        yield Candidate(
            faults.PODS_NOT_MADE, text, Level.POD, (Evidence("no pods", subject.text, waited),), everywhere=True
        )


_NO_POD_SECONDS: Final = 120


def _jobs(seen: WhySnapshot, now: datetime) -> Iterator[Candidate]:
    """Why the Job that reads a source has no pod. The API server tells it the Job's events only."""
    said = seen.subject.conditions if seen.subject is not None else ()
    waits = {
        name
        for c in said
        if c.reason == reasons.READING_ARTIFACT or (c.reason == reasons.STAGE_FAILED and _TOO_LONG in c.message)
        for name in _JOB.findall(c.message)
    }
    for event in seen.events:
        if event.kind != "Job" or event.name not in waits or event.reason != "FailedCreate":
            continue
        phrase = texts.admission(event.message)
        text = (
            f"Job {event.namespace}/{event.name}, which reads the source, gets no pod: {texts.shorten(event.message)}"
        )
        proof = Evidence(
            texts.shorten(event.message), f"event of Job {event.namespace}/{event.name}", age(now, event.at)
        )
        reason = phrase.reason if phrase is not None else reasons.PODS_REFUSED
        yield Candidate(reason, text, Level.POD, (proof,), everywhere=True)


def _replica_sets(seen: WhySnapshot, now: datetime) -> Iterator[Candidate]:
    """Why a Model that starts has no pod: the API server tells it its ReplicaSets' events before the operator knows."""
    model = seen.subject
    if seen.kind != "model" or model is None or seen.pods:
        return
    ready = next((c for c in model.conditions if c.type == reasons.READY), None)
    if ready is None or ready.reason != reasons.STARTING:
        return
    mine = _deployments(model)
    for event in seen.events:
        if event.kind != "ReplicaSet" or event.reason != "FailedCreate" or event.namespace != model.namespace:
            continue
        if event.name.rpartition("-")[0] not in mine if mine else not event.name.startswith(f"{model.name}-"):
            continue
        seconds = age(now, event.at)
        if seconds is None or seconds > nodes.EVENT_SECONDS:
            continue
        said, phrase = texts.shorten(event.message), texts.admission(event.message)
        yield Candidate(
            phrase.reason if phrase is not None else reasons.PODS_REFUSED,
            f"pods of {model.text} are not created: {said}",
            Level.POD,
            (Evidence(said, f"event of ReplicaSet {event.namespace}/{event.name}", seconds),),
            everywhere=True,
        )


def _deployments(model: ObjectView) -> set[str]:
    """Names of a Model's Deployments."""
    variants: list[dict[str, object]] = [*(model.status.get("variants") or []), *(model.spec.get("variants") or [])]
    return {children.deployment(model.name, str(v["class"])) for v in variants if v.get("class")}


def _claims(seen: WhySnapshot, now: datetime) -> Iterator[Candidate]:
    """Claims without a volume that pods wait for, or a Model's source. Their events say why, if a provisioner tries."""
    waiting: dict[str, set[str]] = {}
    for pod in seen.pods:
        for name in pod.claims if not pod.ready else ():
            waiting.setdefault(f"{pod.namespace}/{name}", set()).add(pod.key)
    claim = seen.claim
    if claim is not None and claim.phase == "Pending":
        affected = frozenset(waiting.setdefault(claim.key, set()))
        text = f"claim {claim.key} of StorageClass {claim.storage_class or '(none)'} has no volume"
        proof = Evidence("phase Pending", f"PersistentVolumeClaim {claim.key}", age(now, claim.created))
        yield Candidate(faults.VOLUME_UNBOUND, text, Level.POD, (proof,), affected, everywhere=not affected)
    for event in seen.events:
        seconds = age(now, event.at)
        key = f"{event.namespace}/{event.name}"
        unbound = event.kind == "PersistentVolumeClaim" and event.reason in ("ProvisioningFailed", "FailedBinding")
        if not unbound or key not in waiting or seconds is None or seconds > nodes.EVENT_SECONDS:
            continue
        said = texts.shorten(event.message)
        proof = Evidence(f"{event.reason}: {said}", f"event of claim {key}", seconds)
        affected = frozenset(waiting[key])
        text = f"claim {key} has no volume: {said}"
        yield Candidate(faults.VOLUME_UNBOUND, text, Level.NODE, (proof,), affected, everywhere=not affected)


def _autoscalers(seen: WhySnapshot, now: datetime) -> Iterator[Candidate]:
    """Autoscalers of others on the Model's Deployments: Shoal undoes what they write, and they write it again."""
    model = seen.subject if seen.kind == "model" else None
    if model is None:
        return
    mine = _deployments(model)
    for each in seen.autoscalers:
        if each.namespace == model.namespace and each.deployment in mine:
            where = f"HorizontalPodAutoscaler {each.namespace}/{each.name}"
            yield Candidate(
                reasons.OTHER_AUTOSCALER,
                f"{where} scales Deployment {each.deployment} of {model.text} too: each undoes what the other writes",
                Level.OBJECT,
                (Evidence(f"scaleTargetRef is Deployment {each.deployment}", where, age(now, each.since)),),
                aside=True,
            )


_STAYS: Final = re.compile(r"(?:\bdevice (\S{1,512}) of )?\bnode (\S{1,253}) stays in use\b")
_JOB: Final = re.compile(r"\bJob (?:[a-z0-9.-]{1,63}/)?([a-z0-9][a-z0-9.-]{0,252})")
_TOO_LONG: Final = "DeadlineExceeded"
"""Of Kubernetes: a Job that was not done in its time, which one without a pod never is."""


def _gateways(seen: WhySnapshot, now: datetime) -> Iterator[Candidate]:
    """Without a ready gateway no request reaches anything. What its pods show explains it."""
    if seen.gateways is None or any(pod.ready for pod in seen.gateways):
        return
    there = [pod for pod in seen.gateways if not pod.deleting]
    text = f"none of {len(there)} gateways is ready" if there else "there is no gateway"
    row = advice(faults.GATEWAYS_NOT_READY)
    # Beside serving: replicas start and load without gateways.
    found = [c for pod in there for c in pods.candidates(pod, seen.events, now) if c.state == "fault"]
    for each in found:
        yield replace(each, aside=True, consequences=(f"{row.layer.label} {faults.GATEWAYS_NOT_READY}: {text}",))
    if not found:
        missed = sorted({part for pod in there for part in pod.not_ready})
        said = Evidence(f"not ready: {', '.join(missed)}", "/readyz of the gateways", None)
        proof = Evidence(f"0 of {len(there)} pods ready", "pods of the gateways", None)
        reason = faults.SPOOL_FULL if SPOOL in missed else faults.GATEWAYS_NOT_READY
        why = f" ({', '.join(missed)})" if missed else ""
        named = reason != faults.GATEWAYS_NOT_READY
        more = (f"{row.layer.label} {faults.GATEWAYS_NOT_READY}: {text}",) if named else ()
        yield Candidate(
            reason,
            f"{text}{why}: no request is taken",
            Level.OBJECT,
            (proof, said) if missed else (proof,),
            consequences=more,
            aside=True,
        )


SPOOL: Final = "spool"
"""Name of this part in /readyz of a gateway."""


def _operator(seen: WhySnapshot, now: datetime) -> Iterator[Candidate]:
    if seen.lease is None:
        return
    late = age(now, seen.lease.renewed)
    if seen.lease.holder and late is not None and late <= 2 * max(1, seen.lease.seconds):
        return
    holder = f"{seen.lease.holder} renewed it last" if seen.lease.holder else "nobody holds it"
    yield Candidate(
        faults.OPERATOR_AWAY,
        f"no operator leads: {holder}",
        Level.OBJECT,
        (Evidence(f"the Lease shoal-operator: {holder}", "Lease shoal-operator", late),),
    )


def _decision(seen: WhySnapshot, now: datetime) -> Iterator[Candidate]:
    """Signals that the operator does not get, and what the last decision could not do."""
    decision = seen.decision
    if decision is None:
        return
    if decision.stale:
        text = f"no signals from {', '.join(decision.stale[:4])}: nothing scales down"
        proof = Evidence(text, "the operator's decision", age(now, decision.at))
        yield Candidate(reasons.SIGNALS_STALE, text, Level.OBJECT, (proof,), aside=True)
    row = advice(decision.reason)
    if row.state == "fault" and faults.layer_of(decision.reason) is not None:
        proof = Evidence(f"{decision.reason}: {texts.shorten(decision.message)}", "the operator's decision",
                         age(now, decision.at))  # fmt: skip
        tried = (f"not done: {texts.shorten(decision.alternative)}",) if decision.alternative else ()
        yield Candidate(decision.reason, texts.shorten(decision.message), Level.OBJECT, (proof,), tried=tried)


def _cause(candidate: Candidate, explained: Iterable[Candidate]) -> LayerCause:
    """With all texts bounded: many of them were written by others."""
    row = advice(candidate.reason)
    listed = sorted(explained, key=lambda c: c.rank)
    names = (f"{advice(c.reason).layer.label} {c.reason}: {c.message}" for c in listed)
    tried = (*candidate.tried, *(t for c in listed for t in c.tried))
    return LayerCause(
        candidate.reason,
        row.layer,
        candidate.state,
        texts.shorten(candidate.message, _LONGEST_MESSAGE),
        candidate.do or row.do,
        tuple(
            replace(e, what=texts.shorten(e.what, _LONGEST), where=texts.shorten(e.where, _LONGEST))
            for e in candidate.evidence
        ),
        tuple(dict.fromkeys(texts.shorten(t, _LONGEST) for t in tried)),
        tuple(dict.fromkeys(texts.shorten(t, _LONGEST) for t in (*names, *candidate.consequences))),
    )


def _state(found: Sequence[LayerCause], seen: WhySnapshot) -> Literal["ok", "waiting", "failing", "unknown"]:
    states = {cause.state for cause in found}
    if "fault" in states:
        return "failing"
    if "waits" in states:
        return "waiting"
    return "unknown" if seen.unread else "ok"
