"""Asks a gateway for request logs, through the API server's proxy to its pod. Any gateway asks all the others."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final, Literal, cast
from urllib.parse import urlencode

import aiohttp
import orjson

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.cli.scaling.reach import Unreachable
from shoal.core import facts
from shoal.kube import projections
from shoal.kube.client import Client
from shoal.kube.errors import Forbidden, KubeError, NotFound, Unavailable, from_status
from shoal.kube.resources import PERSISTENTVOLUMECLAIMS, PODS, SECRETS

SELECTOR: Final = f"{names.LABEL_COMPONENT}={names.COMPONENT_GATEWAY},{names.LABEL_PART_OF}={names.MANAGED_BY}"
SECONDS: Final = {"GET": 30.0, "DELETE": 180.0}
"""A gateway waits for the others, and for the bucket."""
_CLAIM: Final = "logs-"
"""Before the pod's name: what a StatefulSet calls the claim of its template `logs`."""

Method = Literal["GET", "DELETE"]


class Gateways:
    """The gateways of an installation in `namespace`. With `url` one is called there, on its port for operations."""

    def __init__(self, client: Client, namespace: str, url: str | None = None) -> None:
        self._client, self._namespace, self._url = client, namespace, url
        self._key: str | None = None

    async def ask(self, method: Method, parameters: Mapping[str, str | None]) -> JsonObject:
        """Raises Unreachable."""
        if self._key is None:
            self._key = await self._admin_key()
        given = {name: value for name, value in parameters.items() if value is not None}
        path = f"{names.LOGS_PATH}?{urlencode(given)}"
        headers = {names.HEADER_KEY: self._key}
        try:
            if self._url is not None:
                return _object(await self._direct(method, path, headers))
            return _object(await self._any(method, path, headers))
        except Forbidden as error:
            raise Unreachable(f"{error.message}\n{self._rights()}") from None
        except KubeError as error:
            raise Unreachable(error.message) from None

    async def left_behind(self) -> list[str]:
        """What no gateway reaches: a gateway that was scaled away leaves its volume. Raises Unreachable."""
        namespace = self._namespace
        try:
            claims = [
                str(raw["metadata"]["name"])
                async for raw in self._client.list(PERSISTENTVOLUMECLAIMS, namespace=namespace, label_selector=SELECTOR)
            ]
            pods = {
                str(raw["metadata"]["name"])
                async for raw in self._client.list(PODS, namespace=namespace, label_selector=SELECTOR)
            }
        except Forbidden as error:
            return [f"volumes of gateways that were scaled away are not known: {error.message}"]
        except KubeError as error:
            raise Unreachable(error.message) from None
        gone = sorted((claim, claim.removeprefix(_CLAIM)) for claim in claims if claim.startswith(_CLAIM))
        return [
            f"gateway {pod}: it was scaled away, and what it logged is on its volume still. Scale up again to reach "
            f"it, or delete it: kubectl -n {namespace} delete persistentvolumeclaim {claim}"
            for claim, pod in gone
            if pod not in pods
        ]

    async def _any(self, method: Method, path: str, headers: Mapping[str, str]) -> bytes:
        """Of the first gateway that is reached. Raises KubeError."""
        last: KubeError | None = None
        for pod in await self._pods():
            try:
                return await self._client.proxy(
                    pod.name,
                    self._namespace,
                    port=names.OPS_TLS_PORT if pod.mtls else names.OPS_PORT,
                    tls=pod.mtls,
                    path=path,
                    method=method,
                    headers=headers,
                    timeout=SECONDS[method],
                )
            except (Unavailable, NotFound) as error:
                last = error
        if last is None:
            raise Unreachable(
                f"there is no gateway in namespace {self._namespace}: if Shoal is installed elsewhere, name its "
                "namespace with --operator-namespace"
            )
        raise last

    async def _pods(self) -> list[facts.Pod]:
        """Those that are ready first."""
        try:
            pages = self._client.list_pages(PODS, namespace=self._namespace, label_selector=SELECTOR)
            found = [projections.pod(raw) async for page in pages for raw in page.items]
        except Forbidden as error:
            raise Unreachable(f"{error.message}\n{self._rights()}") from None
        pods = [pod for pod in found if pod is not None and pod.gateway and not pod.finished]
        return sorted(pods, key=lambda pod: (pod.deleting, not pod.ready, pod.name))

    async def _admin_key(self) -> str:
        name = names.key_secret("logs")
        try:
            secret = await self._client.get(SECRETS, name, self._namespace)
        except NotFound:
            raise Unreachable(
                f"there is no Secret {name} in namespace {self._namespace}: if Shoal is installed elsewhere, name its "
                "namespace with --operator-namespace"
            ) from None
        except Forbidden as error:
            raise Unreachable(f"{error.message}\n{self._rights()}") from None
        data: JsonObject = secret.get("data") or {}
        try:
            key = base64.b64decode(str(data.get("key") or ""), validate=True).decode(errors="replace")
        except binascii.Error:
            key = ""
        if not key:
            raise Unreachable(f"the Secret {name} in namespace {self._namespace} has no `key`")
        return key

    async def _direct(self, method: Method, path: str, headers: Mapping[str, str]) -> bytes:
        url = f"{(self._url or '').rstrip('/')}{path}"
        timeout = aiohttp.ClientTimeout(total=SECONDS[method], sock_connect=5)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, url, headers=headers) as response,
            ):
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"{self._url} does not answer: {error or type(error).__name__}") from error
        if response.status >= 400:
            raise from_status(response.status, _object(raw))
        return raw

    def _rights(self) -> str:
        return (
            f"This needs the right to get the Secret {names.key_secret('logs')}, to list pods and "
            f"persistentvolumeclaims, and to get (and, for `logs delete`, delete) pods/proxy in namespace "
            f"{self._namespace}. A tenant reads its own log with its own key: GET {names.LOGS_PATH} of the gateway."
        )


def _object(raw: bytes) -> JsonObject:
    try:
        body: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    if isinstance(body, dict):
        return cast("JsonObject", body)
    return {"message": raw[:512].decode(errors="replace").strip()}
