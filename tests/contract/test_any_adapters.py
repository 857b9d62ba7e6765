"""Adapters on every engine: who answers by which name, what a load refuses, what an unload means."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.contract.conftest import Client
from tests.support.adapters import make_adapter
from tests.support.behaviour import WORDS
from tests.support.engines import API_KEY, LORA_RANK, LORA_SLOTS, MAX_QUEUED, SERVED, VLLM_SLOTS, Kind, running_engine
from tests.support.lora_calls import rest

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


@pytest.mark.parametrize("what", ["wide", "cut", "dora", "foreign module"])
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
        case _:
            make_adapter(folder, modules=("q_proj", "foo_proj"), widths={"foo_proj": (64, 64)})
    before = await says(any_client, None)
    answer = await any_client.load_adapter("bad", folder)
    assert answer.status == any_client.words.differences.load_wide
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
