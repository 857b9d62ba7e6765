"""Asks the ledger: through the API server's proxy to its pod, or at a URL."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, ParamSpec, TypeVar, cast
from urllib.parse import urlencode

import aiohttp
import click
import orjson
from pydantic import ValidationError

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.api.replica import Message
from shoal.cli.options import installation_options
from shoal.kube.client import Client
from shoal.kube.errors import Forbidden, KubeError, NotFound, from_status
from shoal.kube.resources import PODS, SECRETS

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=Message)

Query = Mapping[str, str | Sequence[str] | None]

SECONDS: Final = 60.0
"""For one answer."""
_PODS: Final = f"{names.LABEL_COMPONENT}={names.COMPONENT_LEDGER}"


class Unreachable(Exception):
    """The ledger was not reached; the text says why and what to do."""


class Refused(Exception):
    """The ledger's own no."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Where:
    """Which ledger: what the options of `ledger_options` say."""

    def __init__(
        self, kubeconfig: str | None, context: str | None, namespace: str, url: str | None, key: str | None
    ) -> None:
        self.kubeconfig, self.context, self.namespace = kubeconfig, context, namespace
        self.url, self.key = url, key


class Ledger:
    """Open it with `opened`."""

    def __init__(self, where: Where, client: Client | None, session: aiohttp.ClientSession | None) -> None:
        self._where = where
        self._client = client
        self._session = session
        self._key = where.key
        self._pod: tuple[str, bool] | None = None
        """Its name, and whether it speaks TLS."""

    async def get(self, path: str, query: Query, kind: type[M]) -> M:
        """Raises Unreachable, Refused."""
        return _read(await self.raw("GET", path, query), kind)

    async def post(self, path: str, body: Message, kind: type[M]) -> M:
        """Raises Unreachable, Refused."""
        return _read(await self.raw("POST", path, {}, body.model_dump_json(by_alias=True).encode()), kind)

    async def raw(self, method: str, path: str, query: Query, body: bytes | None = None) -> bytes:
        """What it answers, as it is. Raises Unreachable, Refused."""
        given = {name: value for name, value in query.items() if value is not None}
        target = path + ("?" + urlencode(given, doseq=True) if given else "")
        if self._key is None:
            self._key = await self._derived()
        headers = {names.HEADER_KEY: self._key}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._session is not None:
            status, content = await self._direct(self._session, method, target, headers, body)
        else:
            status, content = await self._proxied(method, target, headers, body)
        if status >= 400:
            raise self._refusal(status, content)
        return content

    async def _direct(
        self, session: aiohttp.ClientSession, method: str, target: str, headers: dict[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        url = (self._where.url or "").rstrip("/")
        try:
            async with session.request(method, url + target, headers=headers, data=body) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Unreachable(f"the ledger at {url} does not answer: {str(error) or type(error).__name__}") from None

    async def _proxied(
        self, method: str, target: str, headers: dict[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        pod, tls = self._pod = self._pod or await self._find()
        try:
            return await self._cluster().proxied(
                pod,
                self._where.namespace,
                port=names.LEDGER_TLS_PORT if tls else names.LEDGER_PORT,
                tls=tls,
                path=target,
                method=method,
                headers=headers,
                body=body,
                timeout=SECONDS,
            )
        except KubeError as error:
            raise self._kube(error, f"the API server does not reach the ledger, pod {pod}") from None

    async def _find(self) -> tuple[str, bool]:
        namespace = self._where.namespace
        try:
            pods = [pod async for pod in self._cluster().list(PODS, namespace=namespace, label_selector=_PODS)]
        except KubeError as error:
            raise self._kube(error, "the ledger's pod is not found") from None
        pods.sort(key=lambda pod: (not _ready(pod), pod["metadata"]["name"]))
        if not pods:
            raise Unreachable(
                f"no ledger runs in namespace {namespace}: if Shoal is installed elsewhere, name its namespace with "
                "--ledger-namespace; if the chart's `ledger.enabled` is false, nothing counts usage"
            )
        if not _ready(pods[0]):
            raise Unreachable(
                f"the ledger, pod {pods[0]['metadata']['name']}, is not ready: kubectl -n {namespace} describe pod -l "
                f"{_PODS} says why. Gateways keep usage until it is back"
            )
        metadata = pods[0]["metadata"]
        said: dict[str, str] = metadata.get("annotations") or {}
        return metadata["name"], said.get(names.ANNOTATION_TRANSPORT) == names.TRANSPORT_MTLS

    async def _derived(self) -> str:
        namespace, name = self._where.namespace, names.key_secret("billing")
        try:
            secret = await self._cluster().get(SECRETS, name, namespace)
        except Forbidden as error:
            raise Unreachable(
                f"{error.message}\nThe ledger answers to who may read the key for bills: this needs the right to get "
                f"the Secret {name} in namespace {namespace}. Who has a key of the ledger gives it with --ledger-key"
            ) from None
        except NotFound:
            raise Unreachable(
                f"there is no Secret {name} in namespace {namespace}: if Shoal is installed elsewhere, name its "
                "namespace with --ledger-namespace"
            ) from None
        except KubeError as error:
            raise self._kube(error, "the key for bills cannot be read") from None
        data: JsonObject = secret.get("data") or {}
        key = base64.b64decode(str(data.get("key") or "")).decode(errors="replace")
        if not key:
            raise Unreachable(f"the Secret {name} in namespace {namespace} has no `key`: look at the operator's log")
        return key

    def _cluster(self) -> Client:
        if self._client is None:
            raise Unreachable("with --ledger-url and without a cluster, give the key with --ledger-key")
        return self._client

    def _refusal(self, status: int, content: bytes) -> Exception:
        body = _object(content)
        error = body.get("error")
        if isinstance(error, dict):
            message = str(cast("JsonObject", error).get("message"))
            if status == 401:
                message = f"the ledger does not take this key: {message}"
            return Refused(message, status)
        if body.get("kind") == "Status":
            return self._kube(from_status(status, body), "the API server does not reach the ledger")
        return Unreachable(f"what answers there is no ledger: HTTP {status} {content[:200].decode(errors='replace')}")

    def _kube(self, error: KubeError, what: str) -> Unreachable:
        namespace = self._where.namespace
        if isinstance(error, Forbidden):
            return Unreachable(
                f"{error.message}\nThis needs the right to list pods and to use pods/proxy (get; create for credits "
                f"and for bills at other prices) in namespace {namespace}"
            )
        return Unreachable(
            f"{what}: {error.message}. Where a NetworkPolicy or a firewall is between them, try: kubectl -n "
            f"{namespace} port-forward service/shoal-ledger {names.LEDGER_PORT}, and --ledger-url "
            f"http://127.0.0.1:{names.LEDGER_PORT}"
        )


@contextlib.asynccontextmanager
async def opened(where: Where) -> AsyncGenerator[Ledger]:
    """A ledger to ask. The cluster is asked only where something of it is needed. Raises ValueError without one."""
    async with contextlib.AsyncExitStack() as stack:
        client = session = None
        if where.url is not None:
            timeout = aiohttp.ClientTimeout(total=SECONDS, sock_connect=5)
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        if where.url is None or where.key is None:
            client = await stack.enter_async_context(
                await Client.from_environment(kubeconfig=where.kubeconfig, context=where.context)
            )
        yield Ledger(where, client, session)


def ledger_options(command: Callable[P, R]) -> Callable[P, R]:
    """The options that say which ledger: one parameter `where`."""

    def with_where(*args: Any, **values: Any) -> Any:
        values["where"] = Where(
            values.pop("kubeconfig"),
            values.pop("context"),
            values.pop("ledger_namespace"),
            values.pop("ledger_url"),
            values.pop("ledger_key"),
        )
        return cast("Callable[..., Any]", command)(*args, **values)

    with_where.__doc__ = command.__doc__
    with_where.__name__ = command.__name__
    with_where.__dict__.update(command.__dict__)
    wrapped: Any = with_where
    for option in (
        click.option(
            "--ledger-key",
            envvar="SHOAL_LEDGER_KEY",
            show_envvar=True,
            help="The key towards the ledger. Default: from the Secret shoal-key-billing.",
        ),
        installation_options(
            "--ledger-namespace", ("--ledger-url", "Call the ledger here, not through the API server.")
        ),
    ):
        wrapped = option(wrapped)
    return wrapped


def asked(where: Where, work: Callable[[Ledger], Coroutine[Any, Any, R]]) -> R:
    """What `work` makes of a ledger; what a person can do something about becomes a ClickException."""

    async def run() -> R:
        async with opened(where) as ledger:
            return await work(ledger)

    try:
        return asyncio.run(run())
    except (Unreachable, Refused) as error:
        raise click.ClickException(str(error)) from None
    except KubeError as error:
        raise click.ClickException(error.message) from None
    except (ValueError, OSError, TimeoutError) as error:
        raise click.ClickException(f"no cluster to talk to: {error}") from None


def _read(raw: bytes, kind: type[M]) -> M:
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise Unreachable(f"the ledger answers something that this command does not understand: {error}") from None


def _ready(pod: JsonObject) -> bool:
    status: JsonObject = pod.get("status") or {}
    conditions: list[JsonObject] = status.get("conditions") or []
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def _object(content: bytes) -> JsonObject:
    try:
        found: object = orjson.loads(content)
    except orjson.JSONDecodeError:
        return {}
    return cast("JsonObject", found) if isinstance(found, dict) else {}
