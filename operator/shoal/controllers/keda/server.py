"""The external scaler: it listens only while this operator leads, and only once a Model is driven by KEDA. A closed
port is UNAVAILABLE to KEDA, which then keeps the replicas that there are."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import grpc.aio
import structlog

from shoal.controllers.keda.answers import Answers
from shoal.controllers.keda.endpoints import Endpoints
from shoal.controllers.keda.protocol.externalscaler_pb2_grpc import add_ExternalScalerServicer_to_server
from shoal.controllers.keda.service import ScalerService
from shoal.controllers.keda.tls import Certificate, CertificateFiles

log = structlog.get_logger()

RETRY_SECONDS: Final = 2.0
END_SECONDS: Final = 1.0
"""That calls get when this process leads no more; all are answered from memory."""

CALLS: Final = 20_000
"""Concurrent calls, streams included; KEDA needs two per ScaledObject. The bound is for other clients of the port."""

_OPTIONS: Final = (
    # The port of another process is a fault to tell of; it is not to be shared with that process.
    ("grpc.so_reuseport", 0),
    # A KEDA that vanished is noticed, and its streams end.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 * 1024),
)


class ScalerServer:
    """`run` it while this process leads."""

    def __init__(
        self,
        answers: Answers,
        certain: Callable[[], bool],
        *,
        host: str,
        port: int,
        certificate: CertificateFiles | None,
        endpoints: Endpoints | None,
    ) -> None:
        """`certain`: whether this process is sure to lead, asked before each answer. `certificate`: None for plain
        HTTP/2. `endpoints`: None where KEDA gets the address in another way."""
        self._service = ScalerService(answers, certain)
        self._host, self._wanted_port = host, port
        self.certificate, self._endpoints = certificate, endpoints
        self._needed = asyncio.Event()
        self._trouble: str | None = None
        self.port: int | None = None
        """On which it listens; None while it does not."""

    @property
    def streams(self) -> int:
        """Open ones of KEDA."""
        return self._service.streams

    def need(self) -> None:
        """There is a Model whose driver is KEDA."""
        self._needed.set()

    def answer_changed(self, namespace: str, name: str) -> None:
        """The answer for a ScaledObject is another one: its open streams send it at once."""
        self._service.answer_changed(namespace, name)

    @property
    def ca(self) -> str | None:
        """See `ScalerEndpoint`."""
        found = self.certificate.certificate if self.certificate is not None else None
        return None if found is None else found.ca or ""

    @property
    def problem(self) -> str | None:
        """Why KEDA cannot be answered, with what to do; None while it can, or nobody needs it."""
        if not self._needed.is_set():
            return None
        said = self._trouble
        if said is None and self.port is None and self.certificate is not None:
            said = self.certificate.problem
        return said or (self._endpoints.problem if self._endpoints is not None else None)

    async def run(self) -> None:
        """Until cancelled; then what is open ends well."""
        await self._needed.wait()
        server = await self._listening()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._service.run())
                if self.certificate is not None:
                    group.create_task(self.certificate.run())
                if self._endpoints is not None:
                    group.create_task(self._endpoints.run())
        finally:
            self.port = None
            await server.stop(END_SECONDS)
            log.info("the external scaler ends")

    async def _listening(self) -> grpc.aio.Server:
        said: str | None = None
        while True:
            try:
                server = await self._start()
            except RuntimeError:
                # gRPC's words name addresses and files of its own source
                self._trouble = (
                    f"the external scaler cannot listen on {self._host}:{self._wanted_port}: another process has the "
                    "port; KEDA keeps the replicas as they are until it is free"
                )
            else:
                if server is not None:
                    self._trouble = None
                    log.info("external scaler", port=self.port, tls=self.certificate is not None)
                    return server
            if self.problem != said:
                said = self.problem
                log.warning("KEDA cannot be answered", problem=said)
            await asyncio.sleep(RETRY_SECONDS)

    async def _start(self) -> grpc.aio.Server | None:
        """None: there is no certificate yet. Raises RuntimeError when the port is taken."""
        found: Certificate | None = None
        if self.certificate is not None and (found := await self.certificate.refresh()) is None:
            return None
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=CALLS)  # pyright: ignore[reportUnknownMemberType] - of its other arguments
        add_ExternalScalerServicer_to_server(self._service, server)
        address = f"{self._host}:{self._wanted_port}"
        try:
            if found is not None and self.certificate is not None:
                port = server.add_secure_port(address, _credentials(self.certificate, found))
            else:
                port = server.add_insecure_port(address)
            await server.start()
        except BaseException:
            with contextlib.suppress(Exception):
                await server.stop(None)
            raise
        self.port = port
        return server


def _credentials(files: CertificateFiles, first: Certificate) -> grpc.ServerCredentials:
    """With whatever certificate is the newest when KEDA connects."""
    used = first

    def newer() -> grpc.ServerCertificateConfiguration | None:
        # Called by gRPC's own threads: it reads one reference.
        nonlocal used
        if files.certificate is None or files.certificate is used:
            return None
        used = files.certificate
        return _configuration(used)

    return grpc.dynamic_ssl_server_credentials(_configuration(first), newer)  # pyright: ignore[reportArgumentType] - None is allowed: no change


def _configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(certificate.key, certificate.chain)])
