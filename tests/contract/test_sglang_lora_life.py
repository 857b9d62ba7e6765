"""SGLang's life with adapters: which ends it, and what becomes of an unload that was given up."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest

from shoal.engine.port import EngineTimeout, EngineUnreachable
from shoal.engine.sglang.adapters import SGLangAdapters
from shoal.engine.sglang.client import SGLangClient
from tests.contract.conftest import Client
from tests.support.adapters import ALL, make_adapter
from tests.support.engines import (
    ADMIN_KEY,
    API_KEY,
    LORA,
    LORA_RANK,
    Kind,
    running_engine,
)
from tests.support.lora_calls import load, rest, streaming, text


@pytest.mark.parametrize(
    ("what", "modules", "rank"),
    [
        ("other widths", ALL, LORA_RANK),
        ("another rank than it says", ALL, LORA_RANK // 2),
        ("k_proj without q_proj", ("k_proj", "v_proj"), LORA_RANK),
        ("up_proj without gate_proj", ("up_proj",), LORA_RANK),
        ("a module that the slots have not", (*ALL, "extra_proj"), LORA_RANK),
    ],
)
async def test_an_adapter_that_loads_and_does_not_fit_ends_the_engine_at_its_first_request(
    kind: Kind, tmp_path: Path, what: str, modules: Sequence[str], rank: int
):
    """Everybody's engine: such files must never come to it."""
    widths = {"extra_proj": (64, 64), **({"down_proj": (96, 64)} if what == "other widths" else {})}
    config = {"r": LORA_RANK, "target_modules": sorted({*modules} & {*ALL})}
    folder = make_adapter(tmp_path / "a", rank=rank, modules=modules, widths=widths, config=config)
    with running_engine(kind, tmp_path, *LORA) as engine:
        async with aiohttp.ClientSession() as session:
            client = Client(engine, session)
            assert (await load(client, "kills", folder)).status == 200
            assert len(await text(client)) > 0
            with pytest.raises((aiohttp.ClientError, AssertionError)):
                await text(client, lora_path="kills")
        await asyncio.to_thread(engine.process.wait, 60)


@pytest.fixture
async def adapters(lora: Client) -> SGLangAdapters:
    return SGLangAdapters(SGLangClient(lora.session, lora.engine.url, api_key=API_KEY, admin_key=ADMIN_KEY))


async def test_an_unload_that_was_given_up_is_carried_out_all_the_same(
    adapters: SGLangAdapters, lora: Client, tmp_path: Path
):
    await adapters.load("given-up", str(make_adapter(tmp_path / "a")))
    async with streaming(lora, 600, lora_path="given-up") as response:
        with pytest.raises(EngineTimeout):
            await adapters.unload("given-up", seconds=1)
        assert await adapters.loaded() == ()
        await rest(response)
    await lora.idle()
    # It was unloaded, not only hidden: the name can be loaded anew.
    assert len(await adapters.load("given-up", str(tmp_path / "a"))) == 1


async def test_an_engine_that_is_killed_in_a_load_is_unreachable(kind: Kind, tmp_path: Path):
    folder = make_adapter(tmp_path / "a")
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")
    with running_engine(kind, tmp_path, *LORA) as engine:
        async with aiohttp.ClientSession() as session:
            adapters = SGLangAdapters(SGLangClient(session, engine.url, api_key=API_KEY, admin_key=ADMIN_KEY))
            loading = asyncio.create_task(adapters.load("a", str(folder)))
            # Returns when the engine has opened the file to read it.
            pipe = await asyncio.to_thread(os.open, folder / "adapter_config.json", os.O_WRONLY)
            engine.process.kill()
            os.close(pipe)
            with pytest.raises(EngineUnreachable):
                await loading
            await asyncio.to_thread(engine.process.wait, 30)
            with pytest.raises(EngineUnreachable):
                await adapters.loaded()
