"""A ledger's store and its service for tests, on both databases."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from sqlalchemy import Connection, func, select

from shoal.api import keys
from shoal.api.ledger import BatchAnswer
from shoal.ledger import ingest, schema
from shoal.ledger.parse import parse
from shoal.ledger.process import LedgerProcess
from shoal.ledger.settings import LedgerSettings
from shoal.ledger.store import LedgerStore
from shoal.ledger.sums import Changes
from shoal.metering.record import StoredRow
from tests.support.postgres import Postgres
from tests.support.rolekeys import give

INSTALL_KEY = b"an install key of a test"
NOON = datetime(2026, 11, 20, 12, 30, tzinfo=UTC)
NOW_MS = int(NOON.timestamp() * 1000)


@pytest.fixture
def server(postgres_server: Postgres) -> Postgres:
    """The PostgreSQL that all tests of a process share."""
    return postgres_server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.sqlite"
    return request.getfixturevalue("postgres_server").database()


def record(request: str, kind: str = "final", *, at: datetime = NOON, **data: Any) -> dict[str, Any]:
    """A record as a gateway sends it; `kind` such as final, checkpoint:3, attempt:1."""
    word, _, number = kind.partition(":")
    said: dict[str, Any] = {
        "requestId": request,
        "kind": word,
        "tenant": "acme",
        "externalId": "cus-1",
        "keyName": "ci",
        "gateway": "gw-1",
        "admittedAt": at.isoformat(),
        "endpoint": "/v1/chat/completions",
        "model": "demo/chat",
        "modelRequested": "chat",
        "stream": True,
    }
    if word == "attempt":
        said |= {"attempt": int(number), "inputTokens": 7, "outputTokens": 3, "countSource": "continuous"}
    elif word != "open":
        said |= {"inputTokens": 100, "cachedTokens": 40, "outputTokens": 10, "reasoningTokens": 2, "attempts": 1}
        said["countSource"] = "final" if word == "final" else "continuous"
    if word == "final":
        said |= {"outcome": "answered", "status": 200, "gpuClass": "l4"}
    said |= data
    return {
        "specversion": "1.0",
        "id": f"{request}:{kind}",
        "source": "shoal",
        "type": "dev.shoal.usage.v1",
        "subject": said["tenant"],
        "time": (at + timedelta(seconds=2)).isoformat(),
        "data": said,
    }


class Rig:
    """A store alone. `changes` has what each commit told."""

    def __init__(self, url: str, **options: Any) -> None:
        self.store = LedgerStore(url, **options)
        self.changes: list[Changes] = []
        self.store.committed = self.changes.append

    async def take(self, *records: Any) -> tuple[int, int, int]:
        """New, known, aside."""
        taken: BatchAnswer = await self.store.take([parse(orjson.loads(json.dumps(each)), NOW_MS) for each in records])
        return taken.new, taken.known, taken.aside

    async def rows(self, table: Any) -> list[dict[str, Any]]:
        found = await self.store.read(lambda c: c.execute(select(table)).all())
        return [dict(row._mapping) for row in found]

    async def usage(self, request: str, attempt: int = 0) -> dict[str, Any]:
        return next(r for r in await self.rows(schema.usage) if (r["request"], r["attempt"]) == (request, attempt))

    async def count(self, table: Any) -> int:
        return await self.store.read(lambda c: c.execute(select(func.count()).select_from(table)).scalar_one())

    async def balanced(self) -> None:
        """The sums are those of the requests that ended: whatever happened, the books balance."""
        await self.store.read(check_balance)


def check_balance(connection: Connection) -> None:
    rows = [ingest.as_usage(row) for row in connection.execute(select(schema.usage)).all()]
    again = Changes()
    for row in rows:
        if row.ended:
            again.add(row)
    hours = {tuple(row[:9]): tuple(row[9:]) for row in connection.execute(select(schema.hours)).all()}
    assert {k: v for k, v in hours.items() if any(v)} == {tuple(k): tuple(v) for k, v in again.hours.items() if any(v)}
    gateways = {tuple(row[:2]): tuple(row[2:4]) for row in connection.execute(select(schema.gateways)).all()}
    assert {k: v for k, v in gateways.items() if any(v)} == {
        tuple(k): tuple(v)[:2] for k, v in again.gateways.items() if any(v)
    }


@contextlib.asynccontextmanager
async def store(url: str, **options: Any) -> AsyncGenerator[Rig]:
    rig = Rig(url, **options)
    opened = asyncio.Event()
    rig.store.opened = opened.set
    rig.store.start()
    try:
        async with asyncio.timeout(30):
            await opened.wait()
        yield rig
    finally:
        await rig.store.stop()


async def until(true: Callable[[], Any], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


class Served:
    """A whole ledger in this process."""

    def __init__(self, process: LedgerProcess, session: aiohttp.ClientSession) -> None:
        self.process = process
        self._session = session

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.process.server.port}"

    @property
    def ops(self) -> str:
        return f"http://127.0.0.1:{self.process.ops.port}"

    def headers(self, role: keys.Role = "gateway", install_key: bytes = INSTALL_KEY) -> dict[str, str]:
        return {"Authorization": f"Bearer {keys.derive(install_key, role, keys.LEDGER)}"}

    async def send(self, *records: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        return await self.call("POST", "/v1/records", orjson.dumps(list(records)), **headers)

    async def call(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        given = headers or self.headers()
        async with self._session.request(method, self.url + path, data=body, headers=given) as answer:
            return answer.status, {"headers": answer.headers, **orjson.loads(await answer.read())}

    @contextlib.asynccontextmanager
    async def totals(self, boot: str = "") -> AsyncGenerator[Callable[[], Any]]:
        """The stream; what is yielded waits for its next message."""
        headers = self.headers() | {"x-shoal-boot": boot}
        async with self._session.get(f"{self.url}/v1/totals", headers=headers) as answer:
            assert answer.status == 200, await answer.text()

            async def message() -> dict[str, Any]:
                async with asyncio.timeout(20):
                    while True:
                        line = await answer.content.readline()
                        if line.startswith(b"data: "):
                            return orjson.loads(line[6:])
                        assert line, "the stream has ended"

            yield message


@contextlib.asynccontextmanager
async def served(url: str, folder: Path, **settings: Any) -> AsyncGenerator[Served]:
    """A ledger that serves until the end; ready when it is yielded, unless `ready=False`. `client`: of its cluster."""
    ready = settings.pop("ready", True)
    client = settings.pop("client", None)
    key_dir = folder / "install-key"
    key_dir.mkdir(exist_ok=True)
    give(key_dir, INSTALL_KEY, "ledger")
    given: dict[str, Any] = {
        "host": "127.0.0.1",
        "ops_host": "127.0.0.1",
        "port": 0,
        "ops_port": 0,
        "reconcile": False,
    } | settings
    process = LedgerProcess(
        LedgerSettings(database_url=url, keys_dir=key_dir, prices_dir=folder / "prices", **given), client
    )
    started = asyncio.Event()
    running = asyncio.create_task(process.run(started.set))
    try:
        async with asyncio.timeout(90), aiohttp.ClientSession() as session:
            waiting = asyncio.create_task(started.wait())
            await asyncio.wait({waiting, running}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if ready:
                await until(lambda: not process.missing() and process.totals.known)
        async with aiohttp.ClientSession() as session:
            yield Served(process, session)
    finally:
        process.stop()
        await running


def usage_row(element: dict[str, Any]) -> StoredRow:
    good = parse(element, NOW_MS)
    assert hasattr(good, "row"), good
    return good.row  # pyright: ignore[reportAttributeAccessIssue]


def chunks(records: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [records[at : at + size] for at in range(0, len(records), size)]
