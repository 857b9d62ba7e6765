"""The HTTP/1.1 client towards the engines: a pool of connections on httptools.

The gateway has its own client because the client is the largest cost of the request path: measured on the same machine,
this one carries more than twice the requests per core of a general client. It does only what the gateway needs: POST a
body from memory, with back-pressure if it is large, read an answer with back-pressure, abort it.
"""

import asyncio
import contextlib
import select
import socket
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, Protocol, cast

import httptools

from shoal.api.names import HEADER_SIDECAR
from shoal.gateway.upstream import (
    Aborted,
    AbortHandle,
    AnswerTooLarge,
    BadAnswer,
    ConnectFailed,
    ConnectionLost,
    GivenUp,
    PartedBody,
    RequestBody,
    StaleConnection,
    UpstreamAddress,
    UpstreamAnswer,
    UpstreamError,
)
from shoal.net.tls import NoCertificate

_HIGH_WATER: Final = 64 * 1024
"""Bytes read ahead per answer while its client does not read. Above, reading pauses."""
_ONE_WRITE: Final = 256 * 1024
"""A smaller body is written together with its head."""
_SLICE: Final = 128 * 1024
"""Bytes of a larger body that are written at a time. The transport keeps a copy of what its socket does not take, with
TLS an encrypted one, so a slice follows when the one before is nearly gone."""
_MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_IDLE_PER_TARGET: Final = 256
_SIDECAR: Final = HEADER_SIDECAR.encode()
_REFUSED: Final = (b"UF", b"UH", b"UO", b"URX", b"UAEX")
"""Envoy's response flags that mean that there was no connection, or no admission (UAEX), so that nothing reached the
engine."""
_MOST_AROUND: Final = 32
"""Bytes of lengths of chunks for each byte in them, at most."""
_PARTS: Final = 8
"""Of the time for a connection, each of which the loop has to come to the end of."""
_PROBE_SECONDS: Final = 4
_PROBES: Final = 3
"""Seconds between keepalive probes. A machine that answers nothing for four intervals counts as lost."""


class _Connection(asyncio.Protocol):
    """One connection, and the `UpstreamAnswer` of the request on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: "Pool", target: UpstreamAddress) -> None:
        self._loop = loop
        self._pool = pool
        self._target = target
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._write_paused = False
        self._writing = False
        """Part of the request was not written."""
        self._read_paused = False
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._head_bytes = 0
        self._around = 0
        """Bytes of the answer since its head, or since the last byte of its body, in reads that had none of it."""
        self._head_done = False
        self._complete = False
        self._until_close = False
        self._framed = False
        self._interim = False
        self._busy = False
        self._keep_alive = False
        self.handle: AbortHandle | None = None
        self._error: UpstreamError | None = None
        self._take: Callable[[bytes], bool] | None = None
        """Takes what arrives, while `relay` runs and the client takes it. Otherwise what arrives is kept for `read`."""
        self._take_error: Exception | None = None
        self.status = 0
        self.content_type = b""
        self.retry_after = b""
        self.encoding = b""
        self.sidecar = b""
        """Envoy's response flags, if the answer comes from Envoy and not from the engine."""
        self.any_byte = False
        self.idle_since = 0.0

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._busy and not self._complete:
            if self._head_done and self._until_close and exc is None:
                self._complete = True
            elif self._error is None:
                self._error = ConnectionLost("the engine closed the connection")
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._take is None:
            if not self._busy:
                self.close()  # bytes without a request
                return
            self.any_byte = True
            if self._head_done:
                if self._around_is_full(data):
                    return
            else:
                self._head_bytes += len(data)
                if self._head_bytes > _MAX_HEAD_BYTES + len(data):
                    self._fail(BadAnswer("the head of the engine's answer is too large"))
                    return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BadAnswer(f"the engine's answer is not HTTP: {error}"))
        except httptools.HttpParserUpgrade:
            self._fail(BadAnswer("the engine switched protocols"))
        if (take := self._take) is not None:
            if not (chunks := self._chunks):
                self._around_is_full(data)
                return
            if self._around:
                self._around = 0
            part = chunks.popleft() if len(chunks) == 1 else self._drain()
            try:
                if take(part):
                    return
            except Exception as error:
                self._take_error = error
            self._take = None
            self._wake()

    def _around_is_full(self, data: bytes) -> bool:
        """Counts a read that may have nothing of the body. Extensions of a chunk, and trailers, are kept by the parser
        until they end, and copied at each read. Where there is too much of them, the answer fails."""
        if self._around > _MAX_HEAD_BYTES:
            self._fail(BadAnswer("what stands around the engine's answer is too large"))
            return True
        self._around += len(data)
        return False

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._wake()

    # --- httptools ----------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # a trailer, which nobody reads
        lower = name.lower()
        if lower == b"content-type":
            self.content_type = value
        elif lower == _SIDECAR and self._target.server_name is not None and value != b"-":
            self.sidecar = value
        elif lower in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif lower == b"retry-after":
            self.retry_after = value
        elif lower == b"content-encoding":
            self.encoding = value

    def on_headers_complete(self) -> None:
        status: int = self._parser.get_status_code()
        if status < 200:
            self._interim = True
            return
        self.status = status
        self._until_close = not self._framed and status not in (204, 304)
        self._head_done = True
        self._wake()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        if self._take is not None:
            return  # `data_received` hands it over
        self._around = 0
        self._buffered += len(body)
        if self._buffered > _HIGH_WATER and not self._read_paused and self._transport is not None:
            self._read_paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = self._framed = False
            return
        self._complete = True
        self._keep_alive = self._parser.should_keep_alive()
        self._wake()

    # --- a request ----------------------------------------------------------------------------------------------------

    async def send(self, head: bytes, body: RequestBody) -> None:
        """Sends a request and returns when the head of the answer has arrived."""
        self._parser = httptools.HttpResponseParser(self)
        self._busy = True
        self._head_done = self._complete = self._until_close = self._framed = self._interim = False
        self._head_bytes = self._around = 0
        self.any_byte = False
        self.status = 0
        self.content_type = self.sidecar = self.retry_after = self.encoding = b""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionLost("the engine closed the connection")
        if len(body) >= _ONE_WRITE:
            await self._write_slices(transport, head, body)
        else:
            transport.write(head + body if isinstance(body, bytes) else b"".join((head, *body.parts)))
        while not self._head_done:
            self._check()
            self._waiter = self._loop.create_future()
            await self._waiter

    async def _write_slices(self, transport: asyncio.Transport, head: bytes, body: RequestBody) -> None:
        """Writes a large body as the engine takes it. Returns early if the engine has answered with an error, or is
        gone: it wants no more."""
        self._writing = True
        transport.write(head)
        for part in (PartedBody(body) if isinstance(body, bytes) else body).slices(_SLICE):
            await asyncio.sleep(0)  # for other requests, and for what the engine says meanwhile
            if self._write_paused:
                await self._drained()
            if self._error is not None or transport.is_closing() or (self._head_done and self.status >= 400):
                return
            transport.write(part)
        self._writing = False

    async def _drained(self) -> None:
        """Returns when more can be written, when the engine has answered with an error, and when it is gone. Raises
        ConnectionLost."""
        try:
            async with asyncio.timeout(self._pool.write_timeout):
                while self._write_paused and self._error is None and not (self._head_done and self.status >= 400):
                    if self._transport is None or self._transport.is_closing():
                        return
                    self._waiter = self._loop.create_future()
                    await self._waiter
        except TimeoutError:
            raise ConnectionLost(f"the engine took nothing of the request for {self._pool.write_timeout:g} s") from None

    async def read(self) -> bytes:
        while True:
            if self._chunks:
                data = self._drain()
                self._resume_reading()
                return data
            if self._complete:
                return b""
            self._check()
            self._waiter = self._loop.create_future()
            await self._waiter

    async def relay(self, take: Callable[[bytes], bool], drained: Callable[[], Awaitable[None]]) -> None:
        try:
            while True:
                while self._chunks:  # what came while nobody took it
                    more = take(self._drain())
                    self._resume_reading()
                    if not more:
                        await drained()
                if self._complete:
                    return
                self._check()
                self._take = take
                self._waiter = self._loop.create_future()
                await self._waiter
                if self._take_error is not None:
                    raise self._take_error
                if self._take is None:
                    await drained()
        finally:
            self._take = self._take_error = None

    def _resume_reading(self) -> None:
        if self._read_paused and self._transport is not None:
            self._read_paused = False
            self._transport.resume_reading()

    async def read_all(self, limit: int, grown: Callable[[int], None] = lambda _size: None) -> bytes:
        if self._complete and self._chunks and self._buffered <= limit:
            # All of a small answer is here by now.
            data = self._drain()
            self._resume_reading()
            grown(len(data))
            return data
        parts: list[bytes] = []
        size = 0
        while data := await self.read():
            size += len(data)
            if size > limit:
                raise AnswerTooLarge(f"the engine's answer is larger than {limit} bytes")
            grown(len(data))
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self) -> None:
        if self.handle is not None:
            # The handle of this request must not be able to abort the next one on this connection.
            self.handle.drop()
            self.handle = None
        whole = self._busy and self._complete and not self._chunks and not self._until_close and not self._writing
        self._busy = False
        if whole and self.usable and self._keep_alive and not self._read_paused:
            self.idle_since = self.now()
            self._pool.give_back(self._target, self)
        else:
            self.close()

    def abort(self, error: UpstreamError) -> None:
        if self._busy:
            if self._error is None:
                self._error = error
            self.close()
            self._wake()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def socket(self) -> socket.socket | None:
        return None if self._transport is None else self._transport.get_extra_info("socket")

    def now(self) -> float:
        """The loop's time. Asking the running loop would be a system call (asyncio asks for the process id)."""
        return self._loop.time()

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self._error is None

    @property
    def quiet(self) -> bool:
        """Whether nothing has arrived that was not read yet, not even the end of the connection. This is a system
        call."""
        sock = self.socket
        if sock is None or (number := sock.fileno()) < 0:
            return False
        poll = select.poll()
        poll.register(number, select.POLLIN | select.POLLRDHUP)
        return not poll.poll(0)

    def _drain(self) -> bytes:
        self._buffered = 0
        if len(self._chunks) == 1:
            return self._chunks.popleft()
        data = b"".join(self._chunks)
        self._chunks.clear()
        return data

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._complete and (self._transport is None or self._transport.is_closing()):
            raise ConnectionLost("the engine closed the connection")

    def _fail(self, error: UpstreamError) -> None:
        if self._error is None:
            self._error = error
        self.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _OutsideConnection(_Connection):
    """One connection to a server that may send anything. What is no body is bounded by the body too. What follows a
    complete answer is for nobody, and ends the connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: "Pool", target: UpstreamAddress) -> None:
        super().__init__(loop, pool, target)
        self._arrived = self._of_body = 0
        self._lost = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        super().connection_lost(exc)

    async def send(self, head: bytes, body: RequestBody) -> None:
        self._arrived = self._of_body = 0
        await super().send(head, body)

    def data_received(self, data: bytes) -> None:
        self._arrived += len(data)
        super().data_received(data)
        # Small chunks may have as much around them as in them, and a little more.
        if self._arrived > (1 + _MOST_AROUND) * self._of_body + 2 * _MAX_HEAD_BYTES + len(data):
            self._fail(BadAnswer("the answer is hardly more than what stands around it"))

    def _check(self) -> None:
        # Only the end of the connection says whether an answer without a length was cut.
        if not self._until_close or self._lost or self._error is not None:
            super()._check()

    def on_headers_complete(self) -> None:
        if self._complete:
            self.close()  # the next request here would get a second answer to this one
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._complete:
            return
        self._of_body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._complete:
            super().on_message_complete()


class ClientTLS(Protocol):
    """What a pool's TLS connections trust, and show of themselves."""

    def client(self) -> ssl.SSLContext:
        """Raises NoCertificate."""
        ...


class Pool:
    """Keeps connections to the engines. `keep_alive` must be shorter than the engine's own keep-alive time (SGLang: 5
    s)."""

    def __init__(
        self,
        *,
        keep_alive: float = 4.0,
        connect_timeout: float = 2.0,
        write_timeout: float = 30.0,
        credentials: ClientTLS | None = None,
        secured_keep_alive: float | None = None,
        outside: bool = False,
    ) -> None:
        """`write_timeout`: seconds after which an engine that takes nothing of a request counts as lost (Linux says so
        earlier: TCP_USER_TIMEOUT). `credentials` and `secured_keep_alive` apply to targets with a `server_name`.
        `secured_keep_alive` may be longer than `keep_alive`: the sidecar that terminates mutual TLS keeps idle
        connections longer than an engine, and a handshake costs more than a connection.

        `outside`: the servers are not of this installation. What they say of a sidecar is not believed, and an idle
        connection on which its end has arrived is not used, since no request may be sent there twice."""
        self._keep_alive = keep_alive
        self._secured_keep_alive = keep_alive if secured_keep_alive is None else secured_keep_alive
        self._credentials = credentials
        self._connect_timeout = connect_timeout
        self.write_timeout = write_timeout
        self._outside = outside
        self._idle: dict[UpstreamAddress, list[_Connection]] = {}
        self._closed = False

    async def start(
        self, target: UpstreamAddress, head: bytes, body: RequestBody, abort: AbortHandle
    ) -> UpstreamAnswer:
        reused = self._take(target)
        connection = await self._connect(target) if reused is None else reused
        abort.hold(connection)
        try:
            if abort.aborted:
                raise Aborted("the request was cut off")
            if abort.given_up:
                raise GivenUp("the replica stalled")
            abort.sent = True
            await connection.send(head, body)
            if connection.sidecar and not self._outside:
                raise sidecar_error(connection.sidecar)
        except BaseException as error:
            connection.release()
            if reused is None or connection.any_byte or not isinstance(error, ConnectionLost):
                raise
            # The other idle connections are at least as old, so they are closed: the retry must open a new one.
            for idle in self._idle.pop(target, ()):
                idle.close()
            raise StaleConnection(str(error)) from None
        return connection

    def give_back(self, target: UpstreamAddress, connection: _Connection) -> None:
        idle = self._idle.setdefault(target, [])
        if self._closed or len(idle) >= _MAX_IDLE_PER_TARGET:
            connection.close()
            return
        idle.append(connection)

    def sweep(self) -> None:
        """Closes connections that have been idle for too long; call it about once a second."""
        now = asyncio.get_running_loop().time()
        for target, idle in list(self._idle.items()):
            keep: list[_Connection] = []
            longest = self._longest(target)
            for connection in idle:
                if connection.usable and now - connection.idle_since <= longest:
                    keep.append(connection)
                else:
                    connection.close()
            if keep:
                self._idle[target] = keep
            else:
                del self._idle[target]

    def close(self) -> None:
        """Closes idle connections. Connections that are returned later are closed too."""
        self._closed = True
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()

    def _take(self, target: UpstreamAddress) -> _Connection | None:
        idle = self._idle.get(target)
        longest = self._longest(target)
        while idle:
            connection = idle.pop()
            if (
                connection.usable
                and connection.now() - connection.idle_since <= longest
                and (not self._outside or connection.quiet)
            ):
                return connection
            connection.close()
        return None

    def _longest(self, target: UpstreamAddress) -> float:
        return self._keep_alive if target.server_name is None else self._secured_keep_alive

    async def _connect(self, target: UpstreamAddress) -> _Connection:
        loop = asyncio.get_running_loop()
        kind = _OutsideConnection if self._outside else _Connection
        try:
            context = None
            if target.server_name is not None:
                if self._credentials is None:
                    raise NoCertificate("this gateway has no certificate, and the engine speaks mutual TLS only")
                context = self._credentials.client()
            async with _within(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: kind(loop, self, target),
                    target.host,
                    target.port,
                    ssl=context,
                    server_hostname=target.server_name,
                )
        except TimeoutError:
            raise ConnectFailed(f"no connection within {self._connect_timeout:g} s") from None
        except NoCertificate as none:
            raise ConnectFailed(str(none)) from None
        except ssl.SSLError as error:
            # Nothing of the request was sent.
            raise ConnectFailed(f"no mutual TLS: {error.reason or 'the handshake failed'}") from None
        except OSError as error:
            raise ConnectFailed(error.strerror or "no connection") from None
        _enable_keepalive_probes(connection)
        return connection


@contextlib.asynccontextmanager
async def _within(seconds: float) -> AsyncGenerator[None]:
    """Raises TimeoutError after `seconds` in which the loop ran. A loop that was busy, or a process that got no CPU,
    finds the timer and the connection both due, and the timer wins: the engine would be blamed for the gateway's own
    pause. So each part of the time starts when the loop comes to the end of the one before, and a pause costs one."""
    loop, left = asyncio.get_running_loop(), _PARTS
    async with asyncio.timeout(None) as limit:

        def part_over() -> None:
            nonlocal left, timer
            left -= 1
            if left:
                timer = loop.call_later(seconds / _PARTS, part_over)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_later(seconds / _PARTS, part_over)
        try:
            yield
        finally:
            timer.cancel()


def sidecar_error(flags: bytes) -> UpstreamError:
    """The error for an answer of the sidecar itself, which had no connection to the engine or lost it during the
    request."""
    if flags in _REFUSED:
        return ConnectFailed("the engine takes no connection")
    return ConnectionLost(f"the engine closed the connection ({flags.decode('latin-1')[:40]})")


def _enable_keepalive_probes(connection: _Connection) -> None:
    """Lets the kernel probe the connection, so that requests do not wait for a machine that lost power and so closed no
    connection. A hanging process passes the probes, because its kernel answers."""
    sock = connection.socket
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (_PROBES + 1) * _PROBE_SECONDS * 1000)
