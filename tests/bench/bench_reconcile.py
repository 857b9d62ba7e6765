"""What it costs the ledger to keep the counters and the GPU time of a large fleet, and to compare them with the bills.

python -m tests.bench.bench_reconcile [--engines 2000] [--requests 500000]

Rounds in which every engine has counted something, in SQLite; then `GET /v1/unattributed` by engine, which reads single
requests. Time is that of this process; commits wait for the disk besides.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final

from shoal.core.reconcile import HOUR_MS, CounterReading, Held
from shoal.ledger.queries.times import Span
from shoal.ledger.reconcile.compare import by_engine, by_sums
from shoal.ledger.reconcile.keep import keep_gpu_time, keep_readings
from shoal.ledger.schema import usage
from tests.support.ledgertables import LedgerTables

BEGIN: Final = 490_000 * HOUR_MS
ROUND_MS: Final = 5_000


def timed(what: str, work: Callable[[], Any], times: int = 1) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        work()
    wall, cpu = (time.perf_counter() - wall) / times, (time.process_time() - cpu) / times
    print(f"{what:60} {wall * 1000:9.1f} ms  {cpu * 1000:9.1f} ms of CPU", flush=True)


def fill(tables: LedgerTables, requests: int, engines: int) -> None:
    common = {
        "source": "shoal", "ended": True, "tenant": "acme", "key_name": "main", "model_requested": "m",
        "endpoint": "/v1/chat/completions", "stream": True, "count_source": "final", "outcome": "answered",
        "input_tokens": 100, "output_tokens": 10, "received_at": BEGIN, "attempt": 0,
    }  # fmt: skip
    empty: dict[type, Any] = {int: 0, float: 0.0, bool: False, str: ""}
    base = {c.name: empty[c.type.python_type] for c in usage.columns if not c.nullable} | common
    for at in range(0, requests, 10_000):
        rows = [
            base | {"request": f"{n:036}", "admitted_at": BEGIN + n, "engine_boot": f"e{n % engines}", "model": "ns/m0"}
            for n in range(at, min(requests, at + 10_000))
        ]
        with tables.begin() as connection:
            connection.execute(usage.insert(), rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=2_000)
    parser.add_argument("--requests", type=int, default=500_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tables = LedgerTables(f"sqlite:///{folder}/ledger.sqlite")
        turn = 0

        def readings() -> None:
            nonlocal turn
            turn += 1
            now = BEGIN + turn * ROUND_MS
            each = [
                CounterReading(f"e{n}", f"ns/m{n % 200}", "h100", f"ns/p{n}", "node", now, 100 * turn, 10 * turn)
                for n in range(args.engines)
            ]
            with tables.begin() as connection:
                keep_readings(connection, each, {})

        def gpus() -> None:
            nonlocal turn
            turn += 12
            pods = [Held(f"p{n}", f"ns/m{n % 200}", "h100", 8, BEGIN) for n in range(args.engines)]
            with tables.begin() as connection:
                keep_gpu_time(connection, pods, {}, BEGIN + turn * ROUND_MS, 0)

        timed(f"{args.engines} engines, new: counters kept (each 5 s)", readings)
        timed(f"{args.engines} engines: counters kept (each 5 s)", readings, 10)
        timed(f"{args.engines} engines: GPU time kept (each minute)", gpus, 5)
        fill(tables, args.requests, args.engines)
        span = Span(BEGIN, BEGIN + 24 * HOUR_MS)
        with tables.begin() as connection:
            timed("compared by model", lambda: by_sums(connection, span, ("model",)))
            timed(f"compared by engine, of {args.requests} requests", lambda: by_engine(connection, span))


if __name__ == "__main__":
    main()
