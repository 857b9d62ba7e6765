"""What gateways tell each other of tenants, from one's book over the stream into another's."""

import asyncio
from pathlib import Path

import orjson

from shoal.api.demand import TenantUse
from shoal.core.quota.limits import Cost, Limits
from shoal.core.quota.peerusage import UNKNOWN_PEERS, GatewayPeer
from shoal.gateway.demand import DemandState
from shoal.gateway.tenantdemand import TenantUsageState, route_account
from shoal.net.stream import ListenerIdentity
from shoal.net.stream import StreamPeer as At
from shoal.signals.demand import DemandStream
from tests.support.gateway import INSTALL_KEY
from tests.support.gatewaypods import FIRST, OWN, THIRD, following, gateway_pod
from tests.support.streams import told_gateway, until

COST = Cost(40, 5)


def asked(book: TenantUsageState, tenant: str, times: int = 1) -> None:
    for _ in range(times):
        assert book.of(tenant).reserve(1.0, COST, lambda: ()) is None
        book.note(tenant)


def requests_left(book: TenantUsageState, most: int) -> int:
    """Of a limit on `acme`, alone with what was heard."""
    account = book.of("acme")
    account.change(Limits(requests=most))
    return sum(account.reserve(book._clock(), Cost(1), lambda: ()) is None for _ in range(most + 1))


def test_what_is_told_reads_back_as_what_there_is():
    due: list[None] = []
    book = TenantUsageState(lambda: due.append(None))
    assert book.take() is None
    assert orjson.loads(book.full()) == {}
    asked(book, "acme", 2)
    book.of("globex")
    assert len(due) == 1  # one message for both
    told = orjson.loads(book.take() or b"")
    assert told == {"acme": {"requests": 2, "reservedTokens": 80, "inFlight": 2, "reservedSpend": 10}}
    assert book.take() is None
    book.of("acme").settle(2.0, COST, 30, 25, 3)
    book.note("acme")
    expected = TenantUse(requests=2, tokens=30, booked=25, reserved_tokens=40, in_flight=1, spent=3, reserved_spend=5)
    for message in (book.take(), book.full()):
        assert {n: TenantUse.model_validate(row) for n, row in orjson.loads(message or b"").items()} == {
            "acme": expected
        }


def test_money_beyond_64_bits_ends_no_stream():
    book = TenantUsageState()
    price = Cost(40, 10**20)
    assert book.of("acme").reserve(1.0, price, lambda: ()) is None
    book.of("acme").settle(2.0, price, 30, 25, 10**20)
    book.note("acme")
    told = orjson.loads(book.take() or b"")
    assert told["acme"]["spent"] == 2**63 - 1


def test_a_message_of_tenants_alone_is_one_of_the_stream():
    book = DemandState()
    asked(book.tenants, "acme")
    assert orjson.loads(b'{"models":' + (book.take() or b"") + b"}") == {
        "models": {},
        "tenants": {"acme": {"requests": 1, "reservedTokens": 40, "inFlight": 1, "reservedSpend": 5}},
    }
    assert set(orjson.loads(b'{"models":' + book.full() + b"}")) == {"models", "adapters", "tenants"}


def test_a_restart_is_no_negative_use_and_what_ran_before_counts():
    now = 1000.0
    book = TenantUsageState(clock=lambda: now)
    book.peer_reported("pod", "a", {})
    book.peer_reported("pod", "a", {"acme": TenantUse(requests=7)})
    book.peer_reported("pod", "a", {"acme": TenantUse(requests=7)})  # twice
    book.peer_reported("pod", "b", {"acme": TenantUse(requests=0)})
    assert book.boot_of("pod") == "b"
    book.peer_reported("pod", "b", {"acme": TenantUse(requests=2)})
    assert requests_left(book, 20) == 20 - 7 - 2
    now += 61
    assert requests_left(book, 20) == 20


def test_a_gateway_that_is_no_more_counts_with_what_it_used():
    now = 1000.0
    book = TenantUsageState(clock=lambda: now)
    book.peer_reported("pod", "a", {})
    book.peer_reported("pod", "a", {"acme": TenantUse(requests=5, in_flight=5)})
    book.retain([])
    assert book.boot_of("pod") is None
    assert requests_left(book, 20) == 15


def test_what_was_counted_of_a_route_goes_with_it_and_the_others_are_told():
    book, other = TenantUsageState(), TenantUsageState()
    gone, there = route_account("acme", "uid-gone"), route_account("acme", "uid-there")
    for name in ("acme", gone, there):
        asked(book, name)
    other.peer_reported(
        "pod", "a", {n: TenantUse.model_validate(r) for n, r in orjson.loads(book.take() or b"").items()}
    )
    assert not book.retain_routes({"uid-there"}), "a request of it still runs"
    book.accounts[gone].settle(2.0, COST, 30)
    book.ended(gone)
    assert book.retain_routes({"uid-there"}) == [gone]
    assert book.accounts.keys() == orjson.loads(book.full()).keys() == {"acme", there}
    told = orjson.loads(book.take() or b"")
    assert told == {gone: None}
    assert book.take() is None
    assert other.retain_routes({"uid-there"}) == [gone]
    other.peer_reported("pod", "a", told)
    assert other.accounts.keys() == {"acme", there}
    # Of one that nobody was told of nobody is told that it is gone.
    asked(book, gone)
    book.accounts[gone].settle(3.0, COST, 0)
    assert book.retain_routes({"uid-there"}) == [gone]
    assert book.take() is None


def test_an_older_gateway_does_not_say_what_its_tenants_use():
    heard: list[str] = []
    stream = DemandStream(
        At("g", "g", "h", "k"),
        None,  # pyright: ignore[reportArgumentType]
        lambda *_: None,
        ListenerIdentity(),
        lambda *said: heard.append(said[1]),
    )
    stream.take(b'{"boot":"b","seq":0,"full":true,"models":{}}')
    assert not stream.reports_tenants
    stream.take(b'{"boot":"b","seq":0,"full":true,"models":{},"tenants":{}}')
    assert stream.reports_tenants
    assert heard == ["b"]
    stream.lose()
    assert not stream.reports_tenants


async def test_gateways_know_who_else_there_is_and_whom_they_hear(tmp_path: Path):
    async with told_gateway(FIRST) as first:
        first.ring.known = (INSTALL_KEY,)
        pods = [
            gateway_pod("gateway-0", OWN),
            gateway_pod("gateway-1", FIRST),
            gateway_pod("gateway-2", THIRD),  # it was ready, and is stale
            gateway_pod("gateway-3", None, ready=False),
        ]
        async with following(tmp_path, first.port, *pods) as (peers, server):
            assert peers.quota_peers() == UNKNOWN_PEERS
            await until(lambda: peers.live == 2)
            asked(first.book.tenants, "acme")
            heard, silent = sorted(peers.quota_peers(), key=lambda peer: peer.reported_at is None)
            assert heard.boot == first.hub.boot
            assert silent == GatewayPeer(None, None)
            # A quiet gateway is heard every second all the same.
            before = heard.reported_at or 0.0
            async with asyncio.timeout(20):
                for _ in range(2):
                    while (now := max(p.reported_at or 0.0 for p in peers.quota_peers())) <= before:
                        await asyncio.sleep(0.02)
                    before = now
            await server.change("pods", gateway_pod("gateway-2", THIRD, deletionTimestamp="2026-01-01T00:00:00Z"))
            await until(lambda: len(peers.quota_peers()) == 1)
