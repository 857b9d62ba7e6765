"""However messages are late, lost or doubled, and gateways start, stop and join: all together never pass a limit by
more than what the one that lets a request pass could not have heard. And with a protection off, they do.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from shoal.core.quota import account as accounts
from shoal.core.quota import gatewayusage
from shoal.core.quota.account import Account
from shoal.core.quota.gatewayusage import GatewayUsage
from shoal.core.quota.limits import Limit
from shoal.core.quota.share import Share, overshoot
from tests.support.quota_world import TENANT, Gate, World

LIMITS = st.sampled_from(["requests", "tokens", "concurrent"])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask"] * 12 + ["tell"] * 6 + ["end"] * 4 + ["wait"] * 2 + ["restart", "join", "leave", "cut", "mend"]
        ),
        st.integers(0, 5),
        st.integers(0, 5),
        st.integers(1, 40),
        st.sampled_from([0.001, 0.3, 1.1, 2.7, 13.0, 61.0]),
    ),
    max_size=90,
)
FATES = (0.0, 0.05, 0.4, 3.0, None)


def play(limit: Limit, most: int, gates: int, steps: list[tuple[str, int, int, int, float]]) -> World:
    world = World(limit, most, gates)
    for what, one, other, amount, seconds in steps:
        world.pass_time(seconds if what == "wait" else 0.001)
        gate = world.gates[one % len(world.gates)]
        peer = world.gates[other % len(world.gates)]
        if what == "ask":
            for _ in range(amount if limit != "tokens" else 3):
                world.pass_time(0.001)
                world.ask(gate, amount)
        elif what == "end":
            world.end(gate, amount)
        elif what == "tell":
            world.tell(gate, [FATES[(other + n * amount) % len(FATES)] for n in range(len(world.gates))])
        elif what == "restart":
            world.boot(gate)
        elif what == "join" and len(world.gates) < 6:
            world.join()
        elif what == "leave" and len(world.gates) > 1:
            world.leave(gate)
        elif what == "cut":
            world.cut(gate, peer)
        elif what == "mend":
            world.cut_off.discard((gate.pod, peer.pod))
    return world


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(LIMITS, st.integers(1, 120), st.integers(1, 5), STEPS)
def test_all_together_pass_a_limit_by_no_more_than_what_was_not_heard(
    limit: Limit, most: int, gates: int, steps: list[tuple[str, int, int, int, float]]
) -> None:
    play(limit, most, gates, steps)


def everywhere_at_once(
    most: int, gates: int, costs: list[int], phases: list[int], delays: list[int], limit: Limit = "tokens"
) -> World:
    """A burst at all gateways within 50 ms, and whoever was refused comes again four times a second. Gateways tell
    every second, each in its own phase, and messages take at most half a second."""
    world = World(limit, most, gates)
    world.pass_time(2.0)
    for _ in range(3):
        _tell_all(world, [0] * gates, 0)
        world.pass_time(1.6)
    began = world.now
    turns = 0
    for tick in range(160):
        for number, gate in enumerate(world.gates):
            if (tick + phases[number % len(phases)]) % 20 == 0:
                world.tell(gate, [delays[(tick + n) % len(delays)] / 100 for n in range(gates)])
            if tick % 5 == 0:
                # Until its share is used up, as a burst does: a large request that does not fit stops no small one.
                refused = 0
                while refused < len(costs):
                    refused = 0 if world.ask(gate, costs[turns % len(costs)]) else refused + 1
                    turns += 1
        world.pass_time(0.05)
    assert world.now - began < 60
    return world


def _tell_all(world: World, phases: list[int], delay: float) -> None:
    for gate in world.gates:
        world.tell(gate, [delay] * len(phases))


BURSTS = (
    st.integers(20, 2000),
    st.integers(2, 6),
    st.lists(st.integers(1, 60), min_size=1, max_size=7),
    st.lists(st.integers(0, 19), min_size=1, max_size=6),
    st.lists(st.integers(0, 45), min_size=1, max_size=5),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(*BURSTS)
@example(most=200, gates=5, costs=[1, 40], phases=[0], delays=[0])  # small requests between large ones that do not fit
def test_a_burst_everywhere_at_once_goes_over_by_one_request_of_each_other_gateway(
    most: int, gates: int, costs: list[int], phases: list[int], delays: list[int]
) -> None:
    world = everywhere_at_once(most, gates, costs, phases, delays)
    assert world.used() - most <= overshoot(most, gates, max(costs))
    assert world.used() > most - max(costs)  # and the limit can be used, to the last request that fits


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 120), st.integers(2, 6), *BURSTS[3:])
@example(most=1, gates=4, phases=[0, 7, 13], delays=[0])
def test_so_does_a_burst_of_requests_at_a_time_also_where_no_gateway_has_a_whole_share(
    most: int, gates: int, phases: list[int], delays: list[int]
) -> None:
    world = everywhere_at_once(most, gates, [1], phases, delays, "concurrent")
    assert most <= world.used() <= most + overshoot(most, gates, 1)


def one_after_the_other(most: int, gates: int, at: int, ticks: int) -> list[int]:
    """A client with one request at a time, at `at` of the gateways in turn: for how many ticks of 50 ms each had to
    ask. A gateway that frees a place says so in the next tick, as it does in 50 ms."""
    world = World("concurrent", most, gates)
    world.pass_time(2.0)
    _tell_all(world, [0] * gates, 0.0)
    world.pass_time(2.0)
    asked: list[int] = []
    runs: Gate | None = None
    tried = 0
    for tick in range(ticks):
        world.pass_time(0.05)
        for number, gate in enumerate(world.gates):
            if (tick + 7 * number) % 20 == 0 or gate.book.of(TENANT).frees_place:
                world.tell(gate, [0.02] * gates)
        world.pass_time(0.001)
        if runs is not None and tick % 3 == 0:
            world.end(runs, 1)
            runs = None
        if runs is None:
            tried += 1
            gate = world.gates[len(asked) % at]
            if world.ask(gate, 1):
                runs = gate
                asked.append(tried)
                tried = 0
    return asked


@pytest.mark.parametrize(("most", "gates", "at"), [(1, 4, 1), (1, 2, 2), (1, 4, 4), (2, 4, 4), (3, 4, 4)])
def test_a_client_with_one_request_at_a_time_hardly_waits_at_whichever_gateway(most: int, gates: int, at: int) -> None:
    asked = one_after_the_other(most, gates, at, 1200)
    assert max(asked) <= (1 if at == 1 else 4)
    assert len(asked) >= (400 if at == 1 else 200)


def steadily(most: int, gates: int, at: int, a_second: int, seconds: int) -> tuple[World, int]:
    """So many requests a second, at `at` of the gateways in turn; and how many passed in the last minute."""
    world = World("requests", most, gates)
    world.pass_time(2.0)
    _tell_all(world, [0] * gates, 0.0)
    world.pass_time(2.0)
    before = 0
    for tick in range(seconds * 20):
        world.pass_time(0.05)
        for number, gate in enumerate(world.gates):
            if (tick + 5 * number) % 20 == 0:
                world.tell(gate, [0.02] * gates)
        for turn in range(a_second * tick // 20, a_second * (tick + 1) // 20):
            world.pass_time(0.0001)
            world.ask(world.gates[turn % at], 1)
        if tick == (seconds - 60) * 20:
            before = world.passed
    return world, world.passed - before


@pytest.mark.parametrize(("gates", "at"), [(4, 4), (4, 1), (3, 2), (1, 1)])
def test_who_asks_for_more_gets_the_limit_and_no_more(gates: int, at: int) -> None:
    _, passed = steadily(120, gates, at, 6, 130)
    assert 108 <= passed <= 120


@pytest.mark.parametrize(("gates", "at"), [(4, 4), (4, 1)])
def test_who_asks_for_less_than_the_limit_gets_all(gates: int, at: int) -> None:
    world, _ = steadily(120, gates, at, 1, 130)
    assert world.passed == 130


# --- with a protection off --------------------------------------------------------------------------------------------


def _whole(self: Share, now: float, own: int, others: int, remaining: int, gateways: int) -> None:
    _renew(self, now, own, others, remaining, 1)


def _used_again(self: Share, now: float, own: int, others: int, remaining: int, gateways: int) -> None:
    _renew(self, now, own, others, max(0, remaining), gateways)


def _alone(self: Account, limit: Limit, now: float, peers: Any) -> tuple[int, int]:
    return 0, _others(self, limit, now, peers)[1]


def _forgotten(self: GatewayUsage, now: float) -> None:
    self.__init__()
    self.gone_at = now


def _unreserved(self: Account, limit: Limit, now: float) -> int:
    return _own(self, limit, now) - (self.own_use().reserved_tokens if limit == "tokens" else 0)


def _running_anyway(self: GatewayUsage, limit: Limit, now: float) -> int:
    return self.tokens.sum(now) if limit == "tokens" else _used(self, limit, now)


def _nothing(*_: Any, **__: Any) -> None:
    """What is told of the last minute is believed to be nothing."""


def _at_once(*_: Any, **__: Any) -> bool:
    return True


_renew, _others, _own, _used = Share.renew, Account._peer_use, Account._own, GatewayUsage.used  # pyright: ignore[reportPrivateUsage]

OFF: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "each takes all that is left": (Share, "renew", _whole),
    "what others use does not count": (Account, "_peer_use", _alone),
    "what is reserved here does not count": (Account, "_own", _unreserved),
    "what is reserved elsewhere does not count": (GatewayUsage, "used", _running_anyway),
    "what a first message tells does not count": (gatewayusage, "restore", _nothing),
}


@pytest.mark.parametrize("protection", OFF)
def test_with_a_protection_off_the_bound_is_passed(protection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*OFF[protection])

    @settings(
        max_examples=2000,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(LIMITS, st.integers(1, 120), st.integers(1, 5), STEPS)
    def search(limit: Limit, most: int, gates: int, steps: list[tuple[str, int, int, int, float]]) -> None:
        play(limit, most, gates, steps)

    with pytest.raises(AssertionError):
        search()


def _a_restart() -> None:
    world = World("requests", 20, 2)
    first, second = world.gates
    world.pass_time(2.0)
    _tell_all(world, [0, 0], 0.0)
    world.pass_time(2.0)
    for _ in range(10):
        world.ask(first, 1)
    for _ in range(2):
        for gate in (first, second):
            world.tell(gate, [0.0])
        world.pass_time(2.0)
        if first in world.gates:
            world.boot(first)
            first = world.gates[0]
    for _ in range(20):
        world.pass_time(0.001)
        world.ask(second, 1)


def test_what_a_gateway_used_before_its_restart_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    _a_restart()
    monkeypatch.setattr(GatewayUsage, "mark_gone", _forgotten)
    with pytest.raises(AssertionError):
        _a_restart()


@pytest.mark.parametrize(("limit", "cost"), [("tokens", 10), ("concurrent", 1)])
def test_without_waiting_for_the_others_a_burst_goes_further_over(
    limit: Limit, cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Account, "_may_renew", _at_once)
    world = everywhere_at_once(1000, 4, [cost], [0], [0], limit)
    assert world.used() - 1000 > overshoot(1000, 4, cost)


def _all_end_at_once(gates: int = 4, most: int = 40) -> int:
    """One gateway has all the requests that may run at a time, and the others refuse. Then all of them end, it says so,
    and everybody asks for as many as it gets. How many run then."""
    world = World("concurrent", most, gates)
    first = world.gates[0]
    world.pass_time(2.0)
    for _ in range(60):
        _tell_all(world, [0] * gates, 0.0)
        world.pass_time(2.0)
        while world.ask(first, 1):
            pass
    assert world.used() == most
    _tell_all(world, [0] * gates, 0.0)
    world.pass_time(0.1)
    assert not any(world.ask(gate, 1) for gate in world.gates)
    for _ in range(most):
        world.end(first, 1)
    assert first.book.of(TENANT).frees_place
    world.tell(first, [0.0] * gates)
    assert not first.book.of(TENANT).frees_place
    world.pass_time(0.01)
    for gate in world.gates:
        while world.ask(gate, 1):
            pass
    return world.used()


def test_what_a_gateway_reports_as_free_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 40 <= _all_end_at_once() <= 40 + overshoot(40, 4, 1)
    monkeypatch.setattr(Share, "release", lambda *_: None)
    assert _all_end_at_once() > 40 + overshoot(40, 4, 1)


def _over_by_one() -> None:
    """Both gateways let pass the last request; a minute after the first one, its place is free again for nobody."""
    world = World("requests", 3, 2)
    first, second = world.gates

    def hear(seconds: float) -> None:
        world.pass_time(seconds)
        _tell_all(world, [0, 0], 0.0)
        world.pass_time(2.0)

    hear(2.0)
    assert world.ask(first, 1)
    hear(20.0)
    assert world.ask(first, 1)
    hear(0.1)
    assert world.ask(first, 1)
    assert world.ask(second, 1)
    assert world.used() == 4
    hear(34.4)
    assert not world.ask(first, 1)
    world.pass_time(1.0)
    assert world.used() == 3
    world.ask(first, 1)


def test_if_what_leaves_the_window_were_used_again_at_once_an_overshoot_would_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _over_by_one()
    monkeypatch.setattr(Share, "renew", _used_again)
    with pytest.raises(AssertionError):
        _over_by_one()


def test_the_bound() -> None:
    assert overshoot(1000, 1, 50) == 0
    assert overshoot(1000, 4, 1) == 3
    assert overshoot(1000, 4, 50) == 150
    assert overshoot(20, 4, 50) == 60
    # Two shares of a quarter before anybody hears of the first: 437 each, and a request more each time.
    assert overshoot(1000, 4, 0, shares=2) == 4 * 438 - 1000
    assert overshoot(1000, 4, 10, shares=100) == 3000
    assert accounts.PUBLISH_SECONDS + accounts.WIRE_SECONDS < accounts.ROUND_SECONDS


def test_a_gate_alone_uses_its_limit_to_the_last() -> None:
    world = World("requests", 7, 1)
    gate: Gate = world.gates[0]
    assert sum(world.ask(gate, 1) for _ in range(20)) == 7
