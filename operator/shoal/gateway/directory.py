"""The gateway's view of the cluster: an immutable snapshot, replaced when a watch reports a change.

The last snapshot stays while the API server is unreachable. An object that does not validate is left out and counted.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import pydantic
import structlog

from shoal.api import names
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.api.modelroute import ModelRoute
from shoal.api.tenant import Tenant
from shoal.core.access import KeyIdentity, index_keys
from shoal.core.routing.modelindex import ModelIndex
from shoal.core.routing.replica import Replica
from shoal.core.routing.resolve import ServedModel, served_model
from shoal.core.routing.resolveadapters import DeclaredAdapter, DeclaredPool, declared_adapter, declared_pool
from shoal.core.routing.routes import DeclaredRoute, declared_route
from shoal.engine.wires import DEFAULT, differences_of

log = structlog.get_logger()

Source = Literal["models", "tenants", "pods", "pools", "adapters", "routes"]


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """One state of the cluster."""

    models: Mapping[str, ServedModel] = field(default_factory=dict[str, ServedModel])
    keys: Mapping[str, KeyIdentity] = field(default_factory=dict[str, KeyIdentity])
    replicas: Mapping[tuple[str, str], tuple[Replica, ...]] = field(
        default_factory=dict[tuple[str, str], tuple[Replica, ...]]
    )
    """By `namespace/name` and uid of the Model: pods of a deleted Model with the same name have another key."""
    owners: Mapping[str, str] = field(default_factory=dict[str, str])
    """Uid of a pod -> uid of its Model."""
    model_index: ModelIndex = field(default_factory=ModelIndex)
    """Index of the names that clients can put in `model`; all snapshots share one."""

    def replicas_of(self, model: ServedModel) -> tuple[Replica, ...]:
        """Pods of the Model with this uid."""
        return self.replicas.get((model.key, model.uid), ())


class Directory:
    """Builds snapshots from live mappings (a reflector's `objects`, or a dict in a test)."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        tenants: Mapping[str, Tenant],
        pods: Mapping[str, Replica],
        *changed: Callable[[], None],
        pools: Mapping[str, DeclaredPool] | None = None,
        adapters: Mapping[str, DeclaredAdapter] | None = None,
        routes: Mapping[str, DeclaredRoute] | None = None,
    ) -> None:
        self.snapshot = ClusterSnapshot()
        self.changed = list(changed)
        """Called after each new snapshot."""
        self.listed: Callable[[], bool] = lambda: True
        """Whether every mapping has been listed once."""
        self._complete = False
        self._models = models
        self._tenants = tenants
        self._pods = pods
        self._pools: Mapping[str, DeclaredPool] = {} if pools is None else pools
        self._adapters: Mapping[str, DeclaredAdapter] = {} if adapters is None else adapters
        self._routes: Mapping[str, DeclaredRoute] = {} if routes is None else routes
        self._dirty: set[Source] = set()
        self._changed_adapters: set[str | None] = set()

    @property
    def complete(self) -> bool:
        """Whether every list was read once and is in the snapshot; then it stays True. Before that, a name that is not
        found may exist, and a name that is found may belong to another object."""
        if not self._complete:
            self._complete = not self._dirty and self.listed()
        return self._complete

    def mark(self, source: Source, key: str | None = None) -> None:
        """Marks a mapping as changed; for adapters also which one (None: any). The snapshot is rebuilt in the next
        iteration of the loop, so that a first list of thousands of objects costs one rebuild."""
        if not self._dirty:
            asyncio.get_running_loop().call_soon(self.rebuild)
        self._dirty.add(source)
        if source == "adapters":
            self._changed_adapters.add(key)

    def rebuild(self) -> None:
        """Rebuilds the snapshot from the marked mappings."""
        old, index = self.snapshot, self.snapshot.model_index
        dirty, self._dirty = self._dirty, set()
        models = dict(self._models) if "models" in dirty else old.models
        keys = index_keys(self._tenants.values()) if "tenants" in dirty else old.keys
        replicas, owners = old.replicas, old.owners
        if "pods" in dirty:
            by_model: dict[tuple[str, str], list[Replica]] = {}
            for replica in self._pods.values():
                by_model.setdefault((replica.model, replica.model_uid), []).append(replica)
            replicas = {model: tuple(sorted(pods, key=lambda r: r.key)) for model, pods in by_model.items()}
            owners = {replica.uid: replica.model_uid for replica in self._pods.values()}
        if "models" in dirty:
            index.set_models(models)
        if "pools" in dirty:
            index.set_pools(dict(self._pools))
        if "adapters" in dirty:
            changed_adapters, self._changed_adapters = self._changed_adapters, set()
            if None in changed_adapters:
                index.retain(self._adapters.keys())
            for key in self._adapters if None in changed_adapters else changed_adapters:
                index.put(str(key), self._adapters.get(str(key)))
        if "routes" in dirty:
            index.retain_routes(self._routes.keys())
            for key, route in self._routes.items():
                index.put_route(key, route)
        self.snapshot = ClusterSnapshot(models, keys, replicas, owners, index)
        for changed in self.changed:
            changed()


def project_model(obj: JsonObject, invalid: Callable[[str], None]) -> ServedModel | None:
    """A Model as the reflector keeps it. If it does not validate: None, and `invalid` is called."""
    try:
        model = Model.read(obj)
        return served_model(model, differences_of(model.spec.engine.type))
    except pydantic.ValidationError as error:
        _skipped("Model", obj, error, invalid)
        return None


def project_pool(obj: JsonObject, invalid: Callable[[str], None]) -> DeclaredPool | None:
    """A LoRAPool as the reflector keeps it; None while it is being deleted."""
    try:
        pool = LoRAPool.read(obj)
    except pydantic.ValidationError as error:
        _skipped("LoRAPool", obj, error, invalid)
        return None
    return declared_pool(pool) if pool.metadata.deletion_timestamp is None else None


def project_adapter(obj: JsonObject, invalid: Callable[[str], None]) -> DeclaredAdapter | None:
    """A LoRAAdapter as the reflector keeps it; None while it is being deleted."""
    try:
        adapter = LoRAAdapter.read(obj)
    except pydantic.ValidationError as error:
        _skipped("LoRAAdapter", obj, error, invalid)
        return None
    return declared_adapter(adapter) if adapter.metadata.deletion_timestamp is None else None


def project_route(obj: JsonObject, invalid: Callable[[str], None]) -> DeclaredRoute | None:
    """A ModelRoute as the reflector keeps it; None while it is being deleted."""
    try:
        route = ModelRoute.read(obj)
    except pydantic.ValidationError as error:
        _skipped("ModelRoute", obj, error, invalid)
        return None
    return declared_route(route) if route.metadata.deletion_timestamp is None else None


def project_tenant(obj: JsonObject, invalid: Callable[[str], None]) -> Tenant | None:
    """A Tenant as the reflector keeps it, without its status."""
    try:
        return Tenant.model_validate({"metadata": obj.get("metadata"), "spec": obj.get("spec")})
    except pydantic.ValidationError as error:
        _skipped("Tenant", obj, error, invalid)
        return None


def project_pod(obj: JsonObject) -> Replica | None:
    """What routing needs of an engine pod; None for another pod, or one that has ended."""
    metadata: Mapping[str, Any] = obj.get("metadata") or {}
    labels: Mapping[str, str] = metadata.get("labels") or {}
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    spec: Mapping[str, Any] = obj.get("spec") or {}
    status: Mapping[str, Any] = obj.get("status") or {}
    model = labels.get(names.LABEL_MODEL)
    if model is None or status.get("phase") in ("Succeeded", "Failed"):
        return None
    conditions: list[Mapping[str, Any]] = status.get("conditions") or []
    return Replica(
        uid=str(metadata.get("uid", "")),
        namespace=str(metadata.get("namespace", "")),
        name=str(metadata.get("name", "")),
        model=f"{metadata.get('namespace', '')}/{model}",
        model_uid=labels.get(names.LABEL_MODEL_UID, ""),
        ip=status.get("podIP") or None,
        ready=any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions),
        deleting=metadata.get("deletionTimestamp") is not None,
        install_key=annotations.get(names.ANNOTATION_INSTALL_KEY),
        gpu_class=labels.get(names.LABEL_GPU_CLASS),
        node=spec.get("nodeName"),
        mtls=annotations.get(names.ANNOTATION_TRANSPORT) == names.TRANSPORT_MTLS,
        engine=annotations.get(names.ANNOTATION_ENGINE, DEFAULT),
        engine_version=annotations.get(names.ANNOTATION_ENGINE_VERSION),
        compiles_tools=annotations.get(names.ANNOTATION_TOOLS) == names.TOOLS_COMPILED,
        reads_media=annotations.get(names.ANNOTATION_MEDIA) != names.MEDIA_NONE,
        created=_time(metadata.get("creationTimestamp")),
    )


def _time(value: object) -> datetime | None:
    try:
        found = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return None if found.tzinfo is None else found


def _skipped(kind: str, obj: JsonObject, error: pydantic.ValidationError, invalid: Callable[[str], None]) -> None:
    metadata: Mapping[str, Any] = obj.get("metadata") or {}
    invalid(kind)
    # Only the location and type of each error: values stay out of the log.
    faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['type']}" for fault in error.errors()[:5]]
    log.warning(
        "object left out: it does not validate",
        kind=kind,
        namespace=metadata.get("namespace"),
        name=metadata.get("name"),
        faults=faults,
    )
