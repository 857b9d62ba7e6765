"""What the check of a request's fields is for: without it, one request of these ends an engine or stalls it."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.core.fields.check import check
from shoal.core.fields.kinds import Facts
from shoal.core.fields.table import CHAT, COMPLETIONS
from shoal.engine.sglang.launch import ENVIRONMENT
from tests.support import pictures
from tests.support.engines import API_KEY, CONTEXT, SERVED, EngineProcess, Kind, running_engine
from tests.support.vision_engine import running_vision_engine

FACTS = Facts(vocabulary=512, context_length=CONTEXT)
CANARY = {"model": SERVED, "prompt": "a canary", "max_tokens": 4, "ignore_eos": True}
ANSWER = {"model": SERVED, "max_tokens": 60, "ignore_eos": True}
USER = {"messages": [{"role": "user", "content": "hello"}]}
FATAL: dict[str, tuple[str, dict[str, Any]]] = {
    "stop token": (CHAT, {**ANSWER, **USER, "min_tokens": 5, "stop_token_ids": [10_000_000]}),
    "top_logprobs": (CHAT, {**ANSWER, **USER, "logprobs": True, "top_logprobs": 1_000_000}),
    "logprobs": (COMPLETIONS, {**ANSWER, "prompt": "x", "logprobs": 1_000_000}),
    "token": (COMPLETIONS, {**ANSWER, "prompt": [1, 10_000_000]}),
    "schema": (COMPLETIONS, {**ANSWER, "prompt": "x", "json_schema": '{"$ref": "#"}', "top_p": 0.9}),
    "end": (COMPLETIONS, {**ANSWER, "prompt": "x", "regex": "a", "min_tokens": 5, "top_p": 0.9}),
}
"""The last two leave no token to choose from. They end the engine where a request of the same step filters by
probability, so each brings its own `top_p`."""
STALLING: dict[str, tuple[str, dict[str, Any]]] = {
    "stop_regex": (COMPLETIONS, {**ANSWER, "prompt": "x", "stop_regex": "(([^x]|[^y])*)*\x00"}),
}
KINDS = [
    pytest.param("sim", id="sim"),
    pytest.param("sglang", id="sglang", marks=[pytest.mark.engine, pytest.mark.timeout(500)]),
]
GRAMMARS = {"sim": (), "sglang": ("--grammar-backend", "xgrammar")}
SAMPLED = ("schema", "end")


async def send(engine: EngineProcess, path: str, body: dict[str, Any], seconds: float) -> int | None:
    """The status; None: no answer."""
    headers = {"authorization": f"Bearer {API_KEY}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds), headers=headers) as session,
            session.post(engine.url + path, json=body) as response,
        ):
            return response.status
    except (aiohttp.ClientError, TimeoutError):
        return None


@pytest.mark.parametrize("attack", FATAL | STALLING)
def test_the_gateway_refuses_it(attack: str) -> None:
    path, body = (FATAL | STALLING)[attack]
    assert check(body, path, FACTS) is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attack", FATAL)
async def test_without_the_check_one_request_ends_the_engine(kind: Kind, attack: str, tmp_path: Path) -> None:
    path, body = FATAL[attack]
    with running_engine(kind, tmp_path, *GRAMMARS[kind]) as engine:
        assert await send(engine, COMPLETIONS, CANARY, 60) == 200
        await send(engine, path, body, 30)
        async with asyncio.timeout(120):
            while engine.process.poll() is None:
                await asyncio.sleep(0.1)


@pytest.mark.engine
@pytest.mark.timeout(500)
async def test_an_engine_as_a_pod_starts_it_survives_a_step_without_tokens(tmp_path: Path) -> None:
    """The second wall: with what its container's environment says, only such a request fails."""
    environment = {**ENVIRONMENT, "HOME": str(Path.home())}
    with running_engine("sglang", tmp_path, *GRAMMARS["sglang"], environment=environment) as engine:
        for attack in SAMPLED:
            path, body = FATAL[attack]
            answers = await asyncio.gather(
                send(engine, path, body, 60), send(engine, COMPLETIONS, CANARY | {"top_p": 0.9, "max_tokens": 30}, 60)
            )
            assert answers == [500, 200]
            assert await send(engine, COMPLETIONS, CANARY, 60) == 200
        assert engine.process.poll() is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attack", STALLING)
async def test_without_the_check_one_request_stalls_the_engine_for_others(
    kind: Kind, attack: str, tmp_path: Path
) -> None:
    path, body = STALLING[attack]
    with running_engine(kind, tmp_path) as engine:
        assert await send(engine, COMPLETIONS, CANARY, 60) == 200
        # Each step of it takes about twice as long as the one before, and the canary takes several. When its client
        # leaves, the engine is free after the step that it is in: a test could not tell how long that is.
        attacked = asyncio.create_task(send(engine, path, body, 60))
        await asyncio.sleep(10)
        assert await send(engine, COMPLETIONS, CANARY, 10) is None
        assert not attacked.done()
        attacked.cancel()


PICTURE = {"type": "image_url", "image_url": {"url": pictures.data_url("image/png", pictures.png(64, 64))}}
PLACE = {"messages": [{"role": "user", "content": [PICTURE, {"type": "text", "text": "<|image_pad|>"}]}]}


def test_the_gateway_refuses_a_place_without_a_medium() -> None:
    facts = Facts(vocabulary=512, context_length=CONTEXT, media=frozenset({"image"}))
    problem = check({**ANSWER, **PLACE}, CHAT, facts)
    assert problem is not None
    assert problem.code == "token_not_allowed"


@pytest.mark.engine
@pytest.mark.timeout(600)
async def test_without_the_check_a_place_without_a_medium_is_never_answered(tmp_path: Path) -> None:
    with running_vision_engine(tmp_path) as engine:
        seen = {"messages": [{"role": "user", "content": [PICTURE]}]}
        assert await send(engine, CHAT, {**ANSWER, **seen, "max_tokens": 2}, 60) == 200
        assert await send(engine, CHAT, {**ANSWER, **PLACE, "max_tokens": 2}, 20) is None
        assert await send(engine, CHAT, {**ANSWER, **seen, "max_tokens": 2}, 60) == 200
