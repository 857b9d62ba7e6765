"""The routers of `bench_replicas` are processes that forward requests, and end with the bench."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.bench.replica_clients import HOME_HEADER
from tests.bench.replica_processes import NotStarted, helper


async def test_a_proxy_forwards_a_request_as_it_is_and_is_gone_with_the_bench(tmp_path: Path) -> None:
    engines: list[TestServer] = []
    seen: list[tuple[int, Any, str]] = []
    for number in range(2):

        async def answer(request: web.Request, number: int = number) -> web.Response:
            seen.append((number, await request.json(), request.headers["authorization"]))
            return web.Response(body=b"data: [DONE]\n\n", content_type="text/event-stream")

        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        engines.append(TestServer(app))
        await engines[-1].start_server()
    urls = [str(engine.make_url("")).rstrip("/") for engine in engines]
    config = {"rule": "by conversation", "number": 0, "engines": urls}
    async with helper("replica_proxy", config, tmp_path / "log") as it:
        url = f"http://127.0.0.1:{(await it.ready())['port']}/v1/chat/completions"
        headers = {"authorization": "Bearer key", HOME_HEADER: "1"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json={"lora_path": "a1"}, headers=headers) as response,
        ):
            assert (response.status, response.content_type) == (200, "text/event-stream")
            assert await response.read() == b"data: [DONE]\n\n"
        assert it.cpu_seconds() > 0
    assert it.process.returncode == 0
    assert seen == [(1, {"lora_path": "a1"}, "Bearer key")]
    for engine in engines:
        await engine.close()


async def test_what_a_router_said_before_it_ended_is_shown(tmp_path: Path) -> None:
    async with helper("replica_proxy", {"rule": "none", "number": 0, "engines": []}, tmp_path / "log") as it:
        with pytest.raises(NotStarted, match="KeyError: 'none'"):
            await it.ready()
