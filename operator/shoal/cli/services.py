"""Clients of an installation's services: the pods, the credential and the error messages of each."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote

from shoal.api import names, rights
from shoal.api.adapterstats import AdapterStatsAnswer
from shoal.api.choices import RequestChoices
from shoal.api.decisions import Decisions
from shoal.api.meta import JsonObject
from shoal.cli.client import (
    MissingRight,
    RoleService,
    ServiceClient,
    ServiceError,
    ServiceRefused,
    Target,
    Unreachable,
    as_object,
    run_command,
)
from shoal.cli.options import Installation
from shoal.cli.roletokens import TOKEN_SECONDS, user_name
from shoal.core import facts
from shoal.kube import projections
from shoal.kube.client import KubeClient
from shoal.kube.errors import APIServerUnavailable, Forbidden, KubeError, NotFound, Unauthorized, from_status
from shoal.kube.resources import LEASES, PODS

R = TypeVar("R")

GATEWAY_PODS: Final = f"{names.LABEL_COMPONENT}={names.COMPONENT_GATEWAY},{names.LABEL_PART_OF}={names.MANAGED_BY}"
LEDGER_PODS: Final = f"{names.LABEL_COMPONENT}={names.COMPONENT_LEDGER}"
_LOG_SECONDS: Final = {"GET": 30.0, "DELETE": 180.0}
"""Timeouts in seconds: a gateway waits for the other gateways and for the bucket."""
_LEDGER_SECONDS: Final = 60.0
_NOT_CONNECTED: Final = "error trying to reach service"
"""In the API server's answer where its proxy cannot connect."""
_NOT_LEADING: Final = "NotLeading"
_MODEL_UNKNOWN: Final = "ModelUnknown"
_POOL_UNKNOWN: Final = "PoolUnknown"


class OperatorClient(ServiceClient):
    """Client of the leading operator. Its pod is the holder of the Lease."""

    service = "operator"
    namespace_option = "--operator-namespace"
    url_option = "--operator-url"
    by_role = RoleService(
        names.OPERATOR_SERVICE, names.OPS_PORT, None, rights.OPERATOR_AUDIENCE, rights.OPERATOR, tries=30
    )

    async def all(self, namespace: str | None) -> Decisions:
        """The Models of a namespace (None: all namespaces), without their decisions."""
        return await self.get(names.DECISIONS_PATH, {"namespace": namespace}, Decisions)

    async def one(self, namespace: str, name: str) -> Decisions:
        """One Model with its decisions."""
        path = f"{names.DECISIONS_PATH}/{quote(namespace, safe='')}/{quote(name, safe='')}"
        return await self.get(path, {}, Decisions)

    async def adapters(self, namespace: str | None, pool: str | None) -> AdapterStatsAnswer:
        """The pools of a namespace (None: all namespaces), or the one of this name, with their adapters."""
        return await self.get(names.ADAPTERS_PATH, {"namespace": namespace, "pool": pool}, AdapterStatsAnswer)

    async def _targets(self) -> AsyncIterator[Target]:
        for _ in range(2):
            yield Target() if self._url is not None else Target(await self._leader(), names.OPS_PORT)

    async def _leader(self) -> str:
        try:
            lease = await self._api().get(LEASES, names.LEASE_NAME, self._namespace)
        except NotFound:
            raise Unreachable(
                f"no operator has run in namespace {self._namespace} (there is no Lease {names.LEASE_NAME}): if Shoal "
                f"is installed elsewhere, name its namespace with {self.namespace_option}"
            ) from None
        except Forbidden as error:
            raise self._missing_right(error) from None
        spec: JsonObject = lease.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        if not holder:
            raise Unreachable(f"there is no leading operator at the moment: {self._pods_command()}")
        return holder

    async def _credential(self) -> str:
        if self._key is None:
            try:
                self._key = await self._api().token(names.DECISIONS_ACCOUNT, self._namespace, seconds=TOKEN_SECONDS)
            except NotFound:  # an older chart with metrics.auth off has no such account, and its operator asks for none
                self._key = ""
            except Forbidden as error:
                raise self._missing_right(error) from None
            except KubeError as error:
                raise Unreachable(f"no token of {names.DECISIONS_ACCOUNT}: {error.message}") from None
        return self._key

    def _try_next(self, error: KubeError) -> bool:
        if isinstance(error, Unauthorized):
            # The token has expired: `shoal top` runs longer than the lifetime of a token.
            expired, self._key = self._key, None
            return bool(expired)
        # Another operator may have become leader since the Lease was read.
        gone = isinstance(error, NotFound) and error.reason not in (_MODEL_UNKNOWN, _POOL_UNKNOWN)
        return self._url is None and (gone or error.reason == _NOT_LEADING)

    def _explained(self, error: KubeError, target: Target) -> ServiceError:
        if error.reason == _MODEL_UNKNOWN:
            return Unreachable(
                f"{error.message}: see the Model's conditions (kubectl describe), or try again in a few seconds"
            )
        if error.reason == _POOL_UNKNOWN:
            return Unreachable(error.message)
        if error.reason == _NOT_LEADING:
            return Unreachable(f"{error.message}: try again in a few seconds")
        if isinstance(error, Forbidden):
            return self._missing_right(error)
        if self._url is not None:
            return Unreachable(f"{self._url} does not answer: {error.message}")
        if isinstance(error, NotFound):
            return Unreachable(
                f"the leading operator, {target.where}, is gone or does not publish its decisions: "
                f"{self._pods_command()}"
            )
        return Unreachable(
            f"the API server does not reach port {target.port} of the operator, {target.where}: {error.message}. "
            "Where a NetworkPolicy or a firewall is between them, try: "
            f"{self._forwarding(target.forwarded, target.port, tls=target.tls)}"
        )

    def _missing_right(self, error: KubeError) -> MissingRight:
        return MissingRight(
            error.message,
            f"This needs the right to get the Lease {names.LEASE_NAME} and pods/proxy in namespace "
            f"{self._namespace}, and to create a token of the ServiceAccount {names.DECISIONS_ACCOUNT}, as the Role "
            "shoal-decisions there grants it; the Model's status and events also contain the decisions.",
        )

    def _pods_command(self) -> str:
        return f"look at kubectl -n {self._namespace} get pods -l {names.LABEL_COMPONENT}={names.COMPONENT_OPERATOR}"


class GatewayClient(ServiceClient):
    """Client of the gateways, with the key for request logs. Any gateway collects the answers of all others."""

    service = "gateway"
    namespace_option = "--operator-namespace"
    url_option = "--gateway-url"
    by_role = RoleService(
        names.GATEWAY_OPS_SERVICE, names.OPS_PORT, names.OPS_TLS_PORT, rights.GATEWAY_AUDIENCE, rights.GATEWAY, tries=3
    )

    async def choices(self, request: str) -> RequestChoices:
        """Why a request went to its replicas, from the memories of all gateways."""
        return await self.get(names.CHOICES_PATH, {"request": request}, RequestChoices)

    async def _targets(self) -> AsyncIterator[Target]:
        await self._credential()  # fails early, before pods are listed
        if self._url is not None:
            yield Target()
            return
        found = await self._pods()
        if not found:
            raise Unreachable(
                f"there is no gateway in namespace {self._namespace}: if Shoal is installed elsewhere, name its "
                f"namespace with {self.namespace_option}"
            )
        for pod in found:
            yield Target(pod.name, names.OPS_TLS_PORT if pod.mtls else names.OPS_PORT, pod.mtls)

    async def _pods(self) -> list[facts.Pod]:
        """Ready ones first."""
        try:
            pages = self._api().list_pages(PODS, namespace=self._namespace, label_selector=GATEWAY_PODS)
            found = [projections.pod(raw) async for page in pages for raw in page.items]
        except Forbidden as error:
            raise self._missing_right(error) from None
        pods = [pod for pod in found if pod is not None and pod.gateway and not pod.finished]
        return sorted(pods, key=lambda pod: (pod.deleting, not pod.ready, pod.name))

    async def _credential(self) -> str:
        if self._key is None:
            self._key = await self._role_key("logs")
        return self._key

    def _try_next(self, error: KubeError) -> bool:
        return isinstance(error, APIServerUnavailable | NotFound)

    def _seconds(self, method: str) -> float:
        return _LOG_SECONDS[method]

    def _explained(self, error: KubeError, target: Target) -> ServiceError:
        if isinstance(error, Forbidden):
            return self._missing_right(error)
        if self._url is not None and error.status is None:
            return Unreachable(f"{self._url} does not answer: {error.message}")
        if not target.name or _NOT_CONNECTED not in error.message:
            return Unreachable(error.message)
        return Unreachable(
            f"the API server does not reach the gateway, {target.where}: {error.message}. Where a NetworkPolicy or a "
            f"firewall is between them, try: {self._forwarding(target.forwarded, target.port, tls=target.tls)}"
        )

    def _missing_right(self, error: KubeError) -> MissingRight:
        return MissingRight(
            error.message,
            f"This needs the right to get the Secret {names.key_secret('logs')}, to list pods and "
            f"persistentvolumeclaims, and to get (and, for `logs delete`, delete) pods/proxy in namespace "
            f"{self._namespace}. A tenant reads its own log with its own key: GET {names.LOGS_PATH} of the gateway.",
        )


class LedgerClient(ServiceClient):
    """Client of the ledger. Open it with `open_ledger`."""

    service = "ledger"
    namespace_option = "--ledger-namespace"
    url_option = "--ledger-url"
    by_role = RoleService(
        names.LEDGER_SERVICE, names.LEDGER_PORT, names.LEDGER_TLS_PORT, rights.LEDGER_AUDIENCE, rights.LEDGER, tries=2
    )
    _target: Target | None = None

    async def caller(self) -> str:
        """Name of the user of this command in the cluster; "" where the cluster does not tell it."""
        if self._cluster is None:
            return ""
        return await user_name(self._cluster)

    async def _targets(self) -> AsyncIterator[Target]:
        await self._credential()  # fails early, before pods are listed
        if self._target is None:
            self._target = Target() if self._url is not None else await self._pod()
        yield self._target

    async def _pod(self) -> Target:
        namespace = self._namespace
        try:
            pods = [pod async for pod in self._api().list(PODS, namespace=namespace, label_selector=LEDGER_PODS)]
        except KubeError as error:
            raise self._unreachable(error, "the ledger's pod is not found") from None
        pods.sort(key=lambda pod: (not _ready(pod), pod["metadata"]["name"]))
        if not pods:
            raise Unreachable(
                f"no ledger runs in namespace {namespace}: if Shoal is installed elsewhere, name its namespace with "
                f"{self.namespace_option}; if the chart's `ledger.enabled` is false, nothing counts usage"
            )
        metadata = pods[0]["metadata"]
        if not _ready(pods[0]):
            raise Unreachable(
                f"the ledger, pod {metadata['name']}, is not ready: kubectl -n {namespace} describe pod -l "
                f"{LEDGER_PODS} says why. Gateways keep usage until it is back"
            )
        annotations: dict[str, str] = metadata.get("annotations") or {}
        tls = annotations.get(names.ANNOTATION_TRANSPORT) == names.TRANSPORT_MTLS
        return Target(metadata["name"], names.LEDGER_TLS_PORT if tls else names.LEDGER_PORT, tls)

    async def _credential(self) -> str:
        if self._key is None:
            try:
                self._key = await self._role_key("billing")
            except KubeError as error:
                raise self._unreachable(error, "the billing key cannot be read") from None
        return self._key

    def _seconds(self, method: str) -> float:
        return _LEDGER_SECONDS

    def _failure(self, status: int, content: bytes) -> Exception:
        body = as_object(content)
        error = body.get("error")
        if isinstance(error, dict):
            message = str(cast("JsonObject", error).get("message"))
            if status == 401:
                message = f"the ledger does not accept this key: {message}"
            return ServiceRefused(message, status)
        if body.get("kind") == "Status":
            return from_status(status, body)
        return Unreachable(
            f"the service at this address is not a ledger: HTTP {status} {content[:200].decode(errors='replace')}"
        )

    def _explained(self, error: KubeError, target: Target) -> ServiceError:
        if self._url is not None and error.status is None:
            return Unreachable(f"the ledger at {self._url} does not answer: {error.message}")
        where = f", {target.where}" if target.name else ""
        what = f"service/{names.LEDGER_SERVICE}"
        return self._unreachable(
            error,
            f"the API server does not reach the ledger{where}",
            ". Where a NetworkPolicy or a firewall is between them, try: "
            f"{self._forwarding(what, target.port, tls=target.tls)}"
            if target.name
            else "",
        )

    def _unreachable(self, error: KubeError, what: str, advice: str = "") -> Unreachable:
        namespace = self._namespace
        if isinstance(error, Forbidden):
            return Unreachable(
                "This needs the right to list pods and to use pods/proxy (get; create for credits and for bills "
                f"at other prices) in namespace {namespace}",
                error.message,
            )
        return Unreachable(f"{what}: {error.message}{advice}")

    def _missing_right(self, error: KubeError) -> MissingRight:
        return MissingRight(
            error.message,
            f"This needs the right to get the Secret {names.key_secret('billing')} in namespace {self._namespace}. "
            "With a key at hand, use --ledger-key",
        )


@contextlib.asynccontextmanager
async def open_ledger(installation: Installation) -> AsyncGenerator[LedgerClient]:
    """A client of the ledger. With a URL and a key no cluster is needed. Raises ValueError, OSError."""
    async with contextlib.AsyncExitStack() as stack:
        cluster: KubeClient | None = None
        if installation.url is None or installation.key is None:
            cluster = await stack.enter_async_context(await installation.connect())
        yield LedgerClient(
            cluster,
            installation.namespace,
            installation.url,
            installation.key,
            ca_file=installation.ca_file,
            connect=installation.connect,
        )


def call_ledger(installation: Installation, work: Callable[[LedgerClient], Coroutine[Any, Any, R]]) -> R:
    """Runs `work` of a command with a client of the ledger. Raises ClickException."""

    async def run() -> R:
        async with open_ledger(installation) as ledger:
            return await work(ledger)

    return run_command(run())


def _ready(pod: JsonObject) -> bool:
    status: JsonObject = pod.get("status") or {}
    conditions: list[JsonObject] = status.get("conditions") or []
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
