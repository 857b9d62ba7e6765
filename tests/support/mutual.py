"""Certificates for tests: an authority and what it signs, and listeners that keep what reaches them."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from shoal.api import identity
from shoal.api.identity import CertificateIdentity, ProcessRole
from shoal.net.pki import CertificateAuthority, CertificatePair
from shoal.net.tls import TLSCredentials

TRUST_DOMAIN, NAMESPACE = "shoal.internal", "shoal-system"
HOUR = timedelta(hours=1)


def process(role: ProcessRole) -> CertificateIdentity:
    return identity.process(TRUST_DOMAIN, NAMESPACE, role)


def model(uid: str) -> CertificateIdentity:
    return identity.model(TRUST_DOMAIN, NAMESPACE, uid)


def _authority() -> CertificateAuthority:
    """As if it were two days old, so that it can sign what has expired."""
    return CertificateAuthority.make("test", datetime.now(UTC) - 48 * HOUR, 96 * HOUR)


@dataclass
class InstallationPKI:
    """One installation's authority."""

    authority: CertificateAuthority = field(default_factory=_authority)

    @property
    def trust(self) -> str:
        return self.authority.pair.certificate

    def pair(self, who: CertificateIdentity, life: timedelta = HOUR) -> CertificatePair:
        return self.authority.issue(who, datetime.now(UTC), life, calls="/model/" not in who.uri)

    def credentials(
        self, who: CertificateIdentity, *, trust: str | None = None, strict: bool = False
    ) -> TLSCredentials:
        """`trust` of somebody else."""
        found = TLSCredentials()
        found.put(self.pair(who), trust or self.trust, strict=strict)
        return found

    def write(self, folder: Path, who: CertificateIdentity, *, trust: str | None = None, strict: bool = True) -> None:
        """As a mounted Secret has them."""
        folder.mkdir(exist_ok=True)
        pair = self.pair(who)
        (folder / "tls.crt").write_text(pair.certificate)
        (folder / "tls.key").write_text(pair.key)
        (folder / "ca.crt").write_text(trust or self.trust)
        if strict:
            (folder / "strict").touch()


@dataclass
class Heard:
    """What a listener was told."""

    port: int
    raw: bytearray = field(default_factory=bytearray)

    def __contains__(self, text: str) -> bool:
        return text.encode() in self.raw


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


@asynccontextmanager
async def _serving(talk: Talk, context: ssl.SSLContext | None = None) -> AsyncGenerator[int]:
    """A port of this host at which `talk` is done; what is open at the end is cut."""
    open_: list[tuple[asyncio.Task[None], asyncio.StreamWriter]] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_.append((task, writer))
        with contextlib.suppress(OSError):
            await talk(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(take, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for _, writer in open_:
            writer.transport.abort()
        await asyncio.gather(*(task for task, _ in open_), return_exceptions=True)


@asynccontextmanager
async def listener(context: ssl.SSLContext | None, answer: bytes = b"") -> AsyncGenerator[Heard]:
    """Keeps whatever is said to it, and gives `answer` to it."""
    heard = Heard(0)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            heard.raw += data
            writer.write(answer)

    async with _serving(talk, context) as heard.port:
        yield heard


@asynccontextmanager
async def wire(port: int) -> AsyncGenerator[Heard]:
    """A forwarder that keeps every byte: who listens on the network between a client and `port`."""
    heard = Heard(0)

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                heard.raw += data
                sink.write(data)
        sink.transport.abort()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, forth), pump(back, writer))

    async with _serving(talk) as heard.port:
        yield heard
