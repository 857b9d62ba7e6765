"""A loopback proxy inside this process for the bucket library. Through it the library reaches one host only, at an
allowed address.

The library (obstore) resolves names and follows redirects itself, and sends its keys with them. A Secret may name any
server as a bucket's endpoint, and the redirects of such a server must not be followed. Therefore all connections go
through this proxy, which connects to that server only. The clouds' own endpoints are used without it.
"""

import asyncio
import contextlib
import urllib.request
from typing import Final
from urllib.parse import urlsplit

import structlog
from yarl import URL

from shoal.artifacts.connect import CheckedResolver, refused, require_host
from shoal.artifacts.errors import ArtifactError, Unreached
from shoal.core.network import SourceNetwork

_HEAD_BYTES: Final = 64 << 10
_PIECE: Final = 1 << 18
_PORTS: Final = {"http": 80, "https": 443}
TOKEN_HOSTS: Final = ("login.microsoftonline.com", "oauth2.googleapis.com", "www.googleapis.com")
"""Hosts at which the library authenticates a Secret's client or service account."""

log = structlog.get_logger()


class EgressRelay:
    """Forwards connections to `endpoint` and refuses every other host. Use it as an async context manager."""

    def __init__(self, endpoint: str, bucket: str, network: SourceNetwork, connect_seconds: float) -> None:
        scheme, host, port = _origin(endpoint)
        self._host = host
        # A bucket may be part of the host name.
        self._origins = {(scheme, host, port), (scheme, f"{bucket}.{host}", port)}
        self._origins |= {("https", name, 443) for name in TOKEN_HOSTS}
        self._network, self._seconds = network, connect_seconds
        self._resolver: CheckedResolver | None = None
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self.refusal: ArtifactError | None = None
        """Why the last connection was refused; the library only reports that its proxy failed."""

    @property
    def url(self) -> str:
        """URL for the library. Raises RuntimeError before the context is entered."""
        if self._server is None:
            raise RuntimeError("a relay is used as a context manager")
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    async def __aenter__(self) -> "EgressRelay":
        self._resolver = CheckedResolver(self._network)
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_HEAD_BYTES)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        if self._resolver is not None:
            await self._resolver.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a handler is a task
        self._open.add(task)
        try:
            await self._carry(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ValueError) as error:
            log.debug("source.relay_ended", problem=type(error).__name__)
        finally:
            self._open.discard(task)
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles one connection of the library: a tunnel for TLS, otherwise single requests, all to the one host."""
        head = await _head(reader)
        method, target, *_ = head.split(b" ", 2)
        tunnel = method == b"CONNECT"
        try:
            to, from_ = await self._reach(target.decode("ascii"), tunnel=tunnel)
        except ArtifactError as error:
            self.refusal = error
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            return
        try:
            async with asyncio.TaskGroup() as group:
                if tunnel:
                    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    there = group.create_task(_copy(reader, from_))
                else:
                    there = group.create_task(self._requests(head, reader, from_))
                await _copy(to, writer)
                there.cancel()
        except* (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as errors:
            log.debug("source.relay_broke", problem=type(errors.exceptions[0]).__name__)
        finally:
            from_.close()

    async def _requests(self, head: bytes, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        """Forwards requests without bodies on a connection without TLS. Raises ValueError for another host."""
        first = head.split(b" ", 2)[1]
        while True:
            method, target, rest = head.split(b" ", 2)
            if method not in (b"GET", b"HEAD") or _authority(target) != _authority(first):
                raise ValueError("a request that is not for the endpoint")
            path = target.split(b"/", 3)[3] if target.count(b"/") > 2 else b""
            out.write(method + b" /" + path + b" " + rest)
            await out.drain()
            head = await _head(reader)

    async def _reach(self, target: str, *, tunnel: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        scheme, host, port = _origin(f"https://{target}" if tunnel else target)
        if (scheme, host, port) not in self._origins:
            raise refused(f"{self._host} redirects to {host}, refused: name the host where the bucket is in the Secret")
        if (proxy := _proxy(scheme, host)) is not None:
            return await self._through(proxy, host, port)
        require_host(self._network, host)
        assert self._resolver is not None  # noqa: S101 - entered
        last: OSError | None = None
        try:
            async with asyncio.timeout(self._seconds):
                for each in await self._resolver.resolve(host, port):
                    try:
                        return await asyncio.open_connection(each["host"], port, limit=_PIECE)
                    except OSError as error:
                        last = error
        except TimeoutError:
            raise Unreached("no answer in time") from None
        except OSError:
            raise Unreached("its host does not resolve") from None
        raise Unreached("connection refused" if isinstance(last, ConnectionRefusedError) else "no way to its host")

    async def _through(self, proxy: URL, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects through the chart's proxy, which resolves names itself and applies its own rules."""
        require_host(self._network, host)
        try:
            async with asyncio.timeout(self._seconds):
                reader, writer = await asyncio.open_connection(proxy.host, proxy.port, limit=_PIECE)
                name = f"[{host}]" if ":" in host else host
                writer.write(f"CONNECT {name}:{port} HTTP/1.1\r\nHost: {name}:{port}\r\n\r\n".encode())
                answer = await _head(reader)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise Unreached(f"the proxy {proxy.host} does not answer") from None
        if answer.split(b" ", 2)[1:2] != [b"200"]:
            writer.close()
            raise Unreached(f"the proxy {proxy.host} does not lead there")
        return reader, writer


def _origin(url: str) -> tuple[str, str, int]:
    """Raises ValueError for a URL that is not http or https."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError("no address")
    return parts.scheme, parts.hostname.lower(), parts.port or _PORTS[parts.scheme]


def _authority(target: bytes) -> list[bytes]:
    return target.split(b"/", 3)[:3]


def _proxy(scheme: str, host: str) -> URL | None:
    found = urllib.request.getproxies().get(scheme)
    return None if found is None or urllib.request.proxy_bypass(host) else URL(found)


async def _head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies until one side ends."""
    while piece := await reader.read(_PIECE):
        writer.write(piece)
        await writer.drain()
    with contextlib.suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()
