"""Media that clients name by https URL, fetched into `data:` URLs before the request is sent to an engine.

A gateway has network access that a client does not: engines, the API server, the cloud's metadata server. A file is
therefore fetched only from a host that the Model allows (`core/fields/remote.py`), over TLS that proves the host's
name, and from an address that was checked and is then the one connected to. There are no redirects, proxies, cookies or
keys. Size, time and the number of concurrent fetches are bounded.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import aiohttp
import pybase64
from aiohttp.abc import AbstractResolver, ResolveResult
from prometheus_client import Counter
from yarl import URL

from shoal.core.fields.media import MOST_FETCHED, TYPES
from shoal.core.fields.remote import PORT, Wanted, contactable
from shoal.net.errors import ApiError, unavailable

SECONDS: Final = 10.0
"""For one file, from the name lookup to the last byte; the wait for a slot may take as long again."""
MAX_CONCURRENT: Final = 16
"""Files fetched at one time."""
MAX_PER_TENANT: Final = 4
"""Files fetched at one time for one tenant."""
_IDENTITY: Final = frozenset({"", "identity"})
_AddressInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]


class Address(NamedTuple):
    """One address of a host."""

    host: str
    port: int = PORT
    family: socket.AddressFamily = socket.AF_INET


Resolve = Callable[[str], Awaitable[Sequence[Address]]]
"""Returns the addresses of a host. Raises OSError."""


class _Failed(Exception):
    """A file was not fetched: the outcome for the metric, and the text for the client."""

    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(text)
        self.outcome, self.text = outcome, text


class MediaFetcher:
    """`fetches` counts files by outcome. The other parameters are for tests: `resolve` replaces DNS, `allowed` the
    check of addresses, `trust` the public certificate authorities."""

    def __init__(
        self,
        fetches: Counter,
        *,
        resolve: Resolve | None = None,
        allowed: Callable[[str], bool] = contactable,
        trust: ssl.SSLContext | None = None,
        seconds: float = SECONDS,
        most_bytes: int = MOST_FETCHED,
    ) -> None:
        self._fetches = fetches
        self._own_resolver = MediaResolver()
        self._resolve = resolve or self._own_resolver
        self._allowed = allowed
        self._trust = trust
        self._seconds = seconds
        self._most = most_bytes
        self._slots = _FetchSlots(MAX_CONCURRENT, MAX_PER_TENANT)
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, tenant: str, wanted: Sequence[Wanted], take: Callable[[int], None]) -> list[str]:
        """The files as `data:` URLs, in order: all or none. `take` is called with the size of each piece before it is
        kept, and may raise ApiError.

        Raises:
            ApiError: 400, with the field in `param`; 503, too many fetches are running.
        """
        session = await self._open()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(session, tenant, each, take)) for each in wanted]
        except ExceptionGroup as several:
            expected, unexpected = several.split(ApiError)
            if unexpected is not None or expected is None:
                raise
            raise _first(expected) from None
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """Closes the connections. No fetch may be running."""
        self._own_resolver.close()
        if self._session is not None:
            await self._session.close()

    async def _one(
        self, session: aiohttp.ClientSession, tenant: str, wanted: Wanted, take: Callable[[int], None]
    ) -> str:
        outcome = "given_up"
        try:
            async with self._slots.slot(tenant, self._seconds), asyncio.timeout(self._seconds):
                found = await self._get(session, wanted, take)
            outcome = "fetched"
            return found
        except _Failed as failed:
            outcome, text = failed.outcome, failed.text
        except ApiError as error:
            outcome = error.code or outcome
            raise
        except TimeoutError:
            outcome, text = "too_slow", f"it took longer than {self._seconds:g} s"
        except aiohttp.ClientConnectorCertificateError:
            outcome, text = "certificate", "its host does not prove its name with a certificate that is trusted"
        except aiohttp.ClientConnectorDNSError:
            outcome, text = "not_found", "its host's name has no address"
        except (aiohttp.ClientError, OSError, ValueError):
            # The exception's text may contain addresses.
            outcome, text = "unreachable", "its host cannot be reached, or broke off"
        finally:
            self._fetches.labels(outcome).inc()
        message = f"`{wanted.at}` was not fetched: {text}. Try again, or send a `data:` URL."
        raise ApiError(400, message, "media_not_fetched", param=wanted.at)

    async def _get(self, session: aiohttp.ClientSession, wanted: Wanted, take: Callable[[int], None]) -> str:
        types = TYPES[wanted.medium]
        # Already encoded: the URL that was checked is the one requested.
        url = URL(wanted.remote.url, encoded=True)
        async with session.get(url, headers={"Accept": ", ".join(types)}, allow_redirects=False) as response:
            status, headers = response.status, response.headers
            if 300 <= status < 400:
                raise _Failed("redirect", "its host redirects, and redirects are not followed")
            if status != 200:
                raise _Failed("status", f"its host answered with status {status}")
            if not {each.strip().lower() for each in headers.getall("Content-Encoding", [])} <= _IDENTITY:
                raise _Failed("encoding", "it came compressed, which was not asked for")
            kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind not in types:
                raise _Failed("type", f"its Content-Type must be one of {', '.join(types)}")
            if (response.content_length or 0) > self._most:
                raise self._too_large()
            return await self._read(response, kind, take)

    async def _read(self, response: aiohttp.ClientResponse, kind: str, take: Callable[[int], None]) -> str:
        """Encodes to base64 while reading, so that the file is never in memory twice."""
        text = bytearray(f"data:{kind};base64,".encode())
        take(len(text))
        size, rest = 0, b""
        async for piece in response.content.iter_any():
            size += len(piece)
            if size > self._most:
                raise self._too_large()
            piece = rest + piece
            whole = len(piece) - len(piece) % 3
            take(whole // 3 * 4)
            text += pybase64.b64encode(piece[:whole])
            rest = piece[whole:]
        if rest:
            take(4)
            text += pybase64.b64encode(rest)
        return text.decode("ascii")

    def _too_large(self) -> _Failed:
        return _Failed("too_large", f"it has more than {self._most} bytes")

    async def _open(self) -> aiohttp.ClientSession:
        if self._trust is None:
            self._trust = await asyncio.to_thread(ssl.create_default_context)
        if self._session is None:
            resolver = _CheckedResolver(self._resolve, self._allowed)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    ssl=self._trust,
                    resolver=resolver,
                    use_dns_cache=False,
                    force_close=True,
                    limit=0,
                    socket_factory=resolver.socket,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity", "User-Agent": "shoal"},
                timeout=aiohttp.ClientTimeout(total=self._seconds),
                trust_env=False,
                auto_decompress=False,
            )
        return self._session


class MediaResolver:
    """The gateway's own resolver. It has its own threads: slow lookups of media hosts delay no other lookup."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT, "media-names")

    async def __call__(self, host: str) -> list[Address]:
        """Raises OSError."""
        # With a trailing dot, or the cluster's search domains would be tried first.
        ask = partial(socket.getaddrinfo, f"{host}.", PORT, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        return [Address(str(to[0]), PORT, family) for family, _, _, _, to in found]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class _CheckedResolver(AbstractResolver):
    """Returns a host's addresses only if all of them are allowed. aiohttp asks once per connection and connects to what
    it got."""

    def __init__(self, resolve: Resolve, allowed: Callable[[str], bool]) -> None:
        self._resolve, self._allowed = resolve, allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises OSError and _Failed."""
        found = await self._resolve(host)
        if not found:
            raise OSError("no address")
        for each in found:
            self._check(each.host)
        return [
            ResolveResult(
                hostname=host,
                host=each.host,
                port=each.port,
                family=each.family,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for each in found
        ]

    def socket(self, info: _AddressInfo) -> socket.socket:
        """Creates a connection's socket. Raises _Failed: the address is checked again here, wherever it came from."""
        family, kind, proto, _, to = info
        self._check(str(to[0]))
        return socket.socket(family, kind, proto)

    async def close(self) -> None:
        return None

    def _check(self, address: str) -> None:
        if not self._allowed(address):
            raise _Failed("not_allowed", "the address of its host is not allowed")


@dataclass(slots=True)
class _TenantSlots:
    slots: asyncio.Semaphore
    users: int = 0


class _FetchSlots:
    """Limits concurrent fetches, in total and per tenant: a tenant that names slow hosts delays only itself."""

    def __init__(self, at_once: int, per_tenant: int) -> None:
        self._all = asyncio.Semaphore(at_once)
        self._per_tenant = per_tenant
        self._tenants: dict[str, _TenantSlots] = {}

    @asynccontextmanager
    async def slot(self, tenant: str, seconds: float) -> AsyncGenerator[None]:
        """Waits for a slot. Raises ApiError after `seconds`."""
        own = self._tenants.setdefault(tenant, _TenantSlots(asyncio.Semaphore(self._per_tenant)))
        own.users += 1
        try:
            await self._enter(own, seconds)
            try:
                yield
            finally:
                self._all.release()
                own.slots.release()
        finally:
            own.users -= 1
            if not own.users:
                del self._tenants[tenant]

    async def _enter(self, own: _TenantSlots, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await own.slots.acquire()
                try:
                    await self._all.acquire()
                except BaseException:
                    own.slots.release()
                    raise
        except TimeoutError:
            raise unavailable("The gateway fetches as many media as it can. Try again.", "overloaded", 2) from None


def _first(group: BaseExceptionGroup[ApiError]) -> ApiError:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
