"""From raw objects to what decisions know: small enough that a large cluster fits into memory."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, Final, Generic, TypeVar, cast

import orjson
from pydantic import ValidationError

from shoal.api import names
from shoal.api.gpuclass import devices_of
from shoal.api.meta import CustomResource, JsonObject, ObjectMeta
from shoal.core import facts, quantity
from shoal.core.keda import ScaledObject
from shoal.core.ownership import Link, link
from shoal.core.placement.autoscalerevents import PodEvent
from shoal.core.podquota import AdmissionCheck, ProvisioningRequest, Workload

K = TypeVar("K", bound=CustomResource)

_JOB_LABEL: Final = "batch.kubernetes.io/job-name"
_TEMPLATE_LABEL: Final = "pod-template-hash"
_PROCESSES: Final = (names.COMPONENT_GATEWAY, names.COMPONENT_OPERATOR, names.COMPONENT_LEDGER)
_READERS: Final = (names.COMPONENT_FACTS, names.COMPONENT_ADAPTER_FACTS, names.COMPONENT_PREFETCH)
_DEVICES: Final = re.compile(r"[1-9][0-9]{0,2}")
_SAME_MOMENT_SECONDS: Final = 3.0
"""Between the times that a kubelet writes when it first sees a pod."""
LONGEST_MESSAGE: Final = 4096
"""Of a container's termination message: a kubelet's own limit, in bytes."""
MOST_DEVICES: Final = 4096
"""Of one resource on one node, also where each GPU is shared by many: placement has tables of that size."""
_MOST_GATES: Final = 16
_MOST_OWNERS: Final = 64
_OF_KUBELETS: Final = ("Ready", "MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")
_MOST_CONDITIONS: Final = 64
_MOST_HELD: Final = 64
"""Devices of one pod that are read."""
_MOST_CLAIMS: Final = 64
"""ResourceClaims of one pod that are read."""
_LONGEST_NAME: Final = 253
_LONGEST_DEVICE: Final = 512
_LONGEST_SAYING: Final = 512
_LONGEST_IMAGE: Final = 512
_LONGEST_DIGEST: Final = 71
_SORTED: Final = orjson.OPT_SORT_KEYS
_WEIGHTS: Final = (
    names.STAGE_URI_ENV,
    names.STAGE_DIGEST_ENV,
    names.STAGE_REVISION_ENV,
    names.STAGE_MANIFEST_ENV,
)
_NEVER_COMPARED: Final = ("managedFields", "resourceVersion", "generation")


@dataclass(frozen=True, slots=True)
class Custom(Generic[K]):
    """One of Shoal's own objects. `object` is None when what is stored does not pass this version's validation."""

    metadata: ObjectMeta
    object: K | None
    error: str
    status: JsonObject
    """As stored: what a new status is compared with."""


@dataclass(frozen=True, slots=True)
class Child:
    """An object that Shoal made, kept as bytes: it is decoded only to be compared with what it should be."""

    namespace: str
    name: str
    uid: str
    model_uid: str
    raw: bytes
    deployment: facts.Deployment | None = None
    link: Link | None = None
    """Of a Deployment: its place in the chain from pods to Models."""
    scaled: ScaledObject | None = None

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    def decode(self) -> JsonObject:
        return orjson.loads(self.raw)


def custom(kind: type[K], raw: JsonObject) -> Custom[K]:
    metadata = ObjectMeta.model_validate(raw["metadata"])
    status: JsonObject = _map(raw, "status")
    try:
        return Custom(metadata, kind.read(raw), "", status)
    except ValidationError as error:
        return Custom(metadata, None, problems_of(error), status)


def problems_of(error: ValidationError) -> str:
    """The first few problems, each shortened, since they contain names and values that users wrote."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[:5]
    told = (f"{'.'.join(str(part) for part in e['loc'])[:128]}: {e['msg'][:256]}" for e in found)
    more = f"; and {error.error_count() - 5} more" if error.error_count() > 5 else ""
    return "; ".join(told) + more


def node(raw: JsonObject) -> facts.Node:
    spec, status = _map(raw, "spec"), _map(raw, "status")
    return facts.Node(
        name=raw["metadata"]["name"],
        labels={key: text for key, text in _map(raw["metadata"], "labels").items() if isinstance(text, str)},
        ready=_condition(status, "Ready").get("status") == "True",
        unschedulable=bool(spec.get("unschedulable")),
        taints=tuple(
            facts.Taint(t.get("key", ""), t.get("value", ""), t.get("effect", "")) for t in _seq(spec, "taints")
        ),
        capacity=_devices(status.get("capacity")),
        allocatable=_devices(status.get("allocatable")),
        conditions=tuple(_node_conditions(status)),
        created=_time(raw["metadata"].get("creationTimestamp")),
        keeps=_kept(
            _map(raw["metadata"], "annotations"), (names.ANNOTATION_NOT_DISRUPTED, names.ANNOTATION_NOT_REMOVED)
        ),
    )


def _kept(annotations: Mapping[str, Any], forbid: Iterable[str]) -> str:
    """The first annotation of those that forbid a disruption unless they say "false"; "": there is none."""
    return next((key for key in forbid if annotations.get(key, "false") not in ("false", "")), "")


def _node_conditions(status: JsonObject) -> Iterator[facts.NodeCondition]:
    """Without the kubelet's own, and without the times of heartbeats, which would make every one of them a change."""
    others = (c for c in _seq(status, "conditions") if c.get("type") not in _OF_KUBELETS)
    for each in islice(others, _MOST_CONDITIONS):
        yield facts.NodeCondition(
            str(each.get("type"))[:_LONGEST_NAME],
            str(each.get("status"))[:_LONGEST_NAME],
            str(each.get("reason", ""))[:_LONGEST_NAME],
            str(each.get("message", ""))[:_LONGEST_SAYING],
        )


def pod(raw: JsonObject) -> facts.Pod | None:
    """Every pod that asks for an extended resource, engine pods, Shoal's own processes, and those that read a source's
    metadata; the others are of no interest."""
    metadata, spec, status = raw["metadata"], _map(raw, "spec"), _map(raw, "status")
    labels: Mapping[str, str] = _map(metadata, "labels")
    ours = labels.get(names.LABEL_COMPONENT) == names.COMPONENT_ENGINE
    model_uid = labels.get(names.LABEL_MODEL_UID) if ours else None
    requests = engine_requests(metadata, spec) if ours else pod_requests(spec)
    job = labels.get(_JOB_LABEL) if labels.get(names.LABEL_COMPONENT) in _READERS else None
    gateway = labels.get(names.LABEL_COMPONENT) == names.COMPONENT_GATEWAY
    process = labels.get(names.LABEL_COMPONENT) in _PROCESSES and labels.get(names.LABEL_PART_OF) == names.MANAGED_BY
    if model_uid is None and job is None and not gateway and not process and not requests:
        return None
    base = facts.Pod(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        node=spec.get("nodeName"),
        finished=status.get("phase") in ("Succeeded", "Failed"),
        deleting="deletionTimestamp" in metadata,
        ready=_condition(status, "Ready").get("status") == "True",
        requests=requests,
        model_uid=model_uid,
    )
    if model_uid is None and job is None and not gateway and not process:
        return base
    scheduled = _condition(status, "PodScheduled")
    waits = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    return facts.Pod(
        namespace=base.namespace,
        name=base.name,
        uid=base.uid,
        node=base.node,
        finished=base.finished,
        deleting=base.deleting,
        ready=base.ready,
        requests=requests,
        model_uid=model_uid,
        gpu_class=labels.get(names.LABEL_GPU_CLASS),
        install_key=_map(metadata, "annotations").get(names.ANNOTATION_INSTALL_KEY),
        created=_time(metadata.get("creationTimestamp")),
        unschedulable=str(scheduled.get("message", "")) if waits else None,
        gates=tuple(str(gate.get("name", "")) for gate in _seq(spec, "schedulingGates")[:_MOST_GATES]),
        queue=labels.get(names.LABEL_QUEUE),
        queue_managed=labels.get(names.LABEL_QUEUE_MANAGED) == "true",
        lacks_claim=lacks_claim(spec, status),
        scheduled=_time(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None,
        containers=tuple(
            _container(c) for c in [*_seq(status, "initContainerStatuses"), *_seq(status, "containerStatuses")]
        ),
        ip=status.get("podIP"),
        ready_since=_time(_condition(status, "Ready").get("lastTransitionTime")) if base.ready else None,
        devices=tuple(_held_devices(_seq(status, "containerStatuses"))),
        deletion_cost=_cost(_map(metadata, "annotations").get(names.ANNOTATION_DELETION_COST)),
        job=job,
        cache_claim=_cache_claim(spec),
        gateway=gateway,
        process=process,
        mtls=_map(metadata, "annotations").get(names.ANNOTATION_TRANSPORT) == names.TRANSPORT_MTLS,
        knows_role_keys=gateway and names.ANNOTATION_KEYS in _map(metadata, "annotations"),
        was_ready=_was_ready(status),
        engine=_engine_build(spec) if model_uid is not None and base.ready else None,
        template=str(labels.get(_TEMPLATE_LABEL, ""))[:_LONGEST_NAME] if ours else "",
        keeps=_pod_kept(_map(metadata, "annotations")) if ours else "",
    )


def lacks_claim(spec: JsonObject, status: JsonObject) -> bool:
    """Whether a ResourceClaim that a pod wants from a template is not made yet: its status names those that are."""
    made = {each.get("name") for each in _seq(status, "resourceClaimStatuses")[:_MOST_CLAIMS]}
    return any(
        each.get("resourceClaimTemplateName") and each.get("name") not in made
        for each in _seq(spec, "resourceClaims")[:_MOST_CLAIMS]
    )


def _pod_kept(annotations: Mapping[str, Any]) -> str:
    if annotations.get(names.ANNOTATION_SAFE_TO_EVICT) == "false":
        return names.ANNOTATION_SAFE_TO_EVICT
    return _kept(annotations, (names.ANNOTATION_NOT_DISRUPTED,))


def pod_event(raw: JsonObject) -> PodEvent:
    """An event of `events.k8s.io/v1`. Reporters that use the older API are in the deprecated fields."""
    controller = raw.get("reportingController") or _map(raw, "deprecatedSource").get("component")
    at = _map(raw, "series").get("lastObservedTime") or raw.get("deprecatedLastTimestamp") or raw.get("eventTime")
    return PodEvent(
        str(controller or ""),
        str(raw.get("note") or "")[:LONGEST_MESSAGE],
        _seen(at),
        str(raw.get("reason") or "")[:_LONGEST_NAME],
        _seen(raw.get("deprecatedFirstTimestamp") or raw.get("eventTime")),
        str(_map(raw, "regarding").get("name") or "")[:_LONGEST_NAME],
    )


def _seen(at: Any) -> datetime | None:
    try:
        return _time(at)
    except ValueError:
        return None  # users write events too, and the API server takes the year 0


def workload(raw: JsonObject) -> Workload:
    """Kueue's Workload of a pod."""
    owners = (o.get("uid") for o in _seq(raw["metadata"], "ownerReferences")[:_MOST_OWNERS] if o.get("kind") == "Pod")
    status = _map(raw, "status")
    evicted = _condition(status, "Evicted")
    return Workload(
        tuple(str(uid) for uid in owners),
        _conditions_said(status),
        uid=str(raw["metadata"].get("uid") or ""),
        checks=tuple(
            AdmissionCheck(
                str(c.get("name"))[:_LONGEST_NAME],
                str(c.get("state"))[:_LONGEST_NAME],
                str(c.get("message") or "")[:LONGEST_MESSAGE],
            )
            for c in _seq(status, "admissionChecks")[:_MOST_GATES]
        ),
        active=_map(raw, "spec").get("active") is not False,
        requeue_at=str(_map(status, "requeueState").get("requeueAt") or "")[:_LONGEST_NAME],
        inadmissible=_condition(status, "QuotaReserved").get("reason") == "Inadmissible",
        evicted_by=str(evicted.get("reason") or "")[:_LONGEST_NAME] if evicted.get("status") == "True" else "",
    )


def provisioning_request(raw: JsonObject) -> ProvisioningRequest:
    """The request for nodes that Kueue makes for a Workload."""
    metadata = raw["metadata"]
    owners = (o.get("uid") for o in _seq(metadata, "ownerReferences")[:_MOST_OWNERS] if o.get("kind") == "Workload")
    return ProvisioningRequest(
        key=f"{metadata['namespace']}/{metadata['name']}",
        workload=str(next(owners, "")),
        created=str(metadata.get("creationTimestamp") or ""),
        conditions=_conditions_said(_map(raw, "status")),
        failed=_moment(_condition(_map(raw, "status"), "Failed").get("lastTransitionTime")),
    )


def _conditions_said(status: JsonObject) -> dict[str, tuple[str, str]]:
    """Type -> (status, message)."""
    said = _seq(status, "conditions")[:_MOST_GATES]
    return {str(c.get("type")): (str(c.get("status")), str(c.get("message") or "")[:LONGEST_MESSAGE]) for c in said}


def job(raw: JsonObject) -> facts.MetadataJob:
    metadata, status = raw["metadata"], _map(raw, "status")
    failed = _condition(status, "Failed")
    over = failed.get("status") == "True"
    pool = _map(metadata, "labels").get(names.LABEL_POOL)
    return facts.MetadataJob(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        active=not over and _condition(status, "Complete").get("status") != "True",
        failed=f"{failed.get('reason', '')}: {failed.get('message', '')}" if over else None,
        deleting="deletionTimestamp" in metadata,
        created=_time(metadata.get("creationTimestamp")),
        reads=tuple(_map(metadata, "annotations").get(names.ANNOTATION_READS, "").split()),
        pool=f"{metadata['namespace']}/{pool}" if pool else None,
        node=_map(metadata, "annotations").get(names.ANNOTATION_NODE),
        model_uid=_map(metadata, "labels").get(names.LABEL_MODEL_UID),
    )


def pod_requests(spec: JsonObject) -> dict[str, int]:
    """Extended resources that a pod holds: the most of any init container or of all others together, as the scheduler
    counts; a native sidecar counts with the others."""
    together: dict[str, int] = {}
    largest: dict[str, int] = {}
    for container in _seq(spec, "containers"):
        for name, amount in _asked(container).items():
            together[name] = together.get(name, 0) + amount
    for container in _seq(spec, "initContainers"):
        for name, amount in _asked(container).items():
            if container.get("restartPolicy") == "Always":
                together[name] = together.get(name, 0) + amount
            else:
                largest[name] = max(largest.get(name, 0), amount)
    found = {name: max(together.get(name, 0), largest.get(name, 0)) for name in together | largest}
    return {name: amount for name, amount in found.items() if amount}


def engine_requests(metadata: Mapping[str, Any], spec: JsonObject) -> dict[str, int]:
    """What an engine pod holds once it is bound: an extended resource, or devices of its class by their number."""
    gpu_class = _map(metadata, "labels").get(names.LABEL_GPU_CLASS)
    devices = _map(metadata, "annotations").get(names.ANNOTATION_DEVICES)
    if not gpu_class or not isinstance(devices, str) or not _DEVICES.fullmatch(devices):
        return pod_requests(spec)
    return {devices_of(gpu_class): int(devices)}


def deployment(raw: JsonObject) -> Child | None:
    metadata, spec, status = raw["metadata"], _map(raw, "spec"), _map(raw, "status")
    labels: Mapping[str, str] = _map(metadata, "labels")
    kept = child(raw)
    if kept is None or names.LABEL_GPU_CLASS not in labels:
        return kept
    template = _map(spec, "template")
    gpus = engine_requests(_map(template, "metadata"), _map(template, "spec"))
    resource, amount = next(iter(gpus.items()), ("", 0))
    failure = _condition(status, "ReplicaFailure")
    return Child(
        namespace=kept.namespace,
        name=kept.name,
        uid=kept.uid,
        model_uid=kept.model_uid,
        raw=kept.raw,
        link=link(raw),
        deployment=facts.Deployment(
            namespace=kept.namespace,
            name=kept.name,
            uid=kept.uid,
            resource_version=metadata.get("resourceVersion", ""),
            model_uid=kept.model_uid,
            gpu_class=labels[names.LABEL_GPU_CLASS],
            gpus_per_replica=amount,
            resource_name=resource,
            generation=metadata.get("generation") or 0,
            observed_generation=status.get("observedGeneration") or 0,
            replicas=spec.get("replicas", 1),
            replicas_managers=frozenset(_owners(metadata, "replicas")),
            updated=status.get("updatedReplicas") or 0,
            ready=status.get("readyReplicas") or 0,
            total=status.get("replicas") or 0,
            refused=str(failure.get("message")) if failure.get("status") == "True" else None,
            deleting="deletionTimestamp" in metadata,
            surges=_surges(spec),
            replacing=_replacing(metadata, spec, status),
            overdue=_overdue(status),
        ),
    )


def child(raw: JsonObject) -> Child | None:
    """A child by its labels and its owner; a copy of a child has the labels only."""
    metadata = raw["metadata"]
    owner = next((o for o in _seq(metadata, "ownerReferences") if o.get("controller")), None)
    if owner is None:
        return None
    slim = raw | {"metadata": {k: v for k, v in metadata.items() if k not in _NEVER_COMPARED}}
    slim.pop("status", None)
    return Child(metadata["namespace"], metadata["name"], metadata["uid"], owner["uid"], orjson.dumps(slim))


def _owners(metadata: JsonObject, spec_field: str) -> set[str]:
    return {
        entry.get("manager", "")
        for entry in _seq(metadata, "managedFields")
        if f"f:{spec_field}" in _map(_map(entry, "fieldsV1"), "f:spec")
    }


def _condition(status: JsonObject, kind: str) -> JsonObject:
    found = [c for c in _seq(status, "conditions") if c.get("type") == kind]
    return found[0] if found else {}


def _was_ready(status: JsonObject) -> bool:
    """A pod that was never Ready says so since its kubelet knows it. One whose condition turned later was Ready."""
    ready = _condition(status, "Ready")
    if ready.get("status") == "True":
        return True
    turned, started = _time(ready.get("lastTransitionTime")), _time(status.get("startTime"))
    return turned is not None and started is not None and (turned - started).total_seconds() > _SAME_MOMENT_SECONDS


def _surges(spec: JsonObject) -> bool:
    return _map(_map(spec, "strategy"), "rollingUpdate").get("maxSurge") not in (0, "0", "0%")


def _replacing(metadata: JsonObject, spec: JsonObject, status: JsonObject) -> bool:
    """Once complete, a Deployment says so until its next revision, however it is scaled meanwhile."""
    revision = str(_map(metadata, "annotations").get("deployment.kubernetes.io/revision", ""))
    later = revision.isdecimal() and int(revision) > 1
    progressing = _condition(status, "Progressing")
    return later and bool(spec.get("replicas")) and progressing.get("reason") != "NewReplicaSetAvailable"


def _overdue(status: JsonObject) -> str | None:
    progressing = _condition(status, "Progressing")
    if progressing.get("reason") != "ProgressDeadlineExceeded":
        return None
    return str(progressing.get("message") or "no progress within the deadline")


def _extended(amounts: Mapping[str, Any] | None) -> dict[str, int]:
    return {name: quantity.count(amount) for name, amount in (amounts or {}).items() if "/" in name}


def _devices(amounts: Mapping[str, Any] | None) -> dict[str, int]:
    """What a node says that it has. A number that no machine has is the most that one may have."""
    return {name: min(count, MOST_DEVICES) for name, count in _extended(amounts).items()}


def _asked(container: JsonObject) -> dict[str, int]:
    resources = _map(container, "resources")
    return _extended(_map(resources, "limits") | _map(resources, "requests"))


def _container(status: JsonObject) -> facts.Container:
    state, last = _map(status, "state"), _map(status, "lastState")
    waiting = _map(state, "waiting")
    ended = _map(state, "terminated") or _map(last, "terminated")
    return facts.Container(
        name=status.get("name", ""),
        ready=bool(status.get("ready")),
        restarts=status.get("restartCount") or 0,
        waiting_reason=waiting.get("reason"),
        waiting_message=_text(waiting.get("message")),
        exit_code=ended.get("exitCode"),
        exit_reason=ended.get("reason"),
        exit_message=_text(ended.get("message")),
        running="running" in state,
        started=_moment(_map(state, "running").get("startedAt") or ended.get("startedAt")),
        ended=_moment(ended.get("finishedAt")),
    )


def _engine_build(spec: JsonObject) -> facts.EngineBuild | None:
    container = next((c for c in _seq(spec, "containers") if c.get("name") == names.CONTAINER_ENGINE), None)
    if container is None:
        return None
    image = str(container.get("image", ""))[:_LONGEST_IMAGE]
    # Of the weights that this pod has: its Model may name others already.
    stage = next((c for c in _seq(spec, "initContainers") if c.get("name") == names.CONTAINER_STAGE), None)
    given = {str(each.get("name")): each.get("value") for each in (_seq(stage, "env") if stage else ())}
    source = {name: given.get(name) for name in _WEIGHTS}
    folder = str(source[names.STAGE_URI_ENV]).startswith("file://")
    digests = [each for name in (names.STAGE_MANIFEST_ENV, names.STAGE_DIGEST_ENV) if (each := source[name])]
    engine = [container.get(key) for key in ("command", "args", "env")]
    what = [image, source, stage.get("image") if stage and folder else None, *engine]
    digest = hashlib.sha256(orjson.dumps(what, option=_SORTED)).hexdigest()[:16]
    weights = str(digests[0])[:_LONGEST_DIGEST] if digests else None
    return facts.EngineBuild(image, weights, bool(digests) or folder, digest)


def _text(message: object) -> str | None:
    """Kubelets leave no more, and who may write a pod's status could."""
    return message[:LONGEST_MESSAGE] if isinstance(message, str) else None


def _cache_claim(spec: JsonObject) -> str | None:
    volume = next((v for v in _seq(spec, "volumes") if v.get("name") == "cache"), None)
    return _map(volume, "persistentVolumeClaim").get("claimName") if volume else None


def _cost(text: str | None) -> int:
    try:
        return int(text or 0)
    except ValueError:
        return 0


def _held_devices(containers: Iterable[JsonObject]) -> Iterator[facts.HeldDevice]:
    """Kubelets with the feature ResourceHealthStatus say it."""
    listed = (
        device
        for container in containers
        for resource in _seq(container, "allocatedResourcesStatus")
        for device in _seq(resource, "resources")
    )
    for each in islice(listed, _MOST_HELD):
        yield facts.HeldDevice(str(each.get("resourceID", ""))[:_LONGEST_DEVICE], each.get("health") != "Unhealthy")


def _moment(text: object) -> datetime | None:
    """A time that any controller may have written: another form than the API's is unknown."""
    try:
        found = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return found if found is not None and found.tzinfo is not None else None


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _map(obj: Mapping[str, Any], field: str) -> JsonObject:
    """A field that is an object, or an empty one: absent and null are the same in the API."""
    value: Any = obj.get(field)
    return cast("JsonObject", value) if isinstance(value, dict) else {}


def _seq(obj: Mapping[str, Any], field: str) -> list[JsonObject]:
    value: Any = obj.get(field)
    return cast("list[JsonObject]", value) if isinstance(value, list) else []
