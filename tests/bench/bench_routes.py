"""What a route with `fallback.whenCostAbove` costs the gateway, beside the same route without, in one run on one core.

    python -m tests.bench.bench_routes [--seconds 3] [--rounds 5]

One gateway with two Models and three routes, which are measured in turn, round by round, so that what else the machine
does falls on all of them: without the condition, with one that no request meets, and with one that each meets, so that
it goes to the cheaper Model. Once for a tenant without limits, and once for one with limits of each kind and a budget.
Requests are small chat completions whose answers are no streams. A figure is the CPU of all rounds over their requests.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.bench.bench_gateway import LOAD_CORE, PROXY_CORE, Bench, cpu_seconds, free_port, started
from tests.bench.cost_routes import LEAVES, LIMITED_KEY, PLAIN, STAYS
from tests.bench.gateway_process import API_KEY

_CONNECTIONS: Final = 64
_FEWEST: Final = 1500
_REQUESTS: Final = "shoal_gateway_requests_total{"
_FELL_BACK: Final = 'shoal_gateway_route_fallbacks_total{reason="cost"}'


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    name: str
    route: str
    """Also the Model itself."""
    key: str
    beside: str
    """Name of the row that it is compared with."""

    def request(self, port: int) -> bytes:
        messages = [{"role": "user", "content": "x" * 700}]
        body = json.dumps({"model": self.route, "max_tokens": 50, "messages": messages}, separators=(",", ":")).encode()
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nauthorization: Bearer %b\r\n"
            b"content-type: application/json\r\naccept: */*\r\nuser-agent: bench\r\ncontent-length: %d\r\n\r\n%b"
            % (port, self.key.encode(), len(body), body)
        )


def _rows(key: str, tenant: str) -> tuple[Row, ...]:
    plain = f"route{tenant}"
    return (
        Row(f"the Model by its name{tenant}", "bench/model", key, plain),
        Row(plain, PLAIN, key, plain),
        Row(f"route by cost, requests stay{tenant}", STAYS, key, plain),
        Row(f"route by cost, requests go to the cheaper Model{tenant}", LEAVES, key, plain),
    )


ROWS: Final = (*_rows(API_KEY, ""), *_rows(LIMITED_KEY, "; limits and a budget"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {row.name: [] for row in ROWS}
    upstream, port, ops = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        bench = Bench(folder, arguments.seconds)
        engine = [str(bench.load), "upstream", str(upstream)]
        stack.enter_context(started(engine, upstream, folder / "engine.log", LOAD_CORE))
        os.environ |= {"BENCH_ROUTES": "on", "BENCH_OPS_PORT": str(ops)}
        command = [sys.executable, "-m", "tests.bench.gateway_process", str(upstream), str(port), str(folder / "gw")]
        pid = stack.enter_context(started(command, port, folder / "gateway.log", PROXY_CORE))
        for _ in range(arguments.rounds):
            for row in ROWS:
                found[row.name].append(_measure(bench, row, port, ops, pid))
    show({name: _per_request(name, rounds) for name, rounds in found.items()})


def _per_request(name: str, rounds: list[tuple[float, float]]) -> float:
    """CPU microseconds."""
    seconds, requests = map(sum, zip(*rounds, strict=True))
    if requests < _FEWEST:
        raise SystemExit(f"{name}: {requests:.0f} requests are too few to tell: the machine does too much else")
    return seconds / requests * 1e6


def _measure(bench: Bench, row: Row, port: int, ops: int, pid: int) -> tuple[float, float]:
    """CPU seconds of the gateway, and its requests. Its own count of requests: they may come and go in gusts, beside
    other work of the machine."""
    before, requests, fell_back = cpu_seconds(pid), *_counts(ops)
    result = bench.load_with(row.request(port), "closed", port, _CONNECTIONS)
    used = cpu_seconds(pid) - before
    after = _counts(ops)
    requests, fell_back = after[0] - requests, after[1] - fell_back
    if result["errors"]:
        raise SystemExit(f"{row.name}: {result['errors']:.0f} answers without status 200")
    # The last requests of the row before may end only now.
    if (fell_back > _CONNECTIONS) != (row.route == LEAVES):
        raise SystemExit(f"{row.name}: the wrong Model has answered")
    return used, requests


def _counts(ops: int) -> tuple[float, float]:
    """Requests that have ended, and those that went to a fallback for their cost."""
    with urllib.request.urlopen(f"http://127.0.0.1:{ops}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()

    def total(name: str) -> float:
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    return total(_REQUESTS), total(_FELL_BACK)


def show(found: Mapping[str, float]) -> None:
    print("\n| a request to | CPU us/request | beside the same route without whenCostAbove |\n|---|---|---|")
    for row in ROWS:
        print(f"| {row.name} | {found[row.name]:.0f} | {found[row.name] / found[row.beside]:.2f} |")


if __name__ == "__main__":
    main()
