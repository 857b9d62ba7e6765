"""Base of the clients with which commands call an installation's services: operator, gateways, ledger.

A call goes through the API server's proxy to a pod of the service, or directly to a URL. `services.py` defines the pods
and the credential of each service.
"""

import asyncio
import base64
import binascii
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, cast
from urllib.parse import urlencode

import aiohttp
import click
import orjson
from pydantic import ValidationError

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.api.replica import Message
from shoal.kube.client import KubeClient
from shoal.kube.errors import APIServerUnavailable, Forbidden, KubeError, NotFound, from_status
from shoal.kube.resources import SECRETS

R = TypeVar("R")
M = TypeVar("M", bound=Message)

Query = Mapping[str, str | Sequence[str] | None]
"""Query parameters; None is left out."""

CONNECT_SECONDS: Final = 5.0


class ServiceError(Exception):
    """A call of a service failed. The message says why and what to do."""


class Unreachable(ServiceError):
    """The service was not reached, or did not respond."""


class ServiceRefused(ServiceError):
    """The service itself refused the call."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Target(NamedTuple):
    """Target of a call: a port of a pod; with an empty `pod`, the URL of the client."""

    pod: str = ""
    port: int = 0
    tls: bool = False


class ServiceClient(ABC):
    """Client of one service of an installation. Calls raise Unreachable, ServiceRefused, and KubeError when the API
    server itself fails."""

    service: ClassVar[str]
    """Name of the service in error messages."""
    namespace_option: ClassVar[str]
    """Option that sets Shoal's namespace."""

    def __init__(
        self, cluster: KubeClient | None, namespace: str, url: str | None = None, key: str | None = None
    ) -> None:
        """`namespace` is Shoal's own. `url` bypasses the API server's proxy. `cluster` is required unless both `url`
        and `key` are given."""
        self._cluster, self._namespace = cluster, namespace
        self._url = None if url is None else url.rstrip("/")
        self._key: str | None = key

    async def get(self, path: str, query: Query, kind: type[M]) -> M:
        return self._read(await self.raw("GET", path, query), kind)

    async def post(self, path: str, body: Message, kind: type[M]) -> M:
        return self._read(await self.raw("POST", path, {}, body.model_dump_json(by_alias=True).encode()), kind)

    async def json(self, method: str, path: str, query: Query) -> JsonObject:
        """Sends a request and returns the JSON object of the response. A response that is not a JSON object becomes its
        `message`."""
        return as_object(await self.raw(method, path, query))

    async def raw(self, method: str, path: str, query: Query, body: bytes | None = None) -> bytes:
        """Sends a request and returns the body of the response."""
        given = {name: value for name, value in query.items() if value is not None}
        path += "?" + urlencode(given, doseq=True) if given else ""
        failed: tuple[KubeError, Target] | None = None
        async for target in self._targets():
            try:
                return await self._send(target, method, path, body)
            except KubeError as error:
                failed = error, target
                if not self._try_next(error):
                    break
        if failed is None:
            raise AssertionError("a service without a target raises Unreachable")
        raise self._explained(*failed) from None

    @abstractmethod
    def _targets(self) -> AsyncIterator[Target]:
        """Targets of a call in order; the next one is used when `_try_next` allows it. Raises Unreachable,
        KubeError."""

    @abstractmethod
    async def _credential(self) -> str:
        """Credential for the service; empty: none. Raises Unreachable, KubeError."""

    @abstractmethod
    def _explained(self, error: KubeError, target: Target) -> ServiceError:
        """Converts an error to a message for people."""

    @abstractmethod
    def _missing_right(self, error: KubeError) -> Unreachable:
        """Error that names the permissions which this service's commands need."""

    def _try_next(self, error: KubeError) -> bool:
        """Whether the call may succeed at the next target."""
        return False

    def _seconds(self, method: str) -> float:
        """Timeout of a call in seconds."""
        return 15.0

    def _failure(self, status: int, content: bytes) -> Exception:
        """The exception for a response with a status of 400 or more: a KubeError, or a ServiceError that ends the
        call."""
        return from_status(status, as_object(content))

    async def _send(self, target: Target, method: str, path: str, body: bytes | None) -> bytes:
        headers = {names.HEADER_KEY: credential} if (credential := await self._credential()) else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        seconds = self._seconds(method)
        if target.pod:
            status, content = await self._api().proxied(
                target.pod,
                self._namespace,
                port=target.port,
                tls=target.tls,
                path=path,
                method=method,
                headers=headers,
                body=body,
                timeout=seconds,
            )
        else:
            status, content = await self._direct(method, path, headers, body, seconds)
        if status >= 400:
            raise self._failure(status, content)
        return content

    async def _direct(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, seconds: float
    ) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, f"{self._url}{path}", headers=headers, data=body) as response,
            ):
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise APIServerUnavailable(str(error) or type(error).__name__) from error

    async def _role_key(self, role: str) -> str:
        """Key of a role, read from the installation's Secret. Raises Unreachable, KubeError."""
        name = names.key_secret(role)
        where = f"Secret {name} in namespace {self._namespace}"
        try:
            secret = await self._api().get(SECRETS, name, self._namespace)
        except NotFound:
            raise Unreachable(
                f"there is no {where}: if Shoal is installed elsewhere, name its namespace with {self.namespace_option}"
            ) from None
        except Forbidden as error:
            raise self._missing_right(error) from None
        data: JsonObject = secret.get("data") or {}
        try:
            key = base64.b64decode(str(data.get("key") or ""), validate=True).decode(errors="replace")
        except binascii.Error:
            key = ""
        if not key:
            raise Unreachable(f"the {where} has no `key`: look at the operator's log")
        return key

    def _api(self) -> KubeClient:
        if self._cluster is None:
            raise AssertionError("a client without a cluster has a URL and a key")
        return self._cluster

    def _read(self, raw: bytes, kind: type[M]) -> M:
        try:
            return kind.model_validate_json(raw)
        except ValidationError as error:
            raise Unreachable(
                f"the {self.service} sent an answer that this command does not understand: {error}"
            ) from None


def as_object(content: bytes) -> JsonObject:
    """The JSON object of a body; any other body becomes its `message`."""
    try:
        found: object = orjson.loads(content)
    except orjson.JSONDecodeError:
        found = None
    if isinstance(found, dict):
        return cast("JsonObject", found)
    return {"message": content[:512].decode(errors="replace").strip()}


def run_command(work: Coroutine[Any, Any, R]) -> R:
    """Runs the coroutine of a command. Expected failures become ClickException."""
    try:
        return asyncio.run(work)
    except NotFound as error:
        missing = "this cluster has no Model kind: is Shoal's chart `shoal-crds` installed?"
        raise click.ClickException(missing if error.kind_missing else error.message) from None
    except KubeError as error:
        raise click.ClickException(error.message) from None
    except ServiceError as error:
        raise click.ClickException(str(error)) from None
    except (ValueError, OSError, TimeoutError) as error:
        raise click.ClickException(f"cannot connect to a cluster: {error}") from None
