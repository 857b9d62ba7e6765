"""GET /v1/usage with a tenant's own key: the ledger's answer for that tenant only.

The tenant is that of the key; the client only chooses filters and grouping. The ledger is protected by bounds: few
queries at a time, and few per tenant and minute.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, cast
from urllib.parse import parse_qsl, urlencode

import aiohttp
import orjson

from shoal.api import names
from shoal.net.asgi import Headers
from shoal.net.errors import ApiError, unavailable
from shoal.net.tls import NoCertificate, TLSCredentials, dial, ledger_name

SECONDS: Final = 10.0
"""Timeout of one query to the ledger."""
AT_ONCE: Final = 4
WAITING: Final = 32
PER_MINUTE: Final = 30
"""Queries of one tenant at one gateway, after a burst of the same number."""
MOST_BYTES: Final = 16 * 1024 * 1024
_PARAMETERS: Final = ("from", "to", "by", "key", "model", "adapter", "plan", "route", "limit", "after", "output")
_BY: Final = ("tenant", "key", "externalID", "model", "adapter", "plan", "route", "hour", "day", "month")
_MOST_PARAMETERS: Final = 100
_HEADERS: Final = ("content-type", "content-disposition", "x-shoal-next")
"""Headers of the ledger's answer that are passed to the tenant."""


class TenantUsagePage(NamedTuple):
    """Rows of one tenant, as the ledger returned them."""

    body: bytes
    headers: Headers


class UsageApi:
    """`keys` returns this gateway's keys for the ledger, one per valid install key. `clock` returns seconds."""

    def __init__(
        self,
        ledger_url: str,
        keys: Callable[[], Iterable[str]],
        clock: Callable[[], float] = time.monotonic,
        credentials: TLSCredentials | None = None,
    ) -> None:
        self._url = ledger_url.rstrip("/")
        self._keys = keys
        self._credentials, self._server_name = credentials, ledger_name(ledger_url)
        self._clock = clock
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._tokens: dict[str, tuple[float, float]] = {}
        """Token bucket per tenant: queries left, and when that was measured."""
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def page(self, tenant: str, query_string: bytes, accept: bytes = b"") -> TenantUsagePage:
        """A page of the tenant's rows as JSON, or as CSV if `output` or an Accept header asks for it. Raises
        ApiError."""
        query = _query(query_string)
        if _csv_first(accept) and not any(name == "output" for name, _ in query):
            query.append(("output", "csv"))
        if not self._url:
            raise ApiError(404, "This installation has no ledger, so there is no usage to query.", "no_ledger")
        self._count(tenant)
        if self._waiting >= WAITING:
            raise unavailable("Too many usage queries are running. Try again.", "overloaded", 2)
        self._waiting += 1
        try:
            async with self._slots:
                return await self._ask(f"{self._url}{names.USAGE_PATH}?{urlencode([('tenant', tenant), *query])}")
        finally:
            self._waiting -= 1

    async def _ask(self, url: str) -> TenantUsagePage:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS, sock_connect=2))
        for key in self._keys():
            headers = {"authorization": f"Bearer {key}"}
            try:
                secured = dial(self._credentials, self._server_name)
                async with self._session.get(url, headers=headers, allow_redirects=False, **secured) as response:
                    raw = await response.content.read(MOST_BYTES)
                    while more := await response.content.read(MOST_BYTES):
                        if len(raw) + len(more) > MOST_BYTES:
                            raise ApiError(400, "The result is too large for one answer: lower `limit`.", "too_large")
                        raw += more
            except (aiohttp.ClientError, TimeoutError, OSError, NoCertificate):
                break
            if response.status == 200:
                answered = response.headers
                return TenantUsagePage(
                    raw, tuple((name.encode(), answered[name].encode()) for name in _HEADERS if name in answered)
                )
            if response.status in (400, 422):
                raise ApiError(400, _message(raw), "invalid_parameter")
            if response.status != 401:
                break
        raise unavailable("Usage cannot be read now: the ledger does not answer. Try again.", "ledger_unavailable", 10)

    def _count(self, tenant: str) -> None:
        now = self._clock()
        left, since = self._tokens.get(tenant, (float(PER_MINUTE), now))
        left = min(float(PER_MINUTE), left + (now - since) * PER_MINUTE / 60)
        if left < 1:
            wait = int((1 - left) * 60 / PER_MINUTE) + 1
            raise ApiError(429, "Too many usage queries. Try again.", "rate_limit_exceeded", retry_after=wait)
        # Moved to the end, so that the first entries are the least recently used: after a minute they are not needed.
        self._tokens.pop(tenant, None)
        self._tokens[tenant] = (left - 1, now)
        while (oldest := next(iter(self._tokens))) != tenant and now - self._tokens[oldest][1] >= 60:
            del self._tokens[oldest]


def _query(query_string: bytes) -> list[tuple[str, str]]:
    try:
        given = parse_qsl(
            query_string.decode("latin-1"), keep_blank_values=True, max_num_fields=_MOST_PARAMETERS, encoding="utf-8"
        )
    except ValueError:
        raise ApiError(400, f"There are more than {_MOST_PARAMETERS} parameters.", "invalid_parameter") from None
    for name, value in given:
        if name == "tenant":
            raise _wrong(name, "is set by your key: leave it out")
        if name not in _PARAMETERS:
            raise _wrong(name[:64], f"is not known; there are {', '.join(_PARAMETERS)}")
        if name == "by":
            for word in value.split(","):
                if word.strip() and word.strip() not in _BY:
                    raise _wrong(name, f"takes a comma-separated list of {', '.join(_BY)}")
    return given


def _csv_first(accept: bytes) -> bool:
    """Whether an Accept header names CSV, and does not name JSON before it."""
    kinds = [kind.partition(b";")[0].strip().lower() for kind in accept.split(b",")]
    return b"text/csv" in kinds and b"application/json" not in kinds[: kinds.index(b"text/csv")]


def _message(raw: bytes) -> str:
    try:
        body: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    error = cast("dict[str, Any]", body).get("error") if isinstance(body, dict) else None
    message = cast("dict[str, Any]", error).get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else "The ledger does not understand the query."


def _wrong(name: str, must: str) -> ApiError:
    return ApiError(400, f"`{name}` {must}.", "invalid_parameter", param=name)
