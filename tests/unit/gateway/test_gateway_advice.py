"""From requests at a gateway to the advice: engines with a prefix cache of their own, which compare whole prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.api.traffic import TrafficPage
from shoal.core.advice.facts import ClassFact, window_of
from shoal.core.advice.report import AdviceReport, advise
from shoal.core.advice.sentences import sentences
from shoal.gateway.trafficapi import TrafficApi
from tests.support.gateway import gateway
from tests.support.scripted_engine import EngineRequest, ScriptedEngine
from tests.support.waiting import until_async
from tests.unit.gateway.test_gateway_traffic import PEOPLE, ops, read

TOKEN, PAGE = 4, 16
"""Characters of a token; tokens of a page of the cache."""
CONVERSATIONS, TURNS = 61, 4
SYSTEM = {"role": "system", "content": "You keep the log of a lighthouse, in short sentences. " * 12}


class CachingEngine:
    """Knows the pages of every prompt and answer that it has had, each with all that is before it."""

    def __init__(self) -> None:
        self._pages: set[int] = set()
        self.prompt = self.cached = 0

    async def behave(self, request: EngineRequest) -> None:
        messages: list[dict[str, str]] = request.body["messages"]
        salt = str(request.body.get("cache_salt"))
        prompt = "".join(f"<|{each['role']}|>{each['content']}<|end|>" for each in messages)
        count = len(prompt) // TOKEN
        cached = 0
        for page in range(1, count // PAGE + 1):
            if hash((salt, prompt[: page * PAGE * TOKEN])) not in self._pages:
                break
            cached = page * PAGE
        cached = min(cached, count - 1)
        answer = f"Noted as entry {len(prompt)}: " + "all quiet, " * 15
        whole = f"{prompt}<|assistant|>{answer}<|end|>"
        self._pages |= {
            hash((salt, whole[: page * PAGE * TOKEN])) for page in range(1, len(whole) // TOKEN // PAGE + 1)
        }
        self.prompt, self.cached = self.prompt + count, self.cached + cached
        message = {"role": "assistant", "content": answer}
        usage = {
            "prompt_tokens": count,
            "completion_tokens": len(answer) // TOKEN,
            "total_tokens": count + len(answer) // TOKEN,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        body: dict[str, Any] = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": request.model,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": usage,
        }
        await request.answer(200, json.dumps(body).encode())


async def test_what_a_gateway_keeps_predicts_what_its_engines_had_in_their_caches(tmp_path: Path) -> None:
    caches = [CachingEngine(), CachingEngine()]
    async with gateway(tmp_path, *(ScriptedEngine(cache.behave) for cache in caches)) as it:
        logs: list[list[dict[str, str]]] = [[SYSTEM] for _ in range(CONVERSATIONS)]
        for turn in range(TURNS):
            for number, log in enumerate(logs):
                question = (
                    f"Ship {number} passed, {turn} flags, bearing {17 * number}. " + "What do you make of it? " * 12
                )
                log.append({"role": "user", "content": question})
                async with await it.post({"model": "llama", "messages": log}) as response:
                    assert response.status == 200
                    answered = await response.json()
                log.append(answered["choices"][0]["message"])
        await until_async(lambda: len(it.app.traffic) == CONVERSATIONS * TURNS)
        async with ops(it, TrafficApi(it.app.traffic, it.ring, "gateway-1")) as port:
            page: TrafficPage = (await read(it, port, PEOPLE))[0]
    window = window_of(page.models, since=0.0, until=1e12)
    report = advise(window, {"l4-24gb": ClassFact(gpus=1, kv_tokens=1_000_000)})
    assert isinstance(report, AdviceReport), report
    shares = report.shares
    # All that the engines found, and nothing else, is found by the replay of the recorded routing.
    whole = sum(cache.cached for cache in caches) / sum(cache.prompt for cache in caches)
    assert shares.delivered == pytest.approx(whole, abs=0.05)
    assert shares.replayed == pytest.approx(shares.delivered, abs=0.03)
    # Turns by turns at the other replica: only every second turn, and the system prompt, would have been there.
    assert shares.round_robin is not None
    assert shares.round_robin < shares.delivered - 0.1
    assert report.saved is not None
    assert sentences(report)[0].startswith("Prefix routing saved ")
