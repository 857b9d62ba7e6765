"""GET /v1/usage with a tenant's own key: the ledger's answer for that tenant, and for no other.

The tenant is that of the key; what the client says is filters and what to sum by. The ledger is kept from harm: a few
questions at a time, and few of one tenant in a minute.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, cast
from urllib.parse import parse_qsl, urlencode

import aiohttp
import orjson

from shoal.api import names
from shoal.gateway.errors import ApiError, unavailable
from shoal.net.tls import Credentials, NoCertificate, dial, ledger_name
from shoal.serving.asgi import Headers

SECONDS: Final = 10.0
"""For one answer of the ledger."""
AT_ONCE: Final = 4
WAITING: Final = 32
PER_MINUTE: Final = 30
"""Questions of one tenant at one gateway, after a burst of as many."""
MOST_BYTES: Final = 16 * 1024 * 1024
_PARAMETERS: Final = ("from", "to", "by", "key", "model", "adapter", "plan", "limit", "after", "output")
_BY: Final = ("tenant", "key", "externalID", "model", "adapter", "plan", "hour", "day", "month")
_MOST_PARAMETERS: Final = 100
_HEADERS: Final = ("content-type", "content-disposition", "x-shoal-next")
"""Of the ledger's answer, those that are the tenant's too."""


class Page(NamedTuple):
    """Rows of one tenant, as the ledger told them."""

    body: bytes
    headers: Headers


class UsageApi:
    """`said` gives what this gateway says to the ledger, by each valid install key. `clock` gives seconds."""

    def __init__(
        self,
        ledger_url: str,
        said: Callable[[], Iterable[str]],
        clock: Callable[[], float] = time.monotonic,
        credentials: Credentials | None = None,
    ) -> None:
        self._url = ledger_url.rstrip("/")
        self._said = said
        self._credentials, self._server_name = credentials, ledger_name(ledger_url)
        self._clock = clock
        self._asking = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._left: dict[str, tuple[float, float]] = {}
        """Questions that a tenant has left, and when that was so."""
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def page(self, tenant: str, query_string: bytes, accept: bytes = b"") -> Page:
        """A page of the tenant's rows, as JSON, or as CSV where `output` or an Accept header says so. Raises
        ApiError."""
        query = _query(query_string)
        if _csv_first(accept) and not any(name == "output" for name, _ in query):
            query.append(("output", "csv"))
        if not self._url:
            raise ApiError(404, "This installation has no ledger: usage cannot be asked for.", "no_ledger")
        self._count(tenant)
        if self._waiting >= WAITING:
            raise unavailable("Too many ask for usage. Try again.", "overloaded", 2)
        self._waiting += 1
        try:
            async with self._asking:
                return await self._ask(f"{self._url}{names.USAGE_PATH}?{urlencode([('tenant', tenant), *query])}")
        finally:
            self._waiting -= 1

    async def _ask(self, url: str) -> Page:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS, sock_connect=2))
        for key in self._said():
            headers = {"authorization": f"Bearer {key}"}
            try:
                secured = dial(self._credentials, self._server_name)
                async with self._session.get(url, headers=headers, allow_redirects=False, **secured) as response:
                    raw = await response.content.read(MOST_BYTES)
                    while more := await response.content.read(MOST_BYTES):
                        if len(raw) + len(more) > MOST_BYTES:
                            raise ApiError(400, "That is too much for one answer: lower `limit`.", "too_large")
                        raw += more
            except (aiohttp.ClientError, TimeoutError, OSError, NoCertificate):
                break
            if response.status == 200:
                told = response.headers
                return Page(raw, tuple((name.encode(), told[name].encode()) for name in _HEADERS if name in told))
            if response.status in (400, 422):
                raise ApiError(400, _message(raw), "invalid_parameter")
            if response.status != 401:
                break
        raise unavailable("Usage cannot be read now: the ledger does not answer. Try again.", "ledger_unavailable", 10)

    def _count(self, tenant: str) -> None:
        now = self._clock()
        left, since = self._left.get(tenant, (float(PER_MINUTE), now))
        left = min(float(PER_MINUTE), left + (now - since) * PER_MINUTE / 60)
        if left < 1:
            wait = int((1 - left) * 60 / PER_MINUTE) + 1
            raise ApiError(429, "Too many questions for usage. Try again.", "rate_limit_exceeded", retry_after=wait)
        # Kept last, so that the first are those that have not asked for longest: after a minute they need no entry.
        self._left.pop(tenant, None)
        self._left[tenant] = (left - 1, now)
        while (oldest := next(iter(self._left))) != tenant and now - self._left[oldest][1] >= 60:
            del self._left[oldest]


def _query(query_string: bytes) -> list[tuple[str, str]]:
    try:
        given = parse_qsl(
            query_string.decode("latin-1"), keep_blank_values=True, max_num_fields=_MOST_PARAMETERS, encoding="utf-8"
        )
    except ValueError:
        raise ApiError(400, f"There are more than {_MOST_PARAMETERS} parameters.", "invalid_parameter") from None
    for name, value in given:
        if name == "tenant":
            raise _wrong(name, "is that of your key: leave it out")
        if name not in _PARAMETERS:
            raise _wrong(name[:64], f"is not known; there are {', '.join(_PARAMETERS)}")
        if name == "by":
            for word in value.split(","):
                if word.strip() and word.strip() not in _BY:
                    raise _wrong(name, f"takes some of {', '.join(_BY)}, with commas between them")
    return given


def _csv_first(accept: bytes) -> bool:
    """Whether an Accept header names CSV, and JSON not before it."""
    kinds = [kind.partition(b";")[0].strip().lower() for kind in accept.split(b",")]
    return b"text/csv" in kinds and b"application/json" not in kinds[: kinds.index(b"text/csv")]


def _message(raw: bytes) -> str:
    try:
        body: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    error = cast("dict[str, Any]", body).get("error") if isinstance(body, dict) else None
    message = cast("dict[str, Any]", error).get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else "The ledger does not understand the question."


def _wrong(name: str, must: str) -> ApiError:
    return ApiError(400, f"`{name}` {must}.", "invalid_parameter", param=name)
