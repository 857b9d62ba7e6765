"""`kubectl exec`: one command in a running container, its streams in one WebSocket (v5.channel.k8s.io)."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import struct
import termios
from typing import Any

from aiohttp import WSMsgType, web

from shoal_dev.lab.node.container import NodeContainer
from shoal_dev.lab.node.runtime import StartError

_STDIN, _STDOUT, _STDERR, _ERROR, _RESIZE, _CLOSE = 0, 1, 2, 3, 4, 255
"""Channels of v5.channel.k8s.io: the first byte of each message."""
_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_CHUNK = 1 << 15


async def serve(request: web.Request, container: NodeContainer) -> web.StreamResponse:
    """Until the command ends, or the client goes."""
    socket = web.WebSocketResponse(protocols=_PROTOCOLS, heartbeat=30)
    await socket.prepare(request)
    query = request.query
    argv = query.getall("command", [])
    wants = {name: query.get(name) in ("1", "true") for name in ("input", "tty")}
    session = _Session(socket, container, argv, tty=wants["tty"], stdin=wants["input"])
    try:
        status = await session.run()
    except StartError as error:
        status = _failure(f"error executing command in container: {error}", 126)
    with contextlib.suppress(ConnectionResetError):
        await socket.send_bytes(bytes([_ERROR]) + json.dumps(status).encode())
        await socket.close()
    return socket


def _failure(message: str, code: int) -> dict[str, Any]:
    return {
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
        "code": 500,
    }


class _Session:
    """One command: bytes from the WebSocket to the process and back, until the process ends."""

    def __init__(
        self, socket: web.WebSocketResponse, container: NodeContainer, argv: list[str], *, tty: bool, stdin: bool
    ) -> None:
        self._socket = socket
        self._container = container
        self._argv = argv
        self._tty = tty
        self._stdin = stdin
        self._input: int | None = None
        self._outputs: list[tuple[int, int]] = []
        """Channel and file."""

    async def run(self) -> dict[str, Any]:
        """Raises StartError. Ends the process when the client goes."""
        theirs = self._open()
        try:
            process = await self._container.exec(self._argv, theirs, self._tty)
        except BaseException:
            self._close()
            raise
        finally:
            for fd in set(theirs):
                os.close(fd)
        pumps = [asyncio.create_task(self._pump(channel, fd)) for channel, fd in self._outputs]
        receiving = asyncio.create_task(self._receive())
        waiting = asyncio.create_task(process.wait())
        try:
            await asyncio.wait([receiving, waiting], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                process.send_signal(signal.SIGKILL)  # the client has gone
            code = await waiting
            await asyncio.wait(pumps, timeout=1.0)  # a child that it left behind may hold the pipes
        finally:
            for task in (*pumps, receiving):
                task.cancel()
            await asyncio.gather(*pumps, receiving, return_exceptions=True)
            self._close()
        if code == 0:
            return {"metadata": {}, "status": "Success"}
        return _failure(f"command terminated with exit code {code}", code)

    def _open(self) -> tuple[int, ...]:
        """The process's ends: stdin, stdout, stderr."""
        if self._tty:
            ours, theirs = os.openpty()
            os.set_blocking(ours, False)
            self._outputs = [(_STDOUT, ours)]
            self._input = ours
            return theirs, theirs, theirs
        ends: list[int] = []
        if self._stdin:
            read, self._input = os.pipe()
            os.set_blocking(self._input, False)
            ends.append(read)
        else:
            ends.append(os.open("/dev/null", os.O_RDONLY))
        for channel in (_STDOUT, _STDERR):
            read, write = os.pipe()
            os.set_blocking(read, False)
            self._outputs.append((channel, read))
            ends.append(write)
        return tuple(ends)

    def _close(self) -> None:
        self._close_input()
        for _, fd in self._outputs:
            os.close(fd)
        self._outputs = []

    def _close_input(self) -> None:
        if self._input is not None and not self._tty:
            os.close(self._input)
        self._input = None

    async def _pump(self, channel: int, fd: int) -> None:
        while True:
            try:
                data = os.read(fd, _CHUNK)
            except BlockingIOError:
                await _ready(fd, write=False)
                continue
            except OSError:
                return  # a terminal whose last user has gone
            if not data:
                return
            await self._socket.send_bytes(bytes([channel]) + data)

    async def _receive(self) -> None:
        async for message in self._socket:
            if message.type != WSMsgType.BINARY or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel == _STDIN and self._input is not None:
                await self._write(data)
            elif channel == _CLOSE and data[:1] == bytes([_STDIN]):
                self._close_input()
            elif channel == _RESIZE and self._tty and self._input is not None:
                size = json.loads(data)
                fcntl.ioctl(self._input, termios.TIOCSWINSZ, struct.pack("HHHH", size["Height"], size["Width"], 0, 0))

    async def _write(self, data: bytes) -> None:
        while data and self._input is not None:
            try:
                data = data[os.write(self._input, data) :]
            except BlockingIOError:
                await _ready(self._input, write=True)
            except OSError:
                return  # it does not read any more


async def _ready(fd: int, *, write: bool) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
    add(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        remove(fd)
