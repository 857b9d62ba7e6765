"""What the check of a request's fields is for: without it, one request of these ends SGLang or stalls it.

vLLM refuses each of them itself, or gives up that request only. Shoal refuses them for both, since a Model may change
its engine.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.core.fields.check import check
from shoal.core.fields.kinds import Facts
from shoal.core.fields.table import CHAT, COMPLETIONS
from shoal.engine.sglang.launch import ENVIRONMENT
from tests.contract.test_fields_fuzz import GRAMMARS, ROOMY
from tests.support.asgateway import facts_for, sent
from tests.support.behaviour import WORDS
from tests.support.engines import API_KEY, CONTEXT, SERVED, EngineProcess, Kind, running_engine

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
ON_VLLM = {
    "stop token": 400, "top_logprobs": 400, "logprobs": 400, "token": 400,
    # No token is left, so the first one is taken, and the grammar refuses it: the request ends, and no other.
    "schema": 500,
    # Where `min_tokens` forbids the last token that is left, it is allowed again.
    "end": 200,
    # vLLM has no such field, and ignores it.
    "stop_regex": 200,
}  # fmt: skip
"""What vLLM answers to each."""
REAL = (pytest.mark.engine, pytest.mark.timeout(500))
KINDS = [
    pytest.param("sim", id="sim"),
    pytest.param("sglang", id="sglang", marks=[*REAL, pytest.mark.sglang]),
]
VLLM_KINDS = [
    pytest.param("sim-vllm", id="sim-vllm"),
    pytest.param("vllm", id="vllm", marks=[*REAL, pytest.mark.vllm]),
]
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
@pytest.mark.parametrize("kind", ["sim", "sim-vllm"])
def test_the_gateway_refuses_it(kind: Kind, attack: str) -> None:
    path, body = (FATAL | STALLING)[attack]
    assert check(body, path, facts_for(kind, FACTS)) is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attack", FATAL)
async def test_without_the_check_one_request_ends_the_engine(kind: Kind, attack: str, tmp_path: Path) -> None:
    path, body = FATAL[attack]
    with running_engine(kind, tmp_path, *GRAMMARS.get(kind, ())) as engine:
        assert await send(engine, COMPLETIONS, CANARY, 60) == 200
        await send(engine, path, body, 30)
        async with asyncio.timeout(120):
            while engine.process.poll() is None:
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("kind", VLLM_KINDS)
async def test_without_the_check_vllm_ends_at_most_the_request_itself(kind: Kind, tmp_path: Path) -> None:
    """Each as the gateway would send it, in vLLM's own fields, beside a request of another client."""
    with running_engine(kind, tmp_path, *ROOMY[WORDS[kind].name]) as engine:
        for attack, (path, body) in (FATAL | STALLING).items():
            request = sent(kind, path, body, attack.replace(" ", "-"))
            assert request is not None
            raw = json.loads(request.body) | ({"stop_regex": body["stop_regex"]} if "stop_regex" in body else {})
            answers = await asyncio.gather(
                send(engine, request.path, raw, 60),
                send(engine, COMPLETIONS, CANARY | {"top_p": 0.9, "max_tokens": 30}, 60),
            )
            assert answers == [ON_VLLM[attack], 200], attack
            assert await send(engine, COMPLETIONS, CANARY, 60) == 200
        assert engine.process.poll() is None


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
