"""What mutual TLS to the engines costs: a gateway without, and one with it and the sidecar, in turns.

Requests: 64 at a time, kept-alive connections, small bodies. Chunks: 400 streams. CPU is that of the gateway's process,
and of the one Envoy that stands for every engine's sidecar; in a cluster each engine has its own, on its own node. Both
run on one core, the load and the engine on the other.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from shoal.api import identity
from shoal.api.config import AgentImage, Engines, OperatorConfig
from shoal.engine.kinds import DEFAULT
from shoal.manifests import sidecar
from shoal.net.pki import CertificateAuthority
from tests.bench.bench_gateway import LOAD_CORE, PROXY_CORE, Bench, cpu_seconds, free_port, rss_mib, started

_LIFE = timedelta(hours=1)
_CONFIG = OperatorConfig(
    engines=Engines(default_version="1", versions={}, cpuPerGPU="1", memoryPerGPU="1Gi"),
    agent=AgentImage(image="shoal"),
)


@dataclass
class Row:
    """One gateway's figures, a number per round."""

    port: int
    pid: int
    sidecar: int | None
    requests: list[float] = field(default_factory=list[float])
    request_us: list[float] = field(default_factory=list[float])
    chunk_us: list[float] = field(default_factory=list[float])
    sidecar_request_us: list[float] = field(default_factory=list[float])
    sidecar_chunk_us: list[float] = field(default_factory=list[float])
    p50: list[float] = field(default_factory=list[float])
    p99: list[float] = field(default_factory=list[float])
    errors: int = 0

    def measure(self, bench: Bench) -> None:
        closed, beside = self._one(bench, "closed", 64)
        self.requests.append(closed["requests_per_s"])
        self.request_us.append(closed["cpu"] / closed["requests_per_s"] * 1e6)
        self.sidecar_request_us.append(beside / closed["requests_per_s"] * 1e6)
        paced, _ = self._one(bench, "open", 200)
        self.p50.append(paced["p50_ms"])
        self.p99.append(paced["p99_ms"])
        streams, beside = self._one(bench, "streams", 400)
        self.chunk_us.append(streams["cpu"] / streams["chunks_per_s"] * 1e6)
        self.sidecar_chunk_us.append(beside / streams["chunks_per_s"] * 1e6)
        self.errors += int(closed["errors"] + paced["errors"] + streams["errors"])

    def _one(self, bench: Bench, mode: str, amount: int) -> tuple[dict[str, float], float]:
        """What the load says, and the sidecar's CPU in seconds per second."""
        before = cpu_seconds(self.sidecar) if self.sidecar else 0.0
        found = bench.measure(mode, self.port, amount, self.pid)
        after = cpu_seconds(self.sidecar) if self.sidecar else 0.0
        return found, (after - before) / (bench.seconds + 1)


def certify(folder: Path) -> None:
    """The gateway's certificate as files, the engine's as Envoy takes it."""
    folder.mkdir()
    now = datetime.now(UTC)
    authority = CertificateAuthority.make("bench", now, _LIFE)
    gateway = identity.process("bench", "bench", "gateway")
    pair = authority.issue(gateway, now, _LIFE, calls=True)
    files = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": authority.pair.certificate}
    engine = authority.issue(identity.model("bench", "bench", "uid"), now, _LIFE, calls=False)
    files |= sidecar.secrets(engine, authority.pair.certificate, gateway.uri)
    for name, text in files.items():
        (folder / name).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("the bench needs two cores: one for the gateways, one for the load")
    os.sched_setaffinity(0, {int(LOAD_CORE)})
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        bench = Bench(folder, arguments.seconds)
        upstream, serving = free_port(), free_port()
        stack.enter_context(
            started([str(bench.load), "upstream", str(upstream)], upstream, folder / "up.log", LOAD_CORE)
        )
        certify(folder / "tls")
        config = sidecar.bootstrap(
            _CONFIG,
            DEFAULT.pod,
            folder=str(folder / "tls"),
            engine_port=upstream,
            serving_port=serving,
            probe_port=free_port(),
        )
        envoy = Path(sysconfig.get_path("scripts")) / "envoy"
        command = [str(envoy), "--config-yaml", json.dumps(config), *sidecar.command(_CONFIG, DEFAULT.pod)[3:]]
        beside = stack.enter_context(started(command, serving, folder / "envoy.log", PROXY_CORE))
        rows: dict[str, Row] = {}
        for number, (mode, port) in enumerate((("plain", upstream), ("mutual TLS", serving))):
            own = free_port()
            os.environ["BENCH_TLS_DIR"] = str(folder / "tls") if port == serving else ""
            command = [sys.executable, "-m", "tests.bench.gateway_process", str(port), str(own)]
            running = started([*command, str(folder / f"gw-{number}")], own, folder / f"gw-{number}.log", PROXY_CORE)
            rows[mode] = Row(own, stack.enter_context(running), beside if port == serving else None)
        print(f"about {arguments.rounds * 6 * (arguments.seconds + 1):.0f} s", file=sys.stderr, flush=True)
        for _ in range(arguments.rounds):
            for row in rows.values():
                row.measure(bench)
                time.sleep(0.5)
        show(rows, rss_mib(beside))


def show(rows: dict[str, Row], memory: float) -> None:
    print(f"{'p50 of the rounds':<24}" + "".join(f"{mode:>14}" for mode in rows))
    for label, name in {
        "requests/s": "requests",
        "gateway, us/request": "request_us",
        "sidecar, us/request": "sidecar_request_us",
        "gateway, us/chunk": "chunk_us",
        "sidecar, us/chunk": "sidecar_chunk_us",
        "p50 at 200/s, ms": "p50",
        "p99 at 200/s, ms": "p99",
        "errors": "errors",
    }.items():
        found = [getattr(row, name) for row in rows.values()]
        shown = [statistics.median(each) if isinstance(each, list) else each for each in found]
        print(f"{label:<24}" + "".join(f"{each:>14.2f}" for each in shown))
    print(f"the sidecar has {memory:.0f} MiB")


if __name__ == "__main__":
    main()
