"""Loading and unloading of adapters in a vLLM engine, with the answers that vLLM 0.32.0 gives."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from shoal.engine.port import (
    AdapterRejected,
    AlreadyLoaded,
    EngineRefused,
    EngineTimeout,
    LoadedAdapter,
    LoRADisabled,
    NotLoaded,
)
from shoal.engine.vllm.adapters import VLLMAdapters
from shoal.engine.vllm.client import VLLMClient


def refused(message: str, code: int) -> str:
    return json.dumps({"error": {"message": message, "type": "X", "param": None, "code": code}})


class Engine:
    def __init__(self) -> None:
        self.status, self.text, self.hang = 200, "Success: LoRA adapter 'a' added successfully.", False
        self.seen: list[tuple[str, str | None, Any]] = []

    def app(self) -> web.Application:
        async def update(request: web.Request) -> web.Response:
            self.seen.append((request.path, request.headers.get("Authorization"), await request.json()))
            if self.hang:
                await asyncio.sleep(30)
            return web.Response(status=self.status, text=self.text)

        async def models(_: web.Request) -> web.Response:
            cards = [
                {"id": "tiny", "root": "/models/tiny", "parent": None},
                {"id": "a", "root": "/adapters/a", "parent": "tiny"},
            ]
            return web.json_response({"object": "list", "data": cards})

        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/load_lora_adapter", update),
                web.post("/v1/unload_lora_adapter", update),
                web.get("/v1/models", models),
            ]
        )
        return app


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def adapters(engine: Engine) -> AsyncGenerator[VLLMAdapters]:
    server = TestServer(engine.app())
    await server.start_server()
    async with aiohttp.ClientSession() as session:
        yield VLLMAdapters(VLLMClient(session, str(server.make_url("")), api_key="engine-key"))
    await server.close()


async def test_a_load_names_folder_and_never_asks_for_one_in_place(engine: Engine, adapters: VLLMAdapters) -> None:
    await adapters.load("a", "/adapters/a")
    await adapters.unload("a")
    assert engine.seen == [
        ("/v1/load_lora_adapter", "Bearer engine-key", {"lora_name": "a", "lora_path": "/adapters/a"}),
        ("/v1/unload_lora_adapter", "Bearer engine-key", {"lora_name": "a"}),
    ]


async def test_what_is_loaded_leaves_out_the_base(adapters: VLLMAdapters) -> None:
    assert await adapters.loaded() == (LoadedAdapter("a", "/adapters/a"),)


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (400, refused("The lora adapter 'a' has already been loaded. If you want to load ...", 400), AlreadyLoaded),
        (404, refused("The lora adapter 'a' cannot be found.", 404), NotLoaded),
        (404, refused("Loading lora a failed: No adapter found for <path>", 404), AdapterRejected),
        (500, refused("Call to add_lora method failed: Worker failed with error 'LoRA rank'", 500), AdapterRejected),
        (404, '{"detail":"Not Found"}', LoRADisabled),
        (
            500,
            refused("Call to add_lora method failed: Worker failed with error 'LoRA is not enabled. Use --en", 500),
            LoRADisabled,
        ),
        (500, refused("EngineCore encountered an issue.", 500), EngineRefused),
        (401, '{"error":"Unauthorized"}', EngineRefused),
        (502, "<html>", EngineRefused),
    ],
)
async def test_what_vllm_answers_is_told_apart(
    engine: Engine, adapters: VLLMAdapters, status: int, text: str, kind: type[Exception]
) -> None:
    engine.status, engine.text = status, text
    with pytest.raises(kind) as caught:
        await adapters.load("a", "/adapters/a")
    assert type(caught.value) is kind


async def test_a_load_that_hangs_is_a_timeout(engine: Engine, adapters: VLLMAdapters) -> None:
    engine.hang = True
    with pytest.raises(EngineTimeout):
        await adapters.load("a", "/adapters/a", seconds=0.05)
