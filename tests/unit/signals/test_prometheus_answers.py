"""What a Prometheus may answer, and what the operator says of it."""

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shoal.api.config import Prometheus, Signals
from shoal.signals import history, prometheus, promql
from shoal.signals.promql import NotAnswered, PromQLClient


class Answering:
    """Answers every query alike, and remembers who asked."""

    def __init__(self, body: Any, status: int = 200) -> None:
        self.body, self.status = body, status
        self.authorization: list[str | None] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.authorization.append(request.headers.get("authorization"))
        if isinstance(self.body, str):
            return web.Response(text=self.body, status=self.status)
        return web.json_response(self.body, status=self.status)


@contextlib.asynccontextmanager
async def answering(server: Answering) -> AsyncGenerator[str]:
    app = web.Application()
    app.router.add_get("/api/v1/query", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


def settings(url: str, **more: Any) -> Prometheus:
    return Prometheus.model_validate({"url": url, **more})


def samples(*found: dict[str, Any]) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": "vector", "result": list(found)}}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("<html>a login page</html>", 200, "not an answer of Prometheus"),
        ({"status": "success"}, 200, "not an answer of Prometheus"),
        (samples({"metric": {}, "value": ["now"]}), 200, "not an answer of Prometheus"),
        (samples({"value": [1, "2"]}), 200, "not an answer of Prometheus"),
        ({"status": "error", "error": "query processing would load too many samples"}, 422, "too many samples"),
        ("forbidden", 403, "403"),
    ],
)
async def test_what_is_no_answer_is_said_and_nothing_is_known(body: Any, status: int, said: str):
    async with answering(Answering(body, status)) as url:
        asked = settings(url)
        async with PromQLClient(asked) as client:
            with pytest.raises(NotAnswered, match=said):
                await prometheus.read(client, asked)


async def test_nobody_there_is_said():
    asked = settings("http://127.0.0.1:1")
    async with PromQLClient(asked) as client:
        with pytest.raises(NotAnswered, match="Cannot connect"):
            await history.read(client, asked)


async def test_an_answer_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(promql, "MAX_BYTES", 2**20)
    async with answering(Answering("x" * (2**20 + 1))) as url:
        asked = settings(url)
        async with PromQLClient(asked) as client:
            with pytest.raises(NotAnswered, match="longer than 1 MiB"):
                await prometheus.read(client, asked)


async def test_a_token_is_read_anew_for_each_question(tmp_path: Path):
    token = tmp_path / "token"
    server = Answering(samples())
    async with answering(server) as url:
        asked = settings(url, tokenFile=str(token))
        async with PromQLClient(asked) as client:
            with pytest.raises(NotAnswered, match="token"):
                await prometheus.read(client, asked)
            for value in ("first", "second"):
                token.write_text(value + "\n")
                reading = await prometheus.read(client, asked)
                assert reading.targets == {}
    assert server.authorization == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize("content", [b"\xff\xfe", b"one\ntwo"])
async def test_a_token_that_cannot_be_sent_is_said_and_ends_nothing(content: bytes, tmp_path: Path):
    token = tmp_path / "token"
    token.write_bytes(content)
    server = Answering(samples())
    async with answering(server) as url:
        asked = settings(url, tokenFile=str(token))
        async with PromQLClient(asked) as client:
            with pytest.raises(NotAnswered):
                await prometheus.read(client, asked)
            token.write_text("good")
            assert (await prometheus.read(client, asked)).targets == {}
    assert server.authorization == ["Bearer good"]


def test_prometheus_as_the_source_needs_its_address():
    with pytest.raises(ValueError, match=r"source Prometheus needs prometheus\.url"):
        Signals.model_validate({"source": "Prometheus"})
