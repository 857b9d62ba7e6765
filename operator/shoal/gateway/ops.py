"""/healthz, /readyz, /metrics and the demand stream, on a port of their own.

/healthz and /readyz answer everybody, with a word; what is missing, and the metrics, those whom `access` lets in."""

import asyncio
import hmac
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest

from shoal.api import names
from shoal.api.keys import Role
from shoal.api.replica import HEARTBEAT_SECONDS
from shoal.core.quota.share import TELL_SECONDS
from shoal.gateway.requestlog.api import LogsApi
from shoal.kube.access import ALLOWED, Access, Verdict, token_of
from shoal.net.tls import Credentials
from shoal.serving.asgi import DISCONNECT, GONE, Receive, Scope, Send, headers_of, unproved
from shoal.signals.hub import Caller, Hub, Reader, TooManyReaders

Readiness = Callable[[], Mapping[str, str]]
"""What is missing, by part; empty when ready."""

WRITE_SECONDS: Final = 10.0
"""A reader that takes no byte for so long is dropped."""
CALLERS: Final[tuple[Role, ...]] = ("operator", "gateway")
"""Who may read the demand."""
_LONGEST_NAME: Final = 253


class Keys(Protocol):
    """The part of the key ring that is needed here."""

    def demand_keys(self, role: Role) -> Iterable[str]:
        """What `role` says here, under each valid install key."""
        ...


class Ops:
    """`refresh` brings gauges up to date before they are read. `notes` is what is wrong all the same when nothing is
    missing."""

    def __init__(
        self,
        registry: CollectorRegistry,
        missing: Readiness,
        refresh: Callable[[], None],
        demand: Hub,
        keys: Keys,
        *,
        notes: Readiness = dict[str, str],
        logs: LogsApi | None = None,
        access: Access | None = None,
        credentials: Credentials | None = None,
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
            # The event loop answers: that is what a restart could put right. What is missing is readyz's.
            await _answer(send, 200, {"status": "ok"})
        elif path == "/readyz":
            missing = self._missing()
            said = {"status": "not ready" if missing else "ok"}
            if self._access is None or (token_of(headers_of(scope)) and (await self._verdict(scope)).allowed):
                said |= {**self._notes(), **missing}
            await _answer(send, 503 if missing else 200, said)
        elif path == "/metrics":
            verdict = await self._verdict(scope)
            if not verdict.allowed:
                headers = [(name.encode(), value.encode()) for name, value in verdict.headers.items()]
                await _answer(send, verdict.status, {"status": verdict.message}, *headers)
                return
            self._refresh()
            # The figures are taken here, where none changes meanwhile. The text of a fleet's series takes three times
            # as long (measured: 1 ms per Model), and requests would wait for it.
            taken = _Taken(self._registry)
            await _send(send, 200, CONTENT_TYPE_LATEST.encode(), await asyncio.to_thread(generate_latest, taken))
        elif path == names.DEMAND_PATH:
            await self._demand(scope, send)
        elif path == names.LOGS_PATH and self._logs is not None:
            await self._logs.ops(scope, send)
        else:
            await _answer(send, 404, {"status": "unknown path"})

    async def _verdict(self, scope: Scope) -> Verdict:
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
        caller = Caller(role, _word(headers, names.HEADER_CALLER), _word(headers, names.HEADER_BOOT))
        try:
            with self._hub.reader(caller) as reader:
                if scope.get(DISCONNECT) is GONE:
                    return
                scope[DISCONNECT] = reader.end
                await self._stream(reader, send)
        except TooManyReaders:
            await _answer(send, 503, {"status": "too many readers"}, (b"retry-after", b"2"))

    async def _stream(self, reader: Reader, send: Send) -> None:
        head = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        # Gateways share tenants' limits: each must know soon that another has used nothing more.
        seconds = TELL_SECONDS if reader.caller.role == "gateway" else HEARTBEAT_SECONDS
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
        """Whose key it is. All are compared, so that the time tells nothing."""
        scheme, _, given = authorization.partition(b" ")
        found: Role | None = None
        for role in CALLERS:
            for key in self._keys.demand_keys(role):
                if hmac.compare_digest(given, key.encode()):
                    found = role
        return found if scheme.lower() == b"bearer" and given else None


class _Taken(CollectorRegistry):
    """What a registry's collectors say now."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._families = tuple(registry.collect())

    def collect(self) -> Iterable[Metric]:
        return self._families


def _word(headers: Mapping[bytes, bytes], name: str) -> str:
    return headers.get(name.encode(), b"").decode("latin-1")[:_LONGEST_NAME]


async def _answer(send: Send, status: int, body: Mapping[str, Any], *headers: tuple[bytes, bytes]) -> None:
    await _send(send, status, b"application/json", orjson.dumps(body), *headers)


async def _send(send: Send, status: int, content_type: bytes, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    head = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})
