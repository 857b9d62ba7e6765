"""What every controller works with: the store's tables, the client, the configuration. Nothing here decides."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from shoal.api.config import OperatorConfig
from shoal.api.gpuclass import GPUClass
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.api.modelroute import ModelRoute
from shoal.api.tenant import Tenant
from shoal.core import facts, ownership
from shoal.core.artifacts import source_key
from shoal.core.claimants import oldest
from shoal.core.devices import Claim, DeviceClass, DeviceTaintRule, Slice
from shoal.core.keda import Autoscaler
from shoal.core.ownership import Link
from shoal.kube import cacheshares, deviceviews, kedaviews, projections
from shoal.kube.cacheshares import CacheClaim, CacheVolume
from shoal.kube.client import KubeClient
from shoal.kube.definitions import InstalledStatus
from shoal.kube.events import Recorder
from shoal.kube.ownership import Ownership
from shoal.kube.projections import Child, Custom
from shoal.kube.store import Table

_UNREACHABLE: Final = "node.kubernetes.io/unreachable"
"""Set by Kubernetes on a node whose kubelet is silent; with NoExecute it deletes the pods after their toleration."""


def _model_uid(child: Child | facts.Pod) -> Iterable[str]:
    return (child.model_uid,) if child.model_uid else ()


def _uid(custom: Custom[Any]) -> Iterable[str]:
    return (custom.metadata.uid,)


def _claims(custom: Custom[Model]) -> Iterable[str]:
    return custom.object.claimed_names if custom.object else ()


def _listed_classes(custom: Custom[Model]) -> Iterable[str]:
    return [v.gpu_class for v in custom.object.spec.variants] if custom.object else ()


def _hashes(custom: Custom[Tenant]) -> Iterable[str]:
    return [k.sha256 for k in custom.object.spec.keys] if custom.object else ()


def _granted(custom: Custom[Tenant]) -> Iterable[str]:
    return [f"{m.namespace}/{m.name}" for m in custom.object.spec.models] if custom.object else ()


def _claimed(pod: facts.Pod) -> Iterable[str]:
    return (pod.claims,) if pod.claims else ()


def _granted_adapters(custom: Custom[Tenant]) -> Iterable[str]:
    return [grant.namespace for grant in custom.object.spec.adapters] if custom.object else ()


def _adapter_tenants(custom: Custom[LoRAAdapter]) -> Iterable[str]:
    """Each tenant that it lists, alone and with the adapter's namespace before it."""
    for tenant in custom.object.spec.tenants if custom.object else ():
        yield tenant
        yield f"{custom.metadata.namespace}/{tenant}"


def _job(pod: facts.Pod) -> Iterable[str]:
    return (f"{pod.namespace}/{pod.job}",) if pod.job else ()


def _job_pool(job: facts.MetadataJob) -> Iterable[str]:
    return (job.pool,) if job.pool else ()


def _gateway(pod: facts.Pod) -> Iterable[str]:
    return (pod.namespace,) if pod.gateway else ()


def _process(pod: facts.Pod) -> Iterable[str]:
    return (pod.namespace,) if pod.process else ()


def _on_class(pod: facts.Pod) -> Iterable[str]:
    """The class of a replica, also of one that no node holds yet."""
    return (pod.gpu_class,) if pod.model_uid and pod.gpu_class and not pod.finished else ()


def _broken(pod: facts.Pod) -> Iterable[str]:
    """The class of a replica that holds a device which its kubelet calls unhealthy."""
    return (pod.gpu_class,) if pod.gpu_class and pod.broken_device else ()


def _claiming_pods(claim: Claim) -> Iterable[str]:
    return [uid for _, uid in claim.pods]


def _source(custom: Custom[Model]) -> Iterable[str]:
    return (f"{custom.metadata.namespace}/{source_key(custom.object)}",) if custom.object else ()


def _pool(custom: Custom[LoRAAdapter]) -> Iterable[str]:
    return (custom.object.pool_key,) if custom.object else ()


def _adapter_claims(custom: Custom[LoRAAdapter]) -> Iterable[str]:
    return custom.object.claimed_names if custom.object else ()


def _route_claims(custom: Custom[ModelRoute]) -> Iterable[str]:
    return custom.object.claimed_names if custom.object else ()


def _route_targets(custom: Custom[ModelRoute]) -> Iterable[str]:
    return {key for _, key in custom.object.references()} if custom.object else ()


def _granted_routes(custom: Custom[Tenant]) -> Iterable[str]:
    return [grant.namespace for grant in custom.object.spec.routes] if custom.object else ()


def _routes() -> Table[Custom[ModelRoute]]:
    return Table(
        lambda raw: projections.custom(ModelRoute, raw), indexes={"claim": _route_claims, "target": _route_targets}
    )


def _pooled(custom: Custom[LoRAPool]) -> Iterable[str]:
    return (custom.object.model_key,) if custom.object else ()


def _pools() -> Table[Custom[LoRAPool]]:
    return Table(lambda raw: projections.custom(LoRAPool, raw), indexes={"model": _pooled})


def _adapters() -> Table[Custom[LoRAAdapter]]:
    return Table(
        lambda raw: projections.custom(LoRAAdapter, raw),
        indexes={"pool": _pool, "claim": _adapter_claims, "uid": _uid, "tenant": _adapter_tenants},
    )


def _target(hpa: Autoscaler) -> Iterable[str]:
    return (hpa.target_key,)


def _autoscalers() -> Table[Autoscaler]:
    return Table(kedaviews.autoscaler, indexes={"target": _target})


def _models() -> Table[Custom[Model]]:
    return Table(
        lambda raw: projections.custom(Model, raw),
        indexes={"uid": _uid, "claim": _claims, "class": _listed_classes, "source": _source},
    )


def _children(project: Callable[[JsonObject], Child | None]) -> Table[Child]:
    return Table(project, indexes={"model": _model_uid})


@dataclass(slots=True)
class World:
    """The operator's view of the cluster, and its hands."""

    client: KubeClient
    config: OperatorConfig
    namespace: str
    """Shoal's own."""
    recorder: Recorder
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    models: Table[Custom[Model]] = field(default_factory=_models)
    classes: Table[Custom[GPUClass]] = field(
        default_factory=lambda: Table(lambda raw: projections.custom(GPUClass, raw))
    )
    tenants: Table[Custom[Tenant]] = field(
        default_factory=lambda: Table(
            lambda raw: projections.custom(Tenant, raw),
            indexes={"hash": _hashes, "model": _granted, "adapters": _granted_adapters, "routes": _granted_routes},
        )
    )
    pools: Table[Custom[LoRAPool]] = field(default_factory=_pools)
    adapters: Table[Custom[LoRAAdapter]] = field(default_factory=_adapters)
    routes: Table[Custom[ModelRoute]] = field(default_factory=_routes)
    nodes: Table[facts.Node] = field(default_factory=lambda: Table(projections.node))
    ownership: Ownership = field(default_factory=Ownership)
    """Which engine pods have proved that they are: the table of pods says of no other that it is a Model's."""
    pods: Table[facts.Pod] = field(init=False)
    autoscaler_news: dict[str, facts.AutoscalerNews] = field(default_factory=dict[str, facts.AutoscalerNews])
    """Uid of a pending pod -> what an autoscaler says of it. Written by `PendingPodEvents`."""
    claim_refusals: dict[str, facts.ClaimRefusal] = field(default_factory=dict[str, facts.ClaimRefusal])
    """Uid of a pod -> why its ResourceClaim is not made, or was not for a while. Written by `PendingPodEvents`."""
    queue_waits: dict[str, facts.QueueWait] = field(default_factory=dict[str, facts.QueueWait])
    """Uid of a pod that waits for quota -> what Kueue says of it. Written by `QueueMessages`."""
    cache_volumes: Table[CacheVolume] = field(default_factory=lambda: Table(cacheshares.volume))
    cache_claims: Table[CacheClaim] = field(default_factory=lambda: Table(cacheshares.claim))
    jobs: Table[facts.MetadataJob] = field(
        default_factory=lambda: Table(projections.job, indexes={"reads": lambda job: job.reads, "pool": _job_pool})
    )
    deployments: Table[Child] = field(default_factory=lambda: _children(projections.deployment))
    budgets: Table[Child] = field(default_factory=lambda: _children(projections.child))
    policies: Table[Child] = field(default_factory=lambda: _children(projections.child))
    scaled_objects: Table[Child] = field(default_factory=lambda: _children(kedaviews.scaled_object))
    trigger_authentications: Table[Child] = field(default_factory=lambda: _children(projections.child))
    autoscalers: Table[Autoscaler] = field(default_factory=_autoscalers)
    """Of Deployments: KEDA's, and anybody's. Only once KEDA is installed and a Model is driven by it."""

    inference_pools: Table[Child] = field(default_factory=lambda: _children(projections.child))
    picker_services: Table[Child] = field(default_factory=lambda: _children(projections.child))
    picker_slices: Table[Child] = field(default_factory=lambda: _children(projections.child))
    """The three: only where proxies carry requests (docs/other-doors.md) and the cluster has InferencePools."""

    resource_slices: Table[Slice] = field(default_factory=lambda: Table(deviceviews.resource_slice))
    resource_claims: Table[Claim] = field(
        default_factory=lambda: Table(deviceviews.resource_claim, indexes={"pod": _claiming_pods})
    )
    device_classes: Table[DeviceClass] = field(default_factory=lambda: Table(deviceviews.device_class))
    """The three: only once a GPUClass has a `device`."""
    taint_rules: Table[DeviceTaintRule] = field(default_factory=lambda: Table(deviceviews.device_taint_rule))
    taint_rules_beta: Table[DeviceTaintRule] = field(default_factory=lambda: Table(deviceviews.device_taint_rule))
    """DeviceTaintRules, of either version of their API that the cluster has. Of both, a rule is in both tables."""
    claim_templates: Table[Child] = field(default_factory=lambda: _children(projections.child))
    """ResourceClaimTemplates of Models."""

    installed_status: InstalledStatus = field(init=False)

    def __post_init__(self) -> None:
        self.installed_status = InstalledStatus(self.client)
        self.pods = Table(
            self._pod,
            indexes={
                "model": _model_uid,
                "claims": _claimed,
                "job": _job,
                "gateway": _gateway,
                "process": _process,
                "class": _on_class,
                "broken": _broken,
            },
        )
        self.pods.listeners.append(self._forget_pod)
        self.deployments.listeners.append(self._deployment)
        self.models.listeners.append(self._model)
        self.ownership.proved.append(self._proved)

    def model_by_uid(self, uid: str | None) -> Custom[Model] | None:
        return next(iter(self.models.by("uid", uid)), None) if uid else None

    def deployments_of(self, model_uid: str) -> tuple[Child, ...]:
        """The variants of a Model: what Shoal made and nobody else. An ownerReference with the Model's uid can be
        written in any namespace."""
        custom = self.model_by_uid(model_uid)
        found = self.deployments.by("model", model_uid)
        if custom is None:
            return found
        key = f"{custom.metadata.namespace}/{custom.metadata.name}"
        return tuple(c for c in found if c.link is not None and ownership.is_variant(c.link, key, model_uid))

    def deployment_of(self, model_uid: str, gpu_class: str) -> Child | None:
        """A Model's Deployment on a GPU class; None: there is none, or it is being deleted."""
        for child in self.deployments_of(model_uid):
            if child.deployment and child.deployment.gpu_class == gpu_class and not child.deployment.deleting:
                return child
        return None

    def pool_of(self, model_key: str) -> LoRAPool | None:
        """The pool that has the Model `namespace/name`: the oldest that names it. Whether the two go together is asked
        elsewhere."""
        named = [c.object for c in self.pools.by("model", model_key) if c.object is not None]
        return oldest(p for p in named if p.metadata.deletion_timestamp is None)

    def gateways(self) -> tuple[facts.Pod, ...]:
        """Pods of Shoal's own gateways that are not gone."""
        return tuple(p for p in self.pods.by("gateway", self.namespace) if not p.finished)

    def processes(self) -> tuple[facts.Pod, ...]:
        """Pods of Shoal's own gateways, operators and ledger."""
        return self.pods.by("process", self.namespace)

    def has_gateways_of_before(self) -> bool:
        """Whether one lives that has no keys but those of the install key of before."""
        return any(not pod.knows_role_keys for pod in self.gateways())

    def install_keys_in_use(self) -> set[str | None]:
        """Fingerprints of install keys that engine pods carry, of any Model."""
        return {pod.install_key for pod in self.pods.values()}

    def signal_sources(self) -> Iterable[facts.Pod]:
        """Pods that are listened to: engines and gateways."""
        yield from self.gateways()
        yield from (p for p in self.pods.values() if p.model_uid is not None and not p.finished)

    def is_lost(self, pod: facts.Pod) -> bool:
        """On a node that has been unreachable beyond the pod's toleration, or is no more: it never speaks again."""
        if not pod.deleting or pod.node is None:
            return False
        node = self.nodes.get(pod.node)
        return node is None or any(t.key == _UNREACHABLE and t.effect == "NoExecute" for t in node.taints)

    def accepted_classes(self) -> dict[str, GPUClass]:
        """Classes that can be used: valid and not being deleted."""
        return {
            c.metadata.name: c.object
            for c in self.classes.values()
            if c.object is not None and c.metadata.deletion_timestamp is None
        }

    # --- who is a replica ---------------------------------------------------------------------------------------------

    def _pod(self, raw: JsonObject) -> facts.Pod | None:
        found = projections.pod(raw)
        if found is not None and found.uid in self.autoscaler_news:
            found = found.with_news(self.autoscaler_news[found.uid])
        if found is not None and found.uid in self.queue_waits:
            found = replace(found, queue_wait=self.queue_waits[found.uid])
        if found is not None and (refusal := self.claim_refusals.get(found.uid)) is not None:
            found = replace(found, claim_refusal=refusal if found.lacks_claim else None, claim_was_refused=True)
        if found is None or found.model_uid is None or self.ownership.pod(ownership.link(raw)):
            return found
        return replace(found, model_uid=None, claims=found.model_uid)

    def _proved(self, pod: Link) -> None:
        self.pods.amend(pod.key, pod.uid, lambda found: replace(found, model_uid=pod.model_uid, claims=None))

    def _forget_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        if before is not None and (after is None or after.uid != before.uid):
            self.ownership.forget(before.uid)
            self.autoscaler_news.pop(before.uid, None)
            self.queue_waits.pop(before.uid, None)
            self.claim_refusals.pop(before.uid, None)

    def _deployment(self, _key: str, before: Child | None, after: Child | None) -> None:
        if before is not None and before.link is not None and (after is None or after.uid != before.uid):
            self.ownership.deployment_gone(before.uid)
        if after is not None and after.link is not None and (before is None or after.link != before.link):
            self.ownership.deployment(after.link)

    def _model(self, key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        if before is not None and (after is None or after.metadata.uid != before.metadata.uid):
            self.ownership.model_gone(before.metadata.uid)
        if after is not None:
            self.ownership.model(after.metadata.uid, key)
