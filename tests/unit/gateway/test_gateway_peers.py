"""The gateway among gateways: what waits elsewhere, and when that is not known."""

from pathlib import Path

import aiohttp

from shoal.api import keys
from shoal.core.routing.canary import CanaryHalt
from shoal.net.stream import ListenerIdentity, StreamPeer
from shoal.signals.demand import DemandStreams
from tests.support.gateway import INSTALL_KEY
from tests.support.gateway_process import ask, serving
from tests.support.gatewaypods import FIRST, OWN, SECOND, THIRD, following, gateway_pod
from tests.support.scripted_engine import ScriptedEngine
from tests.support.streams import told_gateway, until


async def test_what_waits_elsewhere_is_the_sum_over_the_others(tmp_path: Path):
    async with told_gateway(FIRST) as first, told_gateway(SECOND, first.port) as second:
        for gateway in (first, second):
            gateway.ring.known = (INSTALL_KEY,)
        first.book.held("m", 1, 0.0)
        second.book.held("m", 1, 0.0)
        second.book.held("m", 1, 0.0)
        pods = [
            gateway_pod("gateway-0", OWN),  # this one: it does not listen to itself
            gateway_pod("gateway-1", FIRST),
            gateway_pod("gateway-2", SECOND),
        ]
        async with following(tmp_path, first.port, *pods) as (peers, _):
            assert peers.held_by_peers("m") is None  # nothing is known yet
            await until(lambda: peers.live == 3)
            assert peers.held_by_peers("m") == 3
            assert peers.held_by_peers("another") == 0
            assert {reader.caller.name for reader in first.hub} == {"gateway-0"}
            assert {reader.caller.role for reader in first.hub} == {"gateway"}


async def test_a_gateway_that_was_ready_and_is_silent_makes_it_unknown_until_it_goes(tmp_path: Path):
    async with told_gateway(FIRST) as first:
        first.ring.known = (INSTALL_KEY,)
        first.book.held("m", 1, 0.0)
        silent = gateway_pod("gateway-2", THIRD)
        pods = [gateway_pod("gateway-1", FIRST), silent]
        async with following(tmp_path, first.port, *pods) as (peers, server):
            await until(lambda: peers.live == 2)
            assert peers.held_by_peers("m") is None
            await server.change("pods", gateway_pod("gateway-2", THIRD, deletionTimestamp="2026-01-01T00:00:00Z"))
            await until(lambda: peers.held_by_peers("m") == 1)


async def test_one_that_never_was_ready_holds_nothing(tmp_path: Path):
    async with told_gateway(FIRST) as first:
        first.ring.known = (INSTALL_KEY,)
        pods = [gateway_pod("gateway-1", FIRST), gateway_pod("gateway-2", None, ready=False)]
        async with following(tmp_path, first.port, *pods) as (peers, _):
            await until(lambda: peers.live == 2)
            assert peers.held_by_peers("m") == 0


async def test_a_canary_that_another_gateway_halted_is_known(tmp_path: Path):
    async with told_gateway(FIRST) as first:
        first.ring.known = (INSTALL_KEY,)
        async with following(tmp_path, first.port, gateway_pod("gateway-1", FIRST)) as (peers, _):
            await until(lambda: peers.live == 2)
            assert not peers.halted_canaries()
            first.publisher.set_canaries({"r1": CanaryHalt("Errors", 3, 5)})
            await until(lambda: peers.halted_canaries() == {"r1": CanaryHalt("Errors", 3, 5)})


async def test_the_whole_gateway_tells_what_becomes_of_a_request(tmp_path: Path):
    """From a client's request over the process's own ports to what an operator hears, and a scraper reads."""
    engine = ScriptedEngine()
    async with serving(tmp_path, engine) as process, aiohttp.ClientSession() as session:
        key = keys.derive(INSTALL_KEY, "operator", keys.DEMAND)
        streams = DemandStreams(lambda _uid, _models: None, ListenerIdentity("operator-1", "boot"))
        streams.start()
        streams.put(StreamPeer("g", "g", "127.0.0.1", key, process.ops.port))
        try:
            await until(lambda: bool(streams.live()))
            (heard,) = streams.live()
            assert heard.boot == process.identity.boot
            # No agent is heard, but the replica is Ready: that will do for a base model.
            async with ask(session, process) as answer:
                assert answer.status == 200
            await until(lambda: heard.demand("uid-llama").arrivals == 1)
            await until(lambda: heard.demand("uid-llama").in_flight == heard.demand("uid-llama").held == 0)
            async with session.get(f"http://127.0.0.1:{process.ops.port}/metrics") as metrics:
                text = await metrics.text()
            assert 'shoal_demand_arrivals_total{model="chat/llama",model_uid="uid-llama"} 1.0' in text
        finally:
            await streams.close()
