"""What no watch tells of: an object that is deleted after the first list and before the watches begin."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.kube import resync, watch
from shoal.kube.errors import Forbidden
from shoal.kube.resources import NODES, PODS, Resource
from shoal.kube.store import Table
from shoal.kube.watch import Watched, Watcher
from tests.support.waiting import until_async


class Server:
    """An API server with one pod, which is gone when it was listed once."""

    scope = ()

    def __init__(self) -> None:
        self.lists = 0

    def spaces(self, _resource: Any) -> tuple[None]:
        return (None,)

    async def list_pages(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.lists += 1
        pod = {"metadata": {"name": "p", "namespace": "n", "uid": "u", "resourceVersion": "1"}}
        yield SimpleNamespace(items=[pod] if self.lists == 1 else [], resource_version="1")


def silent(_self: Watcher, loop: asyncio.AbstractEventLoop, stop: threading.Event, done: asyncio.Future[str]) -> None:
    """In the place of kopf's thread: watches that begin too late to hear of it."""
    stop.wait(60)
    loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result("stopped"))


@pytest.mark.parametrize(("begin", "found"), [(0.01, True), (600.0, False)])
async def test_what_was_deleted_before_the_watches_began_is_found_by_a_second_list(
    begin: float, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "BEGIN_SECONDS", begin)
    monkeypatch.setattr(Watcher, "_thread", silent)
    server, table = Server(), Table[str](lambda raw: raw["metadata"]["name"])

    async def credentials() -> Any:
        return None

    watcher = Watcher(server, [Watched(PODS, table)], credentials=credentials, resync_seconds=600)  # type: ignore[arg-type]
    task = asyncio.create_task(watcher.run())
    try:
        await asyncio.wait_for(watcher.synced.wait(), 20)
        if found:
            await until_async(lambda: table.known_keys() == [])
            assert server.lists == 2
        else:  # as it was: until the next of the lists that come every ten minutes
            assert table.known_keys() == ["n/p"]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Refusing(Server):
    """An API server that refuses the list of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = True
        self.lists_of = Counter[str]()

    async def list_pages(self, resource: Resource, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.lists_of[resource.plural] += 1
        if self.refuses and resource is NODES:
            raise Forbidden("no right to list nodes", status=403)
        yield SimpleNamespace(items=[], resource_version="1")


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> tuple[Refusing, Callable[[float], Watcher]]:
    """A server that refuses to list nodes, and what makes a watcher of it that tries again at once."""
    monkeypatch.setattr(resync, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(resync, "LONGEST_BACKOFF", 0.01)
    monkeypatch.setattr(Watcher, "_thread", silent)
    server = Refusing()
    watched = [Watched(PODS, Table[Any](lambda raw: raw)), Watched(NODES, Table[Any](lambda raw: raw))]

    async def credentials() -> Any:
        return None

    def watching(resync_seconds: float) -> Watcher:
        return Watcher(server, watched, credentials=credentials, resync_seconds=resync_seconds)  # type: ignore[arg-type]

    return server, watching


async def test_while_one_kind_cannot_be_listed_the_others_are_not_listed_again_and_again(
    refusing: tuple[Refusing, Callable[[float], Watcher]],
) -> None:
    """Of a large cluster that would be all pods, every two seconds, for as long as a right is missing."""
    server, watching = refusing
    watcher = watching(600)
    rounds: list[None] = []
    watcher.resynced.append(lambda: rounds.append(None))
    task = asyncio.create_task(watcher.run())
    try:
        await until_async(lambda: server.lists_of["nodes"] >= 5)
        assert server.lists_of["pods"] == 1
        assert not watcher.synced.is_set()
        server.refuses = False
        await asyncio.wait_for(watcher.synced.wait(), 20)
        assert server.lists_of["pods"] == 1
        assert len(rounds) == 1
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_while_one_kind_cannot_be_listed_the_others_are_still_compared_in_their_time(
    refusing: tuple[Refusing, Callable[[float], Watcher]],
) -> None:
    """A deletion that no watch told is found, though a right is missing for another kind."""
    server, watching = refusing
    watcher = watching(0.2)
    task = asyncio.create_task(watcher.run())
    try:
        await until_async(lambda: server.lists_of["pods"] >= 3)
        assert server.lists_of["nodes"] > server.lists_of["pods"]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
