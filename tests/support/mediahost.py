"""A host of media over TLS, with an authority of its own, that sends what a test says, and a fetcher that calls it."""

import asyncio
import contextlib
import ssl
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from shoal.core.fields.remote import Remote, Wanted
from shoal.gateway.mediafetch import Address, MediaFetcher
from shoal_dev.lab.pki import LabAuthority
from tests.support import pictures

HOST = "images.example.com"
OUTSIDE, INSIDE = "127.0.0.1", "127.0.0.2"
"""What stands for an address that may be called, and for one that may not."""
PNG = pictures.made("PNG")
AUTHORITY = LabAuthority("media", datetime.now(UTC))

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def outside(address: str) -> bool:
    """The rule of addresses, for a machine that has none but its own."""
    return address == OUTSIDE


def trust() -> ssl.SSLContext:
    return ssl.create_default_context(cadata=AUTHORITY.pair.certificate.decode())


def telling(body: bytes = PNG, kind: str = "image/png", *, status: str = "200 OK", length: bool = True, **more: str):
    """Sends an answer. Without `length` its end is that of the connection."""
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", *(f"{k.replace('_', '-')}: {v}" for k, v in more.items())]
    lines += [f"content-length: {len(body)}"] if length and "content_length" not in more else []

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()

    return answer


def endless(*lines: str, piece: bytes = bytes(65_536), pause: float = 0.0) -> Answer:
    """Sends one piece after the other, for as long as somebody takes them."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join(["HTTP/1.1 200 OK", "content-type: image/png", *lines, "", ""]).encode())
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)

    return answer


@dataclass
class MediaHost:
    answer: Answer = field(default_factory=telling)
    names: Sequence[str] = (HOST,)
    address: str = OUTSIDE
    asked: list[str] = field(default_factory=list)
    """The heads of requests."""
    port: int = 0
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def at(self) -> Address:
        return Address(self.address, self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            self.asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
            await self.answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError, asyncio.CancelledError):
            pass  # it ends here: a task of a server's that is cancelled is reported as an error
        finally:
            self._tasks.discard(task)
            writer.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator["MediaHost"]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        pair = AUTHORITY.server(self.names[0], self.names)
        with tempfile.NamedTemporaryFile() as file:
            file.write(pair.certificate + pair.key)
            file.flush()
            context.load_cert_chain(file.name)
        server = await asyncio.start_server(self._serve, self.address, 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Dns:
    """Answers with what a test says; a list of answers is given out one after the other."""

    def __init__(self, names: Mapping[str, Sequence[Address] | Sequence[Sequence[Address]]]) -> None:
        self.names = {name: list(answers) for name, answers in names.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str) -> Sequence[Address]:
        self.asked.append(host)
        answers: Any = self.names.get(host)
        if answers is None:
            raise OSError("no such name")
        if not answers or isinstance(answers[0], Address):
            return answers
        return answers.pop(0) if len(answers) > 1 else answers[0]


def counter() -> Counter:
    return Counter("fetches", "", ["outcome"], registry=CollectorRegistry())


@contextlib.asynccontextmanager
async def fetcher(dns: Dns, fetches: Counter | None = None, **more: Any) -> AsyncGenerator[MediaFetcher]:
    given: dict[str, Any] = {"allowed": outside, "trust": trust(), "seconds": 60.0, **more}
    it = MediaFetcher(fetches or counter(), resolve=dns, **given)
    try:
        yield it
    finally:
        await it.close()


def wanted(host: str = HOST, target: str = "/a.png", number: int = 0) -> Wanted:
    return Wanted(f"messages[0].content[{number}].image_url.url", "image", Remote(host, target))
