"""`kubectl port-forward`: TCP connections into a pod, many in one WebSocket.

kubectl opens two SPDY streams for each connection, `error` and `data`, in a tunnel that the API server hands on to the
node as it is. A connection goes to the pod's own localhost, as on a real node: what listens on 127.0.0.1 in the pod is
reached, too.
"""

import asyncio
import contextlib
import os
import socket
import threading
from dataclasses import dataclass
from typing import Final

import structlog
from aiohttp import WSMsgType, web

from shoal_dev.lab.node import linux, spdy

_log = structlog.get_logger()

PROTOCOL: Final = "SPDY/3.1+portforward.k8s.io"
_CHUNK: Final = 1 << 15
_CONNECT_SECONDS: Final = 10.0


async def serve(request: web.Request, pod: str, network: str) -> web.StreamResponse:
    """`network` is the path of the pod's network namespace. Until the client goes."""
    tunnel = web.WebSocketResponse(protocols=(PROTOCOL,), heartbeat=30, max_msg_size=0)
    await tunnel.prepare(request)
    await _Session(tunnel, pod, network).run()
    return tunnel


@dataclass(slots=True)
class _Connection:
    """One connection of the client's; complete with both streams."""

    port: int = 0
    data: int | None = None
    error: int | None = None
    writer: asyncio.StreamWriter | None = None
    early: bytes = b""
    """What came before the pod was connected."""
    half_closed: bool = False


class _Session:
    def __init__(self, tunnel: web.WebSocketResponse, pod: str, network: str) -> None:
        self._tunnel = tunnel
        self._pod = pod
        self._network = network
        self._peer = spdy.SPDYPeer()
        self._requests: dict[str, _Connection] = {}
        self._streams: dict[int, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        try:
            async for message in self._tunnel:
                if message.type == WSMsgType.BINARY:
                    for frame in self._peer.receive(message.data):
                        await self._handle(frame)
        except (spdy.SpdyError, ConnectionResetError) as error:
            _log.info("port_forward_ends", pod=self._pod, error=str(error))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._tunnel.close()

    async def _handle(self, frame: spdy.Frame) -> None:
        match frame:
            case spdy.StreamOpened():
                await self._open(frame)
            case spdy.Data():
                await self._data(frame)
            case spdy.Reset():
                if (connection := self._streams.pop(frame.stream, None)) is not None and connection.writer is not None:
                    connection.writer.transport.abort()
            case spdy.Ping():
                await self._tunnel.send_bytes(spdy.ping(frame.number))
            case spdy.GoAway():
                return

    async def _open(self, frame: spdy.StreamOpened) -> None:
        kind, port = frame.headers.get("streamtype"), frame.headers.get("port", "")
        if kind not in ("error", "data") or not port.isdecimal() or not 0 < int(port) < 65536:
            await self._tunnel.send_bytes(spdy.reset(frame.stream))
            return
        connection = self._requests.setdefault(frame.headers.get("requestid", ""), _Connection())
        connection.port = int(port)
        setattr(connection, kind, frame.stream)
        self._streams[frame.stream] = connection
        await self._tunnel.send_bytes(self._peer.reply(frame.stream))
        if connection.data is not None and connection.error is not None:
            self._requests.pop(frame.headers.get("requestid", ""))
            task = asyncio.create_task(self._forward(connection, connection.data, connection.error))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _data(self, frame: spdy.Data) -> None:
        connection = self._streams.get(frame.stream)
        if connection is None or frame.stream != connection.data:
            return
        connection.half_closed = connection.half_closed or frame.fin
        if connection.writer is None:
            connection.early += frame.payload
            return
        with contextlib.suppress(ConnectionError):
            connection.writer.write(frame.payload)
            if frame.fin:
                connection.writer.write_eof()
            await connection.writer.drain()

    async def _forward(self, connection: _Connection, data: int, error: int) -> None:
        """One connection from its begin to its end; an error is told on the error stream, as a kubelet does."""
        try:
            reader, writer = await self._connect(connection.port)
        except (OSError, TimeoutError) as reason:
            text = (
                f"error forwarding port {connection.port} to pod {self._pod}: "
                f"failed to connect to localhost:{connection.port} in the pod: {reason or 'timed out'}"
            )
            await self._send(spdy.data(error, text.encode(), fin=True), spdy.reset(data))
            return
        connection.writer = writer
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(connection.early)
                if connection.half_closed:
                    writer.write_eof()
                while chunk := await reader.read(_CHUNK):
                    await self._send(spdy.data(data, chunk))
        finally:
            writer.close()
            self._streams.pop(data, None)
            self._streams.pop(error, None)
        await self._send(spdy.data(data, b"", fin=True), spdy.data(error, b"", fin=True))

    async def _send(self, *frames: bytes) -> None:
        with contextlib.suppress(ConnectionResetError):  # the client has gone; `run` ends
            for frame in frames:
                await self._tunnel.send_bytes(frame)

    async def _connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises OSError, TimeoutError."""
        connecting = await asyncio.to_thread(_socket_in, self._network)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await asyncio.get_running_loop().sock_connect(connecting, ("127.0.0.1", port))
                return await asyncio.open_connection(sock=connecting)
        except BaseException:
            connecting.close()
            raise


def _socket_in(network: str) -> socket.socket:
    """A socket belongs for ever to the network namespace of the thread that made it. Raises OSError."""
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def make() -> None:
        try:
            namespace = os.open(network, os.O_RDONLY)
            try:
                linux.setns(namespace, linux.CLONE_NEWNET)
            finally:
                os.close(namespace)
            made.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        except OSError as error:
            failed.append(error)

    # A thread of its own, that ends: one of a pool would stay in the pod's network.
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]
