"""What the gateway costs, beside no proxy, Envoy and smg, in one run on one core.

    python -m tests.bench.bench_gateway [--seconds 8]

The proxy has core 0; the load generator and the fake engine (load.c, compiled here) share core 1. The gateway does all
that it does in a pod: key check, resolution, forced usage, an open row on disk before each request, a final one after.
With everything on, its tenant has limits of each kind, a budget and a log of metadata, and a ledger (SQLite, beside the
load generator on core 1, which has less for itself then) takes every record meanwhile.
`CPU us/chunk` is that of the most chunks per second, which arrive several at a time; `alone` that of 100 streams, whose
chunks arrive one by one. Both contain their share of the streams' requests, one for 50 chunks.
Envoy and smg are plain proxies. Numbers on a busy machine are lower bounds: other processes' CPU is printed.
The gateway runs on the Python of this command.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Generator
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.bench.gateway_process import API_KEY, INSTALL_KEY
from tests.support import envoy
from tests.support.rolekeys import give

PROXY_CORE, LOAD_CORE = "0", "1"
HERE = Path(__file__).parent
_TICK = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def request(port: int, *, stream: bool) -> bytes:
    body = json.dumps(
        {
            "model": "bench/model",
            "stream": stream,
            "max_tokens": 50,
            "messages": [{"role": "user", "content": "x" * 700}],
            "temperature": 0.7,
        },
        separators=(",", ":"),
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nauthorization: Bearer %s\r\n"
        b"content-type: application/json\r\naccept: */*\r\nuser-agent: bench\r\ncontent-length: %d\r\n\r\n%s"
        % (port, API_KEY.encode(), len(body), body)
    )


def cpu_seconds(pid: int) -> float:
    """Of a process and its children, all threads."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(stat.parent.name) == pid or int(fields[1]) == pid:
                total += int(fields[11]) + int(fields[12])
    return total / _TICK


def busy_seconds() -> float:
    fields = [int(f) for f in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return (sum(fields) - fields[3] - fields[4]) / _TICK


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


@contextlib.contextmanager
def started(command: list[str], port: int, log: Path, core: str) -> Generator[int, None, None]:
    """Runs a program on a core until the block ends; yields its pid when the port answers."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["taskset", "-c", core, *command], stdout=out, stderr=out, start_new_session=True, env=os.environ
        )
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended early:\n{log.read_text()[-2000:]}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
                break
            time.sleep(0.1)
        else:
            raise SystemExit(f"{command[0]} does not listen:\n{log.read_text()[-2000:]}")
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Bench:
    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self.load = folder / "load"
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise SystemExit("the bench needs a C compiler (cc or gcc) for its load generator")
        subprocess.run([compiler, "-O2", "-o", self.load, HERE / "load.c"], check=True)

    def measure(self, mode: str, port: int, amount: int, pid: int | None) -> dict[str, float]:
        before, busy = cpu_seconds(pid) if pid else 0.0, busy_seconds()
        result = self.load_with(request(port, stream=mode == "streams"), mode, port, amount)
        # The generator runs a second of warm-up as well.
        result["cpu"] = (cpu_seconds(pid) - before) / (self.seconds + 1) if pid else 0.0
        result["busy"] = (busy_seconds() - busy) / (self.seconds + 1)
        return result

    def load_with(self, content: bytes, mode: str, port: int, amount: int) -> dict[str, float]:
        """What the load generator saw of requests with this content."""
        file = self.folder / "request"
        file.write_bytes(content)
        out = subprocess.run(
            ["taskset", "-c", LOAD_CORE, self.load, mode, str(port), str(amount), str(self.seconds), file],
            check=True,
            capture_output=True,
            timeout=self.seconds + 60,
        )
        return json.loads(out.stdout)

    def row(self, name: str, port: int, pid: int | None) -> dict[str, Any]:
        saturated = self.measure("closed", port, 64, pid)
        paced = self.measure("open", port, 200, pid)
        # So few that chunks arrive alone; those of a proxy with all to do arrive several at a time.
        alone = self.measure("streams", port, 100, pid)
        best: dict[str, float] = {}
        for streams in (400, 800, 1200):
            got = self.measure("streams", port, streams, pid)
            if got["chunks_per_s"] > best.get("chunks_per_s", 0):
                best = got
        errors = int(saturated["errors"] + paced["errors"] + alone["errors"] + best["errors"])
        return {
            "name": name,
            "requests": saturated["requests_per_s"],
            "cpu_ms": saturated["cpu"] / saturated["requests_per_s"] * 1000,
            "p50": paced["p50_ms"],
            "p99": paced["p99_ms"],
            "chunks": best["chunks_per_s"],
            "cpu_us_chunk": best["cpu"] / best["chunks_per_s"] * 1e6,
            "cpu_us_alone": alone["cpu"] / alone["chunks_per_s"] * 1e6,
            "rss": rss_mib(pid) if pid else 0.0,
            "errors": errors,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("the bench needs two cores: one for the proxy, one for the load")
    scripts = Path(sysconfig.get_path("scripts"))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        bench = Bench(folder, arguments.seconds)
        upstream = free_port()
        stack.enter_context(
            started([str(bench.load), "upstream", str(upstream)], upstream, folder / "up.log", LOAD_CORE)
        )
        idle = busy_seconds()
        time.sleep(2)
        foreign = (busy_seconds() - idle) / 2

        rows.append(bench.row("no proxy", upstream, None))

        port = free_port()
        command = [sys.executable, "-m", "tests.bench.gateway_process", str(upstream), str(port), str(folder / "gw")]
        with started(command, port, folder / "gateway.log", PROXY_CORE) as pid:
            rows.append(bench.row("shoal gateway", port, pid))

        ledger = stack.enter_context(_ledger(folder))
        port = free_port()
        command = [*command[:3], str(upstream), str(port), str(folder / "full"), f"http://127.0.0.1:{ledger}"]
        with started(command, port, folder / "full.log", PROXY_CORE) as pid:
            rows.append(bench.row("shoal gateway, everything on", port, pid))
            # What the saturated gateway left in its spool would be measured too: rows wait behind it.
            behind = _until_shipped(folder)
            began = time.time()
            bench.measure("open", port, 200, pid)
            _until_shipped(folder)
            kept = _shipped(folder, behind, began)

        if envoy.PROGRAM.exists():
            port = free_port()
            config = folder / "envoy.json"
            config.write_text(envoy.config(port, upstream))
            command = [
                str(envoy.PROGRAM),
                "-c",
                str(config),
                "--concurrency",
                "1",
                "--log-level",
                "error",
                "--use-dynamic-base-id",
            ]
            with started(command, port, folder / "envoy.log", PROXY_CORE) as pid:
                rows.append(bench.row("Envoy", port, pid))
        else:
            _missing("Envoy")
        if (smg := scripts / "smg").exists():
            port, metrics = free_port(), free_port()
            command = [str(smg), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
            command += ["--worker-urls", f"http://127.0.0.1:{upstream}", "--prometheus-port", str(metrics)]
            command += ["--log-level", "error"]
            with started(command, port, folder / "smg.log", PROXY_CORE) as pid:
                time.sleep(3)  # it looks at its worker first
                rows.append(bench.row("smg", port, pid))
        else:
            _missing("smg")
    show(rows, foreign)
    print(kept)


@contextlib.contextmanager
def _ledger(folder: Path) -> Generator[int]:
    """A ledger of its own; yields its port."""
    home, port = folder / "ledger", free_port()
    (home / "key").mkdir(parents=True)
    give(home / "key", INSTALL_KEY)
    environment = {
        "DATABASE_URL": f"sqlite:///{home}/ledger.sqlite",
        "KEYS_DIR": str(home / "key"),
        "PRICES_DIR": str(home),
        "PORT": str(port),
        "OPS_PORT": str(free_port()),
        "RECONCILE": "false",
        "LOG_LEVEL": "warning",
    }
    os.environ.update({f"SHOAL_LEDGER_{name}": value for name, value in environment.items()})
    command = [sys.executable, "-m", "shoal", "ledger", "run"]
    with started(command, port, folder / "ledger.log", LOAD_CORE):
        yield port


def _until_shipped(folder: Path) -> float:
    """Waits until the ledger has what the spool had; returns how long, in seconds."""
    with contextlib.closing(sqlite3.connect(folder / "full/spool/spool.sqlite")) as spool:
        began = time.monotonic()
        waiting = "SELECT count(*) FROM records WHERE seq > (SELECT shipped FROM position)"
        while spool.execute(waiting).fetchone()[0]:
            time.sleep(0.2)
            if time.monotonic() - began > 120:
                left = spool.execute(waiting).fetchone()[0]
                told = (folder / "full.log").read_text()[-1500:]
                raise SystemExit(f"the ledger did not take {left:,} rows of the spool within two minutes:\n{told}")
        return time.monotonic() - began


def _shipped(folder: Path, behind: float, paced_since: float) -> str:
    """What a record takes on disk, how far the ledger was `behind` after the most load, in seconds, and how long final
    rows that were made since then, at 200 requests/s, took to the ledger."""
    spool, ledger = (sqlite3.connect(folder / path) for path in ("full/spool/spool.sqlite", "ledger/ledger.sqlite"))
    with contextlib.closing(spool), contextlib.closing(ledger):
        rows, size = spool.execute("SELECT count(*), avg(length(body)) FROM records").fetchone()
        usage = ledger.execute("SELECT count(*) FROM usage").fetchone()[0]
        heard = "SELECT received_at, body FROM records WHERE kind = 'final' AND received_at > ?"
        paced = ledger.execute(heard, (int(paced_since * 1000),)).fetchall()
    made = (datetime.fromisoformat(json.loads(body)["time"]).timestamp() * 1000 for _, body in paced)
    late = sorted(at - began for (at, _), began in zip(paced, made, strict=True) if began >= paced_since * 1000)
    return (
        f"at 200 requests/s a final row is in the ledger's hands p50 {late[len(late) // 2]:.0f} ms, "
        f"p99 {late[len(late) * 99 // 100]:.0f} ms after it was made ({len(late)} rows).\n"
        f"everything on: {usage:,} requests in the ledger, which had all {behind:.1f} s after the most load; "
        f"of the {rows:,} rows that the spool still keeps, one has {size:.0f} bytes."
    )


def _missing(name: str) -> None:
    print(f"{name} is not installed (uv sync --group bench): left out")


def show(rows: list[dict[str, Any]], foreign: float) -> None:
    base = rows[0]
    print(f"\nGateway on one core, Python {platform.python_version()} of {sys.base_prefix}; ", end="")
    print(f"other processes used {foreign:.2f} cores before the run.\n")
    head = (
        "proxy",
        "req/s",
        "CPU ms/req",
        "added p50 ms",
        "added p99 ms",
        "chunks/s",
        "CPU us/chunk",
        "CPU us/chunk alone",
        "RSS MiB",
        "errors",
    )
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        cells = (
            row["name"],
            f"{row['requests']:,.0f}",
            f"{row['cpu_ms']:.3f}",
            f"{row['p50'] - base['p50']:.2f}",
            f"{row['p99'] - base['p99']:.2f}",
            f"{row['chunks']:,.0f}",
            f"{row['cpu_us_chunk']:.0f}",
            f"{row['cpu_us_alone']:.0f}",
            f"{row['rss']:.0f}",
            str(row["errors"]),
        )
        print("| " + " | ".join(cells) + " |")
    by_name = {row["name"]: row for row in rows}
    print(f"\nno proxy: p50 {base['p50']:.2f} ms, p99 {base['p99']:.2f} ms at 200 req/s.")
    if envoy := by_name.get("Envoy"):
        ours = by_name["shoal gateway"]
        print(
            f"shoal / Envoy: {ours['requests'] / envoy['requests']:.2f} in req/s, "
            f"{ours['chunks'] / envoy['chunks']:.2f} in chunks/s."
        )


if __name__ == "__main__":
    main()
