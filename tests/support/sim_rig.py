"""An engine of the simulator without a port or a process: its HTTP surface is called in this process."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal_dev.sim import args as arguments
from shoal_dev.sim.app import App
from shoal_dev.sim.engine import SimEngine
from shoal_dev.sim.journal import Journal

ADMIN = {"authorization": "Bearer admin"}


@dataclass
class Reply:
    """What one ASGI call sent."""

    status: int | None = None
    body: bytes = b""
    finished: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        events = [block.removeprefix("data: ") for block in self.body.decode().split("\n\n") if block]
        return "".join(json.loads(e)["choices"][0]["text"] for e in events if e != "[DONE]" and "choices" in e)


@dataclass
class Rig:
    """An engine without a port."""

    engine: SimEngine
    app: App
    leave: asyncio.Event = field(default_factory=asyncio.Event)

    async def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        reply = Reply()
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}
            await self.leave.wait()
            return {"type": "http.disconnect"}

        async def send(event: dict[str, Any]) -> None:
            reply.status = event.get("status", reply.status)
            reply.body += event.get("body", b"")
            reply.finished = event["type"] == "http.response.body" and not event.get("more_body")

        given = {"content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(k.encode(), v.encode()) for k, v in given.items()],
        }
        async with asyncio.timeout(20):
            await self.app(scope, receive, send)
        return reply

    async def complete(self, **body: Any) -> Reply:
        return await self.call("POST", "/v1/completions", {"prompt": "hello there", "max_tokens": 8, **body})

    async def fault(self, **body: Any) -> Reply:
        return await self.call("POST", "/sim/faults", body, ADMIN)


@asynccontextmanager
async def running(tmp_path: Path, *argv: str) -> AsyncGenerator[Rig]:
    args = arguments.parse(
        [
            "--model-path",
            str(tmp_path / "none"),
            "--admin-api-key",
            "admin",
            "--enable-metrics",
            "--sim-speed",
            "50",
            *argv,
        ],
        {},
    )
    with Journal(str(tmp_path / "journal.jsonl")) as journal:
        engine = SimEngine(args, journal=journal)
        engine.status = "Up"
        task = asyncio.create_task(engine.loop.run())
        try:
            yield Rig(engine, App(engine))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def journal(tmp_path: Path) -> list[dict[str, Any]]:
    """What it says of sequences that ended."""
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "finished"]
