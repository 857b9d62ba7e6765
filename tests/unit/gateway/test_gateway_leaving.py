"""A gateway hears a replica that goes to its very end: an agent waits for the word of everybody who listened."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from shoal.api import names
from shoal.api.keys import fingerprint
from shoal.gateway import acks
from shoal.gateway.connections import Pool
from shoal.gateway.directory import Directory
from shoal.gateway.replicapool import ReplicaPool
from shoal.net.installkey import KeyRing
from tests.support.addresses import pod_ip
from tests.support.gateway import INSTALL_KEY, MODEL, replica
from tests.support.rolekeys import give
from tests.support.streams import until
from tests.unit.gateway.test_gateway_acks import ME, FakeAgent


async def test_a_replica_whose_model_is_gone_hears_that_its_gateways_turned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acks, "HEARTBEAT_SECONDS", 600.0)  # only what is said at once
    give(tmp_path, INSTALL_KEY)
    ring = KeyRing(tmp_path)
    ring.refresh()
    fleet, pool, agent = ReplicaPool(ring, ME), Pool(keep_alive=30.0), FakeAgent()
    sending = acks.Acks(fleet, ME, pool)
    app = web.Application()
    app.router.add_get(names.REPLICA_PATH, agent.stream)
    app.router.add_post(names.ACK_PATH, agent.ack)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, pod_ip(1), names.AGENT_PORT).start()
    models = {MODEL.key: MODEL}
    pods = {"chat/llama-1": replica(1, ip=pod_ip(1), install_key=fingerprint(INSTALL_KEY))}
    directory = Directory(models, {}, pods)
    directory.changed.append(lambda: fleet.follow(directory.snapshot))
    fleet.streams.start()
    try:
        directory.mark("models")
        directory.mark("pods")
        await agent.until(lambda ack: ack.seq == 0)
        # kubectl delete model: first it is gone, then its pods are going.
        models.clear()
        directory.mark("models")
        await asyncio.sleep(0)
        pods["chat/llama-1"] = replica(
            1, ip=pod_ip(1), install_key=fingerprint(INSTALL_KEY), deleting=True, ready=False
        )
        directory.mark("pods")
        await asyncio.sleep(0)
        await agent.say("draining")
        assert (await agent.until(lambda ack: ack.seq == 1)).running == 0
        assert len(agent.streams) == 1  # the one that it had
        del pods["chat/llama-1"]
        directory.mark("pods")
        await until(lambda: fleet.streams.count == 0)
    finally:
        await fleet.streams.close()
        await sending.close()
        pool.close()
        await runner.cleanup()
