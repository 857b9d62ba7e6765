"""A gateway that has just started, while a tenant has used some of its limit at the others: the first message of each
of them says how much, and when. In virtual time."""

import pytest

from shoal.api.demand import TenantUse
from shoal.core.quota.account import Account, may_learn
from shoal.core.quota.gatewayusage import GatewayUsage
from shoal.core.quota.limits import Cost, Limit, Limits
from shoal.core.quota.peerusage import GatewayPeer
from shoal.core.quota.recent import recent_use, restore
from shoal.core.quota.window import Window
from tests.support.quota_client import Client
from tests.support.quota_world import TENANT, Gate


def asked_until_refused(client: Client, gate: Gate, tokens: int) -> int:
    count = 0
    while client.ask(gate, tokens):
        client.world.end(gate, tokens)
        count += 1
    return count


@pytest.mark.parametrize("late", [0.05, 0.4])
@pytest.mark.parametrize("gateways", range(2, 9))
@pytest.mark.parametrize(
    ("limit", "most", "tokens"), [("requests", 8, 1), ("requests", 60, 1), ("tokens", 800, 100)], ids=str
)
def test_a_client_near_its_limit_gets_all_that_is_left_at_a_gateway_that_starts(
    limit: Limit, most: int, tokens: int, gateways: int, late: float
) -> None:
    """It got a 429 after limit / gateways requests, or at once."""
    fit = most // tokens
    for at, before in ((1, fit // 2), (gateways - 1, fit // 2), (1, fit - 1), (gateways - 1, 0)):
        client = Client(limit, most, gateways - 1, late)
        began = client.world.now
        for turn in range(before):
            gate = client.world.gates[turn % at]
            assert client.ask(gate, tokens)
            client.world.end(gate, tokens)
        client.pass_time(2.0)  # a gateway is ready when it has listed what there is
        new = client.world.join()
        client.pass_time(1.5)  # and by then the others know it
        client.connect()
        client.pass_time(late + 0.05)
        while client.world.now < began + 60.0 and client.ask(new, tokens):  # until the first leave the window
            client.world.end(new, tokens)
        if client.world.now < began + 60.0:
            assert client.world.used() == most, "refused, although there is room"
            assert client.world.over is not None
            assert client.world.over.why == "over"


@pytest.mark.parametrize("gateways", range(2, 9))
def test_a_client_that_comes_before_the_first_messages_waits_for_them(gateways: int) -> None:
    """The limit is passed by no more than the share of a gateway that knows nothing."""
    most = 8 * gateways
    client = Client("requests", most, gateways - 1, 0.3)
    for _ in range(most - 8):
        assert client.ask(client.world.gates[0], 1)
    client.pass_time(2.0)
    new = client.world.join()
    for other in client.world.gates:
        other.born = min(other.born, client.world.now - 5)
    client.connect()  # they are under way
    assert asked_until_refused(client, new, 1) >= 8
    assert client.world.used() <= most + most // gateways


def test_a_gateway_that_restarts_is_told_what_it_used_before_by_those_that_heard_it() -> None:
    client = Client("requests", 20, 3, 0.05)
    for _ in range(12):
        assert client.ask(client.world.gates[0], 1)
    client.pass_time(2.0)
    client.world.boot(client.world.gates[0])
    again = client.world.gates[0]
    client.connect()
    client.pass_time(0.1)
    assert asked_until_refused(client, again, 1) == 8
    assert client.world.used() == 20


def test_a_gateway_that_follows_another_one_is_told_what_that_used() -> None:
    """As in a rollout, one pod after the other."""
    client = Client("requests", 20, 2, 0.05)
    for _ in range(2):
        for _ in range(4):
            assert client.ask(client.world.gates[0], 1)
        client.pass_time(2.0)
        client.world.leave(client.world.gates[0])
        client.world.join()
        client.pass_time(1.5)
        client.connect()
        client.pass_time(1.0)
    assert asked_until_refused(client, client.world.gates[1], 1) == 12
    assert client.world.used() == 20


def test_a_limit_that_is_used_up_by_what_is_assumed_of_a_gateway_that_connects_is_perhaps_not_used_up() -> None:
    it = Account("me")
    it.change(Limits(requests=8))
    for expected, why in ((True, "elsewhere"), (False, "over")):
        peers = [GatewayPeer(None, None, expected)]
        over = None
        while over is None:
            over = it.reserve(1000.0, Cost(1), lambda peers=peers: peers)
        assert (over.why, over.used) == (why, 8)
        assert may_learn(1000.0, peers) is expected


# --- the last minute, by age ------------------------------------------------------------------------------------------


def test_what_was_used_leaves_the_window_of_the_reader_less_than_two_seconds_after_it_has_left_the_own_one() -> None:
    """The clocks of two machines differ, also in when their seconds begin."""
    for clock in (0.0, 0.3, 0.7, -12345.6):
        own, heard, before = (Window(), Window()), (Window(), Window()), list[tuple[int, int]]()
        for at, amount in ((100.2, 1), (100.9, 2), (131.5, 4), (159.99, 8)):
            own[0].add(at, amount)
            own[1].add(at, 10 * amount)
        restore(recent_use(*own, 160.0, 61), *heard, 160.0 + clock)
        for tenths in range(1600, 2300):
            now = tenths / 10
            before.append((own[0].sum(now), own[1].sum(now)))
            for which, of_reader in enumerate(heard):
                assert before[-1][which] <= of_reader.sum(now + clock) <= before[max(0, len(before) - 21)][which]
        assert before[-1] == (0, 0)


@pytest.mark.parametrize("most", [1, 2, 7, 61])
def test_with_fewer_entries_than_seconds_nothing_counts_shorter(most: int) -> None:
    own, heard = (Window(), Window()), (Window(), Window())
    for second in range(100, 161):
        own[second % 2].add(float(second), 1)
    told = recent_use(*own, 160.0, most, reserved=5)
    assert len(told) <= most
    restore(told, *heard, 160.0)
    assert heard[1].sum(160.0) == own[1].sum(160.0) + 5
    for now in range(160, 222):
        assert own[0].sum(now) <= heard[0].sum(now)
        assert own[1].sum(now) <= heard[1].sum(now)
    assert heard[0].sum(222.0) == heard[1].sum(222.0) == 0


def test_what_a_stream_that_begins_again_says_replaces_what_was_known() -> None:
    """What was used while it was broken counted as used when it was heard, for a minute more."""
    it = GatewayUsage()
    it.begin(TenantUse(requests=3), 100.0)
    it.update(TenantUse(requests=9, recent=((40, 6, 0),)), 150.0)
    assert not it.window_unknown(150.0)
    assert [it.used("requests", now) for now in (150.0, 170.0, 172.0)] == [6, 6, 0]
    it.update(TenantUse(requests=10), 172.0)
    assert it.used("requests", 172.0) == 1


def test_of_two_that_tell_of_a_third_one_the_one_that_knew_more_counts_and_itself_first() -> None:
    it = Account("me")
    told = it.peer_usage
    for requests in (5, 7, 6):
        told.relay("gone", ((3, requests, 0),), 100.0)
    told.relay("me", ((3, 90, 0),), 100.0)
    assert told.used("requests", 100, 100.0, ())[0] == 7
    told.update("gone", TenantUse(requests=40, recent=((1, 8, 0),)), 101.0, unknown_before=True)
    told.relay("gone", ((0, 50, 0),), 102.0)
    assert told.used("requests", 100, 102.0, ())[0] == 8
    assert it.own_use() == TenantUse()


@pytest.mark.parametrize(
    "told", [((3, 5, 10), (3, 4, 90)), ((3, 4, 90), (3, 5, 10))], ids=["more requests first", "last"]
)
def test_of_two_that_tell_of_a_third_one_each_counts_with_what_it_knew_more_of(
    told: tuple[tuple[int, int, int], ...],
) -> None:
    """One knew of more requests, and the other of more tokens, which counted for nothing: a limit could be passed."""
    it = Account("me")
    it.change(Limits(requests=8, tokens=100))
    for each in told:
        it.peer_usage.relay("gone", (each,), 100.0)
    assert [it.peer_usage.used(limit, 100, 100.0, ())[0] for limit in ("requests", "tokens")] == [5, 90]
    assert it.reserve(100.0, Cost(20), lambda: ()) is not None
    assert it.reserve(100.0, Cost(10), lambda: ()) is None


def test_of_two_that_tell_of_a_third_one_each_counts_for_as_long_as_what_it_knew() -> None:
    """Before, what the one that knew less knew was lost, also when what the other one knew had left the window."""
    usage = GatewayUsage()
    for age, asked in ((50, 10), (5, 4), (5, 4)):
        usage.relay([(age, asked, 10 * asked)], 100.0)
    for now, asked in ((100.0, 10), (111.9, 10), (112.0, 4), (156.9, 4), (157.0, 0)):
        assert usage.used("requests", now) == asked
        assert usage.used("tokens", now) == 10 * asked


def test_what_was_told_of_one_that_is_gone_is_dropped_when_it_counts_no_more() -> None:
    it = Account("me")
    it.peer_usage.relay("gone", ((0, 5, 0),), 100.0)
    assert not it.unused(150.0)
    assert it.unused(162.0)


def test_a_tenants_account_knows_its_own_last_minute() -> None:
    client = Client("requests", 20, 1, 0.05)
    assert client.ask(client.world.gates[0], 1)
    client.pass_time(5.0)
    assert client.world.gates[0].book.of(TENANT).recent(client.world.now, 61) == [(5, 1, 0)]
    client.pass_time(61.0)
    assert not client.world.gates[0].book.of(TENANT).recent(client.world.now, 61)
