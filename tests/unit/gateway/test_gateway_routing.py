"""Which replica gets a request: by what it costs there, from all gateways' load and from what answers taught."""

import asyncio
import time
from pathlib import Path
from typing import Any

from shoal.core.routing.replica import Replica
from shoal.core.routing.score import ReplicaScores, work
from tests.support.gateway import GatewayUnderTest, gateway, replica
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

LONG = "You are a helpful assistant. " * 60
CHAT = {"model": "llama", "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": LONG}]}
IDLE = {"running": 0, "waiting": 0, "waiting_tokens": 0, "kv_tokens_used": 0, "kv_tokens_total": 100_000}


def usage(prompt: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": 1,
        "total_tokens": prompt + 1,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def long_prompt(request: EngineRequest) -> None:
    await request.begin_stream()
    await request.chunk(request.delta("a", 1))
    await request.chunk(request.closing(usage(2000)))
    await request.chunk(b"data: [DONE]\n\n")
    await request.end_stream()


def scores_of(it: GatewayUnderTest) -> ReplicaScores:
    assert it.fleet.scores is not None
    return it.fleet.scores


def teach(it: GatewayUnderTest, rate: float, *pods: Replica) -> None:
    for pod in pods:
        for _ in range(20):
            scores_of(it).observe(pod, prompt=4000, cached=0, seconds=work(4000, 0) / rate, now=time.monotonic())


async def ask(it: GatewayUnderTest, **changes: Any) -> None:
    response = await it.post({**CHAT, "stream": True, **changes})
    assert response.status == 200
    await response.read()


async def test_a_queue_of_other_gateways_sends_a_conversation_to_the_other_replica(tmp_path: Path) -> None:
    one, two = ScriptedEngine(long_prompt), ScriptedEngine(long_prompt)
    async with gateway(tmp_path, one, two, routing="Seconds") as it:
        teach(it, 10_000.0, replica(1), replica(2))
        for number in (1, 2):
            it.hear(number, **IDLE)
        for _ in range(4):
            await ask(it)
        # All of one conversation went to one replica.
        assert sorted((len(one.requests), len(two.requests))) == [0, 4]
        home = 1 if one.requests else 2
        it.hear(home, **{**IDLE, "waiting": 20, "waiting_tokens": 60_000})
        await ask(it)
        assert sorted((len(one.requests), len(two.requests))) == [1, 4]


async def test_rates_are_learned_from_streams(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine(long_prompt), ScriptedEngine(long_prompt), routing="Seconds") as it:
        for number in (1, 2):
            it.hear(number, **IDLE)
        for turn in range(12):
            await ask(it, messages=[{"role": "user", "content": f"{turn} {LONG}"}])
        assert len(scores_of(it).speeds)


async def test_by_prefix_heads_nothing_is_learned(tmp_path: Path) -> None:
    two = ScriptedEngine(long_prompt), ScriptedEngine(long_prompt)
    async with gateway(tmp_path, *two, routing="PrefixHeads") as it:
        for number in (1, 2):
            it.hear(number, **IDLE)
        await ask(it)
        assert it.fleet.scores is None


async def test_a_model_with_one_replica_learns_and_scores_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine(long_prompt), routing="Seconds") as it:
        it.hear(1, **IDLE)
        for _ in range(6):
            await ask(it)
        assert not len(scores_of(it).speeds)
        assert not len(scores_of(it).reuse)


async def test_what_failed_is_not_chosen_again_however_cheap_it_is(tmp_path: Path) -> None:
    async def refuse(request: EngineRequest) -> None:
        await request.answer(503, b'{"error":{"message":"no"}}')

    one, two = ScriptedEngine(refuse), ScriptedEngine(long_prompt)
    async with gateway(tmp_path, one, two, routing="Seconds") as it:
        teach(it, 90_000.0, replica(1))
        teach(it, 9_000.0, replica(2))
        it.hear(1, **IDLE)
        it.hear(2, **{**IDLE, "waiting": 5, "waiting_tokens": 9_000})
        await ask(it)
        assert (len(one.requests), len(two.requests)) == (1, 1)


async def test_in_flight_is_counted_once_and_ends(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine(long_prompt), ScriptedEngine(long_prompt), routing="Seconds") as it:
        teach(it, 10_000.0, replica(1), replica(2))
        for number in (1, 2):
            it.hear(number, **IDLE)
        for _ in range(3):
            await ask(it)
        assert [it.fleet.in_flight(f"pod-{n}") for n in (1, 2)] == [0, 0]


async def test_a_replica_whose_stream_is_down_is_not_scored(tmp_path: Path) -> None:
    one, two = ScriptedEngine(long_prompt), ScriptedEngine(long_prompt)
    async with gateway(tmp_path, one, two, routing="Seconds") as it:
        teach(it, 90_000.0, replica(1))
        teach(it, 9_000.0, replica(2))
        for number in (1, 2):
            it.hear(number, **IDLE)
        it.fleet.update("pod-1", None)
        for _ in range(3):
            await ask(it)
        assert (len(one.requests), len(two.requests)) == (0, 3)
        it.fleet.update("pod-2", None)
        await ask(it)  # all streams are down: every Ready replica serves
        assert len(one.requests) + len(two.requests) == 4


async def test_held_requests_are_released_where_they_cost_least(tmp_path: Path) -> None:
    one, two = ScriptedEngine(long_prompt), ScriptedEngine(long_prompt)
    async with gateway(tmp_path, one, two, routing="Seconds") as it:
        pods = dict(it.pods)
        it.pods.clear()
        for number in (1, 2):
            it.fleet.update(f"pod-{number}", None)
        it.changed()
        posts = [asyncio.create_task(ask(it)) for _ in range(3)]
        async with asyncio.timeout(20):
            while it.app.holds.waiting != 3:
                await asyncio.sleep(0.005)
        it.pods.update(pods)
        teach(it, 10_000.0, replica(1))
        teach(it, 1_000.0, replica(2))
        for number in (1, 2):
            it.hear(number, **IDLE)
        it.changed()
        await asyncio.gather(*posts)
        # Ten times as fast, and one conversation: by the number of requests they would be spread.
        assert (len(one.requests), len(two.requests)) == (3, 0)
        assert [it.fleet.in_flight(f"pod-{n}") for n in (1, 2)] == [0, 0]
