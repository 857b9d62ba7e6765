"""From raw objects to what `core/doctor` reads."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from shoal.api import names
from shoal.api.meta import GROUP, VERSION, CustomResource, JsonObject
from shoal.api.schema import root_schema
from shoal.core import quantity
from shoal.core.doctor.kinds import fields
from shoal.core.doctor.types import KindState, NodeLease, ServiceState, WorkloadState
from shoal.kube.layerviews import lease as lease_view

SERVICE_LABEL: Final = "kubernetes.io/service-name"
"""On EndpointSlices."""


def workload(raw: JsonObject) -> WorkloadState:
    """A Deployment, StatefulSet or DaemonSet."""
    metadata, spec, status = _map(raw, "metadata"), _map(raw, "spec"), _map(raw, "status")
    labels = _map(metadata, "labels")
    pod = _map(_map(spec, "template"), "spec")
    daemons = raw.get("kind") == "DaemonSet"
    wanted = status.get("desiredNumberScheduled") if daemons else spec.get("replicas", 1)
    ready = status.get("numberReady") if daemons else status.get("readyReplicas")
    updated = status.get("updatedNumberScheduled") if daemons else status.get("updatedReplicas")
    return WorkloadState(
        kind=str(raw.get("kind") or ""),
        name=str(metadata.get("name") or ""),
        component=str(labels.get(names.LABEL_COMPONENT) or ""),
        version=str(labels.get("app.kubernetes.io/version") or ""),
        images=tuple(str(c.get("image")) for c in _seq(pod, "containers")),
        account=str(pod.get("serviceAccountName") or "default"),
        wanted=_number(wanted),
        ready=_number(ready),
        updated=_number(updated),
    )


def kind_state(kind: type[CustomResource], raw: JsonObject | None) -> KindState:
    """A CustomResourceDefinition against this program's schema. `raw` None: the cluster has none."""
    name = f"{kind.plural}.{GROUP}"
    if raw is None:
        return KindState(name, there=False)
    conditions = {c.get("type"): c.get("status") for c in _seq(_map(raw, "status"), "conditions")}
    version = next((v for v in _seq(_map(raw, "spec"), "versions") if v.get("name") == VERSION), JsonObject())
    theirs = fields(_map(_map(version, "schema"), "openAPIV3Schema"))
    ours = fields(root_schema(kind))
    return KindState(
        name,
        there=True,
        established=conditions.get("Established") == "True",
        served=version.get("served") is True,
        missing=_tops(ours - theirs),
        further=_tops(theirs - ours),
    )


def _tops(paths: Iterable[str]) -> tuple[str, ...]:
    """Without what is inside of another path of them."""
    listed = set(paths)
    return tuple(sorted(path for path in listed if not any(path.startswith(f"{other}.") for other in listed)))


def node_lease(raw: JsonObject) -> NodeLease:
    """A Lease of the namespace kube-node-lease."""
    found = lease_view(raw)
    return NodeLease(str(_map(raw, "metadata").get("name") or ""), found.renewed, found.seconds)


def services(listed: Iterable[JsonObject], slices: Iterable[JsonObject]) -> tuple[ServiceState, ...]:
    """Services with the number of their addresses."""
    ready: dict[str, int] = {}
    waiting: dict[str, int] = {}
    for each in slices:
        name = str(_map(_map(each, "metadata"), "labels").get(SERVICE_LABEL) or "")
        for endpoint in _seq(each, "endpoints"):
            # The API leaves out what is unknown, and unknown counts as ready.
            counts = waiting if _map(endpoint, "conditions").get("ready") is False else ready
            counts[name] = counts.get(name, 0) + 1
    found = [str(_map(each, "metadata").get("name") or "") for each in listed]
    return tuple(ServiceState(name, ready.get(name, 0), waiting.get(name, 0)) for name in found)


def disk(raw: JsonObject) -> tuple[str, int] | None:
    """(node, bytes of the disk that the kubelet uses); None: unknown."""
    size = _map(_map(raw, "status"), "capacity").get("ephemeral-storage")
    try:
        return str(_map(raw, "metadata").get("name")), int(quantity.parse(str(size)))
    except (ValueError, ArithmeticError):
        return None


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _map(obj: Mapping[str, Any], field: str) -> JsonObject:
    value: Any = obj.get(field)
    return cast("JsonObject", value) if isinstance(value, dict) else {}


def _seq(obj: Mapping[str, Any], field: str) -> list[JsonObject]:
    value: Any = obj.get(field)
    listed = cast("list[Any]", value) if isinstance(value, list) else []
    return [cast("JsonObject", each) for each in listed if isinstance(each, dict)]
