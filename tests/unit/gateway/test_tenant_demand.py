"""What gateways tell each other of tenants, from one's book over the stream into another's."""

import asyncio
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from shoal.api.demand import MOST_GONE, MOST_RECENT, DemandMessage, TenantUse
from shoal.core.quota.limits import Cost, Limits
from shoal.core.quota.peerusage import UNKNOWN_PEERS, GatewayPeer
from shoal.gateway import tenantdemand
from shoal.gateway.demand import DemandState
from shoal.gateway.tenantdemand import TenantUsageState, route_account
from shoal.net.hub import Caller
from shoal.net.stream import ListenerIdentity, StreamBroken
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


def first_message(book: DemandState, role: str = "gateway") -> dict[str, Any]:
    return orjson.loads(b'{"boot":"b","seq":0,"full":true,"models":' + book.first(Caller(role)) + b"}")


def reader(book: TenantUsageState, pod: str = "pod", *, counted: bool = False) -> DemandStream:
    """`counted`: as at a gateway, which also takes counts of canaries."""
    nobody: Any = None
    return DemandStream(
        At(pod, pod, "h", "k"),
        nobody,
        lambda *_: None,
        ListenerIdentity(),
        book.peer_reported,
        (lambda *_: None) if counted else None,
        book.peer_lost,
    )


def used_elsewhere(book: TenantUsageState, tenant: str = "acme") -> int:
    return book.of(tenant).peer_usage.used("requests", 0, book._clock(), ())[0]


def test_a_gateway_that_begins_to_read_is_told_the_last_minute_and_an_operator_is_not():
    now = 1000.0
    sender, new = DemandState(), TenantUsageState(boot="new", clock=lambda: now)
    sender.tenants._clock = lambda: now
    for seconds in (0.0, 30.0):
        now += seconds
        assert sender.tenants.of("acme").reserve(now, COST, lambda: ()) is None
        sender.tenants.note("acme")
    sender.tenants.of("quiet").reserve(900.0, COST, lambda: ())
    sender.tenants.note("quiet")
    told = first_message(sender)
    DemandMessage.model_validate(told)
    assert {name: row["recent"] for name, row in told["tenants"].items()} == {
        "acme": [[0, 1, 0], [30, 1, 0]],
        "quiet": [],
    }
    for without in (first_message(sender, "operator")["tenants"], orjson.loads(sender.tenants.take() or b"")):
        assert not any("recent" in row for row in without.values())
    reader(new).take(orjson.dumps(told))
    seen = [used_elsewhere(new)]
    for seconds in (33.0, 33.0):
        now += seconds
        seen.append(used_elsewhere(new))
    assert seen == [2, 1, 0]
    assert not new.of("quiet").peer_usage.used("requests", 60, now, [GatewayPeer("b", now)])[0]


def test_gateways_of_an_older_and_a_newer_version_read_each_other():
    """Of an older one the time of its use is not known, so its share counts for a minute. What a newer one adds to a
    message is ignored."""
    new = TenantUsageState(boot="new", clock=lambda: 1000.0)
    row = {"requests": 2, "tokens": 9}
    reader(new).take(orjson.dumps({"boot": "old", "seq": 0, "full": True, "models": {}, "tenants": {"acme": row}}))
    assert new.of("acme").peer_usage.used("requests", 60, 1000.0, [GatewayPeer("old", 1000.0)])[0] == 30
    later = {"acme": row | {"recent": [], "later": {"x": [1]}}}
    full = {"boot": "newer", "seq": 0, "full": True, "models": {}, "tenants": later, "tenantsLater": [1]}
    reader(new, "other").take(orjson.dumps(full))
    assert used_elsewhere(new) == 0


ENTRY = [1, 1, 1]


@pytest.mark.parametrize(
    "more",
    [
        {"tenants": {"acme": {"recent": [[61, 1, 1]]}}},
        {"tenants": {"acme": {"recent": [[-1, 1, 1]]}}},
        {"tenants": {"acme": {"recent": [[1, -1, 1]]}}},
        {"tenants": {"acme": {"recent": [[1, 2**60, 1]]}}},
        {"tenants": {"acme": {"recent": [[1, 1]]}}},
        {"tenants": {"acme": {"recent": [ENTRY] * 62}}},
        {"tenants": {"acme": {"recent": 5}}},
        {"tenants": {f"t{n}": {"recent": [ENTRY] * 61} for n in range(MOST_RECENT // 61 + 1)}},
        {"tenantsGone": {"g": {"acme": [[61, 1, 1]]}}},
        {"tenantsGone": {"g": {"acme": [ENTRY] * 62}}},
        {"tenantsGone": {"g": [ENTRY]}},
        {"tenantsGone": {f"g{n}": {"acme": [ENTRY]} for n in range(MOST_GONE + 1)}},
        {"tenantsGone": {"g": {f"t{n}": [ENTRY] * 61 for n in range(MOST_RECENT // 61 + 1)}}},
    ],
    ids=lambda more: str(more)[:50],
)
def test_a_message_with_a_last_minute_that_cannot_be_changes_nothing(more: dict[str, Any]):
    new = TenantUsageState(boot="new", clock=lambda: 1000.0)
    message = {"boot": "b", "seq": 0, "full": True, "models": {}, "tenants": {}} | more
    with pytest.raises(StreamBroken):
        reader(new).take(orjson.dumps(message))
    assert not new.accounts


@pytest.mark.parametrize(
    "invalid",
    [
        {"canaryCounts": {"r": {"requests": 1, "failed": 2}}},
        {"canaries": {"r": {"reason": "Bored", "bad": 1, "of": 2}}},
        {"adapters": {"a": {"model": "m", "held": -1}}},
        {"tenantsGone": {"g": {"acme": [[61, 1, 1]]}}},
    ],
    ids=lambda invalid: next(iter(invalid)),
)
def test_nothing_is_taken_of_a_first_message_of_which_any_part_is_invalid(invalid: dict[str, Any]):
    """With invalid counts of canaries, the use of tenants was taken before the stream broke. So the peer was not among
    those whose streams have ended: `tenantsGone` of this gateway left it out, and that of its next first message was
    ignored."""
    book = TenantUsageState(boot="me", clock=lambda: 1000.0)
    stream = reader(book, counted=True)
    whole = {
        "boot": "peer",
        "seq": 0,
        "full": True,
        "models": {},
        "adapters": {"a": {"model": "m", "inFlight": 1}},
        "tenants": {"acme": {"requests": 3, "recent": [[1, 3, 30]]}},
        "tenantsGone": {"gone": {"acme": [[5, 2, 20]]}},
        "canaries": {"r": {"reason": "Slow", "bad": 1, "of": 2}},
        "canaryCounts": {"r": {"requests": 1}},
    }
    with pytest.raises(StreamBroken):
        stream.take(orjson.dumps(whole | invalid))
    stream.lose()
    assert (book.boot_of("pod"), dict(book.accounts)) == (None, {})
    assert (stream.adapters, stream.canaries, stream.canary_counts) == (None, {}, {})
    stream.take(orjson.dumps(whole))
    assert used_elsewhere(book) == 5
    assert stream.busy_adapters("m") == {"a"}
    stream.lose()
    assert orjson.loads(book.gone(0) or b"{}").keys() == {"peer", "gone"}


def test_nothing_is_taken_of_a_change_of_which_any_part_is_invalid():
    book = TenantUsageState(boot="me", clock=lambda: 1000.0)
    stream = reader(book, counted=True)
    stream.take(b'{"boot":"b","seq":0,"full":true,"models":{},"tenants":{},"adapters":{"a":{"model":"m"}}}')
    change = {"boot": "b", "seq": 1, "models": {}, "tenants": {"acme": {"requests": 3}}}
    with pytest.raises(StreamBroken):
        stream.take(orjson.dumps(change | {"adapters": {"a": None}, "canaryCounts": {"r": {"requests": -1}}}))
    assert not book.accounts
    assert stream.adapters is not None
    assert stream.adapters.keys() == {"a"}


def test_what_a_gateway_knows_of_one_that_is_gone_is_told_once_to_one_that_starts():
    now = 1000.0
    told, new = DemandState(), TenantUsageState(boot="new", clock=lambda: now)
    told.tenants._clock = lambda: now
    gone = reader(told.tenants, "gone")
    gone.take(b'{"boot":"g","seq":0,"full":true,"models":{},"tenants":{}}')
    gone.take(b'{"boot":"g","seq":1,"models":{},"tenants":{"acme":{"requests":5}}}')
    assert "tenantsGone" not in first_message(told), "it tells itself"
    now += 10
    gone.lose()
    message = first_message(told)
    DemandMessage.model_validate(message)
    assert message["tenantsGone"] == {"g": {"acme": [[10, 5, 0]]}}
    assert "tenantsGone" not in first_message(told, "operator")
    for _ in range(3):
        reader(new).take(orjson.dumps(message))
        now += 20
    assert used_elsewhere(new) == 0
    assert "tenantsGone" not in first_message(told)


@pytest.mark.parametrize("times", [2, 3000])
def test_a_gateway_with_wrong_counters_does_not_break_the_streams_of_the_others(times: int):
    told = DemandState()
    broken = reader(told.tenants, "broken")
    for seq in range(times):
        use = {"epoch": seq, "requests": 1, "tokens": 2**53 - 1, "reservedTokens": 2**53 - 1}
        message = {"boot": "b" * 600, "seq": seq, "full": not seq, "models": {}, "tenants": {"acme": use}}
        broken.take(orjson.dumps(message))
    broken.lose()
    new = TenantUsageState(boot="new")
    reader(new).take(orjson.dumps(first_message(told)))
    account = new.of("acme")
    account.change(Limits(tokens=10**9))
    assert account.reserve(time.monotonic(), Cost(1), lambda: ()) is not None, "its use counts, as far as it goes"


def test_a_name_that_no_reader_takes_is_not_told_to_others():
    told = TenantUsageState()
    broken = reader(told)
    with pytest.raises(StreamBroken):
        broken.take(orjson.dumps({"boot": "b", "seq": 0, "full": True, "models": {}, "tenants": {"a" * 513: {}}}))
    assert not told.accounts


def test_nothing_is_told_of_a_gateway_that_is_heard_and_nothing_is_taken_of_one():
    now = 1000.0
    book = TenantUsageState(boot="me", clock=lambda: now)
    stream = reader(book, "live")
    stream.take(b'{"boot":"live","seq":0,"full":true,"models":{},"tenants":{}}')
    gone = {boot: {"acme": ((0, 5, 0),)} for boot in ("live", "me")}
    book.peer_reported("other", "o", {}, full=True, gone=gone)
    assert used_elsewhere(book) == 0
    stream.lose()
    stream.take(b'{"boot":"live","seq":0,"full":true,"models":{},"tenants":{"acme":{"requests":1}}}')
    assert book.gone(0) is None


def test_a_gateway_may_be_heard_at_any_moment_until_it_is_silent(monkeypatch: pytest.MonkeyPatch):
    stream = reader(TenantUsageState())
    assert stream.awaited
    stream.take(b'{"boot":"b","seq":0,"full":true,"models":{}}')
    assert not stream.awaited, "it is heard"
    stream.lose()
    assert stream.awaited
    later = time.monotonic() + 13
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert not stream.awaited


def test_of_very_many_accounts_of_gateways_that_are_gone_the_largest_are_told(monkeypatch: pytest.MonkeyPatch):
    book = TenantUsageState(boot="me", clock=lambda: 1000.0)
    book.peer_reported("pod", "g", {})
    book.peer_reported("pod", "g", {f"t{n}": TenantUse(requests=n + 1) for n in range(100)})
    book.retain([])
    monkeypatch.setattr(tenantdemand, "MOST_GONE_BYTES", 1000)
    said = book.gone(0) or b""
    assert len(said) <= 1000
    rows = orjson.loads(said)["g"]
    assert rows.keys() == {f"t{99 - n}" for n in range(len(rows))}
    assert orjson.loads(book.gone(tenantdemand.MOST_BYTES) or b"") == {}, "the accounts take all of the message"


def test_of_very_many_gateways_that_are_gone_those_that_ended_last_are_told(monkeypatch: pytest.MonkeyPatch):
    book = TenantUsageState(boot="me", clock=lambda: 1000.0)
    for boot in ("first", "second", "third"):
        for n in range(2):
            book.peer_reported(boot, boot, {f"t{each}": TenantUse(requests=n) for each in range(100)})
        book.peer_lost(boot)
    monkeypatch.setattr(tenantdemand, "MOST_LOOKED", 200)
    assert orjson.loads(book.gone(0) or b"").keys() == {"second", "third"}
    monkeypatch.setattr(tenantdemand, "MOST_LOOKED", 10)
    assert orjson.loads(book.gone(0) or b"").keys() == {"third"}


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
            assert silent == GatewayPeer(None, None, expected=True), "it may be heard at any moment"
            # A quiet gateway is heard every second all the same.
            before = heard.reported_at or 0.0
            async with asyncio.timeout(20):
                for _ in range(2):
                    while (now := max(p.reported_at or 0.0 for p in peers.quota_peers())) <= before:
                        await asyncio.sleep(0.02)
                    before = now
            await server.change("pods", gateway_pod("gateway-2", THIRD, deletionTimestamp="2026-01-01T00:00:00Z"))
            await until(lambda: len(peers.quota_peers()) == 1)
