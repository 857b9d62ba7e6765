"""The spool of a gateway: durable records per second, how long a request waits for the disk, bytes, and its start.

python -m tests.bench.bench_spool [--seconds 4] [--requests 500000] [--folder DIR]

Each request waits until its open row is on disk (SQLite in WAL mode, synchronous=FULL) and leaves a final row, as in
the gateway; so many are made at a time. Then a spool is filled as if its ledger were away, and opened again, as after
the gateway was killed; once more when all but the final rows was taken away. Its pages are in memory by then: a start
on a machine that has just booted reads them from the disk.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import structlog

from shoal.core.routing.replica import Replica
from shoal.gateway.ids import uuid7
from shoal.metering.spool import UsageSpool
from shoal.metering.spoolfile import Row, SpoolFile
from tests.support.gateway import replica
from tests.support.records import meter

AT_ONCE: Final = (1, 16, 64, 256)
_ID: Final = "01a200e9-18ce-79ba-9634-fa3d41586634"
_ROOM: Final = 16 << 30
_MANY: Final = 2_000


def rows() -> tuple[Row, Row]:
    """The open and the final row of a request that was answered, as long as they are."""
    it = meter(_ID)
    answered_by: Replica = replica()
    first = it.open_row()
    it.attempts, it.replica, it.engine_boot = 1, answered_by, "7f1c0a52d4e94c11"
    it.answer_began()
    it.outcome, it.status = "answered", 200
    it.count(b'{"prompt_tokens":700,"completion_tokens":60,"prompt_tokens_details":{"cached_tokens":4}}', "final")
    return first, it.final_row()


OPEN, FINAL = rows()


def of(row: Row, request: str) -> Row:
    """The same row of another request."""
    id, _, kind, body = row
    return id.replace(_ID, request), request, kind, body.replace(_ID.encode(), request.encode())


async def durable(folder: Path, at_once: int, seconds: float) -> tuple[float, float, float, float]:
    """Rows per second, milliseconds that an open row waits (p50, p99), and bytes of disk for a row."""
    spool = UsageSpool(folder, max_bytes=_ROOM)
    spool.start()
    await spool.opened()
    waits: list[float] = []
    began = time.perf_counter()
    ends = began + seconds

    async def requests() -> None:
        while (now := time.perf_counter()) < ends:
            request = uuid7()
            await spool.commit(of(OPEN, request))
            waits.append(time.perf_counter() - now)
            spool.put(of(FINAL, request))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(requests())
    await spool.flush()
    took, count = time.perf_counter() - began, spool.stats.rows
    await spool.stop()
    file = SpoolFile(folder / spool.path.name, _ROOM, 0.0)
    used = file.used()
    file.close()
    waits.sort()
    return count / took, waits[len(waits) // 2] * 1e3, waits[len(waits) * 99 // 100] * 1e3, used / count


def filled(requests: int) -> Iterator[list[Row]]:
    for at in range(0, requests, _MANY):
        ids = [uuid7() for _ in range(min(_MANY, requests - at))]
        yield [row for request in ids for row in (of(OPEN, request), of(FINAL, request))]


def opened(path: Path) -> tuple[float, SpoolFile]:
    """Seconds that it takes, and the file."""
    began = time.perf_counter()
    file = SpoolFile(path, _ROOM, 900.0)
    return time.perf_counter() - began, file


def starts(folder: Path, requests: int) -> None:
    path = folder / "spool.sqlite"
    _, file = opened(path)
    for part in filled(requests):
        file.insert(part)
    file.insert([of(OPEN, uuid7()) for _ in range(200)])
    last = file.last_seq
    file.close()
    took, file = opened(path)
    size = path.stat().st_size / 2**20
    print(
        f"start with {requests:,} requests that the ledger does not have ({size:,.0f} MiB) and "
        f"{file.closed_as_cut} under way: {took * 1e3:,.0f} ms",
        flush=True,
    )
    while file.tidy.step(last, hurry=False):
        pass
    file.close()
    took, file = opened(path)
    print(f"start with the final rows of {requests:,} that it has: {took * 1e3:,.0f} ms")
    file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--requests", type=int, default=500_000, help="in the spool that is opened; 0: none")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: that of temporary files")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    print(f"JSON of an open row {len(OPEN[3])} bytes, of a final row {len(FINAL[3])} bytes")
    print(f"{'requests at a time':>18}{'rows/s':>10}{'waits p50 ms':>14}{'p99 ms':>9}{'disk bytes/row':>16}")
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        for at_once in AT_ONCE:
            rate, p50, p99, size = asyncio.run(durable(Path(name) / str(at_once), at_once, given.seconds))
            print(f"{at_once:18}{rate:10,.0f}{p50:14.2f}{p99:9.2f}{size:16.0f}", flush=True)
        if given.requests:
            starts(Path(name) / "start", given.requests)


if __name__ == "__main__":
    main()
