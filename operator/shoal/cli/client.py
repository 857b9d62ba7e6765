"""Base of the clients with which commands call an installation's services: operator, gateways, ledger.

A call goes through the API server's proxy, or directly to a URL. A user who may have a token of a role's ServiceAccount
(`cli/roletokens.py`) shows that to the Service. Other users call a pod with the key of the role, if they may read it.
`services.py` defines the Service, the pods and the credential of each service.
"""

import asyncio
import base64
import binascii
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, cast
from urllib.parse import unquote, urlencode

import aiohttp
import click
import orjson
from pydantic import ValidationError

from shoal.api import names
from shoal.api.identity import MTLS_NEEDED, ProcessRole
from shoal.api.meta import JsonObject
from shoal.api.replica import Message
from shoal.api.rights import Right, roles_with
from shoal.cli.roletokens import RoleTokens, binding_name, subject, user_name
from shoal.cli.trust import AuthoritySource, Connect, NotVerified, ServiceTrust
from shoal.kube.client import KubeClient
from shoal.kube.errors import APIServerUnavailable, Forbidden, KubeError, NotFound, Unauthorized, from_status
from shoal.kube.projections import problems_of
from shoal.kube.resources import PODS, SECRETS, SERVICES

R = TypeVar("R")
M = TypeVar("M", bound=Message)

Query = Mapping[str, str | Sequence[str] | None]
"""Query parameters; None is left out."""

CONNECT_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.05
_NO_POD: Final = (404, 503)
"""Statuses of the API server's proxy for a Service without endpoints."""


class ServiceError(Exception):
    """A call of a service failed. The message says why and what to do: first what the user lacks, and last what the API
    server said, which may be of one way of several."""

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(f"{message}\nThe API server said: {said}" if said else message)
        self.said = said


class Unreachable(ServiceError):
    """The service was not reached, or did not respond."""


class MissingRight(Unreachable):
    """The API server refused something on the way with a role's key. `needed` says what that way needs."""

    def __init__(self, said: str, needed: str) -> None:
        super().__init__(needed, said)
        self.needed = needed


class ServiceNotReached(Unreachable):
    """The API server found no pod behind the Service, or the user may not call it there."""


class ServiceRefused(ServiceError):
    """The service itself refused the call."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Target(NamedTuple):
    """Target of a call: a port of a pod, or of a Service where there is a token; with an empty `name`, the URL of the
    client."""

    name: str = ""
    port: int = 0
    tls: bool = False
    token: str = ""
    """A token of a role, in place of the service's key."""

    @property
    def where(self) -> str:
        return f"{'Service' if self.token else 'pod'} {self.name}"

    @property
    def forwarded(self) -> str:
        """For `kubectl port-forward`."""
        return f"service/{self.name}" if self.token else self.name


class RoleService(NamedTuple):
    """How people with a token reach a service."""

    name: str
    """Of its Service in Shoal's namespace."""
    port: int
    tls_port: int | None
    audience: str
    rights: Mapping[tuple[str, str], Right]
    """By method and path (its first two parts)."""
    tries: int
    """Calls until one reaches a pod that answers: the API server's proxy chooses a pod at random."""


class ServiceClient(ABC):
    """Client of one service of an installation. Calls raise Unreachable, ServiceRefused, and KubeError when the API
    server itself fails."""

    service: ClassVar[ProcessRole]
    """Name of the service, in error messages and in its certificate."""
    namespace_option: ClassVar[str]
    """Option that sets Shoal's namespace."""
    url_option: ClassVar[str]
    by_role: ClassVar[RoleService]
    _tls: bool | None = None
    """Whether the Service speaks TLS; None: not looked up yet."""

    def __init__(
        self,
        cluster: KubeClient | None,
        namespace: str,
        url: str | None = None,
        key: str | None = None,
        *,
        ca_file: str | None = None,
        connect: Connect | None = None,
    ) -> None:
        """`namespace` is Shoal's own. `url` bypasses the API server's proxy. `cluster` is required unless both `url`
        and `key` are given: then `connect` is used where the CA of the installation has to be read. `ca_file` has this
        CA."""
        self._cluster, self._namespace = cluster, namespace
        self._url = None if url is None else url.rstrip("/")
        self._key: str | None = key
        self._trust: ServiceTrust | None = None
        if self._url is not None and self._url.lower().startswith("https:") and self.by_role.tls_port is not None:
            source = AuthoritySource(namespace, ca_file, cluster, connect)
            self._trust = ServiceTrust(self._url, self.service, source)
        self._tokens: RoleTokens | None = None
        if cluster is not None and key is None:
            self._tokens = RoleTokens(cluster, namespace, self.by_role.audience)

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
        right = self.by_role.rights.get((method, "/".join(path.split("/")[:3])))
        viewed = None if right is None else viewed_namespace(right, path, query)
        path += "?" + urlencode(given, doseq=True) if given else ""
        if self._tokens is None or right is None:
            return await self._by_key(method, path, body)
        if await self._tokens.token(right, viewed) is not None:
            try:
                return await self._by_token(self._tokens, right, viewed, method, path, body)
            except ServiceNotReached as unreached:
                # The user may be able to call the pod itself, and then learns more of what is wrong with it.
                try:
                    return await self._by_key(method, path, body)
                except MissingRight:
                    raise unreached from None
        try:
            return await self._by_key(method, path, body)
        except MissingRight as error:
            advice = await self._tokens.advice(right, viewed)
            raise Unreachable(f"{advice}\nOr, without such a role: {error.needed}", error.said) from None

    async def _by_key(self, method: str, path: str, body: bytes | None) -> bytes:
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

    async def _by_token(
        self, tokens: RoleTokens, right: Right, viewed: str | None, method: str, path: str, body: bytes | None
    ) -> bytes:
        failed: tuple[KubeError, Target] | None = None
        refused: Unauthorized | None = None
        denied: ServiceRefused | None = None
        for _ in range(self.by_role.tries + len(roles_with(right))):
            token = await tokens.token(right, viewed)
            if token is None:
                break
            target = Target(token=token) if self._url is not None else await self._service(token)
            try:
                return await self._send(target, method, path, body)
            except ServiceRefused as error:
                if error.status != 403:
                    raise
                tokens.deny(token, right, viewed)
                denied = denied or error
            except Unauthorized as error:
                # The token has expired: `shoal top` runs longer than the lifetime of a token.
                tokens.forget()
                if refused is not None:
                    break
                refused = error
            except KubeError as error:
                failed = error, target
                if not self._try_next(error):
                    break
                await asyncio.sleep(_PAUSE_SECONDS)
        if failed is not None:
            raise await self._not_reached(*failed) from None
        if denied is not None:
            raise denied
        raise Unreachable(f"the {self.service} does not accept the token: {refused.message if refused else ''}")

    async def _service(self, token: str) -> Target:
        """The Service as target."""
        service = self.by_role
        if self._tls is None:
            try:
                found = await self._api().get(SERVICES, service.name, self._namespace)
            except NotFound:
                raise Unreachable(
                    f"there is no Service {service.name} in namespace {self._namespace}: if Shoal is installed "
                    f"elsewhere, name its namespace with {self.namespace_option}"
                ) from None
            except Forbidden as error:
                raise await self._no_way(error) from None
            spec: JsonObject = found.get("spec") or {}
            ports: list[JsonObject] = spec.get("ports") or []
            self._tls = service.tls_port in [port.get("port") for port in ports]
        if self._tls and service.tls_port is not None:
            return Target(service.name, service.tls_port, True, token)
        return Target(service.name, service.port, False, token)

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
    def _missing_right(self, error: KubeError) -> MissingRight:
        """Error that names the permissions which this service's commands need without a token of a role."""

    async def _not_reached(self, error: KubeError, target: Target) -> ServiceError:
        """Converts an error of a call with a token to a message for people."""
        if isinstance(error, Forbidden):
            return await self._no_way(error)
        explained = self._explained(error, target)
        return ServiceNotReached(str(explained)) if target.name and error.status in _NO_POD else explained

    async def _no_way(self, error: Forbidden) -> Unreachable:
        """The user may have a token, and may not reach the Service through the API server."""
        who = await user_name(self._api())
        return ServiceNotReached(
            f"This needs the Role {names.REACH_ROLE} in namespace {self._namespace}. An administrator runs:\n"
            f"  kubectl -n {self._namespace} create rolebinding {binding_name(names.REACH_ROLE, who)} "
            f"--role={names.REACH_ROLE} {subject(who)}",
            error.message,
        )

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
        credential = target.token or await self._credential()
        headers = {names.HEADER_KEY: credential} if credential else {}
        if body is not None:
            headers["Content-Type"] = "application/json"
        seconds = self._seconds(method)
        if target.name:
            status, content = await self._api().proxied(
                target.name,
                self._namespace,
                port=target.port,
                tls=target.tls,
                path=path,
                method=method,
                headers=headers,
                body=body,
                timeout=seconds,
                resource=SERVICES if target.token else PODS,
            )
        else:
            status, content = await self._direct(method, path, headers, body, seconds)
        if status == 403 and not target.name and MTLS_NEEDED in message_of(content):
            raise Unreachable(self._wrong_port())
        if status == 403 and target.token and as_object(content).get("kind") != "Status":
            raise ServiceRefused(message_of(content), status)
        if status == 401 and target.token:
            raise from_status(status, {"message": message_of(content)})
        if status >= 400:
            raise self._failure(status, content)
        return content

    async def _direct(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, seconds: float
    ) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)

        async def send(tls: Mapping[str, Any]) -> tuple[int, bytes]:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, f"{self._url}{path}", headers=headers, data=body, **tls) as response,
            ):
                return response.status, await response.read()

        try:
            return await (send({}) if self._trust is None else self._trust.call(send))
        except NotVerified as error:
            raise Unreachable(str(error)) from None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise APIServerUnavailable(str(error) or type(error).__name__) from error

    def _forwarding(self, what: str, port: int, *, tls: bool) -> str:
        """How a person reaches a port past the API server's proxy. `what`: a pod, or service/NAME."""
        return (
            f"kubectl -n {self._namespace} port-forward {what} {port}, and {self.url_option} "
            f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        )

    def _wrong_port(self) -> str:
        service = self.by_role
        if service.tls_port is None:
            return f"{self._url} does not answer: {MTLS_NEEDED}"
        return (
            f"mutual TLS is on, so {self._url} answers probes only. Try: "
            f"{self._forwarding(f'service/{service.name}', service.tls_port, tls=True)}"
        )

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
                f"the {self.service} sent an answer that this command does not understand ({problems_of(error)}): is "
                "this command of the same version? `kubectl shoal --version` and `kubectl shoal doctor` show both"
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


def message_of(content: bytes) -> str:
    """The message of a service's refusal, in each of their formats."""
    body = as_object(content)
    error = body.get("error")
    return str((cast("JsonObject", error) if isinstance(error, dict) else body).get("message"))


def viewed_namespace(right: Right, path: str, query: Query) -> str | None:
    """The namespace that a call is about. None: all."""
    if right.narrowed != "namespace":
        return None
    parts = path.split("/")
    if len(parts) > 3:
        return unquote(parts[3])
    found = query.get("namespace")
    return found if isinstance(found, str) else None


def not_found(error: NotFound) -> str:
    """What is said of an object that is not there: also where it was looked for, and where to look."""
    if not error.namespace or error.kind_missing:
        return error.message
    return (
        f"{error.message} in namespace {error.namespace}: `kubectl get {error.plural} -A` lists all; -n names another"
    )


def run_command(work: Coroutine[Any, Any, R]) -> R:
    """Runs the coroutine of a command. Expected failures become ClickException."""
    try:
        return asyncio.run(work)
    except NotFound as error:
        missing = "this cluster has no Model kind: is Shoal's chart `shoal-crds` installed?"
        raise click.ClickException(missing if error.kind_missing else not_found(error)) from None
    except KubeError as error:
        raise click.ClickException(error.message) from None
    except ServiceError as error:
        raise click.ClickException(str(error)) from None
    except (ValueError, OSError, TimeoutError) as error:
        raise click.ClickException(f"cannot connect to a cluster: {error}") from None
