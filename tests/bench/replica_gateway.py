"""One of Shoal's gateways in `bench_replicas`, in a process of its own, with a fixed directory in place of an API
server. It hears the engines' load from their agents, and by its peers' prefix streams what the other gateways sent.

Its configuration: `folder` (its own, empty), `name`, `routing`, `engines` (ports), `agents` (ports), `ops` (its own
port for peers), `peers` (theirs; none: `Seconds` knows heads of prompts only), and with adapters `adapters` (their
folder) and `slots`. It says its `url` when it knows the load of every engine and hears its peers.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

import uvloop

from shoal.core.capabilities import Capability
from shoal.core.routing.resolve import ServedModel
from shoal.gateway.acks import Acks
from shoal.gateway.demand import DemandPublisher
from shoal.gateway.ops import gateway_ops
from shoal.gateway.prefixes import PrefixShare
from shoal.net import gctuning
from shoal.net.installkey import KeyRing
from shoal.net.server import make_server
from shoal.net.serving import serving
from shoal.net.stream import StreamPeer, gateway_peer
from shoal.runtime import logs
from shoal.signals.prefixes import PrefixStreams
from tests.bench import replica_processes
from tests.bench.replica_adapters import NAMESPACE, POOL, Adapters
from tests.bench.replica_agents import GATEWAY_KEY
from tests.support.adapter_agents import pool
from tests.support.engines import API_KEY as ENGINE_KEY
from tests.support.engines import SERVED
from tests.support.gateway import GatewayUnderTest, gateway, replica, tenant

CLAIM: Final = "tiny"
"""What clients call the Model."""
MODEL: Final = ServedModel(SERVED, "uid-tiny", SERVED, (CLAIM,), None, frozenset(get_args(Capability)))
_SECONDS: Final = 60.0
"""Until the reports of all engines and the streams of all peers are there."""


class OneKey(KeyRing):
    """The engines have a key of their own, to which no install key leads."""

    def key_for(self, fingerprint: str | None, model_uid: str) -> str | None:
        return ENGINE_KEY


def declare(it: GatewayUnderTest, engines: Sequence[int], adapters: Adapters | None) -> None:
    """What an API server would tell."""
    it.models[SERVED] = MODEL
    it.tenants["acme"] = tenant(models=[SERVED])
    for at, port in enumerate(engines, 1):
        it.pods[f"{SERVED}-{at}"] = replace(replica(at, MODEL), engine="SGLang")
        it.ports[f"pod-{at}"] = port
    if adapters is not None:
        it.pools[POOL] = pool("pool", NAMESPACE, SERVED.partition("/")[2])
        it.adapters.update(adapters.declared())
        for source in ("pools", "adapters"):
            it.directory.mark(source)
    it.app.key_ring = OneKey(it.settings.keys_dir)
    it.changed()


@contextlib.asynccontextmanager
async def hearing_agents(it: GatewayUnderTest, agents: Sequence[int], *, adapters: bool) -> AsyncGenerator[None]:
    def known(uid: str) -> bool:
        report = it.fleet.report(uid)
        return report is not None and report.running is not None and (not adapters or report.adapters is not None)

    it.fleet.streams.start()
    acks = Acks(it.fleet, it.me, it.agents, it.app.leases)
    try:
        it.fleet.streams.set_peers(
            StreamPeer(f"pod-{at}", f"{SERVED}-{at}", "127.0.0.1", GATEWAY_KEY, port)
            for at, port in enumerate(agents, 1)
        )
        async with asyncio.timeout(_SECONDS):
            while not all(known(uid) for uid in it.ports):
                await asyncio.sleep(0.05)
        yield
    finally:
        await acks.close()
        await it.fleet.streams.close()


@contextlib.asynccontextmanager
async def hearing_peers(it: GatewayUnderTest, ops: int, peers: Sequence[int]) -> AsyncGenerator[None]:
    """As the gateway process does: says what it sent, and hears what the peers did."""
    scores = it.fleet.scores
    assert scores is not None
    share = PrefixShare(scores)
    it.prompt_sent = share.sent
    hub = DemandPublisher(it.fleet.demand).hub
    pages = gateway_ops(it.metrics.registry, dict[str, str], lambda: None, hub, it.ring, prefixes=share.hub)
    sharing = asyncio.create_task(share.run())
    streams = PrefixStreams(share.heard, it.me)
    try:
        async with serving(make_server(pages, host="127.0.0.1", port=ops, keep_alive=5, stop_seconds=1)):
            streams.start()
            key = it.ring.demand_keys("gateway")[0]
            streams.set_peers(
                gateway_peer(f"peer-{port}", f"peer-{port}", "127.0.0.1", key, mtls=False, credentials=None, port=port)
                for port in peers
            )
            async with asyncio.timeout(_SECONDS):
                while len(list(streams.live())) < len(peers):
                    await asyncio.sleep(0.05)
            yield
            share.hub.close()
    finally:
        await streams.close()
        sharing.cancel()
        await asyncio.gather(sharing, return_exceptions=True)


async def main() -> None:
    asked: dict[str, Any] = replica_processes.configuration()
    adapters = Adapters(Path(asked["adapters"]), asked["slots"]) if asked["adapters"] else None
    async with contextlib.AsyncExitStack() as stack:
        it = await stack.enter_async_context(
            gateway(Path(asked["folder"]), name=asked["name"], routing=asked["routing"])
        )
        declare(it, asked["engines"], adapters)
        await stack.enter_async_context(hearing_agents(it, asked["agents"], adapters=adapters is not None))
        if asked["peers"]:
            await stack.enter_async_context(hearing_peers(it, asked["ops"], asked["peers"]))
        elif it.fleet.scores is not None:
            it.fleet.scores.prefixes.sent = lambda uid, points: None
        gctuning.tune_gc()
        await replica_processes.ready(url=it.url)


if __name__ == "__main__":
    logs.configure("error")
    uvloop.run(main())
