"""Calls about adapters, to whichever engine a contract test holds."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.contract.conftest import Answer, Client
from tests.support.engines import API_KEY, SERVED

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
PROMPT = "the quick brown fox"


async def load(client: Client, name: str, folder: Path | str, *, pinned: bool = False) -> Answer:
    return await client.admin("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder), "pinned": pinned})


async def unload(client: Client, name: str) -> Answer:
    return await client.admin("/unload_lora_adapter", {"lora_name": name})


async def loaded(client: Client) -> list[str]:
    """Names of the adapters that /v1/models lists, in its order."""
    return [card["id"] for card in (await client.get("/v1/models")).json["data"][1:]]


async def ask(client: Client, model: str = SERVED, **more: Any) -> Answer:
    return await client.post(COMPLETIONS, {"model": model, "prompt": PROMPT, **GREEDY, **more})


async def text(client: Client, model: str = SERVED, **more: Any) -> str:
    answer = await ask(client, model, **more)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["text"]


@asynccontextmanager
async def streaming(client: Client, tokens: int, **more: Any) -> AsyncGenerator[aiohttp.ClientResponse]:
    """A stream that has begun; `more` says whose."""
    body = {"model": SERVED, "prompt": PROMPT, **GREEDY, "max_tokens": tokens, "stream": True, **more}
    headers = {"authorization": f"Bearer {API_KEY}"}
    async with client.session.post(client.engine.url + COMPLETIONS, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        first = await response.content.readline()
        assert first.startswith(b"data: {"), first
        yield response


async def rest(response: aiohttp.ClientResponse) -> str:
    """The text of what a stream still sends, to its end."""
    parts: list[str] = []
    async for line in response.content:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return "".join(parts)
        if data:
            parts += [choice["text"] for choice in json.loads(data)["choices"]]
    raise AssertionError("the stream broke off")


async def gone(client: Client, name: str) -> None:
    """Returns when /v1/models does not list the adapter any more."""
    async with asyncio.timeout(30):
        while name in await loaded(client):
            await asyncio.sleep(0.01)
