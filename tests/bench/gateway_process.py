"""The gateway as it runs in a pod, with a fixed directory in place of an API server: the child process of the bench.

python -m tests.bench.gateway_process UPSTREAM-PORT PORT SPOOL-DIR
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


logs.configure("warning")


async def main(upstream_port: int, port: int, folder: Path) -> None:
    (folder / "key").mkdir(parents=True, exist_ok=True)
    (folder / "key" / "current").write_bytes(b"bench")
    settings = GatewaySettings(install_key_dir=folder / "key", spool_dir=folder / "spool")
    model = ServedModel("bench/model", "uid", "bench/model", ("bench",), None)
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
        fleet.heard_of(pod.uid, ReplicaKeys(phase="ready", engine_boot="boot"))
    directory = Directory({model.key: model}, {"t": tenant}, pods)
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

    collector.calm()
    sweeping = asyncio.create_task(sweep())
    await server.serve()
    sweeping.cancel()
    await spool.stop()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
