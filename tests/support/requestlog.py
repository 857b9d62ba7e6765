"""A gateway whose tenants have request logs, and what stands in their files."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson

from shoal.api import keys
from shoal.requestlog.frames import read_frames
from shoal.requestlog.logkeys import LogKeys
from shoal.requestlog.store import Folder
from tests.support.gateway import INSTALL_KEY, GatewayUnderTest, gateway, tenant
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally

CANARY = "sk-canary-0123456789abcdef"
ADMIN = {"x-shoal-key": keys.derive(INSTALL_KEY, "logs", keys.DEMAND)}
PEER = {"authorization": f"Bearer {keys.derive(INSTALL_KEY, 'gateway', keys.DEMAND)}"}


def entries(root: Path, name: str = "acme", log_keys: LogKeys | None = None) -> list[dict[str, Any]]:
    """All entries of a tenant, in the order in which they were written."""
    folder, found = Folder(root), list[dict[str, Any]]()
    for date in sorted(folder.dates(name)):
        for file in reversed(folder.files(name, date)):
            with folder.read(file) as opened:
                for frame in read_frames(opened, file.name, name, log_keys or LogKeys(None)):
                    found += [orjson.loads(line) for line in frame.splitlines()]
    return found


def raw_bytes(root: Path) -> bytes:
    """Everything below a folder, also decompressed, names included."""
    out = [str(path).encode() + path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()]
    out += [orjson.dumps(entries(log, name)) for log in (root, root / "logs") for name in Folder(log).tenants()]
    return b"\n".join(out)


async def echo(request: EngineRequest) -> None:
    """Answers with the last message, as a stream in small pieces where one is asked for."""
    text = request.body["messages"][-1]["content"]
    if not isinstance(text, str):
        text = "a picture"
    if not request.body.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        body = {"id": request.body["rid"], "model": request.model, "choices": [choice], "usage": {"prompt_tokens": 1}}
        await request.answer(200, json.dumps(body).encode())
        return
    await request.begin_stream()
    for at in range(0, len(text), 3):
        await request.chunk(request.delta(text[at : at + 3], 1 + at // 3))
    await request.chunk(request.closing())
    await request.chunk(b"data: [DONE]\n\n")
    await request.end_stream()


class LoggedGateway:
    def __init__(self, it: GatewayUnderTest, root: Path) -> None:
        self.it = it
        self.root = root
        self.book = it.app.logs.logger

    def tenant(self, name: str = "acme", key: str | None = None, **logging: Any) -> None:
        self.it.tenants[name] = tenant(name, key or f"sk-test-{name}", logging=logging)
        self.it.changed()

    async def ask(self, content: Any = "hello", *, name: str = "acme", **fields: Any) -> bytes:
        body = {"model": "llama", "messages": [{"role": "user", "content": content}], **fields}
        response = await self.it.post(body, key=f"sk-test-{name}")
        answer = await response.read()
        assert response.status == 200, answer
        return answer

    async def written(self, name: str = "acme") -> list[dict[str, Any]]:
        """What is in the files, after all that ended was written."""
        await asyncio.wrap_future(self.book.writer.close_files())
        return entries(self.root, name, self.book.keys)

    async def page(self, name: str = "acme", status: int = 200, query: Any = None, **more: Any) -> dict[str, Any]:
        await asyncio.wrap_future(self.book.writer.close_files())
        headers = {"authorization": f"Bearer sk-test-{name}"}
        async with self.it.session.get(
            f"{self.it.url}/v1/logs", params={**more, **(query or {})}, headers=headers
        ) as response:
            answer = await response.json()
            assert response.status == status, answer
            return answer


@contextlib.asynccontextmanager
async def logged(
    tmp_path: Path, engine: ScriptedEngine | None = None, **settings: Any
) -> AsyncGenerator[LoggedGateway]:
    """A gateway with one engine; tenant acme logs in full."""

    async def answer(request: EngineRequest) -> None:
        await serve_normally(request)

    root = settings.pop("log_dir", tmp_path / "logs")
    async with gateway(tmp_path, engine or ScriptedEngine(answer), log_dir=root, **settings) as it:
        found = LoggedGateway(it, root)
        found.tenant(mode="Full")
        try:
            yield found
        finally:
            await it.app.logs.close()
            await found.book.stop()
