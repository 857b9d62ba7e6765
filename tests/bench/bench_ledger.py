"""The ledger on millions of records, SQLite and PostgreSQL side by side: durable records per second, queries, restart.

The ledger is a process of its own that takes batches over HTTP from several shippers at a time, as from gateways; each
answer comes after the commit (SQLite: WAL, synchronous=FULL; PostgreSQL: its defaults, so every commit is flushed).

Then it is brought to `--requests` by the database itself (`ledger_growth.py`), and measured again at that size, with
what the ledger does by itself there: looking for open requests, deleting what is old, a backup.

python -m tests.bench.bench_ledger [--records 200000] [--requests 10000000] [--databases sqlite,postgresql]
                                   [--shippers 4] [--batch 1000]
"""

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import aiohttp
import orjson
import zstandard

from shoal.api import keys
from shoal.ledger import bulk, schema
from shoal.ledger.backup import backup
from shoal.ledger.database import Database
from shoal.ledger.maintenance import GatewayLiveness, close_once, retain_once
from shoal.ledger.store import LedgerStore
from tests.bench.ledger_growth import grow
from tests.support.controlplane import free_ports
from tests.support.ledger import INSTALL_KEY, record, usage_row
from tests.support.postgres import postgres

_MIXED = 60_000
"""Requests that are sent with all their rows: open, checkpoint, final."""
_REPLAYED = 100_000
_DAYS = 30
"""Over which all requests are spread, the last of them now."""
_POSTGRES = ("shared_buffers=1GB", "max_wal_size=8GB", "checkpoint_timeout=15min")
_PRICES = (
    "currency: USD\neffectiveFrom: 2020-01-01\nprices:\n- {model: '*', input: '0.20', cached: '0.02', output: '0.60'}\n"
)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The process under test."""

    url: str
    process: subprocess.Popen[bytes]

    def headers(self, role: keys.Role = "gateway") -> dict[str, str]:
        return {"Authorization": f"Bearer {keys.derive(INSTALL_KEY, role, keys.LEDGER)}"}

    @property
    def cpu(self) -> float:
        """Seconds of CPU so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextlib.contextmanager
def run(database_url: str, folder: Path) -> Generator[Ledger]:
    """A ledger until the end; it listens when it is yielded."""
    port, ops = free_ports(2)
    for name, file, content in (
        ("keys", "current", keys.bundle(INSTALL_KEY, "ledger").model_dump_json().encode()),
        ("prices", "list.yaml", _PRICES.encode()),
    ):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / file).write_bytes(content)
    settings = {
        "DATABASE_URL": database_url,
        "HOST": "127.0.0.1",
        "PORT": str(port),
        "OPS_HOST": "127.0.0.1",
        "OPS_PORT": str(ops),
        "KEYS_DIR": str(folder / "keys"),
        "PRICES_DIR": str(folder / "prices"),
        "RECONCILE": "false",
        "RETENTION_DAYS": "3650",
        "ANSWER_SECONDS": "600",
    }
    environment = os.environ | {f"SHOAL_LEDGER_{name}": value for name, value in settings.items()}
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", "ledger", "run"], env=environment, stdout=log, stderr=log
        )
    try:
        yield Ledger(f"http://127.0.0.1:{port}", process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


class Traffic:
    """Requests of 200 tenants to 12 models over the last 30 days, in their order, the same in each run."""

    def __init__(self, requests: int) -> None:
        self.requests = requests
        self._dice = random.Random(1)  # noqa: S311
        self._began = datetime.now(UTC) - timedelta(days=_DAYS)
        self._step = timedelta(days=_DAYS) / requests
        self._count = 0

    def bodies(self, requests: int, batch: int, kinds: tuple[str, ...]) -> Iterator[tuple[int, bytes]]:
        """Batches: how many records, and the compressed body."""
        rows: list[bytes] = []
        for _ in range(requests):
            self._count += 1
            n, dice = self._count, self._dice
            at = self._began + self._step * n
            said = {
                "tenant": f"tenant-{n % 200}",
                "model": f"team-{n % 4}/model-{n % 12}",
                "gateway": f"gateway-{n % 8}",
                "inputTokens": dice.randrange(20, 8_000),
                "cachedTokens": dice.randrange(20),
                "outputTokens": dice.randrange(1, 900),
                "replica": f"team/model-{n % 96}",
                "node": f"node-{n % 24}",
                "ttftMs": 81.5,
                "durationMs": 2_345.5,
            }
            request = f"0193{n:08x}-7abc-8def-{n:012x}"
            for kind in kinds:
                less = {} if kind != "open" else {"inputTokens": None, "cachedTokens": None, "outputTokens": None}
                rows.append(orjson.dumps(record(request, kind, at=at, **(said | less))))
                if len(rows) == batch:
                    yield batch, zstandard.compress(b"[" + b",".join(rows) + b"]", 1)
                    rows = []
        if rows:
            yield len(rows), zstandard.compress(b"[" + b",".join(rows) + b"]", 1)


async def ship(ledger: Ledger, bodies: list[tuple[int, bytes]], shippers: int) -> tuple[float, float, float]:
    """Sends all; returns records per second, CPU of the ledger in us per record, and the slowest answer in ms."""
    waiting = iter(bodies)
    slowest = 0.0
    headers = ledger.headers() | {"Content-Encoding": "zstd"}
    timeout = aiohttp.ClientTimeout(total=600)

    async def one(session: aiohttp.ClientSession) -> None:
        nonlocal slowest
        for _, body in waiting:
            began = time.perf_counter()
            async with session.post(f"{ledger.url}/v1/records", data=body, headers=headers) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"{answer.status}: {await answer.text()}")
                await answer.read()
            slowest = max(slowest, time.perf_counter() - began)

    began, cpu = time.perf_counter(), ledger.cpu
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
        for _ in range(shippers):
            group.create_task(one(session))
    records = sum(count for count, _ in bodies)
    return records / (time.perf_counter() - began), (ledger.cpu - cpu) / records * 1e6, slowest * 1e3


async def fill(ledger: Ledger, traffic: Traffic, records: int, batch: int, shippers: int) -> float:
    """Sends so many final records; returns records per second, without the time to make them."""
    seconds = 0.0
    left = records
    while left > 0:
        part = list(traffic.bodies(min(left, 100_000), batch, ("final",)))
        rate, _, _ = await ship(ledger, part, shippers)
        count = sum(number for number, _ in part)
        seconds += count / rate
        left -= count
        print(f"    {records - left:>12,} final records, {rate:,.0f}/s", flush=True)
    return records / seconds


async def ask(ledger: Ledger, path: str, times: int = 5) -> str:
    """Milliseconds of a question: the median and the slowest."""
    took: list[float] = []
    body = b""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        for _ in range(times):
            began = time.perf_counter()
            async with session.get(ledger.url + path, headers=ledger.headers("billing")) as answer:
                body = await answer.read()
                if answer.status != 200:
                    return f"{answer.status} {body[:80]!r}"
            took.append((time.perf_counter() - began) * 1e3)
    return f"{sorted(took)[len(took) // 2]:,.1f} (slowest {max(took):,.1f}), {len(body):,} bytes"


async def until_known(ledger: Ledger) -> float:
    """Seconds until the totals are there."""
    began = time.perf_counter()
    async with aiohttp.ClientSession() as session:
        while time.perf_counter() - began < 600:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{ledger.url}/v1/totals", headers=ledger.headers()) as answer:
                    if answer.status == 200 and b'"full":true' in await answer.content.readline():
                        return time.perf_counter() - began
            await asyncio.sleep(0.02)
    raise RuntimeError("the ledger does not start")


async def measure(url: str, folder: Path, options: argparse.Namespace, size: Callable[[], int]) -> dict[str, str]:
    """The figures of one database."""
    stats: dict[str, str] = {}
    traffic = Traffic(max(options.requests, options.records + 2 * _MIXED))
    with run(url, folder) as ledger:
        await until_known(ledger)
        await _mixed(ledger, traffic, options, stats)
        small = list(traffic.bodies(4_000, 10, ("final",)))
        rate, cpu, _ = await ship(ledger, small, 16)
        stats["batches of 10, 16 at a time, records/s"] = f"{rate:,.0f} ({cpu:.0f} us CPU each)"
        stats["final records, records/s"] = (
            f"{await fill(ledger, traffic, options.records, options.batch, options.shippers):,.0f}"
        )
        again = list(Traffic(traffic.requests).bodies(min(_REPLAYED, options.records), options.batch, ("final",)))[
            : _REPLAYED // options.batch
        ]
        rate, cpu, _ = await ship(ledger, again, options.shippers)
        stats["replayed (known) records/s"] = f"{rate:,.0f} ({cpu:.0f} us CPU each)"
        await _asked(ledger, stats)
    stats["database, bytes per request"] = f"{size() / (options.records + _MIXED + 4_000):,.0f}"
    if options.requests > options.records + _MIXED + 4_000:
        took = grow(url, options.requests, int(timedelta(days=_DAYS).total_seconds() * 1000))
        print(f"    {options.requests:>12,} requests, copied in {took:.0f} s", flush=True)
        stats |= {f"{options.requests:,} requests": f"{size() / 2**30:.1f} GiB"}
        stats |= {f"  {name}": value for name, value in (await _large(url, folder, traffic, options)).items()}
    else:
        with run(url, folder) as ledger:
            stats["restart until the totals are known, s"] = f"{await until_known(ledger):.2f}"
    return stats


async def _large(url: str, folder: Path, traffic: Traffic, options: argparse.Namespace) -> dict[str, str]:
    """The same where much is there already, and what grows with it."""
    stats: dict[str, str] = {}
    with run(url, folder) as ledger:
        stats["restart until the totals are known, s"] = f"{await until_known(ledger):.2f}"
        await _mixed(ledger, traffic, options, stats)
        await _asked(ledger, stats)
        stats["memory of the ledger, MiB"] = f"{ledger.rss_mib:,.0f}"
    store = LedgerStore(url)
    store.start()
    try:
        while store.error is not None:
            await asyncio.sleep(0.05)
        heard = GatewayLiveness(3_600)
        began = time.perf_counter()
        await close_once(store, heard, lambda _: None)
        stats["a look for requests that dead gateways left open, ms"] = f"{(time.perf_counter() - began) * 1e3:,.1f}"
        began = time.perf_counter()
        # Nobody deletes a whole month at once: the oldest day of it.
        deleted = await retain_once(store, _DAYS - 1, 3_650, time.time_ns() // 1_000_000)
        took = time.perf_counter() - began
        each = took / max(1, -(-deleted // 5_000)) * 1e3
        stats["deleting the oldest day, rows/s"] = f"{deleted / took:,.0f} ({deleted:,} rows, {each:.0f} ms at a time)"
    finally:
        await store.stop()
    if store.kind == "sqlite":
        began = time.perf_counter()
        said = backup(store.database.path, folder / "backup")
        stats["a backup, s"] = f"{time.perf_counter() - began:.1f} ({said.rpartition(': ')[2]})"
    return stats


async def _mixed(ledger: Ledger, traffic: Traffic, options: argparse.Namespace, stats: dict[str, str]) -> None:
    kinds = ("open", "checkpoint:1", "final")
    bodies = list(traffic.bodies(min(_MIXED, options.records), options.batch, kinds))
    rate, cpu, slowest = await ship(ledger, bodies, options.shippers)
    stats["open + checkpoint + final, records/s"] = f"{rate:,.0f} ({cpu:.0f} us CPU each, slowest {slowest:,.0f} ms)"


async def _asked(ledger: Ledger, stats: dict[str, str]) -> None:
    now = datetime.now(UTC)
    month = f"{now:%Y-%m}"
    for name, path in (
        ("one tenant's month by model and day, ms", "/v1/usage?tenant=tenant-7&by=model,day"),
        (
            "all tenants, 29 days by tenant and model, ms",
            f"/v1/usage?from={now - timedelta(days=29):%Y-%m-%d}&by=tenant,model",
        ),
        ("one bill, ms", f"/v1/bill?tenant=tenant-7&month={month}"),
        ("margin of the month, ms", f"/v1/margin?from={month}"),
    ):
        stats[name] = await ask(ledger, path)


def bulk_methods(url: str) -> str:
    """PostgreSQL only: 30,000 rows of `usage`, 1,000 at a time, by arrays and by COPY in turn."""
    rows = [usage_row(record(f"bulk-{n:08}")) for n in range(30_000)]
    database = Database(url)
    seconds = {"unnest": 0.0, "COPY": 0.0}
    from_rows = bulk.COPY_FROM
    try:
        with contextlib.ExitStack() as stack:
            connection = database.open(stack)
            for at in range(0, len(rows), 1_000):
                for name in seconds:
                    bulk.COPY_FROM = 1 if name == "COPY" else len(rows)  # pyright: ignore[reportAttributeAccessIssue]
                    part = [row._replace(source=name) for row in rows[at : at + 1_000]]
                    began = time.perf_counter()
                    with connection.begin():
                        bulk.insert(connection, schema.usage, part, bulk.replacing(schema.usage))
                    seconds[name] += time.perf_counter() - began
    finally:
        bulk.COPY_FROM = from_rows  # pyright: ignore[reportAttributeAccessIssue]
        database.close()
    return ", ".join(f"{name} {len(rows) / took:,.0f}" for name, took in seconds.items())


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--records", type=int, default=200_000, help="final records that come over the network one by one"
    )
    parser.add_argument("--requests", type=int, default=0, help="that the ledger is brought to (design: 10 million)")
    parser.add_argument("--databases", default="sqlite,postgresql")
    parser.add_argument("--shippers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1_000)
    options, _ = parser.parse_known_args()
    columns: dict[str, dict[str, str]] = {}
    for kind in options.databases.split(","):
        print(f"{kind}:", flush=True)
        folder = Path(tempfile.mkdtemp(prefix="shoal-bench-ledger-"))
        try:
            if kind == "sqlite":
                file = folder / "ledger.sqlite"
                columns[kind] = asyncio.run(measure(f"sqlite:///{file}", folder, options, partial(_bytes, file)))
            else:
                with postgres(*_POSTGRES) as server:
                    size = partial(_bytes, server.folder / "data" / "base")
                    columns[kind] = asyncio.run(measure(server.database(), folder, options, size))
                    columns[kind]["rows of `usage` alone, rows/s"] = bulk_methods(server.database())
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{options.records:,} final records, {options.shippers} shippers, batches of {options.batch}")
    for kind, stats in columns.items():
        print(f"\n{kind}")
        for name, value in stats.items():
            print(f"  {name:<50} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
