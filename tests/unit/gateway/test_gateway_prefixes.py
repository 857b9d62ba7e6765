"""Gateways tell each other which prompts they sent where, so that a conversation finds its replica at any of them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest

from shoal.api import names
from shoal.api.keys import Role
from shoal.core.advice.marks import prompt_marks
from shoal.core.routing.prefixes import points_of
from shoal.core.routing.reuse import Prompt
from shoal.core.routing.score import LAG_SECONDS, ReplicaScores
from shoal.core.routing.speeds import NOTHING_KNOWN
from shoal.gateway.prefixes import RECENT, PrefixShare
from shoal.net.stream import ListenerIdentity
from shoal.signals.prefixes import PrefixStreams
from tests.support.gateway import INSTALL_KEY, gateway, replica
from tests.support.gatewaypods import FIRST, OWN, SECOND, following, gateway_pod
from tests.support.scripted_engine import ScriptedEngine
from tests.support.streams import ToldGateway, told_gateway, until
from tests.unit.core.test_routing_score import IDLE
from tests.unit.gateway.test_gateway_routing import IDLE as IDLE_KEYS
from tests.unit.gateway.test_gateway_routing import LONG, ask, long_prompt

PODS = [replica(n) for n in (1, 2, 3)]


def marks(text: str) -> bytes:
    found = prompt_marks(7, {"messages": [{"role": "user", "content": text + LONG}]})
    assert found is not None
    return found


def scores() -> ReplicaScores:
    found = ReplicaScores()
    for pod in PODS:
        found.reported(pod.uid, IDLE, 0, time.monotonic())
    return found


def place(found: ReplicaScores, text: str) -> str | None:
    """The replica of which it is known that it has the prompt."""
    return next(iter(found.prefixes.held(points_of(marks(text)))), None)


def chosen(found: ReplicaScores) -> set[str]:
    """Where prompts go of which nothing is known."""
    picks = [found.pick(PODS, {}, Prompt(500), time.monotonic(), rotation=turn) for turn in range(6)]
    return {pick.replica.uid for pick in picks if pick is not None}


@contextlib.asynccontextmanager
async def listening(to: ToldGateway) -> AsyncGenerator[tuple[PrefixShare, ReplicaScores]]:
    own = scores()
    share = PrefixShare(own)
    streams = PrefixStreams(share.heard, ListenerIdentity("gateway-2", "boot-2"))
    streams.start()
    streams.put(to.peer(role="gateway"))
    taking = asyncio.create_task(share.run())
    try:
        await until(lambda: bool(streams.live()))
        yield share, own
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await streams.close()


async def test_what_one_gateway_sent_is_known_at_the_other_and_after_its_restart() -> None:
    async with told_gateway() as first:
        async with listening(first) as (_, own):
            first.prefixes.sent("pod-2", marks("one"))
            first.prefixes.sent("pod-unknown", marks("two"))
            first.prefixes.publish()
            await until(lambda: place(own, "one") == "pod-2")
            assert place(own, "two") is None
            assert not own.prefixes.tokens("pod-unknown")
        # A gateway that has just started is told the last prompts at once.
        async with listening(first) as (_, own):
            await until(lambda: place(own, "one") == "pod-2")
            # An engine that has restarted has an empty cache.
            own.reported("pod-2", IDLE.model_copy(update={"engine_boot": "b"}), 0, time.monotonic())
            assert place(own, "one") is None


async def test_what_another_gateway_sends_now_is_ahead_of_a_prompt_but_not_what_it_sent_before_the_stream() -> None:
    async with told_gateway() as first:
        first.prefixes.sent("pod-1", marks("old " + 40 * LONG))
        first.prefixes.publish()
        async with listening(first) as (_, own):
            await until(lambda: place(own, "old " + 40 * LONG) == "pod-1")
            assert chosen(own) == {"pod-1", "pod-2", "pod-3"}
            first.prefixes.sent("pod-1", marks("new " + 40 * LONG))
            first.prefixes.publish()
            await until(lambda: place(own, "new " + 40 * LONG) == "pod-1")
            assert chosen(own) == {"pod-2", "pod-3"}


async def test_a_gateway_follows_the_prompts_of_every_other_one_that_exists(tmp_path: Path) -> None:
    async with told_gateway(FIRST) as first, told_gateway(SECOND, first.port) as second:
        for told in (first, second):
            told.ring.known = (INSTALL_KEY,)
        own = scores()
        share = PrefixShare(own)
        pods = [gateway_pod("gateway-0", OWN), gateway_pod("gateway-1", FIRST), gateway_pod("gateway-2", SECOND)]
        async with following(tmp_path, first.port, *pods, prefixes=share) as (peers, server):
            assert peers.prefix_streams is not None
            streams = peers.prefix_streams
            await until(lambda: len(streams.live()) == 2)
            for told, text, pod in ((first, "one", "pod-1"), (second, "two", "pod-2")):
                told.prefixes.sent(pod, marks(text))
                told.prefixes.publish()
            await until(lambda: share.take(9) is None and (place(own, "one"), place(own, "two")) == ("pod-1", "pod-2"))
            await server.remove("pods", "gateway-2")
            await until(lambda: streams.count == 1)
            # What it said stays true.
            assert place(own, "two") == "pod-2"


async def test_only_gateways_may_read_it() -> None:
    async with told_gateway() as first, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{first.port}{names.PREFIXES_PATH}"
        roles: list[tuple[Role, int]] = [("gateway", 200), ("operator", 401)]
        for role, status in roles:
            async with session.get(url, headers={"authorization": f"Bearer {first.peer(role=role).key}"}) as answer:
                assert answer.status == status
        async with session.get(url) as answer:
            assert answer.status == 401


async def test_what_a_gateway_remembers_for_the_others_is_bounded() -> None:
    share = PrefixShare(scores())
    for number in range(3 * RECENT):
        share.sent("pod-1", number.to_bytes(8))
        if number % 1000 == 0:
            share.publish()
    share.publish()
    with share.hub.reader() as reader:
        full = await reader.next(1.0)
    assert full is not None
    assert full.count(b"=") == RECENT
    for number in range(100_000):
        share.heard([("pod-1", number.to_bytes(8))], full=False)
    share.take(1_000_000)
    assert len(share._scores.prefixes) < 10_000


async def test_a_request_is_told_and_a_conversation_of_another_gateway_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = ScriptedEngine(long_prompt), ScriptedEngine(long_prompt)
    async with gateway(tmp_path, one, two, routing="Seconds", traffic_requests=0) as it:
        told: list[tuple[str, bytes]] = []
        it.prompt_sent = lambda uid, prompt: told.append((uid, prompt))
        for number in (1, 2):
            it.hear(number, **IDLE_KEYS)
        assert it.fleet.scores is not None
        # The engines answer at once: what is learned of their speeds would be the time that a task waited for its turn.
        monkeypatch.setattr(it.fleet.scores.speeds, "pace", lambda *_replica: NOTHING_KNOWN)
        await ask(it)
        (first,) = told
        assert (first[0] == "pod-1") == bool(one.requests)
        # Conversations that another gateway sent to the replica to which this one would not.
        for number in range(4):
            messages = [{"role": "user", "content": f"{number} {8 * LONG}"}]
            await ask(it, messages=messages)
            uid, prompt = told.pop()
            other = "pod-2" if uid == "pod-1" else "pod-1"
            it.fleet.scores.prefixes.forget(uid)
            it.fleet.scores.reuse.forget(uid)
            it.fleet.scores.told(other, points_of(prompt))
            # Answers have taught it that the home of a head seldom has it: it does not guess against what it is told.
            it.fleet.scores.reuse.trust(replica(1).model_uid).of["home"] = 0.0
            await asyncio.sleep(LAG_SECONDS)  # the next reports are late enough to show that nothing waits
            for replica_number in (1, 2):
                it.hear(replica_number, **IDLE_KEYS)
            await ask(it, messages=[*messages, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}])
            assert told.pop()[0] == other
