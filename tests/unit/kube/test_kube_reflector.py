"""The reflector against an API server that misbehaves: it never ends, never forgets, and misses no deletion."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import orjson
import pytest
from aiohttp import web

from shoal.kube.auth import ClusterCredentials
from shoal.kube.client import KubeClient
from shoal.kube.reflector import Reflector
from shoal.kube.resources import MODELS
from tests.support.controlplane import free_ports


class Server:
    """LIST and WATCH of Models, by script."""

    def __init__(self) -> None:
        self.objects: dict[str, str] = {}
        self.version = 1
        self.status = 200
        self.answer: bytes | None = None
        """What stands in front of the API server answers this, with status 200."""
        self.lists = self.watches = 0
        self.streams: list[asyncio.Queue[dict[str, Any] | None]] = []
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/apis/shoal.dev/v1alpha1/models", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        self.port = self.port or free_ports(1)[0]  # nobody takes it while this one is down
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()

    async def stop(self) -> None:
        for stream in self.streams:
            stream.put_nowait(None)
        if self._runner is not None:
            await self._runner.cleanup()

    def tell(self, kind: str, name: str, version: str) -> None:
        for stream in self.streams:
            stream.put_nowait({"type": kind, "object": _object(name, version)})

    def fail(self, status: dict[str, Any]) -> None:
        for stream in self.streams:
            stream.put_nowait({"type": "ERROR", "object": status})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self.status != 200:
            if self.status == 404:
                return web.Response(status=404, text="404 page not found")
            return web.json_response({"message": "no", "reason": ""}, status=self.status)
        if self.answer is not None:
            return web.Response(body=self.answer, content_type="text/html")
        if "watch" not in request.query:
            self.lists += 1
            names = sorted(self.objects)
            begin = int(request.query.get("continue", "0"))
            page = names[begin : begin + 2]  # two per page, whatever was asked for
            more = {"continue": str(begin + 2)} if begin + 2 < len(names) else {}
            items = [_object(n, self.objects[n]) for n in page]
            return web.json_response({"metadata": {"resourceVersion": str(self.version)} | more, "items": items})
        self.watches += 1
        stream: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.streams.append(stream)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while (event := await stream.get()) is not None:
                await response.write(orjson.dumps(event) + b"\n")
        finally:
            self.streams.remove(stream)
        return response


def _object(name: str, version: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns", "resourceVersion": version, "uid": name}}


async def until(holds: Any) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.kube.resync.FIRST_BACKOFF", 0.05)
    monkeypatch.setattr("shoal.kube.resync.LONGEST_BACKOFF", 0.1)
    monkeypatch.setattr("shoal.kube.reflector.CRD_BACKOFF", 0.05)


@contextlib.asynccontextmanager
async def reflecting(server: Server, **options: Any) -> AsyncGenerator[tuple[Reflector, list[tuple[str, str]]]]:
    heard: list[tuple[str, str]] = []
    credentials = ClusterCredentials(
        f"http://127.0.0.1:{server.port}", ssl.create_default_context(), None, None, None, "ns", False,
        None, None, None, None,
    )  # fmt: skip
    async with KubeClient(credentials) as client:
        reflector = Reflector(
            client, MODELS, on_event=lambda kind, obj: heard.append((kind, obj["metadata"]["name"])), **options
        )
        task = asyncio.create_task(reflector.run())
        try:
            yield reflector, heard
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_it_lists_page_by_page_then_follows(server: Server) -> None:
    server.objects = {"a": "1", "b": "1", "c": "1"}
    async with reflecting(server) as (reflector, heard):
        await reflector.synced.wait()
        assert sorted(reflector.objects) == ["ns/a", "ns/b", "ns/c"]
        await until(lambda: server.streams)
        server.tell("MODIFIED", "a", "2")
        server.tell("DELETED", "b", "3")
        await until(lambda: ("delete", "b") in heard)
        assert sorted(reflector.objects) == ["ns/a", "ns/c"]
        assert server.lists == 2  # two pages of one list


async def test_the_last_state_outlives_the_api_server_and_a_missed_deletion_is_told(server: Server) -> None:
    server.objects = {"a": "1", "b": "1"}
    async with reflecting(server) as (reflector, heard):
        await until(lambda: server.streams)
        await server.stop()
        await until(lambda: not reflector.connected)
        assert sorted(reflector.objects) == ["ns/a", "ns/b"]
        await asyncio.sleep(0.3)  # several refused connections
        server.objects = {"a": "1", "c": "5"}
        server.version = 9
        await server.start()
        await until(lambda: server.streams)
        server.fail({"code": 410, "reason": "Expired", "message": "too old resource version"})
        await until(lambda: "ns/c" in reflector.objects)
        assert sorted(reflector.objects) == ["ns/a", "ns/c"]
        assert ("delete", "b") in heard
        assert heard.count(("upsert", "a")) == 1  # nothing new about it


async def test_a_kind_that_is_not_installed_is_waited_for(server: Server) -> None:
    server.status = 404
    async with reflecting(server) as (reflector, _):
        await until(lambda: reflector.missing)
        assert not reflector.synced.is_set()
        server.status, server.objects = 200, {"a": "1"}
        await reflector.synced.wait()
        assert not reflector.missing


@pytest.mark.parametrize("status", [403, 500, 503])
async def test_refusals_are_waited_out(server: Server, status: int) -> None:
    server.status = status
    async with reflecting(server) as (reflector, _):
        await asyncio.sleep(0.3)
        server.status, server.objects = 200, {"a": "1"}
        await until(reflector.synced.is_set)


async def test_a_stream_that_ends_goes_on_without_a_new_list(server: Server) -> None:
    server.objects = {"a": "1"}
    async with reflecting(server) as (reflector, _):
        for nth in range(1, 4):
            await until(lambda nth=nth: server.watches == nth and server.streams)
            server.streams[0].put_nowait(None)
        await until(lambda: server.watches == 4)
        assert server.lists == 1
        assert reflector.connected


async def test_an_object_of_no_interest_reads_as_absent(server: Server) -> None:
    server.objects = {"a": "1", "b": "1"}

    def project(obj: dict[str, Any]) -> dict[str, Any] | None:
        if obj["metadata"]["resourceVersion"] == "broken":
            raise ValueError("cannot be read")
        return None if obj["metadata"]["name"] == "b" else obj

    async with reflecting(server, project=project) as (reflector, heard):
        await until(lambda: server.streams)
        assert sorted(reflector.objects) == ["ns/a"]
        server.tell("MODIFIED", "a", "broken")
        await until(lambda: ("delete", "a") in heard)
        assert reflector.objects == {}


NO_ANSWERS = [b"<html>maintenance</html>\n", b"null\n", b'{"type": "ADDED", "object": {}}\n', b'{"ok": 1}\n']


@pytest.mark.parametrize("answer", NO_ANSWERS)
async def test_an_answer_that_is_no_api_servers_is_waited_out(server: Server, answer: bytes) -> None:
    """A load balancer's page, say: to a list, and to a watch."""
    server.answer = answer
    async with reflecting(server) as (reflector, _):
        await asyncio.sleep(0.3)
        server.answer, server.objects = None, {"a": "1"}
        await until(reflector.synced.is_set)
        await until(lambda: server.streams)
        server.answer = answer
        server.streams[0].put_nowait(None)
        await asyncio.sleep(0.3)
        assert sorted(reflector.objects) == ["ns/a"], "the last state stays"
        server.answer = None
        await until(lambda: server.streams)
        server.tell("ADDED", "b", "2")
        await until(lambda: "ns/b" in reflector.objects)
