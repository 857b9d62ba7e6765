"""What the engine's client makes of answers about adapters, also of those that make no sense."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from shoal.engine.models import parse_models
from shoal.engine.port import (
    AdapterRejected,
    AlreadyLoaded,
    EngineGarbled,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    IncompleteUnload,
    LoadedAdapter,
    LoRADisabled,
    NotLoaded,
    TooManyPinned,
)
from shoal.engine.sglang.adapters import SGLangAdapters
from shoal.engine.sglang.client import SGLangClient


@dataclass
class Engine:
    """Answers every call with what the test says."""

    status: int = 200
    body: str = ""
    hang: bool = False
    asked: list[tuple[str, str | None, Any]] = field(default_factory=list[tuple[str, str | None, Any]])

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, request.headers.get("Authorization"), await request.json()))
        if self.hang:
            await asyncio.sleep(30)
        return web.Response(status=self.status, text=self.body)

    def says(self, status: int, message: str | None, loaded: dict[str, str] | None = None) -> None:
        self.status = status
        self.body = json.dumps({"success": status == 200, "error_message": message, "loaded_adapters": loaded})


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def adapters(engine: Engine) -> AsyncGenerator[SGLangAdapters]:
    app = web.Application()
    app.router.add_post("/{path:.*}", engine.answer)
    server = TestServer(app)
    await server.start_server()
    async with aiohttp.ClientSession() as session:
        url = str(server.make_url(""))
        yield SGLangAdapters(SGLangClient(session, url, api_key="engine-key", admin_key="admin-key"))
    await server.close()


async def test_loads_carry_the_key_of_the_administrator(engine: Engine, adapters: SGLangAdapters):
    engine.says(200, "", {"a": "/a", "b": "/b"})
    assert await adapters.load("a", "/a", pinned=True) == {"a": "/a", "b": "/b"}
    await adapters.unload("a")
    assert engine.asked == [
        ("/load_lora_adapter", "Bearer admin-key", {"lora_name": "a", "lora_path": "/a", "pinned": True}),
        ("/unload_lora_adapter", "Bearer admin-key", {"lora_name": "a"}),
    ]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Failed to load LoRA adapter a because it is already loaded", AlreadyLoaded),
        ("LoRA with name a already exists. Loaded LoRAs: odict_keys(['a'])", AlreadyLoaded),
        ("LoRA with name a does not exist. Loaded LoRAs: odict_keys([])", NotLoaded),
        (
            "LoRA adapter 'a' has an incomplete unload. Retry the unload before loading it again.",
            IncompleteUnload,
        ),
        (
            "Failed to load LoRA adapter a as a pinned adapter. It is not allowed to pin all slots in the LoRA memory "
            "pool to avoid starvation for unpinned adapters and base models.",
            TooManyPinned,
        ),
        ("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.", LoRADisabled),
        ("LoRA adapter a with rank 64 is incompatible with the current LoRA memory pool", AdapterRejected),
        ("Error while deserializing header: header too small", AdapterRejected),
    ],
)
async def test_the_engines_texts_are_errors_of_their_own(
    engine: Engine, adapters: SGLangAdapters, message: str, kind: type[AdapterRejected]
):
    engine.says(400, message)
    with pytest.raises(AdapterRejected) as caught:
        await adapters.load("a", "/a")
    assert type(caught.value) is kind
    assert caught.value.message == message


@pytest.mark.parametrize("status", [401, 500, 503])
async def test_other_statuses_are_told_as_such_and_without_the_key(
    engine: Engine, adapters: SGLangAdapters, status: int
):
    engine.status, engine.body = status, "Internal Server Error"
    with pytest.raises(EngineRefused, match=f"/load_lora_adapter answered {status}") as caught:
        await adapters.load("a", "/a")
    assert "admin-key" not in str(caught.value)


@pytest.mark.parametrize("body", ["", "[]", "{", "null"])
async def test_an_answer_that_makes_no_sense_is_garbled(engine: Engine, adapters: SGLangAdapters, body: str):
    engine.body = body
    with pytest.raises(EngineGarbled):
        await adapters.unload("a")


async def test_200_that_does_not_say_success_is_none(engine: Engine, adapters: SGLangAdapters):
    engine.body = '{"success": false}'
    with pytest.raises(EngineRefused):
        await adapters.load("a", "/a")


async def test_a_load_that_hangs_is_a_timeout(engine: Engine, adapters: SGLangAdapters):
    engine.hang = True
    with pytest.raises(EngineTimeout):
        await adapters.load("a", "/a", seconds=0.05)


async def test_a_closed_port_is_unreachable():
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{unused_port()}"
        adapters = SGLangAdapters(SGLangClient(session, url, api_key=None, admin_key=None))
        with pytest.raises(EngineUnreachable):
            await adapters.loaded()


def test_adapters_are_the_cards_with_a_parent():
    cards = [
        {"id": "base", "root": "base", "parent": None},
        {"id": "a", "root": "/a", "parent": "base"},
    ]
    assert parse_models(json.dumps({"data": cards}).encode()) == (LoadedAdapter("a", "/a"),)
    for broken in ('{"data": {}}', '{"data": [7]}', "{}", "[]"):
        with pytest.raises(EngineGarbled):
            parse_models(broken.encode())
