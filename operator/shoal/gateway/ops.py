"""/healthz, /readyz, /metrics and the demand stream, on their own port.

/healthz and /readyz answer everybody with a status. The reasons, and the metrics, are only for callers that `access`
allows."""

import asyncio
import hmac
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest

from shoal.api import names
from shoal.api.keys import Role
from shoal.api.replica import HEARTBEAT_SECONDS
from shoal.core.quota.share import PUBLISH_SECONDS
from shoal.kube.access import ALLOWED, Access, AccessVerdict, token_of
from shoal.net.asgi import DISCONNECT, GONE, Receive, Scope, Send, headers_of, unproved
from shoal.net.hub import Caller, HubReader, StreamHub, TooManyReaders
from shoal.net.tls import TLSCredentials
from shoal.requestlog.api import LogsApi

Readiness = Callable[[], Mapping[str, str]]
"""Why the gateway is not ready, by part; empty when it is."""

WRITE_SECONDS: Final = 10.0
"""A reader that accepts no byte for this long is dropped."""
CALLERS: Final[tuple[Role, ...]] = ("operator", "gateway")
"""Roles that may read the demand stream."""
_LONGEST_NAME: Final = 253


class DemandKeys(Protocol):
    """The part of the key ring that is used here."""

    def demand_keys(self, role: Role) -> Iterable[str]:
        """The keys with which `role` authenticates here, one per valid install key."""
        ...


class Ops:
    """`refresh` updates the gauges before they are read. `notes` are problems that do not make the gateway unready."""

    def __init__(
        self,
        registry: CollectorRegistry,
        missing: Readiness,
        refresh: Callable[[], None],
        demand: StreamHub,
        keys: DemandKeys,
        *,
        notes: Readiness = dict[str, str],
        logs: LogsApi | None = None,
        access: Access | None = None,
        credentials: TLSCredentials | None = None,
    ) -> None:
        self._registry = registry
        self._missing = missing
        self._refresh = refresh
        self._notes = notes
        self._logs = logs
        self._access = access
        self._hub = demand
        self._keys = keys
        self._credentials = credentials

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/healthz":
            # Only shows that the event loop answers: a restart fixes nothing else. /readyz shows what is missing.
            await _answer(send, 200, {"status": "ok"})
        elif path == "/readyz":
            missing = self._missing()
            status = {"status": "not ready" if missing else "ok"}
            if self._access is None or (token_of(headers_of(scope)) and (await self._verdict(scope)).allowed):
                status |= {**self._notes(), **missing}
            await _answer(send, 503 if missing else 200, status)
        elif path == "/metrics":
            verdict = await self._verdict(scope)
            if not verdict.allowed:
                headers = [(name.encode(), value.encode()) for name, value in verdict.headers.items()]
                await _answer(send, verdict.status, {"status": verdict.message}, *headers)
                return
            self._refresh()
            # The values are collected here, where none changes meanwhile. Formatting them takes three times as long
            # (measured: 1 ms per Model), and requests would wait for it.
            taken = _CollectedMetrics(self._registry)
            await _send(send, 200, CONTENT_TYPE_LATEST.encode(), await asyncio.to_thread(generate_latest, taken))
        elif path == names.DEMAND_PATH:
            await self._demand(scope, send)
        elif path == names.LOGS_PATH and self._logs is not None:
            await self._logs.ops(scope, send)
        else:
            await _answer(send, 404, {"status": "unknown path"})

    async def _verdict(self, scope: Scope) -> AccessVerdict:
        if self._access is None:
            return ALLOWED
        return await self._access.check(token_of(headers_of(scope)), "/metrics")

    async def _demand(self, scope: Scope, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        role = self._role(headers.get(b"authorization", b""))
        if role is None:
            await _answer(send, 401, {"status": "a key of an operator or a gateway is needed, as a bearer token"})
            return
        if (why := unproved(self._credentials, scope, role)) is not None:
            await _answer(send, 403, {"status": why})
            return
        caller = Caller(role, _header(headers, names.HEADER_CALLER), _header(headers, names.HEADER_BOOT))
        try:
            with self._hub.reader(caller) as reader:
                if scope.get(DISCONNECT) is GONE:
                    return
                scope[DISCONNECT] = reader.end
                await self._stream(reader, send)
        except TooManyReaders:
            await _answer(send, 503, {"status": "too many readers"}, (b"retry-after", b"2"))

    async def _stream(self, reader: HubReader, send: Send) -> None:
        head = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        # Gateways share tenants' limits: each must learn soon that another has not used more.
        seconds = PUBLISH_SECONDS if reader.caller.role == "gateway" else HEARTBEAT_SECONDS
        await send({"type": "http.response.start", "status": 200, "headers": head})
        while True:
            try:
                message = await reader.next(seconds)
            except TimeoutError:
                message = self._hub.heartbeat()
            if message is None:
                break
            async with asyncio.timeout(WRITE_SECONDS):
                await send({"type": "http.response.body", "body": message, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _role(self, authorization: bytes) -> Role | None:
        """The role of a key. All keys are compared, so that timing reveals nothing."""
        scheme, _, given = authorization.partition(b" ")
        found: Role | None = None
        for role in CALLERS:
            for key in self._keys.demand_keys(role):
                if hmac.compare_digest(given, key.encode()):
                    found = role
        return found if scheme.lower() == b"bearer" and given else None


class _CollectedMetrics(CollectorRegistry):
    """A registry's metrics, collected once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._families = tuple(registry.collect())

    def collect(self) -> Iterable[Metric]:
        return self._families


def _header(headers: Mapping[bytes, bytes], name: str) -> str:
    return headers.get(name.encode(), b"").decode("latin-1")[:_LONGEST_NAME]


async def _answer(send: Send, status: int, body: Mapping[str, Any], *headers: tuple[bytes, bytes]) -> None:
    await _send(send, status, b"application/json", orjson.dumps(body), *headers)


async def _send(send: Send, status: int, content_type: bytes, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    head = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})
