"""Clusters with one fault, as an API server shows them."""

from datetime import UTC, datetime, timedelta
from typing import Any

from shoal.core.layers.types import DecisionView, ExplainedKind, ObjectView, Unread, WhyNode, WhySnapshot
from shoal.kube import layerviews

NOW = datetime(2026, 11, 26, 12, 0, 0, tzinfo=UTC)
GPU = "nvidia.com/gpu"
CLASS_LABELS = {"nvidia.com/gpu.product": "NVIDIA-H100"}
Json = dict[str, Any]


def at(seconds_ago: float) -> str:
    return (NOW - timedelta(seconds=seconds_ago)).isoformat().replace("+00:00", "Z")


def condition(type: str, status: str, reason: str, message: str = "", ago: float = 60) -> Json:
    return {"type": type, "status": status, "reason": reason, "message": message, "lastTransitionTime": at(ago)}


def model(*conditions: Json, name: str = "llama", **more: Any) -> ObjectView:
    raw = {
        "metadata": {"namespace": "chat", "name": name, "generation": 1},
        "spec": {"source": {"uri": "hf://owner/llama"}},
        "status": {"observedGeneration": 1, "conditions": list(conditions), **more},
    }
    return layerviews.shoal_object("model", raw)


def not_ready(reason: str, message: str, ago: float = 60) -> ObjectView:
    return model(condition("Ready", "False", reason, message, ago))


def tenant(*conditions: Json, spec: Json | None = None) -> ObjectView:
    raw = {
        "metadata": {"name": "acme", "generation": 1},
        "spec": {"models": [{"namespace": "chat", "name": "llama"}]} if spec is None else spec,
        "status": {"observedGeneration": 1, "conditions": list(conditions)},
    }
    return layerviews.shoal_object("tenant", raw)


def adapter(*conditions: Json) -> ObjectView:
    raw = {
        "metadata": {"namespace": "chat", "name": "poet", "generation": 1},
        "spec": {"poolRef": {"name": "llama"}},
        "status": {"observedGeneration": 1, "conditions": list(conditions)},
    }
    return layerviews.shoal_object("adapter", raw)


def gpu_class(*conditions: Json) -> ObjectView:
    raw = {
        "metadata": {"name": "h100-80gb", "generation": 1},
        "spec": {"nodeSelector": CLASS_LABELS, "resourceName": GPU},
        "status": {"observedGeneration": 1, "conditions": list(conditions)},
    }
    return layerviews.shoal_object("class", raw)


def engine(**status: Any) -> Json:
    """The status of an engine's container: `waiting`, `running`, `ended` (state or last state), `restarts`."""
    state: Json = {}
    if "waiting" in status:
        reason, message = status["waiting"]
        state = {"waiting": {"reason": reason, "message": message}}
    elif status.get("running"):
        state = {"running": {}}
    found: Json = {"name": status.get("name", "engine"), "ready": False, "restartCount": status.get("restarts", 0)}
    if "ended" in status:
        code, reason, message = status["ended"]
        terminated = {"exitCode": code, "reason": reason, "message": message, "finishedAt": at(status.get("ago", 30))}
        if state:
            found["lastState"] = {"terminated": terminated}
        else:
            state = {"terminated": terminated}
    return found | {"state": state} | status.get("more", {})


def crashed(message: str, code: int = 1, *, reason: str = "Error", restarts: int = 3, **more: Any) -> Json:
    return engine(
        waiting=("CrashLoopBackOff", "back-off 40s restarting failed container"),
        ended=(code, reason, message),
        restarts=restarts,
        **more,
    )


def stage(message: str, code: int = 1) -> Json:
    return crashed(message, code, name="stage")


def pod(*containers: Json, name: str = "llama-1", node: str | None = "gpu-1", **status: Any) -> Json:
    stages = [c for c in containers if c["name"] == "stage"]
    return {
        "metadata": {
            "namespace": "chat",
            "name": name,
            "creationTimestamp": at(600),
            "labels": {
                "shoal.dev/model": "llama",
                "shoal.dev/gpu-class": "h100-80gb",
                "app.kubernetes.io/component": "engine",
            },
        },
        "spec": {"nodeName": node} if node else {},
        "status": {
            "phase": "Pending",
            "conditions": [condition("Ready", "False", "ContainersNotReady", ago=300)],
            "initContainerStatuses": stages,
            "containerStatuses": [c for c in containers if c["name"] != "stage"],
            **status,
        },
    }


def gateway(name: str = "shoal-gateway-1", **status: Any) -> Json:
    """A pod of a gateway that is not ready."""
    found = pod(*([engine(name="gateway", **status)] if status else []), name=name, node="cpu-1")
    found["metadata"] |= {"namespace": "shoal-system", "labels": {"app.kubernetes.io/component": "gateway"}}
    return found


def ready_gateway(**more: Any) -> Json:
    found = gateway(running=True, conditions=[condition("Ready", "True", "")])
    found["metadata"]["labels"] |= {"app.kubernetes.io/part-of": "shoal"}
    found["status"] |= {"podIP": "10.244.1.2", "conditions": [condition("Ready", "True", "")], **more}
    return found


def policy(namespace: str, name: str, **spec: Any) -> Json:
    """A NetworkPolicy."""
    return {"metadata": {"namespace": namespace, "name": name}, "spec": spec}


def pending(message: str, name: str = "llama-1") -> Json:
    waits = condition("PodScheduled", "False", "Unschedulable", message, ago=120)
    return pod(name=name, node=None, conditions=[waits])


def gated(queue: str = "serving") -> Json:
    """A pod that Kueue holds back."""
    text = "Scheduling is blocked due to non-empty scheduling gates"
    found = pod(node=None, conditions=[condition("PodScheduled", "False", "SchedulingGated", text, ago=120)])
    found["metadata"]["labels"] |= {"kueue.x-k8s.io/queue-name": queue, "kueue.x-k8s.io/managed": "true"}
    return found


def unclaimed(message: str | None = None, *, made: bool = False, waits: str | None = None, ago: float = 20) -> Json:
    """What is told of a pod whose ResourceClaim is to be made from a template: arguments of `seen`. `message`: of the
    event that says why it is not made; `made`: it was, later; `waits`: words of the scheduler."""
    found = pending(waits) if waits is not None else pod(node=None, conditions=[])
    found["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": "llama-h100-80gb-7c9"}]
    if made:
        found["status"]["resourceClaimStatuses"] = [{"name": "gpus", "resourceClaimName": "llama-1-gpus-x"}]
    said = f"PodResourceClaim gpus: create ResourceClaim : {message}"
    events = (event("Pod", "llama-1", "FailedResourceClaimCreation", said, ago),) if message is not None else ()
    return {"pods": (found,), "events": events}


def node(*conditions: Json, name: str = "gpu-1", gpus: int = 8, usable: int | None = None, **more: Any) -> Json:
    usable = gpus if usable is None else usable
    extra: dict[str, tuple[int, int]] = more.pop("devices", {})
    kept = [] if any(c["type"] == "Ready" for c in conditions) else [condition("Ready", "True", "KubeletReady")]
    return {
        "metadata": {"name": name, "labels": CLASS_LABELS},
        "spec": more,
        "status": {
            "conditions": [*kept, *conditions],
            "capacity": ({GPU: str(gpus)} if gpus else {}) | {k: str(v[0]) for k, v in extra.items()},
            "allocatable": ({GPU: str(usable)} if gpus else {}) | {k: str(v[1]) for k, v in extra.items()},
        },
    }


def event(kind: str, name: str, reason: str, note: str, ago: float = 20) -> Json:
    return {
        "regarding": {"kind": kind, "name": name, **({"namespace": "chat"} if kind != "Node" else {})},
        "type": "Warning",
        "reason": reason,
        "note": note,
        "eventTime": at(ago),
        "reportingController": "kubelet",
    }


def seen(
    subject: ObjectView | None = None,
    *,
    kind: ExplainedKind = "model",
    pods: tuple[Json, ...] = (),
    nodes: tuple[Json, ...] = (),
    events: tuple[Json, ...] = (),
    related: tuple[ObjectView, ...] = (),
    gateways: tuple[Json, ...] | None = None,
    lease_ago: float | None = 2,
    decision: DecisionView | None = None,
    unread: tuple[Unread, ...] = (),
    policies: tuple[Json, ...] = (),
    removed: tuple[str, ...] = (),
) -> WhySnapshot:
    """What `shoal why` reads. `lease_ago`: seconds since the operator renewed its Lease; None: nobody holds it.
    `removed`: nodes that pods are bound to and that do not exist."""
    lease = {
        "spec": {"holderIdentity": "shoal-operator-1" if lease_ago is not None else "", "leaseDurationSeconds": 15}
    }
    if lease_ago is not None:
        lease["spec"]["renewTime"] = at(lease_ago)
    return WhySnapshot(
        kind=subject.kind if subject is not None else kind,
        key=subject.key if subject is not None else "chat/llama-1",
        subject=subject,
        related=related,
        pods=tuple(layerviews.pod(each) for each in pods),
        nodes=(
            *(layerviews.node(each) for each in nodes),
            *(WhyNode(name, (), False, {}, {}, {}, gone=True) for name in removed),
        ),
        events=tuple(layerviews.event(each) for each in events),
        gateways=None if gateways is None else tuple(layerviews.pod(each) for each in gateways),
        policies=tuple(layerviews.policy(each) for each in policies),
        lease=layerviews.lease(lease),
        decision=decision,
        unread=unread,
    )
