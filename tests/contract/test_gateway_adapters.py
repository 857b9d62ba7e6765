"""The gateway in front of every engine with adapters: whose weights answer, by whichever name."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from shoal.api.adapters import Ensure
from shoal.core.routing.resolve import ServedModel
from tests.contract.conftest import Client
from tests.contract.test_gateway_with_engine import OneKey
from tests.support.adapter_agents import AdapterAgent, TunedGateway, adapter, name_of, pool, tuned
from tests.support.adapter_names import BODIES, MEANS_IT, MEANS_NOTHING
from tests.support.adapters import make_adapter
from tests.support.engines import SERVED
from tests.support.gateway import replica, tenant
from tests.support.lora_calls import GREEDY, PROMPT, loaded

BASE = ServedModel(SERVED, "uid-llama", SERVED, ("llama",), None)
_digests = itertools.count(1)


@dataclass
class Front:
    """A gateway whose only replica is an engine."""

    gate: TunedGateway
    agent: AdapterAgent
    engine: Client
    folders: dict[str, Path]
    """By engine name."""
    texts: dict[str, str]
    """What answers to the prompt: `base`, and by engine name."""

    async def ask(self, word: str, **more: Any) -> tuple[int, str]:
        response = await self.gate.it.post({"model": word, "prompt": PROMPT, **GREEDY, **more}, "/v1/completions")
        answer = await response.json()
        return response.status, answer["choices"][0]["text"] if response.status == 200 else answer["error"]["code"]


@pytest.fixture
async def front(any_client: Client, tmp_path: Path) -> AsyncIterator[Front]:
    # The engine remembers every name that it ever had: each test has revisions of its own.
    revisions = [f"sha256:{next(_digests):012x}{'0' * 52}" for _ in range(2)]
    names = [name_of("chat/support", revision) for revision in revisions]
    folders = {name: make_adapter(tmp_path / name, seed=seed) for seed, name in enumerate(names, 1)}

    async def ensure(wanted: Ensure) -> tuple[int, dict[str, Any]]:
        if wanted.name not in await loaded(any_client):
            answer = await any_client.load_adapter(wanted.name, folders[wanted.name])
            assert answer.status == 200, answer.body
        return 200, {}

    agent = AdapterAgent(1, answer=ensure)
    texts = {"base": await says(any_client, None)}
    for name, folder in folders.items():
        probe = f"probe-{name}"
        await any_client.load_adapter(probe, folder)
        texts[name] = await says(any_client, probe)
        await any_client.unload_adapter(probe)
    assert len(set(texts.values())) == 3
    async with tuned(tmp_path, agent) as gate:
        it = gate.it
        it.app.key_ring = OneKey(tmp_path)
        it.fleet._key_ring = it.app.key_ring
        it.models.clear()
        it.models[SERVED] = BASE
        it.pods.clear()
        it.pods[f"{SERVED}-1"] = replace(replica(1, BASE), engine=any_client.words.name)
        it.ports["pod-1"] = any_client.engine.port
        it.tenants["acme"] = tenant(models=[SERVED], adapters=[{"namespace": "chat"}])
        namespace, name = SERVED.split("/")
        gate.pools.clear()
        gate.pools[f"{namespace}/pool"] = pool(namespace=namespace, model=name, allowedNamespaces={"from": "All"})
        gate.declare(adapter(revision=revisions[0], pool_namespace=namespace))
        yield Front(gate, agent, any_client, folders, texts)


async def says(client: Client, adapter: str | None) -> str:
    """What the engine itself answers to the prompt."""
    answer = await client.post("/v1/completions", client.words.select(adapter) | {"prompt": PROMPT, **GREEDY})
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["text"]


def current(front: Front) -> str:
    served = front.gate.adapters["chat/support"].current
    assert served is not None
    return served.engine_name


async def test_its_words_reach_it_and_those_of_the_base_the_base(front: Front):
    for word in MEANS_IT:
        assert await front.ask(word) == (200, front.texts[current(front)])
    for word in ("llama", SERVED):
        assert await front.ask(word) == (200, front.texts["base"])


async def test_no_other_word_is_answered_at_all(front: Front):
    assert (await front.ask("support"))[0] == 200
    own = {"by the engine's name": current(front), "behind the base": f"{SERVED}:{current(front)}"}
    for why, word in (MEANS_NOTHING | own).items():
        assert await front.ask(word) == (404, "model_not_found"), why


@pytest.mark.parametrize("beside", BODIES)
async def test_nothing_beside_its_word_changes_who_answers(front: Front, beside: str):
    fields = {k: v for k, v in BODIES[beside].items() if k != "chat_template_kwargs"}
    if beside not in ("nothing", "nested"):
        for word in ("support", "llama"):
            assert (await front.ask(word, **fields))[0] == 400
        return
    assert await front.ask("support", **fields) == (200, front.texts[current(front)])
    assert await front.ask("llama", **fields) == (200, front.texts["base"])


async def test_an_engine_that_lost_it_never_answers_with_the_base(front: Front):
    assert (await front.ask("support"))[0] == 200
    await front.engine.unload_adapter(current(front))  # behind the agent's back
    assert await front.ask("support") == (200, front.texts[current(front)])


async def test_each_answer_is_of_the_revision_before_or_after_a_switch(front: Front):
    v1, v2 = front.folders
    allowed = {front.texts[v1], front.texts[v2]}
    seen: list[str] = []

    async def client() -> None:
        for _ in range(6):
            status, answer = await front.ask("support")
            assert status == 200
            seen.append(answer)

    async def switch() -> None:
        namespace = SERVED.split("/")[0]
        for name in (v2, v1, v2):
            await asyncio.sleep(0.3)
            revision = f"sha256:{name.partition('@')[2]}{'0' * 52}"
            front.gate.declare(adapter(revision=revision, pool_namespace=namespace))

    await asyncio.gather(switch(), client(), client())
    assert set(seen) <= allowed
    assert await front.ask("support") == (200, front.texts[v2])
