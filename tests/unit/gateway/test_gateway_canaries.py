"""Canaries among gateways that each see too few of their requests: what they tell each other, and what it halts."""

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import orjson
import pytest

from shoal.api import keys
from shoal.api.demand import DemandMessage
from shoal.core.routing.canary import CanaryCounts, CanaryHalt
from shoal.core.routing.routes import DeclaredCanary, DeclaredRoute
from shoal.gateway.canaries import Canaries
from shoal.gateway.canarycounts import CanaryCountState
from shoal.gateway.demand import DemandState
from shoal.net.stream import ListenerIdentity, StreamBroken, StreamPeer
from shoal.signals.demand import DemandStream, DemandStreams
from tests.support.records import meter
from tests.support.routes import declared, target
from tests.support.streams import ToldGateway, told_gateway, until


def route(**halt_on: int) -> DeclaredRoute:
    canary = {"target": target("b"), "percent": 5, "haltOn": halt_on}
    return declared({"targets": [target("a")], "canary": canary})


def canary_of(one: DeclaredRoute) -> DeclaredCanary:
    (rule,) = one.rules
    assert rule.canary is not None
    return rule.canary


ROUTE = route()
"""Halted by more than 2 failures of 20 requests."""
CANARY = canary_of(ROUTE)
REVISION = CANARY.revision


class TalkingGateway:
    """The canaries of one gateway process, its demand stream, and its streams to the others."""

    def __init__(self, told: ToldGateway) -> None:
        self.told = told
        self.canaries = Canaries(self._halted, told.book.canary_counts)
        self.canaries.follow([ROUTE])
        identity = ListenerIdentity("gateway", told.hub.boot)
        self.streams = DemandStreams(lambda _uid, _models: None, identity, counted=self.canaries.counted)
        self.streams.start()

    def listen(self, *others: "TalkingGateway") -> None:
        self.streams.set_peers(
            other.told.peer(f"gateway-{number}", "gateway") for number, other in enumerate(others) if other is not self
        )

    def ended(self, *outcomes: str) -> None:
        for outcome in outcomes:
            one = meter()
            one.outcome = outcome  # type: ignore[assignment]
            self.canaries.ended(CANARY, one)

    @property
    def halt(self) -> CanaryHalt | None:
        return self.canaries.halts.get(REVISION)

    @property
    def heard(self) -> list[Mapping[str, CanaryCounts]]:
        return [stream.canary_counts for stream in self.streams.live()]

    def _halted(self) -> None:
        self.told.publisher.set_canaries(self.canaries.halts)


@contextlib.asynccontextmanager
async def gateways(number: int) -> AsyncGenerator[list[TalkingGateway]]:
    """So many gateways that listen to each other."""
    async with contextlib.AsyncExitStack() as stack:
        found = [TalkingGateway(await stack.enter_async_context(told_gateway())) for _ in range(number)]
        for one in found:
            stack.push_async_callback(one.streams.close)
            one.listen(*found)
        await until(lambda: all(len(one.streams.live()) == number - 1 for one in found))
        yield found


async def test_gateways_that_each_see_too_few_failures_halt_it_together():
    async with gateways(4) as them:
        for one in them[:3]:
            one.ended("answered", "failed")
        assert not any(one.halt for one in them), "nobody has heard of the others yet"
        await until(lambda: all(one.halt for one in them))
        assert {one.halt for one in them} == {CanaryHalt("Errors", 3, 6)}


async def test_as_many_failures_as_one_gateway_would_tolerate_halt_nothing():
    async with gateways(3) as them:
        them[0].ended("failed", *["answered"] * 5)
        them[1].ended("failed", *["answered"] * 5)
        both = {REVISION: CanaryCounts(6, 1)}
        await until(lambda: both in them[0].heard and both in them[1].heard and them[2].heard == [both, both])
        assert not any(one.halt for one in them)
        them[2].ended("failed")
        assert them[2].halt == CanaryHalt("Errors", 3, 13)


async def test_counts_that_are_told_again_after_a_cut_count_once():
    async with gateways(2) as (one, other):
        one.ended("failed", "failed")
        await until(lambda: other.heard == [{REVISION: CanaryCounts(2, 2)}])
        for _ in range(3):
            for reader in list(one.told.hub):
                reader.end()
            await until(lambda: not other.heard)
            await until(lambda: other.heard == [{REVISION: CanaryCounts(2, 2)}])
        assert other.halt is None
        other.ended("failed")
        assert other.halt == CanaryHalt("Errors", 3, 3)


async def test_a_gateway_that_starts_again_halts_nothing_and_its_failures_of_before_still_count():
    async with gateways(2) as (one, other):
        one.ended("failed", "failed")
        other.ended("answered")
        await until(lambda: other.heard == [{REVISION: CanaryCounts(2, 2)}])
        await one.told.down()
        await one.streams.close()
        await one.told.up()
        again = TalkingGateway(one.told)
        try:
            again.listen(other)
            await until(lambda: other.heard == [{}] and again.heard == [{REVISION: CanaryCounts(1, 0)}])
            again.ended("answered")
            await until(lambda: other.heard == [{REVISION: CanaryCounts(1, 0)}])
            assert not other.halt
            assert not again.halt
            again.ended("failed")
            await until(lambda: other.halt is not None)
            assert other.halt == CanaryHalt("Errors", 3, 5), "two before the restart, and one after it"
        finally:
            await again.streams.close()


def test_counts_of_a_route_that_is_not_known_yet_are_heard_again_with_it():
    canaries = Canaries()
    told = {REVISION: CanaryCounts(2, 2), "of no route here": CanaryCounts(99, 99)}
    canaries.counted("a", told)
    canaries.follow([ROUTE])
    for _ in range(2):  # with each change of the cluster
        canaries.counted("a", told)
    assert not canaries.halts
    canaries.counted("b", {REVISION: CanaryCounts(1, 1)})
    assert canaries.halts == {REVISION: CanaryHalt("Errors", 3, 3)}


def test_another_canary_begins_with_nothing():
    counts = CanaryCountState()
    canaries = Canaries(counts=counts)
    canaries.follow([ROUTE])
    failed = meter()
    failed.outcome = "failed"
    canaries.ended(CANARY, failed)
    assert orjson.loads(counts.take() or b"") == {
        REVISION: {"requests": 1, "failed": 1, "streams": 0, "slow": 0, "left": 0}
    }
    other = route(minRequests=30)
    canaries.follow([other])
    assert orjson.loads(counts.take() or b"") == {REVISION: None}
    assert counts.full() is None
    canaries.counted("a", {REVISION: CanaryCounts(9, 9)})
    assert not canaries.halts
    canaries.counted("a", {canary_of(other).revision: CanaryCounts(4, 4)})
    assert list(canaries.halts) == [canary_of(other).revision]


def test_what_is_told_is_what_the_message_says_it_is():
    book = DemandState()
    book.canary_counts.put("r1", CanaryCounts(7, 2, 4, 1, 3))
    for content in (book.full(), book.take() or b""):
        message = DemandMessage.model_validate_json(b'{"boot":"b","seq":1,"models":' + content + b"}")
        assert message.canary_counts is not None
        told = message.canary_counts["r1"]
        assert told is not None
        assert tuple(told.model_dump().values()) == (7, 2, 4, 1, 3)
    assert book.take() is None


# --- lies -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"requests": 1, "failed": 2},
        {"requests": -1},
        {"requests": 2**53},
        {"requests": 5, "streams": 4, "slow": 5},
        {"requests": 5, "streams": 4, "left": 5},
        {"requests": 5, "failed": 3, "streams": 3},
        {"requests": "many"},
        [],
    ],
)
def test_counts_that_cannot_be_end_the_stream_and_count_nothing(row: Any):
    heard: list[object] = []
    stream = DemandStream(
        StreamPeer("g", "g", "127.0.0.1", "key"),
        None,  # type: ignore[arg-type]
        lambda _uid, _models: None,
        ListenerIdentity(),
        counted=lambda _boot, counts: heard.append(counts),
    )
    message = {"boot": "b", "seq": 1, "full": True, "models": {}, "canaryCounts": {"r1": row}}
    with pytest.raises(StreamBroken):
        stream.take(orjson.dumps(message))
    assert not heard
    assert not stream.live


async def test_who_has_no_key_of_the_installation_hears_no_counts():
    async with gateways(2) as (one, other):
        outsider = DemandStreams(lambda _uid, _models: None, ListenerIdentity(), counted=lambda _boot, _counts: None)
        outsider.start()
        try:
            forged = keys.derive(b"not the install key ............", "gateway", keys.DEMAND)
            outsider.put(StreamPeer("g", "g", one.told.host, forged, one.told.port))
            one.ended("failed", "failed", "failed")
            await until(lambda: other.halt is not None)
            assert not outsider.live()
        finally:
            await outsider.close()
