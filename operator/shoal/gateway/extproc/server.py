"""The port on which Envoys ask for decisions: `envoy.service.ext_proc.v3.ExternalProcessor`, and gRPC's health check.

An Envoy whose question gets no answer refuses the request (FailClose): so a gateway that stops, or that is not ready,
answers nothing new, and a port that is closed refuses all.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from shoal.gateway import redact
from shoal.gateway.app import GatewayApp
from shoal.gateway.extproc.exchange import Ended, Exchange
from shoal.gateway.extproc.protocol import external_processor_pb2 as pb
from shoal.gateway.extproc.protocol.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)

log = structlog.get_logger()

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""Of one message: Envoy sends bodies in parts as they arrive, by default of 1 MiB at most."""
_LEAVE_SECONDS: Final = 10.0
"""How long a request may take to end after its Envoy has gone."""
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # the port of another process is an error
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
)
_HEALTH: Final = "/grpc.health.v1.Health/Check"
_SERVING, _NOT_SERVING, _UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"
"""HealthCheckResponse with its one field, `status`."""
Context = grpc.aio.ServicerContext[Any, Any]


class ExternalProcessor(ExternalProcessorServicer):
    """`ready`: whether this gateway takes requests."""

    def __init__(self, app: GatewayApp, ready: Callable[[], bool], body_seconds: float) -> None:
        self._app, self._ready, self._body_seconds = app, ready, body_seconds

    async def Process(self, request_iterator: object, context: Context) -> None:
        if not self._ready():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this gateway takes no requests")

        async def read() -> pb.ProcessingRequest | None:
            try:
                heard = await context.read()
            except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
                raise Ended from error
            return heard if isinstance(heard, pb.ProcessingRequest) else None

        async def write(said: pb.ProcessingResponse) -> None:
            try:
                await context.write(said)
            except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
                raise Ended from error

        exchange = Exchange(self._app, read, write, body_seconds=self._body_seconds)
        work = asyncio.create_task(exchange.run(), name="a request of an Envoy")
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError:
            # Envoy has reset the stream. The request ends as one whose client has left, and is recorded.
            exchange.leave()
            await asyncio.wait((work,), timeout=_LEAVE_SECONDS)
            raise
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait((work,), timeout=_LEAVE_SECONDS)
            if work.done() and not work.cancelled() and (error := work.exception()) is not None:
                log.error("a request of an Envoy failed", **redact.redact_error(error))


class ExtProcServer:
    """The gRPC server. `start` and `stop` it once."""

    def __init__(
        self,
        app: GatewayApp,
        ready: Callable[[], bool],
        *,
        host: str,
        port: int,
        body_seconds: float,
        most_streams: int,
        credentials: Callable[[], grpc.ServerCredentials | None] = lambda: None,
    ) -> None:
        """`credentials`: None for plain HTTP/2."""
        self._service = ExternalProcessor(app, ready, body_seconds)
        self._ready = ready
        self._host, self._wanted, self._most = host, port, most_streams
        self._credentials = credentials
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Raises RuntimeError when the port is taken."""
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=self._most)  # pyright: ignore[reportUnknownMemberType] - of its other arguments
        add_ExternalProcessorServicer_to_server(self._service, server)
        server.add_generic_rpc_handlers((_Health(self._ready),))
        address = f"{self._host}:{self._wanted}"
        found = self._credentials()
        self.port = server.add_insecure_port(address) if found is None else server.add_secure_port(address, found)
        await server.start()
        self._server = server
        log.info("external processing", port=self.port, tls=found is not None)

    async def stop(self, seconds: float) -> None:
        """Takes no new requests; those that run get `seconds`."""
        if self._server is not None:
            await self._server.stop(seconds)


class _Health(grpc.GenericRpcHandler):
    """gRPC's health check, by which data planes and kubelets look whether to send requests here."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        if handler_call_details.method != _HEALTH:
            return None
        return grpc.unary_unary_rpc_method_handler(self._check)

    async def _check(self, request: bytes, context: Context) -> bytes:
        # HealthCheckRequest has one field, `service`.
        asked = request[2:].decode("utf-8", "replace") if request[:1] == b"\x0a" else ""
        if asked == "liveness":
            return _SERVING
        if asked in ("", "readiness", SERVICE):
            return _SERVING if self._ready() else _NOT_SERVING
        return _UNKNOWN
