"""A ledger's questions without its process: a store, price lists, routes, a clock that stands."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import orjson
from sqlalchemy import Connection, insert

from shoal.api import keys, names
from shoal.kube.callers import Callers
from shoal.ledger.prices import PriceFolder
from shoal.ledger.queries.routes import QueryAPI
from shoal.ledger.reconcile.routes import Routes
from shoal.ledger.reconcile.watch import EngineCoverage
from shoal.ledger.schema import engine_hours, hours, usage
from shoal.ledger.service import LedgerService
from shoal.ledger.store import LedgerStore
from shoal.net.installkey import KeyRing
from shoal.net.server import make_server
from shoal.net.shell import ShellRequest
from tests.support.gateway import INSTALL_KEY
from tests.support.rolekeys import give

ADMIN = keys.derive(INSTALL_KEY, "billing", keys.LEDGER)
GATEWAY = keys.derive(INSTALL_KEY, "gateway", keys.LEDGER)
NOW = "2026-11-22T12:00"

OCTOBER = """\
currency: EUR
effectiveFrom: 2026-10-01
prices:
  - {model: chat/llama, input: "3", cached: "0.30", output: "15"}
  - {plan: gold, model: chat/llama, input: "2", cached: "0.20", output: "10"}
  - {model: chat/llama, adapter: "*", input: "4", cached: "0.40", output: "20"}
"""
MID_NOVEMBER = OCTOBER.replace("2026-10-01", "2026-11-15").replace('input: "3"', 'input: "6"')


def ms(moment: str) -> int:
    return int(datetime.fromisoformat(moment).replace(tzinfo=UTC).timestamp() * 1000)


def hour(start: str, tenant: str = "acme", **other: Any) -> dict[str, Any]:
    """A row of `hours`."""
    return {
        "hour": ms(start),
        "tenant": tenant,
        "external_id": f"cus_{tenant}",
        "key_name": "main",
        "plan": "",
        "model": "chat/llama",
        "adapter": "",
        "gpu_class": "h100",
        "billed": True,
        "requests": 1,
        "input_tokens": 0,
        "cached_tokens": 0,
        "unknown_cached_input": 0,
        "output_tokens": 0,
        "reasoning_tokens": 0,
        "unknown_requests": 0,
        "documents": 0,
        "images": 0,
        "audio_ms": 0,
        "image_tokens": 0,
        "audio_tokens": 0,
        "accepted_tokens": 0,
    } | other


def gpu_hour(start: str, gpu_class: str = "h100", **other: Any) -> dict[str, Any]:
    """A row of `engine_hours`."""
    return {
        "hour": ms(start),
        "model": "chat/llama",
        "gpu_class": gpu_class,
        "prompt_tokens": 0,
        "generation_tokens": 0,
        "gpu_seconds": 3600.0,
        "cost": 2_500_000_000,
        "currency": "EUR",
    } | other


@dataclass(slots=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def message(self) -> str:
        return self.json["error"]["message"]


def asked(path: str, **query: str) -> ShellRequest:
    """A call as a handler gets it, from who may call."""
    given = urlencode({name.rstrip("_"): value for name, value in query.items()}).encode()
    return ShellRequest({"type": "http", "method": "GET", "path": path, "query_string": given, "headers": []})


class Ledger:
    """Ask it with `get` and `post`, or over HTTP at `url` within `served`."""

    def __init__(self, store: LedgerStore, prices: PriceFolder, service: LedgerService) -> None:
        self.store, self.prices, self.service = store, prices, service
        self.credited = 0
        self.standing = EngineCoverage(False, 0, ())

    async def fill(self, *rows: dict[str, Any], engines: tuple[dict[str, Any], ...] = ()) -> None:
        """Writes rows of `hours` and `engine_hours`."""

        def work(connection: Connection) -> None:
            if rows:
                connection.execute(insert(hours), list(rows))
            if engines:
                connection.execute(insert(engine_hours), list(engines))

        await self.store.write(work)

    async def open_request(self, admitted: str, tenant: str = "acme", request: str = "r1") -> None:
        """Writes a request that has not ended."""
        row = {
            "source": "shoal", "request": request, "attempt": 0, "ended": False, "received_at": ms(admitted),
            "admitted_at": ms(admitted), "tenant": tenant, "key_name": "main", "model": "chat/llama",
            "model_requested": "llama", "endpoint": "/v1/chat/completions", "stream": True, "count_source": "none",
            "step": 0, "attempts": 0,
        }  # fmt: skip
        await self.store.write(lambda connection: connection.execute(insert(usage), [row]) and None)

    async def get(self, path: str, as_: str = ADMIN, **query: Any) -> Answer:
        return await self.call("GET", path, key=as_, query=query)

    async def post(self, path: str, body: Any, as_: str = ADMIN) -> Answer:
        return await self.call("POST", path, key=as_, body=orjson.dumps(body))

    async def call(
        self, method: str, path: str, *, key: str, query: dict[str, Any] | None = None, body: bytes = b""
    ) -> Answer:
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": urlencode(
                {n.rstrip("_"): v for n, v in (query or {}).items()}, True, quote_via=quote
            ).encode(),
            "headers": [(names.HEADER_KEY.encode(), key.encode())],
        }
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.service.shell(scope, receive, send)
        content = b"".join(message.get("body", b"") for message in sent[1:])
        return Answer(sent[0]["status"], dict(sent[0]["headers"]), content)

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncGenerator[str]:
        """Its URL, on loopback."""
        server = make_server(self.service.shell, host="127.0.0.1", port=0, keep_alive=5, stop_seconds=1)
        task = asyncio.create_task(server.serve())
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            yield f"http://127.0.0.1:{server.port}"
        finally:
            server.should_exit = True
            await task


def price_folder(path: Path, **lists: str) -> PriceFolder:
    """A folder with these files, read, at `NOW`."""
    path.mkdir(exist_ok=True)
    for name, text in lists.items():
        (path / f"{name}.yaml").write_text(text)
    folder = PriceFolder(path, lambda: ms(NOW) / 1000)
    folder.refresh_now()
    return folder


@contextlib.asynccontextmanager
async def ledger(url: str, path: Path, *, callers: Callers | None = None, **lists: str) -> AsyncGenerator[Ledger]:
    """`url` of a database that is empty; `lists` are price lists by file name without .yaml; `callers` knows people by
    their tokens."""
    (path / "key").mkdir()
    give(path / "key", INSTALL_KEY, "ledger")
    ring = KeyRing(path / "key")
    ring.refresh()
    store = LedgerStore(url)
    store.start()
    prices = price_folder(path / "prices", **lists)
    service = LedgerService(ring, max_body_bytes=1024 * 1024, callers=callers)
    found = Ledger(store, prices, service)

    def credited() -> None:
        found.credited += 1

    Routes(store, lambda: found.standing, lambda: ms(NOW)).add(service)
    QueryAPI(store, prices, "shoal-test", keep_days=1_100, credited=credited, clock=lambda: ms(NOW) / 1000).add(service)
    try:
        async with asyncio.timeout(30):
            while store.error is not None:
                await asyncio.sleep(0.01)
        yield found
    finally:
        await store.stop()
