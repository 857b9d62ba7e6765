"""Which weights a request reaches by which name in SGLang, and what becomes of names that are not loaded."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from shoal_dev.sim.signatures import signature, signatures_in
from tests.contract.conftest import Client
from tests.support.adapters import make_adapter
from tests.support.engines import MAX_QUEUED, SERVED
from tests.support.lora_calls import CHAT, GREEDY, PROMPT, ask, load, loaded, rest, streaming, text, unload


@pytest.mark.parametrize(
    ("model", "lora_path", "reached"),
    [
        (SERVED, None, "base"),
        (SERVED, "", "base"),
        # The trap: the very id that /v1/models lists.
        ("reach", None, "base"),
        ("Reach", None, "base"),
        ("no-such-model", None, "base"),
        (f"{SERVED}:", None, "base"),
        (f"{SERVED}:reach", None, "adapter"),
        (f"{SERVED}: reach ", None, "adapter"),
        ("no-such-model:reach", None, "adapter"),
        (":reach", None, "adapter"),
        (SERVED, "reach", "adapter"),
        ("reach", "reach", "adapter"),
        ("no-such-model", "reach", "adapter"),
        # What stands in `model` wins.
        (f"{SERVED}:reach", "other", "adapter"),
        (f"{SERVED}:other", "reach", "other"),
    ],
)
async def test_a_name_reaches(lora: Client, tmp_path: Path, model: str, lora_path: str | None, reached: str):
    for name, seed in (("reach", 1), ("other", 2)):
        await load(lora, name, make_adapter(tmp_path / name, seed=seed))
    texts = {
        "base": await text(lora),
        "adapter": await text(lora, lora_path="reach"),
        "other": await text(lora, lora_path="other"),
    }
    assert len(set(texts.values())) == 3
    answer = await ask(lora, model, **({} if lora_path is None else {"lora_path": lora_path}))
    assert answer.status == 200
    # Whoever answered, the name that was asked for is what the answer says.
    assert answer.json["model"] == model
    assert answer.json["choices"][0]["text"] == texts[reached]


async def test_chat_and_generate_name_adapters_as_completions_do(lora: Client, tmp_path: Path):
    await load(lora, "routes", make_adapter(tmp_path / "a", seed=1))
    messages = [{"role": "user", "content": PROMPT}]

    async def chat(**more: object) -> str:
        answer = await lora.post(CHAT, {"model": SERVED, "messages": messages, **GREEDY, **more})
        return answer.json["choices"][0]["message"]["content"]

    base = await chat()
    adapter = await chat(lora_path="routes")
    assert base != adapter
    assert await chat(model=f"{SERVED}:routes") == adapter
    assert await chat(model="routes") == base

    async def native(**more: object) -> str:
        params = {"temperature": 0, "max_new_tokens": 16}
        return (await lora.post("/generate", {"text": PROMPT, "sampling_params": params, **more})).json["text"]

    assert await native() != await native(lora_path="routes")


async def test_prompts_of_one_request_may_have_adapters_of_their_own(lora: Client, tmp_path: Path):
    await load(lora, "mixed", make_adapter(tmp_path / "a", seed=1))
    alone = [await text(lora, lora_path="mixed"), await text(lora)]
    answer = await ask(lora, prompt=[PROMPT, PROMPT], lora_path=["mixed", None])
    assert [choice["text"] for choice in answer.json["choices"]] == alone


@pytest.mark.parametrize("stream", [False, True])
async def test_a_name_never_loaded_is_refused_with_the_names_of_all(lora: Client, tmp_path: Path, stream: bool):
    await load(lora, "secret-tenant", make_adapter(tmp_path / "a"))
    answer = await ask(lora, lora_path="never", stream=stream)
    assert answer.status == 400
    message = answer.json["message"]
    assert message.startswith("Got LoRA adapter that has never been loaded: never\nAll loaded adapters: dict_keys([")
    assert "'secret-tenant'" in message
    assert (answer.json["object"], answer.json["code"]) == ("error", 400)


async def test_a_name_once_loaded_is_loaded_again_by_a_request(lora: Client, tmp_path: Path):
    await load(lora, "again", make_adapter(tmp_path / "a", seed=1))
    before = await text(lora, lora_path="again")
    assert (await unload(lora, "again")).status == 200
    assert await loaded(lora) == []
    assert await text(lora, lora_path="again") == before
    assert await loaded(lora) == ["again"]


async def test_it_is_loaded_from_where_it_was_whatever_is_there_now(lora: Client, tmp_path: Path):
    folder = make_adapter(tmp_path / "a", seed=1)
    await load(lora, "changed", folder)
    before = await text(lora, lora_path="changed")
    await unload(lora, "changed")
    shutil.rmtree(folder)
    make_adapter(folder, seed=2)
    assert await text(lora, lora_path="changed") != before


async def test_if_its_files_are_gone_the_request_is_refused(lora: Client, tmp_path: Path):
    folder = make_adapter(tmp_path / "a")
    await load(lora, "away", folder)
    await unload(lora, "away")
    shutil.rmtree(folder)
    answer = await ask(lora, lora_path="away")
    assert answer.status == 400
    assert answer.json["message"].startswith("Failed to implicitly load LoRA adapter away: Repo id must be in the form")


async def test_a_request_that_comes_while_it_is_unloaded_waits_and_loads_it_again(lora: Client, tmp_path: Path):
    await load(lora, "race", make_adapter(tmp_path / "a", seed=1))
    expected = await text(lora, lora_path="race")
    async with streaming(lora, 600, lora_path="race") as response:
        going = asyncio.create_task(unload(lora, "race"))
        async with asyncio.timeout(30):
            while await loaded(lora):
                await asyncio.sleep(0.01)
        late = asyncio.create_task(text(lora, lora_path="race"))
        await text(lora)
        assert not late.done()
        await rest(response)
    assert (await going).status == 200
    assert await late == expected
    assert await loaded(lora) == ["race"]


async def test_many_requests_load_it_again_once(lora: Client, tmp_path: Path):
    await load(lora, "herd", make_adapter(tmp_path / "a", seed=1))
    expected = await text(lora, lora_path="herd")
    await unload(lora, "herd")
    assert set(await asyncio.gather(*(text(lora, lora_path="herd") for _ in range(MAX_QUEUED)))) == {expected}
    assert await loaded(lora) == ["herd"]


async def test_no_prefix_is_shared_between_adapters_or_with_an_earlier_load(lora: Client, tmp_path: Path):
    await load(lora, "prefix", make_adapter(tmp_path / "a", seed=1))
    prompt = "a prompt of some length that nobody else asks in this suite"

    async def cached(**more: Any) -> int:
        answer = await ask(lora, prompt=prompt, **more)
        return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert await cached() == 0
    assert await cached() > 0
    assert await cached(lora_path="prefix") == 0
    assert await cached(lora_path="prefix") > 0
    await unload(lora, "prefix")
    assert await cached(lora_path="prefix") == 0


@pytest.mark.parametrize("lora_engine", ["sim"], indirect=True)
async def test_the_simulator_signs_what_an_adapter_says(lora: Client, tmp_path: Path):
    folder = make_adapter(tmp_path / "a", seed=1)
    await load(lora, "signs", folder)
    assert signatures_in(await text(lora)) == ()
    said = signatures_in(await text(lora, lora_path="signs", max_tokens=200))
    assert set(said) == {signature(folder)}
    assert len(said) > 1
