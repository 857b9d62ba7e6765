"""Kinds that a cluster need not have: absent is an answer; they may come and go while the operator runs."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.api.meta import JsonObject
from shoal.controllers.devices import until_listed
from shoal.kube import optional, reflector
from shoal.kube.client import KubeClient
from shoal.kube.errors import APIServerUnavailable, NotFound
from shoal.kube.optional import OptionalKind, OptionalKinds
from shoal.kube.resources import HPAS, SCALEDOBJECTS, Resource
from shoal.kube.store import Table


class Server:
    """One ScaledObject and one HPA, where the kind is installed."""

    def __init__(self) -> None:
        self.installed = False
        self.broken = False
        self.discoveries = 0
        self.listed: list[str] = []
        self.streams: list[asyncio.Event] = []

    def spaces(self, *_: Any) -> tuple[None]:
        return (None,)

    async def discover(self, *_: Any) -> frozenset[str]:
        self.discoveries += 1
        if self.broken:
            raise APIServerUnavailable("no answer")
        return frozenset({"scaledobjects"}) if self.installed else frozenset()

    async def list_pages(self, resource: Resource, **_: Any) -> AsyncIterator[Any]:
        self.listed.append(resource.plural)
        if resource is SCALEDOBJECTS and not self.installed:
            raise NotFound("404 page not found", status=404)
        found = {"metadata": {"namespace": "ns", "name": resource.plural, "uid": resource.plural}}
        yield SimpleNamespace(items=[found], resource_version="1")

    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        end = asyncio.Event()
        self.streams.append(end)
        await end.wait()
        raise NotFound("404 page not found", status=404)
        yield  # pyright: ignore[reportUnreachable] - what makes it a generator

    def remove(self) -> None:
        self.installed = False
        for stream in self.streams:
            stream.set()


class Rig:
    def __init__(self, server: Server) -> None:
        def table() -> Table[JsonObject]:
            return Table(lambda raw: raw)

        self.objects, self.hpas = table(), table()
        kinds = [OptionalKind(SCALEDOBJECTS, self.objects), OptionalKind(HPAS, self.hpas, with_need=True)]
        self.kinds = OptionalKinds(cast("KubeClient", server), SCALEDOBJECTS, kinds)
        self.said: list[bool | None] = []
        self.kinds.changed.append(lambda: self.said.append(self.kinds.installed))

    async def __aenter__(self) -> "Rig":
        self._task = asyncio.create_task(self.kinds.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def until(self, installed: bool) -> None:
        async with asyncio.timeout(20):
            while self.kinds.installed is not installed:
                await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SOON_SECONDS", "RETRY_SECONDS", "CHECK_SECONDS"):
        monkeypatch.setattr(optional, name, 0.01)
    monkeypatch.setattr(reflector, "CRD_BACKOFF", 0.02)


async def test_absent_is_known_at_once_and_not_asked_for_again_without_need() -> None:
    server = Server()
    async with Rig(server) as rig:
        await rig.until(False)
        assert rig.kinds.known.is_set()
        await asyncio.sleep(0.1)
        assert server.discoveries == 1
        server.installed = True
        rig.kinds.need()
        await rig.until(True)
        assert [o["metadata"]["name"] for o in rig.objects.values()] == ["scaledobjects"]
        assert rig.said == [False, True]


async def test_an_api_server_that_does_not_answer_is_not_taken_for_absent() -> None:
    server = Server()
    server.broken = True
    async with Rig(server) as rig:
        async with asyncio.timeout(20):
            while server.discoveries < 3:
                await asyncio.sleep(0.01)
        assert rig.kinds.installed is None
        assert not rig.kinds.known.is_set()
        server.broken = False
        await rig.until(False)


async def test_what_is_only_for_need_is_not_listed_before() -> None:
    server = Server()
    server.installed = True
    async with Rig(server) as rig:
        await rig.until(True)
        assert server.listed == ["scaledobjects"]
        rig.kinds.need()
        async with asyncio.timeout(20):
            while not list(rig.hpas.values()):
                await asyncio.sleep(0.01)


async def test_kinds_are_listed_once_all_that_is_needed_is_or_once_it_is_known_that_they_are_absent() -> None:
    server = Server()
    async with Rig(server) as rig, asyncio.timeout(20):
        await rig.kinds.listed()
        assert (rig.kinds.installed, rig.kinds.complete) == (False, False)
    server.installed = True
    async with Rig(server) as rig, asyncio.timeout(20):
        rig.kinds.need()
        await rig.kinds.listed()
        assert rig.kinds.complete
        assert list(rig.hpas.values())


async def test_devices_that_nobody_may_list_are_not_waited_for_without_end() -> None:
    server = Server()
    server.broken = True
    async with Rig(server) as rig, asyncio.timeout(20):
        await until_listed(rig.kinds, seconds=0.05)
        assert not rig.kinds.complete


async def test_kinds_that_are_removed_and_come_back() -> None:
    server = Server()
    server.installed = True
    async with Rig(server) as rig:
        await rig.until(True)
        server.remove()
        await rig.until(False)
        assert list(rig.objects.values()) == []
        server.installed = True
        await rig.until(True)
        assert rig.said == [True, False, True]
