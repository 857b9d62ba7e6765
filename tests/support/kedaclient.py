"""What KEDA does at an external scaler, and answers that a test decides."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.controllers.keda.answers import Changed
from shoal.controllers.keda.endpoints import Endpoints
from shoal.controllers.keda.protocol import externalscaler_pb2 as pb
from shoal.controllers.keda.protocol.externalscaler_pb2_grpc import ExternalScalerStub
from shoal.controllers.keda.server import ScalerServer
from shoal.controllers.keda.tls import CertificateFiles
from shoal.core.keda import ScalerAnswer

NAMESPACE, NAME = "ml", "chat-h100"
REF = pb.ScaledObjectRef(namespace=NAMESPACE, name=NAME, scalerMetadata={"scalerAddress": "shoal-scaler:9666"})
HOST = "shoal-scaler.shoal-system.svc"


class Said:
    """Answers by ScaledObject, as the test says."""

    def __init__(self) -> None:
        self.changed: list[Changed] = []
        self.questions: list[tuple[str, str]] = []
        self._answers: dict[tuple[str, str], ScalerAnswer] = {}

    def say(self, answer: ScalerAnswer | None, namespace: str = NAMESPACE, name: str = NAME) -> None:
        if answer is None:
            self._answers.pop((namespace, name), None)
        else:
            self._answers[namespace, name] = answer
        for listener in self.changed:
            listener(namespace, name)

    def answer(self, namespace: str, name: str) -> ScalerAnswer | None:
        return self._answers.get((namespace, name))

    def polled(self, namespace: str, name: str) -> None:
        self.questions.append((namespace, name))


def wants(replicas: int, *, standing: bool = False) -> ScalerAnswer:
    return ScalerAnswer(active=replicas > 0, replicas=replicas, metric=float(replicas), target=1.0, above_zero=standing)


class Leadership:
    """Whether the process is sure to lead."""

    def __init__(self) -> None:
        self.certain = True

    def __call__(self) -> bool:
        return self.certain


def scaler(
    said: Said,
    certain: Leadership,
    *,
    port: int = 0,
    certificate: CertificateFiles | None = None,
    endpoints: Endpoints | None = None,
) -> ScalerServer:
    server = ScalerServer(said, certain, host="127.0.0.1", port=port, certificate=certificate, endpoints=endpoints)
    said.changed.append(server.answer_changed)
    server.need()
    return server


class Term:
    """One term of leadership."""

    def __init__(self, server: ScalerServer) -> None:
        self._task = asyncio.ensure_future(server.run())

    async def begin(self, server: ScalerServer) -> None:
        async with asyncio.timeout(60):
            while server.port is None:
                await asyncio.sleep(0.01)
                if self._task.done():
                    await self._task

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@asynccontextmanager
async def leading(server: ScalerServer) -> AsyncGenerator[Term]:
    """The server's term, once it listens."""
    term = Term(server)
    try:
        await term.begin(server)
        yield term
    finally:
        await term.end()


@asynccontextmanager
async def keda(port: int | None, ca: str | None = None) -> AsyncGenerator[Any]:
    """KEDA's side of one connection. With `ca` over TLS, by the name that the Service has."""
    # Else a later channel would inherit how long an earlier one waits before it connects again.
    options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1)]
    if ca is None:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options)
    else:
        options.append(("grpc.ssl_target_name_override", HOST))
        channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(ca.encode()), options)
    async with channel:
        yield ExternalScalerStub(channel)


def write_certificate(directory: Path, *, days: int = 30, with_ca: bool = True) -> str:
    """A self-signed certificate as a Secret's files; returns it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=60))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tls.crt").write_bytes(pem)
    (directory / "tls.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    if with_ca:
        (directory / "ca.crt").write_bytes(pem)
    return pem.decode()
