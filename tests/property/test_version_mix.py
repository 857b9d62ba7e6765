"""Versions that mix during an upgrade: whatever another one adds to its messages or leaves out of them, streams stay
up, what is said counts, and what is not said lowers nothing. And the mutations that must break it."""

import json
from collections.abc import Callable
from typing import Any, cast

import aiohttp
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pydantic import ConfigDict

from shoal.api import demand as demand_api
from shoal.api import reasons
from shoal.api import replica as replica_api
from shoal.core.scaling import Policy, SignalSource
from shoal.gateway.demand import DemandState
from shoal.net.stream import ListenerIdentity, StreamBroken, StreamPeer
from shoal.signals import replica as replica_stream
from shoal.signals.demand import DemandStream
from shoal.signals.live import demand_of, load_of
from shoal.signals.replica import ReplicaStream
from tests.support.scaling import KV_TOKENS, Term, replica, snapshot

DEMAND = {"arrivals": 7, "inFlight": 0, "held": 0}
LOAD = {"running": 0, "waiting": 0, "kvTokensUsed": 0}
MORE = {
    "maxRunning": 256,
    "waitingTokens": 0,
    "kvTokensTotal": KV_TOKENS,
    "promptTokensTotal": 0,
    "generationTokensTotal": 0,
}
POLICY = Policy(idle_seconds=60.0, stabilization_seconds=20.0)
NEWER = st.dictionaries(
    st.text("abc", min_size=1).map("x{}".format),
    st.one_of(st.integers(), st.text(), st.none(), st.lists(st.integers()), st.just({"a": {"b": 1}})),
    max_size=3,
)
"""What a later version says besides."""


def some(known: dict[str, int]) -> st.SearchStrategy[set[str]]:
    """What it leaves out."""
    return st.sets(st.sampled_from(sorted(known)))


def told(
    stream_of: Callable[[StreamPeer, aiohttp.ClientSession], Any], field: str, content: object, more: dict[str, Any]
) -> Any:
    """A stream that has taken a message."""
    stream = stream_of(StreamPeer("uid", "pod", "host", "key"), cast(aiohttp.ClientSession, None))
    stream.take(json.dumps({**more, "boot": "b", "seq": 1, "full": True, field: content}).encode())
    return stream


def gateway(row: dict[str, Any], more: dict[str, Any]) -> DemandStream:
    return told(
        lambda p, s: DemandStream(p, s, lambda _uid, _models: None, ListenerIdentity()), "models", {"m": row}, more
    )


def agent(row: dict[str, Any], more: dict[str, Any]) -> ReplicaStream:
    return told(lambda p, s: ReplicaStream(p, s, lambda _uid, _keys: None, ListenerIdentity()), "keys", row, more)


def _law(data: st.DataObject) -> None:
    left_out, silent = data.draw(some(DEMAND)), data.draw(some(LOAD))
    newer, fewer = data.draw(NEWER), data.draw(some(MORE))
    row = {name: value for name, value in DEMAND.items() if name not in left_out} | newer
    load = {name: value for name, value in LOAD.items() if name not in silent} | newer
    load |= {name: value for name, value in MORE.items() if name not in fewer}
    keys = agent({"phase": "ready", "engineBoot": "e", **load}, newer).keys
    assert keys is not None
    said = demand_of(gateway(row, newer).demand("m"))
    seen = snapshot(replica(0, load_of(keys)), sources=[SignalSource("gateway-0", "b", said)], policy=POLICY)

    term = Term()
    assert term.at(0.0, seen).wanted == 1
    decision = term.at(1000.0, seen)

    if left_out or silent:
        assert decision.wanted == 1
        assert decision.reason == reasons.SIGNALS_UNKNOWN or silent  # which counts as loaded: no fewer would do
        assert set(decision.stale) == ({"gateway-0"} if left_out else set()) | ({"pod-0"} if silent else set())
    else:
        assert (decision.wanted, decision.reason) == (0, reasons.SCALED_TO_ZERO)


def holds() -> None:
    @settings(max_examples=80, deadline=None)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        _law(data)

    run()


def breaks(error: type[Exception]) -> None:
    """Finds a case in which the law does not hold: the same one each time."""

    @settings(max_examples=500, deadline=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        _law(data)

    with pytest.raises(error):
        run()


def test_what_another_version_adds_is_passed_over_and_what_it_leaves_out_lowers_nothing() -> None:
    holds()


@pytest.mark.parametrize("held", [1, 40])
def test_one_that_leaves_something_out_still_wakes_a_model(held: int) -> None:
    said = demand_of(gateway({"held": held}, {}).demand("m"))
    decision = Term().at(0.0, snapshot(sources=[SignalSource("gateway-0", "b", said)], policy=POLICY))

    assert (decision.wanted, decision.reason) == (1, reasons.WAKING)


def test_a_gateway_of_this_version_leaves_nothing_out() -> None:
    book = DemandState()
    book.arrived("m")
    stream = gateway(json.loads(book.take() or b"")["m"], {})
    assert stream.demand("m").whole
    assert stream.demand("never named").whole


class _Strict(demand_api.ModelDemand):
    model_config = ConfigDict(extra="forbid")


class _StrictKeys(replica_api.ReplicaKeys):
    model_config = ConfigDict(extra="forbid")


class _Anything(frozenset[str]):
    """Has every key: with it for what is known, a follower passes over nothing."""

    def __contains__(self, key: object) -> bool:
        return True


class _Zeros(demand_api.ModelDemand):
    @property
    def whole(self) -> bool:
        return True


class _ZeroKeys(replica_api.ReplicaKeys):
    running: int | None = 0
    waiting: int | None = 0
    kv_tokens_used: int | None = 0


@pytest.mark.parametrize(
    ("module", "name", "mutant", "error"),
    [
        (demand_api, "ModelDemand", _Strict, StreamBroken),
        (replica_api, "ReplicaKeys", _StrictKeys, StreamBroken),
        (demand_api, "ModelDemand", _Zeros, AssertionError),
        (replica_api, "ReplicaKeys", _ZeroKeys, AssertionError),
    ],
    ids=["a gateway's news ends the stream", "an agent's", "a gateway's silence is zero", "an agent's is"],
)
def test_versions_mix_no_more_where_news_is_refused_or_silence_is_zero(
    module: Any, name: str, mutant: type, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, mutant)
    if mutant is _StrictKeys:
        monkeypatch.setattr(replica_stream, "_KNOWN_KEYS", _Anything())  # passes news over before anybody may refuse it
    breaks(error)
