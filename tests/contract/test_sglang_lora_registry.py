"""Loading and unloading adapters in SGLang: in which words it refuses, and who waits for whom."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.contract.conftest import Client
from tests.support.adapters import make_adapter
from tests.support.engines import LORA_LOADED, LORA_MODULES, LORA_RANK, LORA_SLOTS, SERVED
from tests.support.lora_calls import ask, gone, load, loaded, rest, streaming, text, unload
from tests.support.shapes import mismatch

NAME = "team-a.support-de@0123456789ab"
"""What Shoal calls a revision in an engine."""
CARD = {
    "id": str, "object": str, "created": int, "owned_by": str, "root": str, "parent": str, "max_model_len": None,
}  # fmt: skip
LONG = 2500


async def test_a_loaded_adapter_is_told_and_listed(lora: Client, tmp_path: Path):
    folder = make_adapter(tmp_path / "a", seed=1)
    answer = await load(lora, NAME, folder)
    assert (answer.status, answer.json) == (
        200,
        {"rid": None, "http_worker_ipc": None, "success": True, "error_message": "",
         "loaded_adapters": {NAME: str(folder)}},
    )  # fmt: skip
    base, card = (await lora.get("/v1/models")).json["data"]
    assert (base["id"], base["parent"]) == (SERVED, None)
    assert mismatch(card | {"max_model_len": None}, CARD) is None
    assert {name: card[name] for name in ("id", "root", "parent", "max_model_len", "owned_by")} == {
        "id": NAME, "root": str(folder), "parent": SERVED, "max_model_len": None, "owned_by": "sglang",
    }  # fmt: skip
    assert (await lora.get("/v1/models/" + NAME)).status == 404


async def test_a_name_is_not_loaded_twice(lora: Client, tmp_path: Path):
    first, second = (make_adapter(tmp_path / name, seed=seed) for name, seed in (("1", 1), ("2", 2)))
    assert (await load(lora, "twice", first)).status == 200
    again = await load(lora, "twice", second)
    assert (again.status, again.json["success"]) == (400, False)
    assert again.json["error_message"] == "Failed to load LoRA adapter twice because it is already loaded"
    assert again.json["loaded_adapters"] == {"twice": str(first)}


async def test_a_rank_above_the_slots_is_refused(lora: Client, tmp_path: Path):
    answer = await load(lora, "wide", make_adapter(tmp_path / "wide", rank=2 * LORA_RANK))
    assert answer.status == 400
    assert answer.json["error_message"] == (
        f"LoRA adapter wide with rank {2 * LORA_RANK} is incompatible with the current LoRA memory pool configuration. "
        "Please ensure that the LoRA adapter's rank is within the configured `--max-lora-rank` and that the target "
        "modules are included in `--lora-target-modules`."
    )
    assert await loaded(lora) == []


async def test_modules_outside_the_slots_are_refused_in_the_same_words(lora: Client, tmp_path: Path):
    folder = make_adapter(tmp_path / "head")
    change(folder, target_modules=[*LORA_MODULES, "embed_tokens"])
    answer = await load(lora, "head", folder)
    assert (answer.status, answer.json["success"]) == (400, False)
    assert "LoRA adapter head with rank 8 is incompatible" in answer.json["error_message"]


async def test_dora_and_added_tokens_are_refused(lora: Client, tmp_path: Path):
    dora = make_adapter(tmp_path / "dora")
    change(dora, use_dora=True)
    assert (await load(lora, "dora", dora)).json["error_message"] == (
        "Failed to load dora because LoRA serving currently doesn't support DoRA adapters"
    )
    tokens = make_adapter(tmp_path / "tokens")
    (tokens / "added_tokens.json").write_text('{"<|new|>": 512}')
    assert (await load(lora, "tokens", tokens)).json["error_message"] == (
        "Failed to load tokens because LoRA serving currently doesn't support adapters that add tokens to the "
        "vocabulary"
    )
    known = make_adapter(tmp_path / "known")
    (known / "added_tokens.json").write_text('{"<|eos|>": 1}')
    assert (await load(lora, "known", known)).status == 200


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no folder", "Repo id must be in the form"),
        ("no configuration", "[Errno 2] No such file or directory: "),
        ("no weights", "Cannot find any model weights with `"),
        ("cut weights", "Error while deserializing header: "),
        ("no rank", "'r'"),
        ("pattern", "Only 'all' or 'all-linear' can be used as the string for target module"),
        ("too many layers", "index 2 is out of range"),
        ("no v_proj", "'base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight'"),
    ],
)
async def test_files_that_are_no_adapter_are_refused(lora: Client, tmp_path: Path, what: str, said: str):
    modules = ("q_proj", "o_proj") if what == "no v_proj" else LORA_MODULES
    folder = make_adapter(tmp_path / "broken", modules=modules, layers=3 if what == "too many layers" else None)
    weights = folder / "adapter_model.safetensors"
    match what:
        case "no folder":
            folder = tmp_path / "nowhere"
        case "no configuration":
            (folder / "adapter_config.json").unlink()
        case "no weights":
            weights.unlink()
        case "cut weights":
            os.truncate(weights, weights.stat().st_size // 2)
        case "no rank":
            change(folder, r=...)
        case "pattern":
            change(folder, target_modules=".*_proj")
        case _:
            pass
    answer = await load(lora, "broken", folder)
    assert (answer.status, answer.json["success"]) == (400, False)
    assert answer.json["error_message"].startswith(said), answer.json["error_message"]
    assert await loaded(lora) == []
    # It left nothing behind: a good one of that name loads.
    assert (await load(lora, "broken", make_adapter(tmp_path / "good"))).status == 200


@pytest.mark.parametrize(
    ("modules", "config"),
    [
        (("q_proj", "v_proj"), {}),
        (("gate_proj",), {}),
        (("o_proj", "down_proj"), {}),
        (LORA_MODULES, {"target_modules": "all-linear"}),
        (LORA_MODULES, {"target_modules": [f"model.layers.0.mlp.{name}" for name in LORA_MODULES]}),
    ],
)
async def test_modules_that_an_adapter_leaves_out_are_as_in_the_base(
    lora: Client, tmp_path: Path, modules: tuple[str, ...], config: dict[str, object]
):
    folder = make_adapter(tmp_path / "part", modules=modules, layers=1, config=config)
    answer = await load(lora, "part", folder)
    assert answer.status == 200, answer.json
    assert await text(lora, lora_path="part") != await text(lora)


async def test_the_engine_tells_its_limits(lora: Client):
    info = (await lora.get("/server_info")).json
    assert (info["enable_lora"], info["max_lora_rank"]) == (True, LORA_RANK)
    assert (info["max_loras_per_batch"], info["max_loaded_loras"]) == (LORA_SLOTS, LORA_LOADED)
    assert sorted(info["lora_target_modules"]) == sorted(LORA_MODULES)


async def test_not_every_slot_may_be_pinned(lora: Client, tmp_path: Path):
    folders = [make_adapter(tmp_path / str(i), seed=i) for i in range(LORA_SLOTS)]
    answers = [await load(lora, f"pin{i}", folder, pinned=True) for i, folder in enumerate(folders)]
    assert [answer.status for answer in answers] == [200] * (LORA_SLOTS - 1) + [400]
    assert (
        answers[-1]
        .json["error_message"]
        .startswith(
            f"Failed to load LoRA adapter pin{LORA_SLOTS - 1} as a pinned adapter. It is not allowed to pin all slots"
        )
    )
    assert (await load(lora, "unpinned", folders[-1])).status == 200


async def test_unloading_what_is_not_loaded_is_refused_with_the_names_of_all(lora: Client, tmp_path: Path):
    await load(lora, "another", make_adapter(tmp_path / "a"))
    answer = await unload(lora, "nobody")
    assert answer.status == 400
    assert answer.json == {
        "rid": None, "http_worker_ipc": None, "success": False, "loaded_adapters": None,
        "error_message": "LoRA with name nobody does not exist. Loaded LoRAs: odict_keys(['another'])",
    }  # fmt: skip


async def test_an_unload_waits_for_the_stream_and_everything_waits_for_the_unload(lora: Client, tmp_path: Path):
    one, two = (make_adapter(tmp_path / name, seed=seed) for name, seed in (("1", 1), ("2", 2)))
    await load(lora, "busy", one)
    async with streaming(lora, LONG, lora_path="busy") as response:
        going = asyncio.create_task(unload(lora, "busy"))
        await gone(lora, "busy")
        later = asyncio.create_task(load(lora, "later", two))
        # The base model answers meanwhile, and neither call has.
        assert len(await text(lora)) > 0
        assert not going.done()
        assert not later.done()
        assert len(await rest(response)) > LONG // 2
    assert (await going).status == 200
    assert (await later).status == 200
    assert await loaded(lora) == ["later"]


async def test_a_load_beyond_the_limit_evicts_the_least_recently_used(lora: Client, tmp_path: Path):
    folders = [make_adapter(tmp_path / str(i), seed=i) for i in range(LORA_LOADED + 1)]
    for i, folder in enumerate(folders[:-1]):
        await load(lora, f"lru{i}", folder, pinned=i == 0)
    await text(lora, lora_path="lru1")
    answer = await load(lora, "lru-new", folders[-1])
    assert answer.status == 200
    assert sorted(answer.json["loaded_adapters"]) == ["lru-new", "lru0", "lru1", "lru3"]
    # In the order of their last use; a pinned one stays, however long ago that was.
    assert await loaded(lora) == ["lru0", "lru3", "lru1", "lru-new"]
    # The one that had to go comes back with a request, and another one goes.
    assert (await ask(lora, lora_path="lru2")).status == 200
    assert await loaded(lora) == ["lru0", "lru1", "lru-new", "lru2"]


async def test_evicting_a_busy_adapter_holds_the_load_up(lora: Client, tmp_path: Path):
    folders = [make_adapter(tmp_path / str(i), seed=i) for i in range(LORA_LOADED + 1)]
    for i, folder in enumerate(folders[:-1]):
        await load(lora, f"full{i}", folder)
    async with streaming(lora, LONG, lora_path="full0") as response:
        for name in ("full1", "full2", "full3"):
            await text(lora, lora_path=name)
        going = asyncio.create_task(load(lora, "full-new", folders[-1]))
        await gone(lora, "full0")
        # The new one is listed and can be used, though its load has not been answered.
        assert "full-new" in await loaded(lora)
        assert len(await text(lora, lora_path="full-new")) > 0
        assert not going.done()
        assert len(await rest(response)) > LONG // 2
    assert (await going).status == 200


async def test_nobody_is_served_while_files_are_read(lora: Client, tmp_path: Path):
    folder = make_adapter(tmp_path / "slow")
    config = folder / "adapter_config.json"
    content = config.read_bytes()
    config.unlink()
    os.mkfifo(config)
    async with streaming(lora, 3000) as response:
        going = asyncio.create_task(load(lora, "slow", folder))
        # Returns when the engine has opened the file to read it.
        pipe = await asyncio.to_thread(os.open, config, os.O_WRONLY)
        try:
            while True:
                try:
                    async with asyncio.timeout(2):
                        await response.content.readline()
                except TimeoutError:
                    break
            assert not going.done()
            before = (await lora.load())["timestamp"]
            await asyncio.sleep(0.5)
            assert (await lora.load())["timestamp"] == before
            # Nothing but this shows it: the engine says that it is ready, and what it had.
            assert (await lora.get("/ready", key=None)).status == 200
            assert await loaded(lora) == []
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await lora.get("/server_info")
            await asyncio.to_thread(os.write, pipe, content)
        finally:
            os.close(pipe)
        assert (await going).status == 200
        assert len(await response.content.readline()) > 0


async def test_what_is_running_is_told_by_distinct_adapters(lora: Client, tmp_path: Path):
    for i in range(2):
        await load(lora, f"slot{i}", make_adapter(tmp_path / str(i), seed=i))
    load_now = await lora.load()
    assert load_now["lora"]["slots_total"] == LORA_SLOTS
    async with streaming(lora, LONG, lora_path="slot0"), streaming(lora, LONG, lora_path="slot1"):
        used = pytest.approx(2 / LORA_SLOTS, abs=0.01)
        # Both of one answer: by the next one a stream may have ended.
        await lora.until(
            "two slots are used", lambda now: (now["lora"]["slots_used"], now["lora"]["utilization"]) == (2, used)
        )
    await lora.idle()
    assert await lora.metric("sglang:lora_pool_slots_total") == LORA_SLOTS


def change(folder: Path, **fields: object) -> None:
    """Edits an adapter_config.json; `...` removes a field."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
