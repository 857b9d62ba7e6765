"""The gateway as it runs in a pod, with a fixed directory in place of an API server: the child process of the bench.

python -m tests.bench.gateway_process UPSTREAM-PORT PORT SPOOL-DIR [asleep | LEDGER-URL]

With `asleep` its Model has no replica until `wake` is read from standard input; `sleep` takes the replicas away again;
`held` does nothing. Each is answered by how many requests wait. With the URL of a ledger everything is on: the tenant
has limits of each kind and a budget, none of which is met, and a log of each request's metadata; records are shipped.

BENCH_ROUTES: there are a second Model, routes to both, their prices, and a second tenant (cost_routes.py).
BENCH_METRICS=off: nothing is counted. BENCH_OPS_PORT: /metrics is served there, with BENCH_MODELS more Models' series.
Traces are on by OpenTelemetry's own variables. BENCH_TLS_DIR: the engines are called over mutual TLS, with the
certificate in that folder.
"""

import asyncio
import hashlib
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import uvloop

from shoal.api import keys
from shoal.api.replica import ReplicaKeys
from shoal.api.tenant import Tenant
from shoal.core.capabilities import Capability
from shoal.core.fields.kinds import Facts
from shoal.core.hold.limits import Limits
from shoal.core.routing.replica import Replica
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.score import ReplicaScores
from shoal.gateway.app import GatewayApp
from shoal.gateway.connections import Pool
from shoal.gateway.demand import DemandPublisher, DemandState
from shoal.gateway.directory import Directory
from shoal.gateway.metrics import GatewayMetrics
from shoal.gateway.ops import gateway_ops
from shoal.gateway.quota import Quotas
from shoal.gateway.replicapool import ReplicaPool
from shoal.gateway.settings import GatewaySettings
from shoal.gateway.shared import Gateway
from shoal.gateway.tracing import Traces
from shoal.metering.meter import Meter
from shoal.metering.shipper import Shipper
from shoal.metering.spool import UsageSpool
from shoal.net import gctuning, trace
from shoal.net.installkey import KeyRing
from shoal.net.server import make_server
from shoal.net.stream import ListenerIdentity
from shoal.net.tls import TLSCredentials
from shoal.requestlog.api import LogsApi
from shoal.requestlog.logger import RequestLogger
from shoal.runtime import logs as structured
from shoal.signals.totals import TotalsFollower
from tests.bench import cost_routes
from tests.support.rolekeys import give

API_KEY = "sk-bench"
INSTALL_KEY = b"bench"
HEARD = ReplicaKeys(
    phase="ready",
    engine_boot="boot",
    running=0,
    waiting=0,
    max_running=128,
    kv_tokens_used=0,
    kv_tokens_total=10**9,
)

structured.configure("warning")


EVERYTHING: dict[str, object] = {
    "limits": {"requestsPerMinute": 10_000_000, "tokensPerMinute": 10**12, "concurrentRequests": 1_000_000},
    "budget": {"tokens": 10**15},
    "logging": {"mode": "Metadata"},
}


class Unmeasured(GatewayMetrics):
    """Counts no request."""

    def observe(self, meter: Meter, endpoint: str) -> None:
        pass


def fill(metrics: GatewayMetrics, models: int) -> None:
    """Series of other Models, as a scrape finds them."""
    for number in range(models):
        series = metrics.of(f"bench/other-{number}", "/v1/chat/completions")
        for tally in (series.duration["answered"], series.first_token, series.input_tokens, series.output_tokens):
            tally.observe(1.0)


def _tenant(name: str, key: str, **spec: object) -> Tenant:
    """A tenant with this API key, which may use all Models."""
    keys = [{"name": "key", "sha256": hashlib.sha256(key.encode()).hexdigest()}]
    models = [{"namespace": "bench", "name": each} for each in ("model", cost_routes.SMALL)]
    return Tenant.model_validate({"metadata": {"name": name}, "spec": {"keys": keys, "models": models, **spec}})


async def main(upstream_port: int, port: int, folder: Path, *, asleep: bool, ledger_url: str = "") -> None:
    (folder / "key").mkdir(parents=True, exist_ok=True)
    give(folder / "key", INSTALL_KEY)
    settings = GatewaySettings(
        keys_dir=folder / "key", spool_dir=folder / "spool", log_dir=folder / "logs", ledger_url=ledger_url
    )
    tls = os.environ.get("BENCH_TLS_DIR", "")
    limits = Limits(max_requests=100_000, max_bytes=2**30, max_tenant_percent=100)
    model = ServedModel(
        "bench/model",
        "uid",
        "bench/model",
        ("bench",),
        None,
        capabilities=frozenset(get_args(Capability)),
        limits=limits,
        facts=Facts(vocabulary=151_936, media=frozenset({"image"})),
    )
    models, tenants = {model.key: model}, {"t": _tenant("t", API_KEY, **(EVERYTHING if ledger_url else {}))}
    pods = {
        f"bench/pod-{n}": Replica(
            f"pod-{n}",
            "bench",
            f"pod-{n}",
            model.key,
            "uid",
            "127.0.0.1",
            True,
            False,
            keys.fingerprint(INSTALL_KEY),
            "c",
            "n",
            mtls=bool(tls),
        )
        for n in range(4)
    }
    routed = bool(os.environ.get("BENCH_ROUTES"))
    if routed:
        small = replace(model, key=f"bench/{cost_routes.SMALL}", uid="uid-small", claims=(cost_routes.SMALL,))
        models[small.key] = small
        tenants["limited"] = _tenant("limited", cost_routes.LIMITED_KEY, **cost_routes.LIMITS)
        others = [replace(pod, uid=f"small-{pod.uid}", model=small.key, model_uid=small.uid) for pod in pods.values()]
        pods |= {f"bench/{pod.uid}": pod for pod in others}
    credentials = TLSCredentials(Path(tls) if tls else None)
    credentials.refresh()
    ring = KeyRing(settings.keys_dir)
    ring.refresh()
    book = DemandState()
    publisher = DemandPublisher(book)
    me = ListenerIdentity("gateway-0", publisher.hub.boot)
    fleet = ReplicaPool(ring, me, book, scores=ReplicaScores() if settings.routing == "Seconds" else None)
    for pod in pods.values():
        fleet.update(pod.uid, HEARD)
    seen = {} if asleep else dict(pods)
    directory = Directory(models, tenants, seen, routes=cost_routes.routes() if routed else None)
    for source in ("models", "tenants", "pods", "routes"):
        directory.mark(source)
    spool = UsageSpool(settings.spool_dir)
    spool.start()
    pool = Pool(credentials=credentials, secured_keep_alive=50.0)
    logs = LogsApi(RequestLogger(settings, gateway=me.name), ring)
    background = [asyncio.create_task(logs.logger.run())]
    quotas = Quotas(book.tenants, ledger=cost_routes.prices() if routed else None)
    if ledger_url:
        said = partial(ring.bearers_of, "gateway", keys.LEDGER)
        totals = TotalsFollower(ledger_url, said, me)
        quotas = Quotas(book.tenants, ledger=totals)
        totals.changed = quotas.totals_changed
        totals.start()
        totals.follow()
        background.append(asyncio.create_task(Shipper(spool, ledger_url, said).run()))
    metrics = Unmeasured() if os.environ.get("BENCH_METRICS") == "off" else GatewayMetrics()
    traces = trace.from_environment("shoal-gateway", metrics.registry)
    if ops_port := os.environ.get("BENCH_OPS_PORT"):
        fill(metrics, int(os.environ.get("BENCH_MODELS", "0")))
        ops = gateway_ops(metrics.registry, dict[str, str], lambda: None, publisher.hub, ring)
        serving = make_server(ops, host="127.0.0.1", port=int(ops_port), keep_alive=5, stop_seconds=1)
        background.append(asyncio.create_task(serving.serve()))
    gateway = Gateway(
        settings,
        directory,
        fleet,
        ring,
        spool,
        pool,
        metrics,
        quotas=quotas,
        identity=me,
        engine_port=lambda _: upstream_port,
        logs=logs,
        traces=None if traces is None else Traces(traces.tracer),
    )
    server = make_server(GatewayApp(gateway), host="127.0.0.1", port=port, keep_alive=75, stop_seconds=1)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: setattr(server, "should_exit", True))

    async def sweep() -> None:
        while True:
            await asyncio.sleep(1)
            pool.sweep()
            server.sweep()
            spool.check()

    def command() -> None:
        match sys.stdin.readline().strip():
            case "wake":
                seen.update(pods)
            case "sleep":
                seen.clear()
            case "held":
                pass
            case _:
                asyncio.get_running_loop().remove_reader(sys.stdin)
                return
        directory.mark("pods")
        directory.rebuild()
        print(gateway.holds.waiting, flush=True)

    if asleep:
        asyncio.get_running_loop().add_reader(sys.stdin, command)
    gctuning.tune_gc()
    background.append(asyncio.create_task(sweep()))
    await server.serve()
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    await logs.logger.stop()
    await spool.stop()
    await trace.close(traces)


if __name__ == "__main__":
    asleep, urls = sys.argv[4:] == ["asleep"], [each for each in sys.argv[4:] if "://" in each]
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), asleep=asleep, ledger_url="".join(urls)))
