"""Loopback forwarders: from a port of the host to the API server or to a Service in the lab.

A socket belongs for ever to the network namespace in which it was made. The supervisor opens the listening sockets
before it enters the lab's; here their connections are accepted, and led on inside.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import structlog

from shoal_dev.lab.state import LabForward

_log = structlog.get_logger()
_CONNECT_TIMEOUT_S: Final = 5.0
_CHUNK: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class ForwardTarget:
    """Where a connection goes, or `problem`: what to tell the client instead."""

    address: str
    port: int
    problem: str = ""


def service_target(forward: LabForward, services: Mapping[str, Mapping[str, Any]]) -> ForwardTarget:
    """The Service's ClusterIP and port as it is now; it may be made long after the forwarder. Keys: NAMESPACE/NAME."""
    service = services.get(f"{forward.namespace}/{forward.service}")
    if service is None:
        return ForwardTarget("", 0, f"Service {forward.namespace}/{forward.service} does not exist in the lab (yet)")
    ports = [int(port["port"]) for port in service["spec"].get("ports") or ()]
    if forward.port not in ports:
        listed = ", ".join(map(str, ports)) or "none"
        return ForwardTarget(
            "", 0, f"Service {forward.namespace}/{forward.service} has no port {forward.port}; it has: {listed}"
        )
    address = service["spec"].get("clusterIP") or "None"
    if address == "None":
        return ForwardTarget(
            "", 0, f"Service {forward.namespace}/{forward.service} is headless: it has no address to forward to"
        )
    return ForwardTarget(address, forward.port)


async def serve(listener: socket.socket, resolve: Callable[[], ForwardTarget]) -> None:
    """Forwards each connection to what `resolve` says at that moment, until cancelled."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _forward(reader, writer, resolve())

    async with await asyncio.start_server(accept, sock=listener, limit=_CHUNK):
        await asyncio.Event().wait()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: ForwardTarget) -> None:
    try:
        if target.problem:
            await _refuse(reader, writer, target.problem)
            return
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                inner_reader, inner_writer = await asyncio.open_connection(target.address, target.port, limit=_CHUNK)
        except (OSError, TimeoutError):
            await _refuse(
                reader, writer, f"nothing answers at {target.address}:{target.port} in the lab: no ready pod?"
            )
            return
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(_pump(reader, inner_writer))
                pumps.create_task(_pump(inner_reader, writer))
        finally:
            inner_writer.close()
    except* OSError as errors:
        _log.debug("forwarded_connection_broke", error=str(errors.exceptions[0]))
    finally:
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One direction. The end of one is passed on as such, so that half-closed connections work; a reset ends both."""
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    with suppress(OSError, NotImplementedError):
        writer.write_eof()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, problem: str) -> None:
    """As an HTTP answer, since that is what nearly every client of a forwarder speaks."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await reader.read(_CHUNK)  # an answer before the request would reach the client as a reset
            body = f"shoal lab: {problem}\n".encode()
            writer.write(
                b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\n"
                b"Retry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            await writer.drain()
