"""What the gateway's metrics and traces cost, side by side in one run on one core.

    python -m tests.bench.bench_metrics [--seconds 6] [--rounds 3] [--models 100]

Four gateways that differ in nothing else take turns on core 0: nothing is counted; metrics on, scraped every second
with the series of 100 Models (a Prometheus scrapes every 15 s); traces too, at the bound of 100 per second that is the
default; and every request traced. Load, fake engine, scraper and collector share core 1. Each figure is the median of
the rounds. Numbers on a busy machine are lower bounds: other processes' CPU is printed.

A round is twelve measurements, each a second longer than --seconds: four and a half minutes by default, one with
--seconds 3 --rounds 1. Its progress goes to standard error.
"""

import argparse
import contextlib
import http.server
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.bench_gateway import LOAD_CORE, PROXY_CORE, Bench, busy_seconds, free_port, started

_SCRAPE_SECONDS = 1.0
_LOADS = 3
"""Kinds of load that each gateway is measured with."""
_MODES = {
    "metrics and traces off": ("off", None),
    "metrics on": ("on", None),
    "metrics on, 100 traces/s": ("on", "100"),
    "metrics on, every request traced": ("on", "1000000"),
}


@dataclass
class Row:
    """One gateway's figures, a number per round."""

    port: int
    pid: int
    requests: list[float] = field(default_factory=list[float])
    cpu_ms: list[float] = field(default_factory=list[float])
    p50: list[float] = field(default_factory=list[float])
    p99: list[float] = field(default_factory=list[float])
    chunks: list[float] = field(default_factory=list[float])
    errors: int = 0

    def measure(self, bench: Bench) -> str:
        """What this round said, in a line."""
        saturated = bench.measure("closed", self.port, 64, self.pid)
        paced = bench.measure("open", self.port, 200, self.pid)
        streams = bench.measure("streams", self.port, 400, self.pid)
        self.requests.append(saturated["requests_per_s"])
        self.cpu_ms.append(saturated["cpu"] / saturated["requests_per_s"] * 1000)
        self.p50.append(paced["p50_ms"])
        self.p99.append(paced["p99_ms"])
        self.chunks.append(streams["chunks_per_s"])
        self.errors += int(saturated["errors"] + paced["errors"] + streams["errors"])
        return f"{self.requests[-1]:,.0f} requests/s, p99 {self.p99[-1]:.2f} ms, {self.chunks[-1]:,.0f} chunks/s"


class _Sink(http.server.BaseHTTPRequestHandler):
    """A collector that takes everything and looks at nothing."""

    protocol_version = "HTTP/1.1"
    taken = 0

    def do_POST(self) -> None:
        _Sink.taken += len(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def collecting() -> Generator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()


@contextlib.contextmanager
def scraping(port: int) -> Generator[None]:
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(_SCRAPE_SECONDS):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                answer.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def spans(port: int) -> dict[str, float]:
    """What became of a gateway's spans."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = (line.rpartition(" ") for line in lines if line.startswith("shoal_trace"))
    return {name.removeprefix("shoal_"): float(value) for name, _, value in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=int, default=100, help="whose series a scrape finds")
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("the bench needs two cores: one for the gateways, one for the load")
    os.sched_setaffinity(0, {int(LOAD_CORE)})
    rows: dict[str, Row] = {}
    ops: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        bench = Bench(folder, arguments.seconds)
        upstream = free_port()
        stack.enter_context(
            started([str(bench.load), "upstream", str(upstream)], upstream, folder / "up.log", LOAD_CORE)
        )
        collector = stack.enter_context(collecting())
        idle = busy_seconds()
        time.sleep(2)
        foreign = (busy_seconds() - idle) / 2
        seconds = arguments.rounds * len(_MODES) * _LOADS * (arguments.seconds + 1)
        print(f"about {seconds + 15:.0f} s", file=sys.stderr, flush=True)
        for number, (mode, (metrics, traces)) in enumerate(_MODES.items()):
            port = free_port()
            os.environ["BENCH_METRICS"] = metrics
            os.environ["BENCH_MODELS"] = str(arguments.models)
            for variable in ("BENCH_OPS_PORT", "OTEL_EXPORTER_OTLP_ENDPOINT", "SHOAL_TRACES_PER_SECOND"):
                os.environ.pop(variable, None)
            if metrics == "on":
                ops[mode] = free_port()
                os.environ["BENCH_OPS_PORT"] = str(ops[mode])
            if traces is not None:
                os.environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": collector, "SHOAL_TRACES_PER_SECOND": traces}
            command = [sys.executable, "-m", "tests.bench.gateway_process", str(upstream), str(port)]
            running = started([*command, str(folder / f"gw-{number}")], port, folder / f"gw-{number}.log", PROXY_CORE)
            rows[mode] = Row(port, stack.enter_context(running))
        for turn in range(arguments.rounds):
            order = list(rows)
            for mode in order[turn % len(order) :] + order[: turn % len(order)]:
                with scraping(ops[mode]) if mode in ops else contextlib.nullcontext():
                    said = rows[mode].measure(bench)
                print(f"round {turn + 1} of {arguments.rounds}: {mode}: {said}", file=sys.stderr, flush=True)
        told = {mode: spans(port) for mode, port in ops.items() if _MODES[mode][1] is not None}
    show(rows, foreign, arguments.models)
    for mode, counts in told.items():
        print(f"{mode}: {json.dumps(counts)}")
    print(f"The collector took {_Sink.taken / 2**20:.1f} MiB.")


def show(rows: dict[str, Row], foreign: float, models: int) -> None:
    base = next(iter(rows.values()))
    print(f"\nGateway on one core, {models} more Models' series; other processes used {foreign:.2f} cores before.\n")
    head = ("gateway", "req/s", "of off", "CPU ms/req", "p50 ms", "p99 ms", "chunks/s", "errors")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for mode, row in rows.items():
        cells = (
            mode,
            f"{statistics.median(row.requests):,.0f}",
            f"{statistics.median(row.requests) / statistics.median(base.requests):.1%}",
            f"{statistics.median(row.cpu_ms):.3f}",
            f"{statistics.median(row.p50):.2f}",
            f"{statistics.median(row.p99):.2f}",
            f"{statistics.median(row.chunks):,.0f}",
            str(row.errors),
        )
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
