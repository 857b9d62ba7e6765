"""What the gateway knows of the cluster: an immutable snapshot, swapped when the API server tells of a change.

Keeps what it last knew while the API server is away. An object that does not validate is left out and counted.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pydantic
import structlog

from shoal.api import names
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.api.tenant import Tenant
from shoal.core.access import Identity, index_keys
from shoal.core.resolve import ServedModel, served_model
from shoal.core.resolve_adapters import DeclaredAdapter, DeclaredPool, declared_adapter, declared_pool
from shoal.core.routing import Replica
from shoal.core.words import Words

log = structlog.get_logger()

Source = Literal["models", "tenants", "pods", "pools", "adapters"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One state of the cluster."""

    models: Mapping[str, ServedModel] = field(default_factory=dict[str, ServedModel])
    keys: Mapping[str, Identity] = field(default_factory=dict[str, Identity])
    replicas: Mapping[tuple[str, str], tuple[Replica, ...]] = field(
        default_factory=dict[tuple[str, str], tuple[Replica, ...]]
    )
    """By `namespace/name` and uid of the Model: pods of a deleted one of the same name have other keys."""
    owners: Mapping[str, str] = field(default_factory=dict[str, str])
    """Uid of a pod -> uid of its Model."""
    words: Words = field(default_factory=Words)
    """What clients can put in `model`; one index for all snapshots."""

    def replicas_of(self, model: ServedModel) -> tuple[Replica, ...]:
        """Pods of this very Model."""
        return self.replicas.get((model.key, model.uid), ())


class Directory:
    """Makes snapshots from live mappings (a reflector's `objects`, or a dict in a test)."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        tenants: Mapping[str, Tenant],
        pods: Mapping[str, Replica],
        *changed: Callable[[], None],
        pools: Mapping[str, DeclaredPool] | None = None,
        adapters: Mapping[str, DeclaredAdapter] | None = None,
    ) -> None:
        self.snapshot = Snapshot()
        self.changed = list(changed)
        """Called after each new snapshot."""
        self.listed: Callable[[], bool] = lambda: True
        """Whether each mapping was filled once."""
        self._complete = False
        self._models = models
        self._tenants = tenants
        self._pods = pods
        self._pools: Mapping[str, DeclaredPool] = {} if pools is None else pools
        self._adapters: Mapping[str, DeclaredAdapter] = {} if adapters is None else adapters
        self._dirty: set[Source] = set()
        self._stale: set[str | None] = set()

    @property
    def complete(self) -> bool:
        """Whether every list was read once, and is in the snapshot: from then on for good. Before that, what is not
        found may be there all the same, and what is found may be somebody else's word."""
        if not self._complete:
            self._complete = not self._dirty and self.listed()
        return self._complete

    def mark(self, source: Source, key: str | None = None) -> None:
        """Says that a mapping changed; of adapters, which one (None: any). The snapshot follows in the next turn of the
        loop: a first list of thousands of objects costs one rebuild and not thousands."""
        if not self._dirty:
            asyncio.get_running_loop().call_soon(self.rebuild)
        self._dirty.add(source)
        if source == "adapters":
            self._stale.add(key)

    def rebuild(self) -> None:
        """Brings the snapshot up to date with what was marked."""
        old, words = self.snapshot, self.snapshot.words
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
            words.set_models(models)
        if "pools" in dirty:
            words.set_pools(dict(self._pools))
        if "adapters" in dirty:
            stale, self._stale = self._stale, set()
            if None in stale:
                words.retain(self._adapters.keys())
            for key in self._adapters if None in stale else stale:
                words.put(str(key), self._adapters.get(str(key)))
        self.snapshot = Snapshot(models, keys, replicas, owners, words)
        for changed in self.changed:
            changed()


def project_model(obj: JsonObject, invalid: Callable[[str], None]) -> ServedModel | None:
    """A Model as the reflector keeps it; None, and a call of `invalid`, when it does not validate."""
    try:
        return served_model(Model.model_validate(obj))
    except pydantic.ValidationError as error:
        _skipped("Model", obj, error, invalid)
        return None


def project_pool(obj: JsonObject, invalid: Callable[[str], None]) -> DeclaredPool | None:
    """A LoRAPool as the reflector keeps it; one that is being deleted is gone."""
    try:
        pool = LoRAPool.model_validate(obj)
    except pydantic.ValidationError as error:
        _skipped("LoRAPool", obj, error, invalid)
        return None
    return declared_pool(pool) if pool.metadata.deletion_timestamp is None else None


def project_adapter(obj: JsonObject, invalid: Callable[[str], None]) -> DeclaredAdapter | None:
    """A LoRAAdapter as the reflector keeps it; one that is being deleted is gone."""
    try:
        adapter = LoRAAdapter.model_validate(obj)
    except pydantic.ValidationError as error:
        _skipped("LoRAAdapter", obj, error, invalid)
        return None
    return declared_adapter(adapter) if adapter.metadata.deletion_timestamp is None else None


def project_tenant(obj: JsonObject, invalid: Callable[[str], None]) -> Tenant | None:
    """A Tenant as the reflector keeps it, without its status."""
    try:
        return Tenant.model_validate({"metadata": obj.get("metadata"), "spec": obj.get("spec")})
    except pydantic.ValidationError as error:
        _skipped("Tenant", obj, error, invalid)
        return None


def project_pod(obj: JsonObject) -> Replica | None:
    """What routing needs of an engine pod; None for a pod that is none or has ended."""
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
    )


def _skipped(kind: str, obj: JsonObject, error: pydantic.ValidationError, invalid: Callable[[str], None]) -> None:
    metadata: Mapping[str, Any] = obj.get("metadata") or {}
    invalid(kind)
    # Of the error only places and kinds of fault: values stay out of the log.
    faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['type']}" for fault in error.errors()[:5]]
    log.warning(
        "object left out: it does not validate",
        kind=kind,
        namespace=metadata.get("namespace"),
        name=metadata.get("name"),
        faults=faults,
    )
