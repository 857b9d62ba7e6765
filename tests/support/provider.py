"""A provider outside of the cluster: an OpenAI-compatible API over TLS, with an authority of its own, that answers what
a test says, and a gateway that may call it."""

import asyncio
import contextlib
import itertools
import json
import ssl
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.api.config import ExternalHost
from shoal.core.routing.external import Credential, credential_id
from shoal.gateway.externals import CredentialFiles, Externals
from shoal.gateway.mediafetch import Address
from shoal_dev.lab.pki import LabAuthority
from tests.support.gateway import GatewayUnderTest, gateway, tenant
from tests.support.mediahost import Dns
from tests.support.routes import put
from tests.support.scripted_engine import ScriptedEngine

HOST = "api.example.com"
TOKEN = "sk-outside-0123456789"
AUTHORITY = LabAuthority("provider", datetime.now(UTC))
CA = AUTHORITY.pair.certificate.decode()
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
CHUNK = {"id": "c-1", "object": "chat.completion.chunk", "model": "gpt-x-2026", "usage": None}

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def whole(body: Any = None, status: str = "200 OK", kind: str = "application/json", **headers: str) -> Answer:
    """Sends a whole answer; without a body that of a chat."""
    if body is None:
        choice = {"index": 0, "message": {"role": "assistant", "content": "Hello there"}, "finish_reason": "stop"}
        body = {"id": "c-1", "object": "chat.completion", "model": "gpt-x-2026", "choices": [choice], "usage": USAGE}
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(raw)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join([*lines, "", ""]).encode() + raw)
        await writer.drain()

    return answer


def event(text: str) -> bytes:
    return b"data: %b\n\n" % json.dumps({**CHUNK, "choices": [{"index": 0, "delta": {"content": text}}]}).encode()


KEY = Credential(HOST, TOKEN)
CLOSING = b"data: %b\n\n" % json.dumps({**CHUNK, "choices": [], "usage": USAGE}).encode()
DONE = b"data: [DONE]\n\n"


def stream(*parts: bytes, hang: bool = False, ends: bool = False) -> Answer:
    """Sends a stream of these parts; then its connection ends, or with `hang` nothing more comes. A stream whose last
    part is DONE is complete, as is one that `ends`."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for part in parts:
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
        if hang:
            await asyncio.Event().wait()
        if not ends and (not parts or parts[-1] != DONE):
            raise ConnectionError("the provider breaks off")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    return answer


async def hanging(_: asyncio.StreamWriter) -> None:
    """Takes the request, and says nothing."""
    await asyncio.Event().wait()


@dataclass
class Provider:
    answer: Answer = field(default_factory=whole)
    names: Sequence[str] = (HOST,)
    tls: bool = True
    heads: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0
    ends_after: int | None = None
    """Answers per connection; None: any number."""
    connections: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    """Of the connections that are open."""
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.writers.append(writer)
        try:
            for _ in itertools.count() if self.ends_after is None else range(self.ends_after):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:"))
                self.bodies.append(json.loads(await reader.readexactly(length)))
                self.heads.append(head)
                await self.answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self.writers.remove(writer)
            writer.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator["Provider"]:
        context = None
        if self.tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            pair = AUTHORITY.server(self.names[0], self.names)
            with tempfile.NamedTemporaryFile() as file:
                file.write(pair.certificate + pair.key)
                file.flush()
                context.load_cert_chain(file.name)
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def target(self, name: str = "outside", host: str = HOST, **more: Any) -> dict[str, Any]:
        """An entry of `externalTargets`."""
        scheme = "https" if self.tls else "http"
        return {
            "name": name,
            "url": f"{scheme}://{host}:{self.port}/v1",
            "model": "gpt-x",
            "credentials": {"name": "provider"},
            "caBundle": CA,
            **more,
        }


def local(address: str, _networks: Iterable[str]) -> bool:
    """The rule of addresses, for a machine that has none but its own."""
    return address == "127.0.0.1"


@contextlib.asynccontextmanager
async def beside(
    tmp_path: Path,
    provider: Provider,
    engine: ScriptedEngine,
    *rules: dict[str, Any],
    changed: dict[str, Any] | None = None,
    grant: bool = True,
    dns: Dns | None = None,
    allowed: Sequence[ExternalHost] | None = None,
    credential: Credential | None = KEY,
    connectable: Callable[[str, Iterable[str]], bool] = local,
    **settings: Any,
) -> AsyncGenerator[GatewayUnderTest]:
    """A gateway with the Model chat/llama and the route chat/front, which has the provider as a target (with `changed`
    fields)."""
    async with provider.running(), gateway(tmp_path, engine, **settings) as it:
        folder = tmp_path / "external-keys"
        folder.mkdir()
        if credential is not None:
            (folder / credential_id("chat", "provider", "token")).write_text(credential.file())
        hosts = [ExternalHost(host=HOST, port=provider.port)] if allowed is None else allowed
        it.app.externals.close()
        it.app.externals = Externals(
            hosts, CredentialFiles(folder), resolve=dns or Dns({HOST: address()}), connectable=connectable
        )
        it.app.externals.sweep()
        it.tenants["acme"] = tenant(routes=[{"namespace": "chat"}] if grant else [])
        put(it, *rules, externalTargets=[provider.target(**(changed or {}))])
        yield it


def address(*hosts: str) -> list[Address]:
    """What a name means."""
    return [Address(host) for host in hosts or ("127.0.0.1",)]
