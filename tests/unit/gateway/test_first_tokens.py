"""The first token of a replica whose engine a gateway saw become ready."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.api.demand import MOST_FIRST_TOKENS, FirstToken
from shoal.gateway.demand import DemandState
from shoal.gateway.firsttokens import FirstTokens
from tests.support.clock import Clock
from tests.support.gateway import MODEL, GatewayUnderTest, gateway, replica
from tests.support.scripted_engine import EngineRequest, ScriptedEngine, serve_normally
from tests.unit.gateway.test_gateway_demand import told
from tests.unit.gateway.test_gateway_hold import CHAT, STREAM, asleep, until_held, wake

POD = replica(1)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> DemandState:
    found = DemandState(clock)
    found.arrived(MODEL.uid)
    return found


@pytest.fixture
def first(book: DemandState, clock: Clock) -> FirstTokens:
    return FirstTokens(book, clock)


def tells(book: DemandState) -> dict[str, FirstToken]:
    """As a reader understands the full state."""
    row = told(book.full().partition(b',"adapters"')[0]).get(MODEL.uid)
    return {} if row is None else row.first_tokens


def test_a_request_that_waited_counts_from_readiness(first: FirstTokens, book: DemandState, clock: Clock) -> None:
    since = clock.now
    first.reported(POD.uid, "fetching")
    first.reported(POD.uid, "loading")
    clock.now += 60
    first.reported(POD.uid, "ready")
    clock.now += 1
    request = first.sent(POD, since)
    assert request is not None
    clock.now += 3
    request.answers(shows=True)
    request.ended()
    assert tells(book) == {POD.uid: FirstToken(after=1, seconds=4)}
    assert first.sent(POD, None) is None, "the second finds a warmer engine"


def test_a_request_that_came_later_counts_from_when_it_was_sent(
    first: FirstTokens, book: DemandState, clock: Clock
) -> None:
    first.reported(POD.uid, "loading")
    first.reported(POD.uid, "ready")
    clock.now += 600
    request = first.sent(POD, None)
    assert request is not None
    clock.now += 2
    request.answers(shows=True)
    assert tells(book) == {POD.uid: FirstToken(after=600, seconds=2)}


def test_an_answer_that_does_not_show_its_first_token_leaves_it_unknown(
    first: FirstTokens, book: DemandState, clock: Clock
) -> None:
    for phase in ("loading", "ready"):
        first.reported(POD.uid, phase)
    request = first.sent(POD, None)
    assert request is not None
    clock.now += 9
    request.answers(shows=False)
    assert tells(book) == {POD.uid: FirstToken(after=0, seconds=None)}, "unknown, and not zero"


def test_a_request_that_failed_leaves_it_unknown(first: FirstTokens, book: DemandState) -> None:
    for phase in ("loading", "ready"):
        first.reported(POD.uid, phase)
    request = first.sent(POD, None)
    assert request is not None
    request.ended()
    assert tells(book) == {POD.uid: FirstToken(after=0, seconds=None)}
    assert first.sent(POD, None) is None


def test_a_replica_that_was_ready_before_is_not_new(first: FirstTokens) -> None:
    first.reported(POD.uid, "ready")
    assert first.sent(POD, None) is None, "whether others asked it is not known"
    for phase in ("loading", "ready"):
        first.reported(POD.uid, phase)
    assert first.sent(POD, None) is None, "its engine started again, which is no cold start"


@pytest.mark.parametrize("meanwhile", ["loading", "draining", "stalled", None])
def test_a_replica_that_was_not_served_while_it_was_new_is_unknown(first: FirstTokens, meanwhile: Any) -> None:
    for phase in ("loading", "ready"):
        first.reported(POD.uid, phase)
    if meanwhile is None:
        first.down(POD.uid)  # the stream broke: others may have asked it
    else:
        first.reported(POD.uid, meanwhile)
    first.reported(POD.uid, "ready")
    assert first.sent(POD, None) is None


def test_an_agent_that_does_not_know_the_phase_changes_nothing(first: FirstTokens) -> None:
    for phase in ("loading", None, "ready", None):
        first.reported(POD.uid, phase)
    assert first.sent(POD, None) is not None


def test_pods_that_are_gone_are_forgotten(first: FirstTokens, book: DemandState) -> None:
    for number in (1, 2):
        for phase in ("loading", "ready"):
            first.reported(f"pod-{number}", phase)
        request = first.sent(replica(number), None)
        assert request is not None
        request.answers(shows=True)
    first.keep({"pod-2"})
    assert tells(book).keys() == {"pod-2"}
    first.keep(())
    assert tells(book) == {}


def test_a_gateway_tells_of_the_last_ones_only(book: DemandState) -> None:
    for number in range(MOST_FIRST_TOKENS + 5):
        book.first_token(MODEL.uid, f"pod-{number}", 0.0, 1.0)
    assert len(tells(book)) == MOST_FIRST_TOKENS
    assert f"pod-{MOST_FIRST_TOKENS + 4}" in tells(book)
    book.retain(())
    assert tells(book) == {}


# --- through a gateway ------------------------------------------------------------------------------------------------


def seen(it: GatewayUnderTest) -> dict[str, FirstToken]:
    return tells(it.app.demand)


async def test_a_wake_tells_how_long_the_first_stream_took(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine(), live=False) as it:
        asleep(it)
        post = asyncio.create_task(it.post(STREAM))
        await until_held(it, 1)
        wake(it, phase="loading")
        assert seen(it) == {}
        wake(it)
        response = await post
        await response.read()
        [(uid, first)] = seen(it).items()
        assert uid == "pod-1"
        assert first.seconds is not None
        second = await it.post(STREAM)
        await second.read()
        assert seen(it) == {uid: first}


async def test_a_long_answer_in_one_piece_tells_nothing(tmp_path: Path) -> None:
    async def long(request: EngineRequest) -> None:
        message = {"role": "assistant", "content": "abc " * 40}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        usage = {"prompt_tokens": 7, "completion_tokens": 40, "total_tokens": 47}
        body = {"id": request.body.get("rid"), "model": request.model, "choices": choices, "usage": usage}
        await request.answer(200, json.dumps(body).encode())

    for behave, known in ((long, False), (serve_normally, True)):
        async with gateway(tmp_path, ScriptedEngine(behave), live=False) as it:
            asleep(it)
            wake(it, phase="loading")
            wake(it)
            assert (await it.post(CHAT)).status == 200
            [first] = seen(it).values()
            assert (first.seconds is not None) is known


async def test_an_engine_that_refuses_the_first_request_tells_nothing(tmp_path: Path) -> None:
    async def refuse(request: EngineRequest) -> None:
        await request.answer(400, b"{}")

    async with gateway(tmp_path, ScriptedEngine(refuse), live=False) as it:
        asleep(it)
        wake(it, phase="loading")
        wake(it)
        assert (await it.post(STREAM)).status == 400
        [first] = seen(it).values()
        assert first.seconds is None
