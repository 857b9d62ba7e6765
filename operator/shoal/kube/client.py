"""A thin asynchronous client of the API server: raw objects in and out, a timeout on every call, errors as types.

Reads and writes that may safely be repeated are retried on 429, 5xx and lost connections, after the server's own
Retry-After; everything else is the caller's decision, because a conflict means "read again, decide again".
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import MappingProxyType
from typing import Final, Literal, Self, cast

import aiohttp
import orjson
import prometheus_client

from shoal.api.meta import JsonObject
from shoal.kube import auth
from shoal.kube.errors import APIServerUnavailable, Gone, KubeError, NotFound, ObjectInvalid, from_status
from shoal.kube.resources import PODS, SERVICEACCOUNTS, Resource

REQUESTS = prometheus_client.Counter("shoal_kube_requests", "Calls to the API server.", ["verb", "resource", "code"])
SECONDS = prometheus_client.Histogram(
    "shoal_kube_request_seconds",
    "Duration of calls to the API server, retries included; watches excluded.",
    ["verb"],
    buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 30),
)

Verb = Literal["get", "list", "watch", "create", "apply", "patch", "delete"]
EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]

APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"
METADATA_ONLY: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
LIST_METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

CALL_TIMEOUT: Final = 30.0
"""Seconds for one call with all its retries."""
ATTEMPT_TIMEOUT: Final = 15.0
ATTEMPTS: Final = 5
IDLE_SECONDS: Final = 75.0
"""A connection is kept that long for the next request: a TLS handshake is milliseconds of the loop, and work comes in
bursts that need several. The API server closes them itself after 90 s."""
_NOT_ITS_ANSWER: Final = "the answer is not the API server's"
WATCH_SECONDS: Final = 300
"""A watch is renewed by the server after this time, so that load spreads again after a restart of API servers."""
IDLE_WATCH_SECONDS: Final = 90.0
"""Bookmarks come about every minute; a silent stream longer than this is taken for dead (a load balancer's drop)."""


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a LIST."""

    items: list[JsonObject]
    resource_version: str
    """Of the collection: where a watch can start once the last page is read."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One event of a watch. A BOOKMARK's object carries only its resourceVersion."""

    type: EventType
    object: JsonObject


class KubeClient:
    """One API server, one set of credentials. Close it, or use it as an async context manager."""

    def __init__(
        self,
        credentials: auth.ClusterCredentials,
        *,
        kubeconfig: str | None = None,
        context: str | None = None,
        scope: tuple[str, ...] = (),
    ):
        """`scope`: the namespaces that watches may read; empty: all."""
        self._credentials = credentials
        self.scope = tuple(dict.fromkeys(scope))
        self._kubeconfig = kubeconfig
        self._context = context
        self._loaded = time.monotonic()
        self._session: aiohttp.ClientSession | None = None
        self._login = asyncio.Lock()
        self.writes: Counter[tuple[Verb, str]] = Counter()
        """Write calls sent so far, by verb and plural: a quiet fleet adds nothing but Leases."""

    @classmethod
    async def from_environment(
        cls, *, kubeconfig: str | None = None, context: str | None = None, scope: tuple[str, ...] = ()
    ) -> Self:
        """From the given kubeconfig, else KUBECONFIG or ~/.kube/config, else the pod's service account.

        Raises ValueError, OSError, TimeoutError when there are no credentials.
        """
        return cls(await auth.load(kubeconfig, context), kubeconfig=kubeconfig, context=context, scope=scope)

    def spaces(self, resource: Resource, namespace: str | None = None) -> tuple[str | None, ...]:
        """Where a kind is listed and watched: the given namespace, or each one of the scope; None: everywhere."""
        if namespace is not None or not resource.namespaced or not self.scope:
            return (namespace,)
        return self.scope

    @property
    def namespace(self) -> str:
        """The namespace of the context or of the pod."""
        return self._credentials.namespace

    @property
    def server(self) -> str:
        return self._credentials.server

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
            await asyncio.sleep(0.05)  # TLS connections end in the loop's next turns, and the loop may end with us

    # --- reading ----------------------------------------------------------------------------------------------------

    async def get(
        self, resource: Resource, name: str, namespace: str | None = None, *, subresource: str | None = None
    ) -> JsonObject:
        """Reads one object. Raises NotFound, Forbidden, Unavailable."""
        path = resource.path(namespace=namespace, name=name, subresource=subresource)
        try:
            return await self._call("get", resource, "GET", path, idempotent=True)
        except NotFound as error:
            error.plural, error.namespace = resource.plural, namespace or ""
            raise

    async def get_metadata(self, resource: Resource, name: str, namespace: str | None = None) -> JsonObject:
        """Reads one object's metadata only: that a Secret exists can be known without its content."""
        path = resource.path(namespace=namespace, name=name)
        return await self._call("get", resource, "GET", path, idempotent=True, accept=METADATA_ONLY)

    async def discover(self, group: str, version: str) -> frozenset[str]:
        """Plurals that the server serves in a group version; empty when it knows none of it."""
        resource = Resource(group, version, "", "", namespaced=False)
        try:
            found = await self._call("get", resource, "GET", resource.root, idempotent=True)
        except KubeError as error:
            if error.status == 404:
                return frozenset()
            raise
        return frozenset(r["name"] for r in found.get("resources", []))

    async def schemas(self, group: str, version: str) -> list[JsonObject]:
        """The OpenAPI schemas that the server publishes of a group version."""
        resource = Resource(group, version, "", "", namespaced=False)
        found = await self._call("get", resource, "GET", f"/openapi/v3/apis/{group}/{version}", idempotent=True)
        return list(found.get("components", {}).get("schemas", {}).values())

    async def server_time(self) -> datetime | None:
        """The API server's clock, in whole seconds, by the Date header of an answer; None: the answer has none. Raises
        Unavailable."""
        timeout = aiohttp.ClientTimeout(total=ATTEMPT_TIMEOUT, sock_connect=5)
        try:
            response = await self._open("GET", "/version", params=None, timeout=timeout)
            async with response:
                text = response.headers.get("Date", "")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise APIServerUnavailable(f"get /version: {_why(error)}") from error
        try:
            found = parsedate_to_datetime(text)
        except ValueError:
            return None
        return found.astimezone(UTC) if found.tzinfo is not None else found.replace(tzinfo=UTC)

    async def log(self, pod: str, namespace: str, *, container: str, lines: int, previous: bool = False) -> str:
        """The last lines of a container's log; with `previous`, of the container that ran before its last restart.
        Raises NotFound, Forbidden, Invalid (not started yet; there is none before), Unavailable."""
        path = PODS.path(namespace=namespace, name=pod, subresource="log")
        timeout = aiohttp.ClientTimeout(total=ATTEMPT_TIMEOUT, sock_connect=5)
        params = {"container": container, "tailLines": str(lines)} | ({"previous": "true"} if previous else {})
        try:
            response = await self._open("GET", path, params=params, timeout=timeout, headers={"Accept": "*/*"})
            async with response:
                if response.status >= 400:
                    raise await _error(response)
                return (await response.read()).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise APIServerUnavailable(f"get {path}: {_why(error)}") from error

    async def proxied(
        self,
        target_name: str,
        namespace: str,
        *,
        port: int,
        path: str,
        method: str = "GET",
        headers: Mapping[str, str] = MappingProxyType({}),
        body: bytes | None = None,
        timeout: float = ATTEMPT_TIMEOUT,
        tls: bool = False,
        resource: Resource = PODS,
    ) -> tuple[int, bytes]:
        """A call of `path` (with a leading slash, and its query) at a pod's HTTP port (or a Service's: `resource`),
        through the API server, once: status and body, be they the pod's or the API server's. With `tls` the API server
        calls the pod over TLS, whatever certificate the pod shows.

        Raises:
            APIServerUnavailable: neither of them answered.
        """
        name = f"{'https:' if tls else ''}{target_name}:{port}"
        target = resource.path(namespace=namespace, name=name, subresource=f"proxy{path}")
        within = aiohttp.ClientTimeout(total=timeout, sock_connect=5)
        sent = {"Accept": "*/*", **headers}
        try:
            response = await self._open(method, target, params=None, timeout=within, data=body, headers=sent)
            async with response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise APIServerUnavailable(f"{method.lower()} {target}: {_why(error)}") from error

    async def list_pages(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        label_selector: str | None = None,
        field_selector: str | None = None,
        page_size: int = 500,
        metadata_only: bool = False,
    ) -> AsyncIterator[ListPage]:
        """Lists page by page, so that a large collection never lies in memory as a whole.

        Raises Gone when the pages expired on the way: start again.
        """
        params = {"limit": str(page_size)} | _selectors(label_selector, field_selector)
        path = resource.path(namespace=namespace)
        while True:
            accept = LIST_METADATA_ONLY if metadata_only else "application/json"
            body = await self._call("list", resource, "GET", path, params=params, idempotent=True, accept=accept)
            if "items" not in body:
                # Read as a list without objects, it would say that all are deleted.
                raise APIServerUnavailable(f"list {path}: {_NOT_ITS_ANSWER}")
            metadata: JsonObject = body.get("metadata") or {}
            items: list[JsonObject] = body["items"] or []
            for item in items:  # a list's items come without their type
                item.setdefault("apiVersion", resource.api_version)
                item.setdefault("kind", resource.kind)
            yield ListPage(items, str(metadata.get("resourceVersion", "")))
            if not metadata.get("continue"):
                return
            params = params | {"continue": metadata["continue"]}

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        label_selector: str | None = None,
        field_selector: str | None = None,
        page_size: int = 500,
    ) -> AsyncIterator[JsonObject]:
        """All objects, read page by page."""
        async for page in self.list_pages(
            resource,
            namespace=namespace,
            label_selector=label_selector,
            field_selector=field_selector,
            page_size=page_size,
        ):
            for item in page.items:
                yield item

    async def watch(
        self,
        resource: Resource,
        resource_version: str,
        *,
        namespace: str | None = None,
        label_selector: str | None = None,
        field_selector: str | None = None,
        server_seconds: int = WATCH_SECONDS,
        idle_seconds: float = IDLE_WATCH_SECONDS,
        metadata_only: bool = False,
    ) -> AsyncIterator[WatchEvent]:
        """Events after `resource_version`, until the server ends the stream (normal, every few minutes).

        Raises Gone when the version is too old, Unavailable when the connection breaks or stays silent.
        """
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(server_seconds),
        } | _selectors(label_selector, field_selector)
        timeout = aiohttp.ClientTimeout(
            total=server_seconds + 30, sock_connect=10, sock_read=min(idle_seconds, server_seconds + 10)
        )
        response: aiohttp.ClientResponse | None = None
        try:
            path, headers = resource.path(namespace=namespace), {"Accept": METADATA_ONLY} if metadata_only else None
            response = await self._open("GET", path, params=params, timeout=timeout, headers=headers)
            REQUESTS.labels("watch", resource.plural, response.status).inc()
            if response.status != 200:
                raise await _error(response)
            buffer = bytearray()
            # By chunks and not by lines: an object may be longer than the stream reader's line limit.
            async for chunk in response.content.iter_any():
                buffer += chunk
                if b"\n" not in chunk:
                    continue
                *lines, rest = bytes(buffer).split(b"\n")
                buffer = bytearray(rest)
                for line in lines:
                    if line:
                        yield _watch_event(line)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise APIServerUnavailable(f"watch of {resource.plural} broke: {_why(error)}") from error
        finally:
            if response is not None:
                response.close()

    async def token(self, account: str, namespace: str, *, seconds: int, audience: str | None = None) -> str:
        """A short-lived token of a ServiceAccount, for this audience (None: the API server itself). Raises NotFound,
        Forbidden, Unavailable."""
        path = SERVICEACCOUNTS.path(namespace=namespace, name=account, subresource="token")
        spec: JsonObject = {"expirationSeconds": seconds}
        if audience is not None:
            spec["audiences"] = [audience]
        asked: JsonObject = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        made = await self._call("create", SERVICEACCOUNTS, "POST", path, body=asked, idempotent=True)
        return str(made["status"]["token"])

    # --- writing ----------------------------------------------------------------------------------------------------

    async def create(self, resource: Resource, obj: JsonObject, *, manager: str | None = None) -> JsonObject:
        """Creates an object; its fields belong to `manager` (None: to a name that the API server makes up). Raises
        AlreadyExists. Not retried when it is unknown whether it was carried out."""
        path = resource.path(namespace=obj["metadata"].get("namespace"))
        params = None if manager is None else {"fieldManager": manager}
        return await self._call("create", resource, "POST", path, body=obj, params=params, idempotent=False)

    async def apply(
        self,
        resource: Resource,
        obj: JsonObject,
        *,
        manager: str,
        force: bool = True,
        subresource: str | None = None,
    ) -> JsonObject:
        """Server-side apply of the fields in `obj`, which must be all that `manager` owns.

        `metadata.resourceVersion` or `metadata.uid` in `obj` are preconditions. Raises Conflict when they do not hold,
        or when another manager owns a field and `force` is off; Invalid when the object is refused.
        """
        metadata = obj["metadata"]
        path = resource.path(namespace=metadata.get("namespace"), name=metadata["name"], subresource=subresource)
        params = {"fieldManager": manager, "force": "true" if force else "false"}
        return await self._call(
            "apply", resource, "PATCH", path, body=obj, params=params, content_type=APPLY, idempotent=True
        )

    async def apply_status(self, resource: Resource, obj: JsonObject, *, manager: str) -> JsonObject:
        """Server-side apply on `/status`; `obj` holds the whole status."""
        return await self.apply(resource, obj, manager=manager, subresource="status")

    async def apply_scale(
        self, resource: Resource, name: str, namespace: str, *, replicas: int, manager: str, resource_version: str
    ) -> JsonObject:
        """Server-side apply on `/scale`, with the version that the decision was made from. Raises Conflict.

        An apply also takes the ownership of `replicas` when the number stays the same; a merge patch would not.
        """
        scale: JsonObject = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": name, "namespace": namespace, "resourceVersion": resource_version},
            "spec": {"replicas": replicas},
        }
        return await self.apply(resource, scale, manager=manager, subresource="scale")

    async def merge_patch(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        patch: JsonObject,
        *,
        manager: str,
        subresource: str | None = None,
    ) -> JsonObject:
        """JSON merge patch. With `metadata.resourceVersion` in it, a compare-and-set (raises Conflict)."""
        path = resource.path(namespace=namespace, name=name, subresource=subresource)
        return await self._call(
            "patch",
            resource,
            "PATCH",
            path,
            body=patch,
            params={"fieldManager": manager},
            content_type=MERGE,
            idempotent="resourceVersion" not in patch.get("metadata", {}),
        )

    async def replace(self, resource: Resource, obj: JsonObject, *, manager: str) -> JsonObject:
        """PUT of a whole object; its resourceVersion makes it a compare-and-set. Raises Conflict."""
        metadata = obj["metadata"]
        path = resource.path(namespace=metadata.get("namespace"), name=metadata["name"])
        return await self._call(
            "patch", resource, "PUT", path, body=obj, params={"fieldManager": manager}, idempotent=False
        )

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
    ) -> None:
        """Deletes an object; its children follow in the background. An object that is gone already is a success.

        Raises Conflict when the uid or the resourceVersion is another one.
        """
        preconditions = {"uid": uid, "resourceVersion": resource_version}
        body: JsonObject = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
            "preconditions": {k: v for k, v in preconditions.items() if v is not None},
        }
        path = resource.path(namespace=namespace, name=name)
        try:
            await self._call("delete", resource, "DELETE", path, body=body, idempotent=uid is not None)
        except KubeError as error:
            if error.status != 404:
                raise

    # --- transport --------------------------------------------------------------------------------------------------

    async def _call(
        self,
        verb: Verb,
        resource: Resource,
        method: str,
        path: str,
        *,
        idempotent: bool,
        body: JsonObject | None = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> JsonObject:
        if verb not in ("get", "list", "watch"):
            self.writes[verb, resource.plural] += 1
        data = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": content_type, "Accept": accept}
        begin = time.monotonic()
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                for attempt in range(1, ATTEMPTS + 1):
                    try:
                        return await self._attempt(verb, resource, method, path, data, params, headers)
                    except APIServerUnavailable as error:
                        # 429 was not carried out whatever the verb; for the rest nobody knows.
                        if attempt == ATTEMPTS or not (idempotent or error.status == 429):
                            raise
                        backoff = 0.1 * 2**attempt
                        await asyncio.sleep(max(error.retry_after or 0.0, backoff * random.uniform(0.5, 1.0)))  # noqa: S311
            raise AssertionError("unreachable")
        except TimeoutError as error:
            raise APIServerUnavailable(f"{verb} {path}: no answer within {CALL_TIMEOUT:.0f} s") from error
        finally:
            SECONDS.labels(verb).observe(time.monotonic() - begin)

    async def _attempt(
        self,
        verb: Verb,
        resource: Resource,
        method: str,
        path: str,
        data: bytes | None,
        params: Mapping[str, str] | None,
        headers: Mapping[str, str],
    ) -> JsonObject:
        timeout = aiohttp.ClientTimeout(total=ATTEMPT_TIMEOUT, sock_connect=5)
        try:
            response = await self._open(method, path, params=params, timeout=timeout, data=data, headers=headers)
            async with response:
                REQUESTS.labels(verb, resource.plural, response.status).inc()
                if response.status >= 400:
                    raise await _error(response)
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            REQUESTS.labels(verb, resource.plural, "none").inc()
            raise APIServerUnavailable(f"{verb} {path}: {_why(error)}") from error
        found = _parsed(raw)
        if not isinstance(found, dict):
            raise APIServerUnavailable(f"{verb} {path}: {_NOT_ITS_ANSWER}")
        return cast("JsonObject", found)

    async def _open(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None,
        timeout: aiohttp.ClientTimeout,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> aiohttp.ClientResponse:
        """Sends a request. 401 loads the credentials again, once."""
        renew = self._credentials.renew_seconds
        if renew is not None and time.monotonic() - self._loaded > renew:
            await self._reload(self._credentials)
        for last in (False, True):
            used = self._credentials
            if self._session is None:
                connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=IDLE_SECONDS)
                self._session = aiohttp.ClientSession(connector=connector)
            response = await self._session.request(
                method,
                used.server + path,
                params=params,
                data=data,
                headers={
                    **(headers or {"Accept": "application/json"}),
                    "User-Agent": "shoal",
                    **({"Authorization": f"Bearer {used.token}"} if used.token else {}),
                },
                timeout=timeout,
                ssl=used.tls,
                server_hostname=used.tls_server_name,
                proxy=used.proxy,
                allow_redirects=False,
            )
            if response.status != 401 or last:
                return response
            response.close()
            await self._reload(used)
        raise AssertionError("unreachable")

    async def _reload(self, used: auth.ClusterCredentials) -> None:
        async with self._login:
            if self._credentials is not used:  # another call did it meanwhile
                return
            try:
                self._credentials = await auth.load(self._kubeconfig, self._context)
            except (ValueError, OSError, TimeoutError) as error:
                raise APIServerUnavailable(f"credentials could not be loaded again: {error}") from error
            self._loaded = time.monotonic()


def _why(error: BaseException) -> str:
    """In one short sentence; aiohttp's own names its TLS context by address."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect to {error.host}:{error.port}: {error.os_error.strerror or error.os_error}"
    return str(error) or type(error).__name__


def _selectors(label_selector: str | None, field_selector: str | None) -> dict[str, str]:
    pairs = {"labelSelector": label_selector, "fieldSelector": field_selector}
    return {k: v for k, v in pairs.items() if v}


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else None


async def _error(response: aiohttp.ClientResponse) -> KubeError:
    raw = await response.read()
    body = _parsed(raw)
    if not isinstance(body, dict):
        body = {"message": raw[:512].decode(errors="replace").strip()}
    return from_status(response.status, cast("JsonObject", body), retry_after=_retry_after(response))


def _parsed(raw: bytes) -> object:
    """JSON; None: it is none, but the page of something in front of the API server, perhaps."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


def _watch_event(line: bytes) -> WatchEvent:
    event = _parsed(line)
    members: JsonObject = cast("JsonObject", event) if isinstance(event, dict) else {}
    kind, obj = members.get("type"), members.get("object")
    if not isinstance(obj, dict):
        raise ObjectInvalid(f"not a watch event: {line[:200]!r}")
    found = cast("JsonObject", obj)
    if kind in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
        if not isinstance(found.get("metadata"), dict):
            raise ObjectInvalid(f"a watch event without an object: {line[:200]!r}")
        return WatchEvent(kind, found)
    if kind != "ERROR":
        raise ObjectInvalid(f"not a watch event: {line[:200]!r}")
    # "too old resource version" also comes as 500; the reason is what counts
    if found.get("reason") in ("Expired", "Gone"):
        raise Gone(str(found.get("message")), status=410, reason="Expired")
    raise from_status(int(found.get("code") or 500), found)
