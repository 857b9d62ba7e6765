"""The gateway as it runs in a pod, with a fixed directory in place of an API server: the child process of the bench.

python -m tests.bench.gateway_process UPSTREAM-PORT PORT SPOOL-DIR [asleep]

With `asleep` its Model has no replica until `wake` is read from standard input; `sleep` takes the replicas away again;
`held` does nothing. Each is answered by how many requests wait.
"""

import asyncio
import hashlib
import signal
import sys
from pathlib import Path

import uvloop

from shoal.api import keys
from shoal.api.replica import ReplicaKeys
from shoal.api.tenant import Tenant
from shoal.core.hold.limits import Limits
from shoal.core.resolve import ServedModel
from shoal.core.routing import Replica
from shoal.gateway import collector
from shoal.gateway.app import Gateway
from shoal.gateway.directory import Directory
from shoal.gateway.fleet import Fleet
from shoal.gateway.installkey import KeyRing
from shoal.gateway.metrics import Metrics
from shoal.gateway.server import make_server
from shoal.gateway.settings import GatewaySettings
from shoal.gateway.upstream import Pool
from shoal.ledger.spool import Spool
from shoal.runtime import logs

API_KEY = "sk-bench"
HEARD = ReplicaKeys(
    phase="ready",
    engine_boot="boot",
    running=0,
    waiting=0,
    max_running=128,
    kv_tokens_used=0,
    kv_tokens_total=10**9,
)

logs.configure("warning")


async def main(upstream_port: int, port: int, folder: Path, *, asleep: bool) -> None:
    (folder / "key").mkdir(parents=True, exist_ok=True)
    (folder / "key" / "current").write_bytes(b"bench")
    settings = GatewaySettings(install_key_dir=folder / "key", spool_dir=folder / "spool")
    limits = Limits(max_requests=100_000, max_bytes=2**30, max_tenant_percent=100)
    model = ServedModel("bench/model", "uid", "bench/model", ("bench",), None, limits=limits)
    key = {"name": "key", "sha256": hashlib.sha256(API_KEY.encode()).hexdigest()}
    tenant = Tenant.model_validate(
        {"metadata": {"name": "t"}, "spec": {"keys": [key], "models": [{"namespace": "bench", "name": "model"}]}}
    )
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
            keys.fingerprint(b"bench"),
            "c",
            "n",
        )
        for n in range(4)
    }
    ring = KeyRing(settings.install_key_dir)
    ring.refresh()
    fleet = Fleet(ring)
    for pod in pods.values():
        fleet.heard_of(pod.uid, HEARD)
    seen = {} if asleep else dict(pods)
    directory = Directory({model.key: model}, {"t": tenant}, seen)
    for source in ("models", "tenants", "pods"):
        directory.mark(source)
    spool = Spool(settings.spool_dir)
    spool.start()
    pool = Pool()
    gateway = Gateway(settings, directory, fleet, ring, spool, pool, Metrics(), engine_port=lambda _: upstream_port)
    server = make_server(gateway, host="127.0.0.1", port=port, keep_alive=75, stop_seconds=1)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: setattr(server, "should_exit", True))

    async def sweep() -> None:
        while True:
            await asyncio.sleep(1)
            pool.sweep()
            server.sweep()

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
    collector.calm()
    sweeping = asyncio.create_task(sweep())
    await server.serve()
    sweeping.cancel()
    await spool.stop()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), asleep=sys.argv[4:] == ["asleep"]))
