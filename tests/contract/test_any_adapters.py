"""Adapters on every engine: who answers by which name, what a load refuses, what an unload means."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shoal.artifacts import adapter
from shoal.core.lora.format.check import Limits, check_adapter
from shoal.engine.port import AdapterRejected, AlreadyLoaded, LoadedAdapter, NotLoaded
from tests.contract.conftest import Client
from tests.support.adapters import base_of, make_adapter
from tests.support.behaviour import WORDS
from tests.support.engines import (
    ADMIN_KEY,
    API_KEY,
    LORA_MODULES,
    LORA_RANK,
    LORA_SLOTS,
    MAX_QUEUED,
    MODEL,
    ROOT,
    SERVED,
    VLLM_SLOTS,
    Kind,
    running_engine,
)
from tests.support.lora_calls import rest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
NAME = "team-a.support-de@0123456789ab"
"""What Shoal calls a revision in an engine."""
GREEDY: dict[str, Any] = {"prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


async def ask(client: Client, adapter: str | None, **more: Any) -> tuple[int, str]:
    """Status and text of an answer."""
    answer = await client.post(COMPLETIONS, client.words.select(adapter) | GREEDY | more)
    return answer.status, answer.json["choices"][0]["text"] if answer.status == 200 else ""


async def says(client: Client, adapter: str | None, **more: Any) -> str:
    status, text = await ask(client, adapter, **more)
    assert status == 200
    return text


async def loaded(client: Client) -> list[str]:
    return [card["id"] for card in (await client.get("/v1/models")).json["data"][1:]]


@asynccontextmanager
async def streaming(client: Client, adapter: str | None, tokens: int) -> AsyncGenerator[aiohttp.ClientResponse]:
    """A stream that has begun."""
    body = client.words.select(adapter) | GREEDY | {"max_tokens": tokens, "stream": True}
    headers = {"authorization": f"Bearer {API_KEY}"}
    async with client.session.post(client.engine.url + COMPLETIONS, json=body, headers=headers) as response:
        assert response.status == 200
        assert (await response.content.readline()).startswith(b"data: {")
        yield response


# --- the list ---------------------------------------------------------------------------------------------------------


async def test_a_loaded_adapter_is_listed_below_its_base(any_client: Client, tmp_path: Path):
    folder = make_adapter(tmp_path / "a", seed=1)
    assert (await any_client.load_adapter(NAME, folder)).status == 200
    base, card = (await any_client.get("/v1/models")).json["data"]
    assert (base["id"], base["parent"]) == (SERVED, None)
    assert {name: card[name] for name in ("id", "root", "parent", "max_model_len")} == {
        "id": NAME, "root": str(folder), "parent": SERVED, "max_model_len": None,
    }  # fmt: skip


async def test_a_name_is_not_loaded_twice(any_client: Client, tmp_path: Path):
    first, second = (make_adapter(tmp_path / name, seed=seed) for name, seed in (("1", 1), ("2", 2)))
    assert (await any_client.load_adapter("twice", first)).status == 200
    before = await says(any_client, "twice")
    again = await any_client.load_adapter("twice", second)
    assert again.status == 400
    assert "already" in any_client.words.load_error(again.json)
    assert await says(any_client, "twice") == before


async def test_two_loads_of_one_name_at_a_time(any_client: Client, tmp_path: Path):
    folder = make_adapter(tmp_path / "a", seed=1)
    answers = await asyncio.gather(*(any_client.load_adapter("race", folder) for _ in range(2)))
    assert sorted(answer.status for answer in answers) == [200, 400]
    assert await loaded(any_client) == ["race"]


async def test_a_folder_that_is_not_there(any_client: Client, tmp_path: Path):
    answer = await any_client.load_adapter("missing", tmp_path / "nowhere")
    assert answer.status == any_client.words.differences.load_missing
    assert len(any_client.words.load_error(answer.json)) > 0
    assert await loaded(any_client) == []


def change(folder: Path, **values: object) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


@pytest.mark.parametrize("what", ["wide", "cut", "dora", "foreign module", "no configuration", "no weights", "no rank"])
async def test_files_that_do_not_fit_are_refused_and_harm_nobody(any_client: Client, tmp_path: Path, what: str):
    folder = tmp_path / "a"
    match what:
        case "wide":
            make_adapter(folder, rank=2 * LORA_RANK)
        case "cut":
            weights = make_adapter(folder) / "adapter_model.safetensors"
            os.truncate(weights, weights.stat().st_size // 2)
        case "dora":
            change(make_adapter(folder), use_dora=True)
        case "foreign module":
            make_adapter(folder, modules=("q_proj", "foo_proj"), widths={"foo_proj": (64, 64)})
        case "no configuration":
            (make_adapter(folder) / "adapter_config.json").unlink()
        case "no weights":
            (make_adapter(folder) / "adapter_model.safetensors").unlink()
        case _:
            path = make_adapter(folder) / "adapter_config.json"
            path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "r"}))
    before = await says(any_client, None)
    answer = await any_client.load_adapter("bad", folder)
    differences = any_client.words.differences
    assert answer.status == (differences.load_missing if what == "no configuration" else differences.load_wide)
    assert len(any_client.words.load_error(answer.json)) > 0
    assert await loaded(any_client) == []
    assert await says(any_client, None) == before
    # Nothing is left behind: a good one of that name loads.
    assert (await any_client.load_adapter("bad", make_adapter(tmp_path / "good"))).status == 200


async def test_unloading_what_is_not_loaded(any_client: Client):
    answer = await any_client.unload_adapter("nobody")
    assert answer.status == any_client.words.differences.unload_unknown
    assert "nobody" in any_client.words.load_error(answer.json)


async def test_loads_beyond_the_cache(any_client: Client, tmp_path: Path):
    names = [f"many{i}" for i in range(6)]
    for at, name in enumerate(names):
        assert (await any_client.load_adapter(name, make_adapter(tmp_path / name, seed=at))).status == 200
    assert (len(await loaded(any_client)) < 6) == any_client.words.differences.listed_limit
    # All of them answer, each with weights of its own.
    texts = [await says(any_client, name) for name in names]
    assert len(set(texts)) == 6
    assert [await says(any_client, name) for name in names] == texts


# --- who answers ------------------------------------------------------------------------------------------------------


async def test_the_bare_name_of_an_adapter(any_client: Client, tmp_path: Path):
    await any_client.load_adapter("bare", make_adapter(tmp_path / "a", seed=1))
    adapter, base = await says(any_client, "bare"), await says(any_client, None)
    assert adapter != base
    answer = await any_client.post(COMPLETIONS, GREEDY | {"model": "bare"})
    expected = {"the adapter": adapter, "the base model": base}[any_client.words.differences.bare_adapter_name]
    assert answer.json["choices"][0]["text"] == expected
    assert answer.json["model"] == "bare"


async def test_an_adapter_that_was_never_loaded_is_never_answered_by_the_base(any_client: Client):
    for stream in (False, True):
        status, _ = await ask(any_client, "stranger", stream=stream)
        assert status == any_client.words.differences.never_loaded


async def test_an_adapter_after_its_unload(any_client: Client, tmp_path: Path):
    await any_client.load_adapter("revoked", make_adapter(tmp_path / "a", seed=1))
    before, base = await says(any_client, "revoked"), await says(any_client, None)
    assert (await any_client.unload_adapter("revoked")).status == 200
    assert await loaded(any_client) == []
    status, text = await ask(any_client, "revoked")
    assert status == any_client.words.differences.after_unload
    # Loaded again by the request, or refused: the base never answers for it.
    assert text in ("", before)
    assert text != base


async def test_base_and_adapters_in_one_batch_keep_their_answers(any_client: Client, tmp_path: Path):
    await any_client.load_adapter("one", make_adapter(tmp_path / "1", seed=1))
    await any_client.load_adapter("two", make_adapter(tmp_path / "2", seed=2))
    who = [None, "one", "two"]
    alone = [await says(any_client, name, max_tokens=40) for name in who]
    assert len(set(alone)) == 3
    # One after another: of three that arrive at once, the third may find the queue full (MAX_QUEUED is 2).
    async with (
        streaming(any_client, who[0], 40) as base, streaming(any_client, who[1], 40) as one,
        streaming(any_client, who[2], 40) as two,
    ):  # fmt: skip
        together = [await rest(response) for response in (base, one, two)]
    # What `streaming` has read is the beginning.
    assert all(len(text) > 0 and whole.endswith(text) for text, whole in zip(together, alone, strict=True))


async def test_prefixes_are_not_shared_between_base_and_adapters(any_client: Client, tmp_path: Path):
    for name, seed in (("p1", 1), ("p2", 2)):
        await any_client.load_adapter(name, make_adapter(tmp_path / name, seed=seed))
    prompt = [320 + (i * 13) % 40 for i in range(100)]

    async def cached(adapter: str | None) -> int:
        body = any_client.words.select(adapter) | {"prompt": prompt, "max_tokens": 1}
        usage = (await any_client.post(COMPLETIONS, body)).json["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [await cached(name) for name in (None, "p1", "p2")] == [0, 0, 0]
    assert all([await cached(name) > 0 for name in (None, "p1", "p2")])


async def test_another_folder_under_the_same_name_has_no_prefixes_of_the_first(any_client: Client, tmp_path: Path):
    """A path of its own for each revision: then no engine computes on the KV of another revision."""
    prompt = [330 + (i * 17) % 40 for i in range(100)]
    for seed in (1, 2):
        await any_client.load_adapter("revision", make_adapter(tmp_path / str(seed), seed=seed))
        body = any_client.words.select("revision") | {"prompt": prompt, "max_tokens": 1}
        usage = (await any_client.post(COMPLETIONS, body)).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        await any_client.unload_adapter("revision")


async def test_a_chat_names_adapters_as_a_completion_does(any_client: Client, tmp_path: Path):
    await any_client.load_adapter("chats", make_adapter(tmp_path / "a", seed=1))

    async def chat(adapter: str | None) -> tuple[str, str]:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}
        answer = (await any_client.post(CHAT, any_client.words.select(adapter) | body)).json
        return answer["choices"][0]["message"]["content"], answer["model"]

    base, adapter = await chat(None), await chat("chats")
    assert base[0] != adapter[0]
    assert (base[1], adapter[1]) == (SERVED, any_client.words.select("chats")["model"])


async def test_an_adapter_that_is_loaded_again_from_its_folder(any_client: Client, tmp_path: Path):
    folder = make_adapter(tmp_path / "a", seed=1)
    prompt = [335 + (i * 23) % 26 for i in range(100)]
    cached: list[int] = []
    for _ in range(2):
        await any_client.load_adapter("reloaded", folder)
        body = any_client.words.select("reloaded") | {"prompt": prompt, "max_tokens": 1}
        usage = (await any_client.post(COMPLETIONS, body)).json["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        await any_client.unload_adapter("reloaded")
    assert cached[0] == 0
    assert (cached[1] > 0) == any_client.words.differences.old_prefixes


def without(*modules: str) -> list[str]:
    return [module for module in LORA_MODULES if module not in modules]


FITTING: dict[str, dict[str, Any]] = {
    "whole": {},
    "low-rank": {"rank": 2},
    "no-k": {"modules": without("k_proj")},
    "no-up": {"modules": without("up_proj")},
    "down-and-o": {"modules": ["down_proj", "o_proj"]},
    "first-layer": {"layers": 1},
    "all-linear": {"config": {"target_modules": "all-linear"}},
    "full-names": {"config": {"target_modules": [f"model.layers.0.x.{module}" for module in LORA_MODULES]}},
    "same-patterns": {"config": {"rank_pattern": {"q_proj": LORA_RANK}, "alpha_pattern": {}}},
}


@pytest.mark.parametrize("name", FITTING)
async def test_an_adapter_that_passes_shoals_check_loads_and_answers_with_weights_of_its_own(
    any_client: Client, tmp_path: Path, name: str
):
    folder = make_adapter(tmp_path / name, seed=21, **FITTING[name])
    facts = adapter.read_folder(folder, name, f"sha256:{'0' * 64}")
    limits = Limits("pool", LORA_RANK, LORA_MODULES, any_client.words.kind.pod.adapter_rules)
    assert check_adapter(facts, limits, base_of(MODEL)) is None
    assert (await any_client.load_adapter(name, folder)).status == 200
    assert await says(any_client, name) != await says(any_client, None)


async def test_the_adapters_of_the_examples_load_and_each_answers_its_own(any_client: Client, tmp_path: Path):
    script = ROOT / "images" / "shoal" / "make_models.py"
    await asyncio.to_thread(
        subprocess.run, [sys.executable, str(script), str(tmp_path / "m"), str(tmp_path / "a")], check=True, timeout=60
    )
    answers = [await says(any_client, None)]
    for name in ("support-v1", "support-v2", "legal", "poet"):
        assert (await any_client.load_adapter(name, tmp_path / "a" / name)).status == 200
        answers.append(await says(any_client, name))
    assert len(set(answers)) == 5


async def test_what_the_agent_is_told_of_loads_and_unloads(any_client: Client, tmp_path: Path):
    """In the port's own errors, whatever an engine's status and words are."""
    agent = any_client.words.kind.agent
    adapters = agent.connect(
        any_client.session, any_client.engine.url, api_key=API_KEY, admin_key=ADMIN_KEY
    ).adapters  # fmt: skip
    folder = make_adapter(tmp_path / "a")
    await adapters.load("mine", str(folder), seconds=60)
    assert await adapters.loaded() == (LoadedAdapter("mine", str(folder)),)
    with pytest.raises(AlreadyLoaded):
        await adapters.load("mine", str(folder), seconds=60)
    await adapters.unload("mine", seconds=60)
    assert await adapters.loaded() == ()
    with pytest.raises(NotLoaded):
        await adapters.unload("mine", seconds=60)
    for name, path in (("wide", make_adapter(tmp_path / "wide", rank=64)), ("gone", tmp_path / "gone")):
        with pytest.raises(AdapterRejected) as caught:
            await adapters.load(name, str(path), seconds=60)
        assert type(caught.value) is AdapterRejected
        assert len(caught.value.message) > 0


# --- unload, slots, reads ---------------------------------------------------------------------------------------------


async def test_an_unload_and_the_requests_that_run(any_client: Client, tmp_path: Path):
    await any_client.load_adapter("busy", make_adapter(tmp_path / "a", seed=1))
    expected = await says(any_client, "busy", max_tokens=500)
    async with streaming(any_client, "busy", 500) as response:
        going = asyncio.create_task(any_client.unload_adapter("busy"))
        async with asyncio.timeout(30):
            while "busy" in await loaded(any_client):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        if any_client.words.differences.unload_waits:
            assert not going.done()
        else:
            assert (await going).status == 200
        # The answer ends as it began, whoever waits for whom.
        assert expected.endswith(await rest(response))
    assert (await going).status == 200


async def test_a_request_that_comes_while_its_adapter_is_unloaded(any_client: Client, tmp_path: Path):
    await any_client.load_adapter("leaving", make_adapter(tmp_path / "a", seed=1))
    expected = await says(any_client, "leaving")
    async with streaming(any_client, "leaving", 600) as response:
        going = asyncio.create_task(any_client.unload_adapter("leaving"))
        async with asyncio.timeout(30):
            while "leaving" in await loaded(any_client):
                await asyncio.sleep(0.01)
        late = asyncio.create_task(ask(any_client, "leaving"))
        assert len(await says(any_client, None)) > 0
        await rest(response)
    assert (await going).status == 200
    # Refused, or loaded again for it: the base never answers.
    status = any_client.words.differences.after_unload
    assert await late == (status, expected if status == 200 else "")


@pytest.mark.parametrize("end", ["several choices", "a client that leaves"])
async def test_whatever_ends_a_request_frees_its_adapter(any_client: Client, tmp_path: Path, end: str):
    """Of an engine that counts them wrong the unload never returns (github.com/sgl-project/sglang/issues/36894)."""
    await any_client.load_adapter("counted", make_adapter(tmp_path / "a", seed=1))
    if end == "several choices":
        for _ in range(3):
            body = any_client.words.select("counted") | GREEDY | {"n": 2, "temperature": 1, "max_tokens": 64}
            assert len((await any_client.post(COMPLETIONS, body)).json["choices"]) == 2
    else:
        async with streaming(any_client, "counted", 3000):
            pass
    async with asyncio.timeout(30):
        assert (await any_client.unload_adapter("counted")).status == 200
    assert len(await says(any_client, None)) > 0


async def test_more_adapters_than_slots_take_turns(any_client: Client, tmp_path: Path):
    """With the base model in the batch, too."""
    for_base = LORA_SLOTS - any_client.words.differences.slots  # where the base takes a slot, the suite gives one more
    slots = (LORA_SLOTS if for_base else VLLM_SLOTS) - for_base
    names = [f"turn{i}" for i in range(slots + 1)]
    for at, name in enumerate(names):
        await any_client.load_adapter(name, make_adapter(tmp_path / name, seed=at))
    long = GREEDY | {"max_tokens": 3000}
    any_client.background(COMPLETIONS, any_client.words.select(None) | long)
    await any_client.settle(1)
    for at, name in enumerate(names[:-1]):
        any_client.background(COMPLETIONS, any_client.words.select(name) | long)
        await any_client.settle(2 + at)
    waiting = any_client.background(COMPLETIONS, any_client.words.select(names[-1]) | GREEDY)
    await any_client.settle(1 + slots, 1)
    assert MAX_QUEUED > 1
    # One whose adapter runs passes it.
    assert len(await says(any_client, names[0], max_tokens=4)) > 0
    assert not waiting.done()
    # One that leaves frees its slot.
    any_client.tasks[1].cancel()
    assert (await waiting).status == 200


async def test_nobody_is_served_while_files_are_read(any_client: Client, tmp_path: Path):
    words = any_client.words
    folder = make_adapter(tmp_path / "slow")
    config = folder / "adapter_config.json"
    content = config.read_bytes()
    config.unlink()
    os.mkfifo(config)
    async with streaming(any_client, None, 3000) as response:
        going = asyncio.create_task(any_client.load_adapter("slow", folder))
        pipe = await asyncio.to_thread(os.open, config, os.O_WRONLY)
        try:
            while True:
                try:
                    async with asyncio.timeout(2):
                        await response.content.readline()
                except TimeoutError:
                    break
            assert not going.done()
            # The probe does not show it.
            assert (await any_client.get(words.differences.ready_path, key=None)).status == 200
            assert await loaded(any_client) == []
        finally:
            await asyncio.to_thread(os.write, pipe, content)
            os.close(pipe)
        assert (await going).status == 200
        assert len(await response.content.readline()) > 0


async def test_an_engine_begins_with_the_adapters_of_its_arguments_and_forgets_the_others(
    any_kind: Kind, tmp_path: Path
):
    words = WORDS[any_kind]
    first, second = (make_adapter(tmp_path / name, seed=seed) for name, seed in (("1", 1), ("2", 2)))
    for at in ("begins", "restarted"):
        with running_engine(any_kind, tmp_path / at, *words.lora, words.adapters_at_start, f"first={first}") as engine:
            async with aiohttp.ClientSession() as session:
                client = Client(engine, session)
                assert await loaded(client) == ["first"]
                assert await says(client, "first") != await says(client, None)
                assert (await ask(client, "second"))[0] == words.differences.never_loaded
                assert (await client.load_adapter("second", second)).status == 200
                assert (await ask(client, "second"))[0] == 200
