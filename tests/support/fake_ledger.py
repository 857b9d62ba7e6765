"""A ledger over HTTP that keeps what it is sent in memory, and fails as it is told."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
import zstandard
from aiohttp import web

from shoal.api import keys, names
from shoal.metering.record import UsageRecord
from tests.support.controlplane import free_ports
from tests.support.gateway import INSTALL_KEY


@dataclass
class FakeLedger:
    install_keys: tuple[bytes, ...] = (INSTALL_KEY,)
    refuse: Callable[[], int | None] = lambda: None
    """Status of the answer instead of taking the batch."""
    rejects: Callable[[dict[str, Any]], bool] = lambda _record: False
    """Whether a record is one because of which the whole batch is refused."""
    before_answer: Callable[[], Any] | None = None
    """Awaited after the records were kept, before the answer."""
    batches: list[bytes] = field(default_factory=list)
    """Bodies, as they were before compression."""
    encodings: list[str] = field(default_factory=list)
    records: dict[tuple[str, str], UsageRecord] = field(default_factory=dict)
    again: list[str] = field(default_factory=list)
    """Ids of rows that came when they were there already."""
    aside: int = 0
    port: int = 0
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def of(self, kind: str) -> list[UsageRecord]:
        return [record for record in self.records.values() if record.data.kind == kind]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        said = request.headers.get("authorization", "")
        if said not in [f"Bearer {keys.derive(key, 'gateway', keys.LEDGER)}" for key in self.install_keys]:
            return web.Response(status=401)
        if (status := self.refuse()) is not None:
            return web.Response(status=status)
        body = await request.read()
        encoding = request.headers.get("content-encoding", "")
        self.encodings.append(encoding)
        if encoding == "zstd":
            body = zstandard.ZstdDecompressor().decompress(body)
        new = known = 0
        try:
            elements = orjson.loads(body)
        except orjson.JSONDecodeError:
            return web.Response(status=400)
        if any(self.rejects(each) for each in elements):
            return web.Response(status=400)
        self.batches.append(body)
        for each in elements:
            record = UsageRecord.model_validate(each)
            if (key := (record.source, record.id)) in self.records:
                known += 1
                self.again.append(record.id)
            else:
                new += 1
                self.records[key] = record
        if self.before_answer is not None:
            await self.before_answer()
        return web.json_response({"new": new, "known": known, "aside": self.aside})

    async def up(self) -> None:
        app = web.Application(client_max_size=8 << 20)
        app.router.add_post(names.RECORDS_PATH, self.handle)
        # aiohttp would take the compression off by itself, and must not: a ledger gets the bytes as they come.
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, auto_decompress=False)
        await self._runner.setup()
        self.port = self.port or free_ports(1)[0]  # nobody takes it while this one is down
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def down(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator["FakeLedger", None]:
        await self.up()
        try:
            yield self
        finally:
            await self.down()


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
