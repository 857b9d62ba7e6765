"""GET /v1/logs: a tenant's own entries from this gateway, its peers and the bucket. The operations port serves the same
to peers and to `kubectl shoal logs`; on that port, DELETE removes entries."""

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, cast

import orjson
from starlette.responses import Response

from shoal.api import names, rights
from shoal.api.keys import Role
from shoal.core import facts
from shoal.kube.callers import Callers
from shoal.net.asgi import unproved
from shoal.net.errors import ApiError, unavailable
from shoal.net.gatewaycalls import GatewayCalls, GatewayKeys, GatewayPods, MissingGateways, NoAnswer
from shoal.net.rights import PERSON
from shoal.net.roles import given_key, role_of
from shoal.net.shell import ShellRequest
from shoal.net.tls import TLSCredentials
from shoal.requestlog.logger import RequestLogger, merged
from shoal.requestlog.parameters import FILTERS, cursor_of, parameters, query_of
from shoal.requestlog.query import Found, LogQuery

PEER_SECONDS: Final = 12.0
ERASE_SECONDS: Final = 120.0
"""Timeout for a peer that deletes entries from its files. The peer continues after it, and can be called again."""
_MOST_READS: Final = 4
_MOST_WAITING: Final = 32
_TENANT: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_ROLES: Final[tuple[Role, ...]] = ("gateway", "logs")
_PLACES: Final = ("authorization", names.HEADER_KEY)
"""Headers that may contain a key. Calls through the API server's proxy have it in the second header."""
Logging = Literal["On", "Off", "NoTenant"]
"""Whether a tenant's requests are logged, or that there is no such Tenant."""


class LogsApi:
    """Reads and deletes entries in this gateway, its peers and the bucket. `peers` returns the peers; None: unknown."""

    def __init__(
        self,
        logger: RequestLogger,
        keys: GatewayKeys,
        peers: GatewayPods = lambda: (),
        port: int = names.OPS_PORT,
        credentials: TLSCredentials | None = None,
        callers: Callers | None = None,
        logging: Callable[[str], Logging | None] = lambda _: None,
    ) -> None:
        """`callers` knows people by their tokens; None: keys only. `logging` knows Tenants; it returns None while they
        are unknown."""
        self.logger = logger
        self._keys = keys
        self._calls = GatewayCalls(keys, peers, port, credentials)
        self._credentials = credentials
        self._callers = callers
        self._logging = logging
        self._reads = asyncio.Semaphore(_MOST_READS)
        self._waiting = 0

    async def close(self) -> None:
        await self._calls.close()

    async def page(self, tenant: str, query_string: bytes) -> bytes:
        """A page of a tenant's entries as JSON. Raises ApiError."""
        return await self._page(query_of(tenant, parameters(query_string, FILTERS)), None)

    async def ops(self, request: ShellRequest) -> Response:
        """Serves the operations port."""
        try:
            return _json(200, await self._ops(request))
        except ApiError as error:
            # Also in the API server's flat format: through its proxy, `kubectl shoal` reads the error as one of the API
            # server.
            flat = {**orjson.loads(error.body()), "message": error.message, "reason": error.code}
            headers = {name.decode(): value.decode() for name, value in error.headers}
            return _json(error.status, orjson.dumps(flat), headers)

    async def _ops(self, request: ShellRequest) -> bytes:
        secret = given_key(request.headers, _PLACES)
        role = role_of(secret, _ROLES, self._keys.demand_keys)
        callers = self._callers
        person = role is None and callers is not None and callers.understands(secret)
        if role is None and not person:
            token = "" if callers is None else f" A person's token is for {callers.audience}."
            raise ApiError(401, f"A key for logs, or of a gateway, is needed.{token}", "invalid_key")
        if (why := unproved(self._credentials, request.scope, role or PERSON.role)) is not None:
            raise ApiError(403, f"{why[0].upper()}{why[1:]}.", "mutual_tls_needed")
        method = request.method
        if method not in ("GET", "DELETE"):
            raise ApiError(405, "Use GET or DELETE.", "method_not_allowed", headers=((b"allow", b"GET, DELETE"),))
        known = ("tenant", *FILTERS) if method == "GET" else ("tenant", "user")
        given = parameters(request.scope.get("query_string", b""), known)
        tenant = given.pop("tenant", "")
        if not _TENANT.fullmatch(tenant):
            raise ApiError(400, "`tenant` must be the name of a Tenant.", "invalid_parameter", param="tenant")
        if person and callers is not None:
            await _allowed(callers, secret, method, tenant)
        if method == "DELETE":
            return await self._erase(tenant, given.get("user"), everywhere=role != "gateway")
        if role != "gateway":
            # The person may not have the right to read Tenants: a Role of one namespace cannot grant it.
            return await self._page(query_of(tenant, given), self._logging(tenant))
        return _body(await self._read(query_of(tenant, given), everywhere=False), [])

    # --- reading ----------------------------------------------------------------------------------------------------

    async def _page(self, query: LogQuery, logging: Logging | None) -> bytes:
        peers, missing = self._calls.reachable()
        asked = asyncio.gather(*(self._ask(pod, query) for pod in peers))
        try:
            parts = [await self._read(query, everywhere=True)]
            answers = await asked
        finally:
            asked.cancel()
        for pod, answer in zip(peers, answers, strict=True):
            if isinstance(answer, Found):
                parts.append(answer)
            else:
                missing.append({"gateway": pod.name, "reason": answer})
        return _body(merged(parts, query.limit), missing, logging)

    async def _read(self, query: LogQuery, *, everywhere: bool) -> Found:
        if self._waiting >= _MOST_WAITING:
            raise unavailable("Too many queries of the request log are running. Try again.", "overloaded", 2)
        self._waiting += 1
        try:
            async with self._reads:
                return await self.logger.newest(query, everywhere=everywhere)
        except OSError as error:
            raise unavailable(
                f"The request log cannot be read: {error.strerror or type(error).__name__}.", "log_unavailable", 10
            ) from None
        finally:
            self._waiting -= 1

    async def _ask(self, pod: facts.Pod, query: LogQuery) -> Found | str:
        """The entries in a peer's own folder, or why there is no answer."""
        asked = {
            "tenant": query.tenant,
            "limit": str(query.limit),
            "user": query.user,
            "model": query.model,
            "route": query.route,
            "from": query.since,
            "to": query.until,
            "cursor": query.before and cursor_of(query.before),
        }
        answer = await self._call("GET", pod, asked)
        if isinstance(answer, str):
            return answer
        entries = cast(list[dict[str, Any]], answer.get("data") or [])
        lines = [((str(entry["time"]), str(entry["id"])), orjson.dumps(entry)) for entry in entries]
        return Found(lines, bool(answer.get("has_more")), list(answer.get("unreadable") or ()), "incomplete" in answer)

    # --- deleting ---------------------------------------------------------------------------------------------------

    async def _erase(self, tenant: str, user: str | None, *, everywhere: bool) -> bytes:
        """Deletes from peers first and the bucket last, so that files that a peer uploads meanwhile are deleted too."""
        total: dict[str, Any] = {"files": 0, "entries": None if user is None else 0, "unreadable": []}
        missing: MissingGateways = []
        if everywhere:
            peers, missing = self._calls.reachable()
            asked = {"tenant": tenant, "user": user}
            answers = await asyncio.gather(*(self._call("DELETE", pod, asked) for pod in peers))
            for pod, answer in zip(peers, answers, strict=True):
                if isinstance(answer, str):
                    missing.append({"gateway": pod.name, "reason": answer})
                else:
                    _add(total, answer)
        try:
            erased = await self.logger.erase(tenant, user, everywhere=everywhere)
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise unavailable(f"Not all could be deleted: {why}. Try again.", "log_unavailable", 10) from None
        _add(total, {"files": erased.files, "entries": erased.entries, "unreadable": erased.unreadable})
        return orjson.dumps({"object": "logs.deleted", "tenant": tenant, **total, "missing": missing})

    # --- peers ------------------------------------------------------------------------------------------------------

    async def _call(
        self, method: Literal["GET", "DELETE"], pod: facts.Pod, asked: Mapping[str, str | None]
    ) -> dict[str, Any] | str:
        seconds = PEER_SECONDS if method == "GET" else ERASE_SECONDS
        answer = await self._calls.call(method, pod, names.LOGS_PATH, asked, seconds=seconds)
        if isinstance(answer, NoAnswer):
            return answer.reason
        try:
            return cast(dict[str, Any], orjson.loads(answer))
        except orjson.JSONDecodeError:
            return "its answer is not understood"


async def _allowed(callers: Callers, token: str, method: str, tenant: str) -> None:
    """Raises ApiError for a person without the right to this tenant's log."""
    verdict = await callers.may(token, rights.GATEWAY[method, names.LOGS_PATH], tenant=tenant)
    if not verdict.allowed:
        codes = {401: "invalid_token", 503: "overloaded"}
        headers = tuple((name.lower().encode(), value.encode()) for name, value in verdict.headers.items())
        raise ApiError(verdict.status, verdict.message, codes.get(verdict.status, "forbidden"), headers=headers)


def _add(total: dict[str, Any], part: Mapping[str, Any]) -> None:
    total["files"] += int(part.get("files") or 0)
    if total["entries"] is not None:
        total["entries"] += int(part.get("entries") or 0)
    total["unreadable"] += list(part.get("unreadable") or ())


def _body(found: Found, missing: MissingGateways, logging: Logging | None = None) -> bytes:
    page: dict[str, Any] = {"object": "list", "has_more": found.more, "missing": missing}
    if logging is not None:
        page["logging"] = logging
    if found.more and found.lines:
        page["next_cursor"] = cursor_of(found.lines[-1][0])
    if found.unreadable:
        page["unreadable"] = found.unreadable
    if found.incomplete:
        page["incomplete"] = "not all files could be read in time: ask for a shorter span, with `from` and `to`"
    # The entries are JSON already.
    return orjson.dumps(page)[:-1] + b',"data":[' + b",".join(line for _, line in found.lines) + b"]}"


def _json(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")
