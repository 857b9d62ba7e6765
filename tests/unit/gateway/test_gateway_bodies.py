"""Request bodies: what they may become in memory, how many at a time, and how much of the room one tenant gets."""

import asyncio
import io
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.core.fields.kinds import Facts
from shoal.gateway.bigbodies import BIG, BigBodies
from shoal.gateway.body import BodyBudget
from shoal.gateway.memory import MIB, container_limit, memory_bounds
from shoal.gateway.settings import GatewaySettings
from shoal.net.errors import ApiError
from tests.support.gateway import API_KEY, GatewayUnderTest, gateway, tenant
from tests.support.scripted_engine import EngineRequest, ScriptedEngine

CHAT: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}


async def send(it: GatewayUnderTest, body: Any, **kw: Any) -> aiohttp.ClientResponse:
    """A large one: the client takes it from a file."""
    return await it.post(data=io.BytesIO(json.dumps(body).encode()), **kw)


async def attacked(folder: Path, *options: str) -> dict[str, Any]:
    """Two bodies of 16 MiB of empty objects, in a process of their own."""
    command = (sys.executable, "-m", "tests.support.body_attack", str(folder), "2", "16", *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(100):
        out, _ = await process.communicate()
    return json.loads(out.splitlines()[-1])


async def test_bodies_of_empty_objects_are_refused_before_they_fill_the_memory(tmp_path: Path):
    held = await attacked(tmp_path / "held")
    assert held["statuses"] == {"413": 2}
    through = await attacked(tmp_path / "through", "open")
    assert through["statuses"] == {"400": 2}  # decoded, and only then refused: an empty object is no part of a message
    assert held["mib"] < 150, held
    assert through["mib"] > 300, through


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([{}] * 70_000, "arrays and objects"),
        ([""] * 140_000, "strings"),
        ([1] * 1_100_000, "values"),
        (json.loads("[" * 130 + "]" * 130), "levels"),
    ],
)
async def test_a_body_says_what_it_has_too_much_of(tmp_path: Path, content: Any, what: str):
    async with gateway(tmp_path, ScriptedEngine()) as it:
        response = await send(it, {**CHAT, "messages": [{"role": "user", "content": content}]})
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (413, "request_too_complex")
        assert what in error["message"]
        assert it.app.body_budget.held == 0


async def test_a_long_text_and_a_long_prompt_of_tokens_go_through(tmp_path: Path):
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        it.model(facts=Facts(vocabulary=500_000, context_length=1_048_576))
        text = 'code: {"a": [1, 2]}, \\ "quoted" ' * 60_000
        assert (await send(it, {**CHAT, "messages": [{"role": "user", "content": text}]})).status == 200
        assert engine.requests[0].body["messages"][0]["content"] == text
        tokens = list(range(500_000))
        body = {"model": "llama", "prompt": tokens}
        assert (await send(it, body, path="/v1/completions")).status == 200
        assert engine.requests[1].body["prompt"] == tokens


async def test_big_bodies_take_turns_and_tenants_too():
    order: list[str] = []
    turns = BigBodies()

    async def one(tenant: str, name: str) -> None:
        async with turns.slot(tenant, BIG):
            order.append(name)

    await asyncio.gather(*(one("acme", f"a{n}") for n in range(4)), one("zeta", "z"))
    assert order == ["a0", "a1", "z", "a2", "a3"]
    assert not turns.waiting


async def test_one_that_leaves_its_turn_holds_nobody_up():
    turns = BigBodies()
    inside = asyncio.Event()

    async def one(name: str) -> str:
        async with turns.slot("acme", BIG):
            inside.set()
            return name

    async with turns.slot("acme", BIG):
        waiting = [asyncio.create_task(one(name)) for name in "abc"]
        while turns.waiting < 3:
            await asyncio.sleep(0)
        waiting[0].cancel()
    assert await asyncio.gather(*waiting[1:]) == ["b", "c"]


def test_one_tenant_takes_no_more_than_its_share():
    budget = BodyBudget(100, 50)
    budget.take("acme", 50)
    with pytest.raises(ApiError, match="of your") as refused:
        budget.take("acme", 1)
    assert (refused.value.status, refused.value.code, refused.value.retry_after) == (503, "overloaded", 2)
    budget.take("zeta", 40)
    with pytest.raises(ApiError, match="too many request bodies"):
        budget.take("other", 11)
    budget.give("acme", 50)
    budget.give("zeta", 40)
    budget.take("zeta", 50)
    assert budget.held == 50


async def test_slow_bodies_of_one_tenant_leave_room_for_anothers(tmp_path: Path):
    """They are sent to the last byte but one, and hold what they may."""
    async with gateway(
        tmp_path, ScriptedEngine(), max_held_body_bytes=400_000, max_body_bytes=150_000, max_form_bytes=150_000
    ) as it:
        it.tenants["zeta"] = tenant("zeta", "sk-zeta")
        it.changed()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {API_KEY}\r\n"
        slow: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for _ in range(3):
            slow.append(await asyncio.open_connection("127.0.0.1", it.server.port))
            slow[-1][1].write(f"{head}content-length: 90001\r\n\r\n".encode() + b" " * 90_000)
        async with asyncio.timeout(20):
            assert b" 503 " in await slow[2][0].readline()
            while it.app.body_budget.held < 180_000:
                await asyncio.sleep(0.01)
        big = {**CHAT, "messages": [{"role": "user", "content": "x" * 100_000}]}
        assert (await it.post(big, key="sk-zeta")).status == 200
        response = await it.post(big)
        assert (response.status, (await response.json())["error"]["code"]) == (503, "overloaded")
        for _, writer in slow:
            writer.close()


def test_the_bounds_follow_from_the_containers_memory(tmp_path: Path):
    at = tmp_path / "memory.max"
    assert container_limit((at,)) is None
    at.write_text("max\n")
    assert container_limit((at,)) is None
    at.write_text(f"{512 * MIB}\n")
    assert container_limit((tmp_path / "other", at)) == 512 * MIB
    at.write_text("9223372036854771712\n")
    assert container_limit((at,)) is None
    small = memory_bounds(GatewaySettings(), 512 * MIB)
    assert (small.bodies, small.bodies_of_tenant, small.answers, small.answer) == (
        128 * MIB,
        64 * MIB,
        128 * MIB,
        64 * MIB,
    )
    assert small.connections == 8192
    large = memory_bounds(GatewaySettings(), 8192 * MIB)
    assert (large.answer, large.connections) == (256 * MIB, 16384)
    set_by_hand = memory_bounds(GatewaySettings(max_held_body_bytes=5, max_answer_bytes=7, max_connections=9), None)
    assert (set_by_hand.bodies, set_by_hand.answer, set_by_hand.connections) == (5, 7, 9)
    # One body fits, however small the container.
    tiny = memory_bounds(GatewaySettings(), 64 * MIB)
    assert (tiny.body, tiny.form, tiny.bodies_of_tenant, tiny.bodies) == (16 * MIB, 26 * MIB, 26 * MIB, 32 * MIB)


def test_a_body_that_could_never_be_held_is_too_large():
    """A 503 would say to try again."""
    asked = memory_bounds(GatewaySettings(max_body_bytes=90 * MIB, max_form_bytes=50 * MIB), 200 * MIB)
    assert (asked.bodies, asked.body, asked.form, asked.bodies_of_tenant) == (50 * MIB, 50 * MIB, 50 * MIB, 50 * MIB)
    larger = memory_bounds(GatewaySettings(max_body_bytes=40 * MIB), 1024 * MIB)
    assert (larger.body, larger.form) == (40 * MIB, 40 * MIB)


async def test_answers_that_nobody_takes_are_counted_until_they_are_taken(tmp_path: Path):
    """A client that asks for much and reads nothing holds what its tenant may, and no more."""

    async def much(request: EngineRequest) -> None:
        await request.answer(200, b'{"model":"chat/llama","x":"%b"}' % (b"x" * 6_000_000))

    async with gateway(tmp_path, ScriptedEngine(much), max_held_answer_bytes=20_000_000) as it:
        it.tenants["zeta"] = tenant("zeta", "sk-zeta")
        it.changed()
        body = json.dumps(CHAT).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {API_KEY}\r\n"
        _, not_reading = await asyncio.open_connection("127.0.0.1", it.server.port, limit=1024)
        not_reading.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(20):
            while it.app.answer_budget.held < 6_000_000:
                await asyncio.sleep(0.01)
        refused = await it.post(CHAT)
        assert (refused.status, (await refused.json())["error"]["code"]) == (503, "overloaded")
        assert (await it.records())[0].data.outcome == "refused"
        other = await it.post(CHAT, key="sk-zeta")
        assert (other.status, len(await other.read()) > 6_000_000) == (200, True)
        not_reading.transport.abort()
        async with asyncio.timeout(20):
            while it.app.answer_budget.held:
                await asyncio.sleep(0.01)
        again = await it.post(CHAT)
        assert (again.status, len(await again.read()) > 6_000_000) == (200, True)
