"""The HTTP shell's applications for tests: called without a server, or over loopback."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from shoal.net.server import HTTPServer, make_server
from shoal.net.serving import serving
from shoal.net.shell import Shell


class Answer:
    """What a call got: its head, its body, and whether it came to its end."""

    def __init__(self, sent: list[dict[str, Any]]) -> None:
        self.status: int = sent[0]["status"] if sent else 0
        self.headers = {name.decode(): value.decode() for name, value in (sent[0]["headers"] if sent else ())}
        self.body = b"".join(message.get("body", b"") for message in sent)
        self.whole = bool(sent) and not sent[-1].get("more_body", True)

    @property
    def message(self) -> str:
        return orjson.loads(self.body)["error"]["message"]


async def call(
    shell: Shell,
    path: str,
    method: str = "GET",
    *,
    query: bytes = b"",
    body: tuple[bytes, ...] = (b"",),
    more: dict[str, Any] | None = None,
    stuck: bool = False,
    **headers: str,
) -> Answer:
    """Without a server; a `stuck` client takes nothing. An empty `body` is that of a client that has gone."""
    sent: list[dict[str, Any]] = []
    parts = [{"type": "http.request", "body": part, "more_body": True} for part in body]
    if parts:
        parts[-1]["more_body"] = False

    async def receive() -> dict[str, Any]:
        return parts.pop(0) if parts else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if stuck:
            await asyncio.Event().wait()
        sent.append(message)

    head = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": head, **(more or {})}
    await shell(scope, receive, send)
    return Answer(sent)


@contextlib.asynccontextmanager
async def served_shell(shell: Shell) -> AsyncGenerator[HTTPServer]:
    server = make_server(shell, host="127.0.0.1", port=0, keep_alive=5, stop_seconds=1)
    async with serving(server):
        yield server
