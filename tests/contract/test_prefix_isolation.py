"""What one tenant can find out of another's prompts by an engine's prefix cache: nothing, unless the Model shares it.

Each wall stands beside the attack that works without it: a Model with `prefixCache.isolation: Shared`."""

import dataclasses
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.contract.conftest import Client
from tests.contract.test_gateway_with_engine import MODEL, OneKey
from tests.support.adapters import make_adapter
from tests.support.behaviour import WORDS
from tests.support.engines import SERVED, Kind, running_engine
from tests.support.gateway import GatewayUnderTest, gateway, replica, tenant
from tests.support.lora_calls import COMPLETIONS

KEYS = {name: f"sk-{name}" for name in ("acme", "globex", "team-a", "team-b")}
_asked = itertools.count()


@pytest.fixture
async def front(any_client: Client, tmp_path: Path) -> AsyncIterator[GatewayUnderTest]:
    """Tenants that may use one Model; `team-a` and `team-b` are of one organisation."""
    model = dataclasses.replace(MODEL, uid=f"uid-{next(_asked)}")  # the engine is every test's: a salt has its uid
    async with gateway(tmp_path) as it:
        it.models[SERVED] = model
        for name, key in KEYS.items():
            group = {"prefixCacheGroup": "teams"} if name.startswith("team") else {}
            it.tenants[name] = tenant(name, key, models=[SERVED], **group)
        it.pods[f"{SERVED}-1"] = replica(1, model, engine=any_client.words.name)
        it.ports["pod-1"] = any_client.engine.port
        it.app.key_ring = OneKey(it.settings.keys_dir)
        it.app.key_ring.refresh()
        it.changed()
        it.hear(1)
        yield it


def secret() -> dict[str, dict[str, Any]]:
    """By path: a prompt that nobody asked before, of several blocks of a cache that is kept in blocks."""
    case = f"case {next(_asked)}: the patient in room twelve is called Mallory and waits for the results of the test"
    prompt = f"{case}, and nobody else may hear of {case}"
    return {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": prompt}]},
        "/v1/completions": {"prompt": prompt},
    }


async def cached(front: GatewayUnderTest, who: str, path: str, body: dict[str, Any]) -> int:
    answer = await front.post({"model": "tiny", "max_tokens": 2, **body}, path, key=KEYS[who])
    assert answer.status == 200, await answer.text()
    return (await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", list(secret()))
async def test_a_tenant_finds_its_own_prompts_and_nobody_elses(front: GatewayUnderTest, path: str):
    body = secret()[path]
    assert await cached(front, "acme", path, body) == 0
    assert await cached(front, "acme", path, body) > 8
    assert await cached(front, "globex", path, body) == 0
    assert await cached(front, "globex", path, body) > 8  # by now its own
    for field in ("cache_salt", "extra_key"):
        stolen = await front.post({"model": "tiny", **body, field: "x"}, path, key=KEYS["globex"])
        assert stolen.status == 400
    # Both go on finding their own.
    assert await cached(front, "acme", path, body) > 8


@pytest.mark.parametrize("path", list(secret()))
async def test_with_shared_isolation_the_probe_works_and_so_does_a_shared_system_prompt(
    front: GatewayUnderTest, path: str
):
    front.models[SERVED] = dataclasses.replace(front.models[SERVED], shares_prefixes=True)
    front.changed()
    body = secret()[path]
    await cached(front, "acme", path, body)
    assert await cached(front, "globex", path, body) > 8


async def test_tenants_of_one_group_share_and_others_do_not(front: GatewayUnderTest):
    path, body = "/v1/completions", secret()["/v1/completions"]
    await cached(front, "team-a", path, body)
    assert await cached(front, "team-b", path, body) > 8
    assert await cached(front, "globex", path, body) == 0


async def test_a_salt_parts_prompts_of_the_base_and_of_an_adapter_alike(any_client: Client, tmp_path: Path):
    await any_client.load_adapter("salted", make_adapter(tmp_path / "a", seed=1))
    prompt = [371 + (i * 19) % 40 for i in range(100)]  # no other test's begins so
    for adapter in (None, "salted"):

        async def found(salt: str | None, adapter: str | None = adapter) -> int:
            salted = {} if salt is None else {"cache_salt": salt}
            body = any_client.words.select(adapter) | {"prompt": prompt, "max_tokens": 2} | salted
            answer = await any_client.post(COMPLETIONS, body)
            assert answer.status == 200, answer.body
            return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert await found("a") == 0
        assert await found("a") > 0
        assert await found("b") == 0
        assert await found(None) == 0


@pytest.mark.parametrize("isolated", [True, False])
async def test_an_engine_for_embeddings_keeps_no_prompts_where_tenants_are_parted(
    any_kind: Kind, tmp_path: Path, isolated: bool
):
    """SGLang takes no salt there. No engine says in its answer what it found; its counter does."""
    words = WORDS[any_kind]
    more = (words.no_prefix_cache,) if isolated else ()
    with running_engine(any_kind, tmp_path, *words.embeds, *more) as engine:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            client = Client(engine, session)
            for _ in range(2):
                text = "the patient in room twelve is called Mallory and waits for the results " * 3
                answer = await client.post("/v1/embeddings", {"model": SERVED, "input": text, "cache_salt": "ignored"})
                assert answer.status == 200, answer.body
            name, _, label = words.found_in_cache.rstrip("}").partition("{")
            lines = (await client.get("/metrics", key=None)).body.decode().splitlines()
            hits = [line for line in lines if line.startswith(name + "{") and label in line]
            assert (sum(float(line.rsplit(" ", 1)[1]) for line in hits) == 0) is isolated
