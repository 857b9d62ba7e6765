"""Reads what `core/doctor` checks. Each part has a timeout, and one that cannot be read leaves the others alone."""

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Final, TypeVar, cast

import click
import yaml

from shoal.api import names, permissions
from shoal.api.billing import PricesInForce
from shoal.api.meta import CustomResource, JsonObject
from shoal.api.permissions import Permission
from shoal.api.schema import KINDS
from shoal.cli import gpus
from shoal.cli.client import ServiceError
from shoal.cli.services import LedgerClient
from shoal.cli.why import readiness
from shoal.core import quantity
from shoal.core.doctor.types import (
    CertificateState,
    ClockState,
    DeviceState,
    DoctorSnapshot,
    KindState,
    NodeCacheSettings,
    PermissionState,
    PriceState,
    ProxySettings,
    ServiceState,
    WorkloadState,
)
from shoal.core.layers.types import ExplainedKind, ObjectView, OperatorLease, Unread, WhyPod
from shoal.kube import doctorviews, layerviews
from shoal.kube.access import ACCESSREVIEWS
from shoal.kube.client import KubeClient
from shoal.kube.errors import KubeError, NotFound
from shoal.kube.resources import (
    CONFIGMAPS,
    DEPLOYMENTS,
    DEVICECLASSES,
    ENDPOINTSLICES,
    EVENTS,
    GPUCLASSES,
    INFERENCEPOOLS,
    LEASES,
    MODELS,
    NODES,
    PODS,
    RESOURCESLICES,
    SECRETS,
    SERVICES,
    TENANTS,
    Resource,
)
from shoal.manifests.certificates import read_annotation

T = TypeVar("T")

SECONDS: Final = 20.0
"""Timeout of one part."""
MOST: Final = 5_000
"""Objects of one kind that are read."""
AT_ONCE: Final = 8
"""Reviews of permissions that run at a time."""
MOST_SCOPES: Final = 5
"""Namespaces of `scope.namespaces` in which permissions are asked for."""
_OWN: Final = f"{names.LABEL_PART_OF}={names.MANAGED_BY}"
_STATEFULSETS: Final = Resource("apps", "v1", "statefulsets", "StatefulSet")
_DAEMONSETS: Final = Resource("apps", "v1", "daemonsets", "DaemonSet")
_CRDS: Final = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
_LOCAL_REVIEWS: Final = Resource("authorization.k8s.io", "v1", "localsubjectaccessreviews", "LocalSubjectAccessReview")
_NODE_LEASES: Final = "kube-node-lease"
_SYSTEM: Final = "kube-system"
_DNS: Final = "k8s-app=kube-dns"
_CONFIG: Final = "shoal-operator"


class DoctorReader:
    """Reads one installation. `namespace` is Shoal's own."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client, self._namespace = client, namespace

    async def read(self) -> DoctorSnapshot:
        """Everything, part by part."""
        config = await self._part("ConfigMap shoal-operator", self._config())
        settings = {} if isinstance(config, Unread) else config
        scope = tuple(str(each) for each in _list(settings, "scopeNamespaces"))
        workloads = await self._part("workloads", self._workloads())
        nodes = await self._part("nodes", self._list(NODES))
        classes = await self._part("GPU classes", self._list(GPUCLASSES))
        click.echo("reading permissions", err=True)
        known = () if isinstance(workloads, Unread) else workloads
        return DoctorSnapshot(
            namespace=self._namespace,
            version=version("shoal"),
            scope=scope,
            workloads=workloads,
            pods=await self._part("pods of Shoal", self._pods()),
            events=await self._views("events of Shoal", EVENTS, layerviews.event),
            lease=await self._part("Lease shoal-operator", self._lease()),
            kinds=await self._part("CustomResourceDefinitions", self._kinds()),
            permissions=()
            if workloads == ()
            else await self._part(
                "permissions of Shoal's processes", self._permissions(known, scope, _section(settings, "extProc"))
            ),
            certificates=await self._part("metadata of Secrets", self._certificates()),
            clock=await self._part("clock of the API server", self._clock()),
            node_leases=await self._views("Leases of nodes", LEASES, doctorviews.node_lease, _NODE_LEASES),
            services=await self._part("Services of Shoal", self._services()),
            name_service=await self._part("the cluster's name service", self._name_service()),
            cache=config if isinstance(config, Unread) else _cache(settings),
            proxies=config
            if isinstance(config, Unread)
            else await self._part("InferencePools", self._proxies(settings)),
            prices=await self._part("the ledger's price lists", self._prices())
            if any(each.component == names.COMPONENT_LEDGER and each.ready for each in known)
            else None,
            disks=None if isinstance(nodes, Unread) else dict(d for raw in nodes if (d := doctorviews.disk(raw))),
            classes=_objects("class", classes),
            nodes=nodes if isinstance(nodes, Unread) else tuple(layerviews.node(raw) for raw in nodes),
            devices=await self._part("GPUs that are devices", self._devices(classes, nodes)),
            models=await self._models(scope),
            tenants=await self._objects("tenants", "tenant", TENANTS),
        )

    async def _part(self, what: str, work: Awaitable[T]) -> T | Unread:
        try:
            async with asyncio.timeout(SECONDS):
                return await work
        except TimeoutError:
            return Unread(what, f"no answer within {SECONDS:.0f} s")
        except KubeError as error:
            return Unread(what, error.message)
        except (OSError, ValueError, ServiceError) as error:
            return Unread(what, str(error) or type(error).__name__)

    async def _views(self, what: str, resource: Resource, view: Any, namespace: str | None = None) -> Any:
        found = await self._part(what, self._list(resource, namespace or self._namespace))
        return found if isinstance(found, Unread) else tuple(view(raw) for raw in found)

    async def _pods(self) -> tuple[WhyPod, ...]:
        """Gateways that are not ready with what they say of it."""
        found: list[WhyPod] = []
        for raw in await self._list(PODS, self._namespace):
            pod = layerviews.pod(raw)
            if pod.component == names.COMPONENT_GATEWAY and not pod.deleting:
                pod = replace(pod, not_ready=await readiness.missing(self._client, pod, raw))
            found.append(pod)
        return tuple(found)

    async def _objects(
        self, what: str, kind: ExplainedKind, resource: Resource, namespace: str | None = None
    ) -> tuple[ObjectView, ...] | Unread:
        return _objects(kind, await self._part(what, self._list(resource, namespace)))

    async def _models(self, scope: tuple[str, ...]) -> tuple[ObjectView, ...] | Unread:
        listed: list[ObjectView] = []
        for namespace in scope or (None,):
            found = await self._objects("Models", "model", MODELS, namespace)
            if isinstance(found, Unread):
                return found
            listed += found
        return tuple(listed)

    async def _list(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> list[JsonObject]:
        found: list[JsonObject] = []
        async for each in self._client.list(resource, namespace=namespace, label_selector=selector):
            if len(found) >= MOST:
                raise ValueError(f"there are more than {MOST}")
            found.append(each)
        return found

    async def _devices(self, classes: list[JsonObject] | Unread, nodes: list[JsonObject] | Unread) -> DeviceState:
        """Nothing where the API server has no such devices, or what they are compared with cannot be read."""
        if isinstance(classes, Unread) or isinstance(nodes, Unread):
            return DeviceState()
        try:
            slices, of_drivers = await self._list(RESOURCESLICES), await self._list(DEVICECLASSES)
        except NotFound:
            return DeviceState()
        view = gpus.view(classes, nodes, slices, of_drivers)
        matched = gpus.matched(view)
        return DeviceState(gpus.counts(matched), gpus.unmatched(view, matched))

    async def _config(self) -> JsonObject:
        found = await self._client.get(CONFIGMAPS, _CONFIG, self._namespace)
        data: JsonObject = found.get("data") or {}
        try:
            read: object = yaml.safe_load(str(data.get("config.yaml") or ""))
        except yaml.YAMLError as error:
            raise ValueError(f"config.yaml is not YAML: {error}") from None
        return cast("JsonObject", read) if isinstance(read, dict) else {}

    async def _workloads(self) -> tuple[WorkloadState, ...]:
        listed = [
            raw
            for resource in (DEPLOYMENTS, _STATEFULSETS, _DAEMONSETS)
            for raw in await self._list(resource, self._namespace, _OWN)
        ]
        found = [doctorviews.workload(raw) for raw in listed]
        return tuple(each for each in found if each.component != names.COMPONENT_ENGINE)

    async def _lease(self) -> OperatorLease | None:
        try:
            return layerviews.lease(await self._client.get(LEASES, names.LEASE_NAME, self._namespace))
        except NotFound:
            return None

    async def _kinds(self) -> tuple[KindState, ...]:
        return tuple([await self._kind(kind) for kind in KINDS])

    async def _kind(self, kind: type[CustomResource]) -> KindState:
        try:
            return doctorviews.kind_state(kind, await self._client.get(_CRDS, kind.crd_name()))
        except NotFound:
            return doctorviews.kind_state(kind, None)

    async def _certificates(self) -> tuple[CertificateState, ...]:
        """By metadata only: contents of Secrets are not read."""
        found: list[CertificateState] = []
        async for page in self._client.list_pages(SECRETS, namespace=self._namespace, metadata_only=True):
            for raw in page.items:
                name = str(raw["metadata"].get("name"))
                leaf = read_annotation(raw)
                if leaf is not None or name == names.SCALER_TLS_SECRET:
                    found.append(CertificateState(name, leaf.not_after if leaf is not None else None))
        return tuple(found)

    async def _clock(self) -> ClockState:
        before = datetime.now(UTC)
        server = await self._client.server_time()
        return ClockState(server, before, datetime.now(UTC))

    async def _services(self) -> tuple[ServiceState, ...]:
        return doctorviews.services(
            await self._list(SERVICES, self._namespace, _OWN), await self._list(ENDPOINTSLICES, self._namespace)
        )

    async def _name_service(self) -> ServiceState | None:
        listed = await self._list(SERVICES, _SYSTEM, _DNS)
        found = doctorviews.services(listed, await self._list(ENDPOINTSLICES, _SYSTEM) if listed else ())
        return max(found, key=lambda each: each.ready, default=None)

    async def _proxies(self, settings: JsonObject) -> ProxySettings:
        proxies, mtls = _section(settings, "extProc"), _section(_section(settings, "transport"), "mtls")
        try:
            kind = await self._client.get(_CRDS, f"{INFERENCEPOOLS.plural}.{INFERENCEPOOLS.group}")
        except NotFound:
            kind = {}
        versions = _list(_section(kind, "spec"), "versions")
        served = any(v.get("name") == INFERENCEPOOLS.version and v.get("served") is True for v in versions)
        return ProxySettings(
            enabled=proxies.get("enabled") is True,
            mtls=mtls.get("enabled") is True,
            namespaces=tuple(str(each) for each in _list(proxies, "proxyNamespaces")),
            pools=served,
        )

    async def _prices(self) -> PriceState:
        ledger = LedgerClient(self._client, self._namespace)
        found = await ledger.get(names.PRICES_PATH, {}, PricesInForce)
        return PriceState(found.lists, found.refused)

    async def _permissions(
        self, workloads: Iterable[WorkloadState], scope: tuple[str, ...], proxies: JsonObject
    ) -> tuple[PermissionState, ...]:
        """By reviews, which the API server does not store."""
        wanted = permissions.OPERATOR
        if proxies.get("enabled") is True:
            wanted += permissions.OPERATOR_PROXIES
        accounts = _accounts(workloads)
        of = {component: rights for component, rights in _OF_OTHERS.items() if component in accounts}
        rows: list[tuple[str, str | None, Permission]] = []
        for component, needed in ({names.COMPONENT_OPERATOR: wanted} | of).items():
            if scope:
                rows += [(component, None, row) for row in permissions.in_cluster(needed, scoped=True)]
                narrow = permissions.in_cluster(needed, scoped=False)
                rows += [(component, space, row) for space in scope[:MOST_SCOPES] for row in narrow]
            else:
                rows += [(component, None, row) for row in needed]
        own = permissions.OPERATOR_OWN_NAMESPACE
        rows += [(names.COMPONENT_OPERATOR, self._namespace, row) for row in own]
        gate = asyncio.Semaphore(AT_ONCE)
        asked = [(component, space, row, *each) for component, space, row in rows for each in _single(row)]

        async def one(
            component: str, space: str | None, row: Permission, verb: str, resource: str, name: str
        ) -> PermissionState:
            async with gate:
                allowed = await self._allowed(accounts[component], space, row.group, verb, resource, name)
            shown = f"{resource}.{row.group}" if row.group else resource
            return PermissionState(verb, shown, space, row.why, allowed, component)

        first = await one(*asked[0])  # where the caller may not ask, one question is enough
        return (first, *await asyncio.gather(*(one(*each) for each in asked[1:])))

    async def _allowed(
        self, account: str, namespace: str | None, group: str, verb: str, resource: str, name: str
    ) -> bool:
        plural, _, sub = resource.partition("/")
        attributes = {"verb": verb, "group": group, "resource": plural, "subresource": sub, "name": name}
        user = f"system:serviceaccount:{self._namespace}:{account}"
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{self._namespace}", "system:authenticated"]
        spec = {
            "user": user,
            "groups": groups,
            "resourceAttributes": {k: v for k, v in (attributes | {"namespace": namespace}).items() if v},
        }
        local = namespace == self._namespace
        kind = _LOCAL_REVIEWS if local else ACCESSREVIEWS
        body: JsonObject = {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {"namespace": namespace} if local else {},
            "spec": spec,
        }
        answer = await self._client.create(kind, body)
        status: JsonObject = answer.get("status") or {}
        return status.get("allowed") is True


def _objects(kind: ExplainedKind, found: list[JsonObject] | Unread) -> tuple[ObjectView, ...] | Unread:
    return found if isinstance(found, Unread) else tuple(layerviews.shoal_object(kind, raw) for raw in found)


def _single(row: Permission) -> Iterable[tuple[str, str, str]]:
    """(verb, resource, name) of each single permission of a row."""
    for verb in row.verbs:
        for resource in row.resources:
            for name in row.resource_names or ("",):
                yield verb, resource, name


_OF_OTHERS: Final = {
    names.COMPONENT_GATEWAY: permissions.GATEWAY,
    names.COMPONENT_LEDGER: permissions.LEDGER,
    names.COMPONENT_CACHE: permissions.CACHE,
}
"""Permissions of the processes beside the operator, where they are installed."""


def _accounts(workloads: Iterable[WorkloadState]) -> dict[str, str]:
    """ServiceAccounts by component."""
    return {names.COMPONENT_OPERATOR: "shoal-operator"} | {
        each.component: each.account for each in workloads if each.component in (*_OF_OTHERS, names.COMPONENT_OPERATOR)
    }


def _cache(settings: JsonObject) -> NodeCacheSettings:
    section = _section(settings, "cache")
    selector: Any = section.get("nodeSelector")
    try:
        size = int(quantity.parse(str(section.get("size"))))
    except (ValueError, ArithmeticError):
        size = None
    return NodeCacheSettings(
        section.get("enabled") is True, size, cast("dict[str, str]", selector) if isinstance(selector, dict) else {}
    )


def _section(settings: JsonObject, field: str) -> JsonObject:
    found: Any = settings.get(field)
    return cast("JsonObject", found) if isinstance(found, dict) else {}


def _list(settings: JsonObject, field: str) -> list[Any]:
    found: Any = settings.get(field)
    return cast("list[Any]", found) if isinstance(found, list) else []
