"""What no watch tells of: an object that is deleted after the first list and before the watches begin."""

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.kube import watch
from shoal.kube.resources import PODS
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
