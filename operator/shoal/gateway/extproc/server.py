"""The port on which Envoys ask for decisions: `envoy.service.ext_proc.v3.ExternalProcessor`, and gRPC's health check.

An Envoy whose question gets no answer refuses the request (FailClose): so a gateway that stops, or that is not ready,
answers nothing new, and a port that is closed refuses all.
"""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from shoal.api import names
from shoal.gateway import redact
from shoal.gateway.app import GatewayApp
from shoal.gateway.extproc.exchange import CarriedRequest, Ended
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
_RETRY_SECONDS: Final = 2.0
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
        self._running: set[asyncio.Task[None]] = set()
        """Requests, also those whose Envoy is gone."""

    async def Process(self, request_iterator: object, context: Context) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - it reads and writes by its context
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

        exchange = CarriedRequest(self._app, read, write, body_seconds=self._body_seconds)
        work = asyncio.create_task(exchange.run(), name="a request of an Envoy")
        self._running.add(work)
        work.add_done_callback(self._running.discard)
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
        if exchange.unfinished:
            await context.abort(grpc.StatusCode.INTERNAL, "the gateway has given the request up")

    async def wait_ended(self) -> None:
        """Waits for requests whose Envoy is gone: until then they are not recorded."""
        if self._running:
            await asyncio.wait(tuple(self._running), timeout=_LEAVE_SECONDS + 1)


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
        certificate: "PortCertificate | None" = None,
    ) -> None:
        """`certificate`: None for plain HTTP/2."""
        self._service = ExternalProcessor(app, ready, body_seconds)
        self._ready = ready
        self._host, self._wanted, self._most = host, port, most_streams
        self._certificate = certificate
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def run(self) -> None:
        """Starts it as soon as the port and the certificate are there."""
        told: str | None = None
        while self._server is None:
            try:
                await self.start()
            except (RuntimeError, OSError, ValueError) as error:
                # gRPC's own text names files of its source.
                why = f"port {self._wanted} is taken" if isinstance(error, RuntimeError) else str(error)
                if why != told:
                    log.warning("Envoys get no answers yet, and refuse requests", problem=why)
                    told = why
                await asyncio.sleep(_RETRY_SECONDS)

    async def start(self) -> None:
        """Raises RuntimeError when the port is taken; OSError, ValueError while there is no certificate."""
        credentials = None if self._certificate is None else self._certificate.credentials()
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=self._most)  # pyright: ignore[reportUnknownMemberType] - of its other arguments
        add_ExternalProcessorServicer_to_server(self._service, server)
        server.add_generic_rpc_handlers((_Health(self._ready),))  # pyright: ignore[reportUnknownMemberType] - of its arguments
        address = f"{self._host}:{self._wanted}"
        if credentials is None:
            self.port = server.add_insecure_port(address)
        else:
            self.port = server.add_secure_port(address, credentials)
        await server.start()
        self._server = server
        log.info("external processing", port=self.port, tls=credentials is not None)

    async def stop(self, seconds: float) -> None:
        """Takes no new requests; those that run get `seconds`. Afterwards all of them are recorded."""
        if self._server is not None:
            await self._server.stop(seconds)
            await self._service.wait_ended()


class PortCertificate:
    """tls.crt and tls.key of a mounted Secret, as they are when a caller connects. `asks_clients`: a caller needs a
    certificate that ca.crt signed."""

    def __init__(self, folder: Path, *, asks_clients: bool = False) -> None:
        self._folder, self._asks = folder, asks_clients
        self._seen: tuple[int, ...] = ()

    def credentials(self) -> grpc.ServerCredentials:
        """Raises OSError, ValueError: the files are not there, or are none."""
        first = self._configuration()
        self._seen = self._stamp()
        return grpc.dynamic_ssl_server_credentials(first, self._newer, require_client_authentication=self._asks)  # pyright: ignore[reportArgumentType] - None is allowed: no change

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        # Called by gRPC's own threads, once per connection.
        try:
            seen = self._stamp()
            if seen == self._seen:
                return None
            made = self._configuration()
        except (OSError, ValueError) as error:
            log.warning("cannot read the certificate again; keeping the old one", error=str(error))
            return None
        self._seen = seen
        return made

    def _stamp(self) -> tuple[int, ...]:
        files = (names.CERTIFICATE_FILE, names.CERTIFICATE_KEY_FILE, *((names.TRUST_FILE,) if self._asks else ()))
        return tuple((self._folder / name).stat().st_mtime_ns for name in files)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        chain, key = self._folder / names.CERTIFICATE_FILE, self._folder / names.CERTIFICATE_KEY_FILE
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key)
        except ssl.SSLError as error:
            raise ValueError(f"{chain.name} and {key.name} do not go together ({error.reason or error})") from None
        trust = (self._folder / names.TRUST_FILE).read_bytes() if self._asks else None
        return grpc.ssl_server_certificate_configuration([(key.read_bytes(), chain.read_bytes())], trust)


class _Health(grpc.GenericRpcHandler):  # pyright: ignore[reportMissingTypeArgument] - it takes none when it runs
    """gRPC's health check, by which data planes and kubelets look whether to send requests here."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        if handler_call_details.method != _HEALTH:
            return None
        return grpc.unary_unary_rpc_method_handler(self._check)  # pyright: ignore - the stubs know no coroutines

    async def _check(self, request: bytes, context: Context) -> bytes:
        # HealthCheckRequest has one field, `service`.
        asked = request[2:].decode("utf-8", "replace") if request[:1] == b"\x0a" else ""
        if asked == "liveness":
            return _SERVING
        if asked in ("", "readiness", SERVICE):
            return _SERVING if self._ready() else _NOT_SERVING
        return _UNKNOWN
