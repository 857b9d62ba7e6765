"""The operator's garbage: cycles are freed, and what stays is looked at once and not every few seconds."""

import asyncio
import gc
import weakref
from collections.abc import Generator

import pytest

from shoal.runtime import collector


class Thing:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_before() -> Generator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def cycle() -> "weakref.ref[Thing]":
    return weakref.ref(Thing())


def test_new_cycles_are_freed_at_each_look() -> None:
    collector.collect(whole=True)
    lost = cycle()
    assert lost() is not None
    collector.collect(whole=False)
    assert lost() is None


def test_what_has_stayed_is_not_looked_at_again_before_a_look_at_the_whole() -> None:
    kept = Thing()
    lost = weakref.ref(kept)
    collector.collect(whole=False)
    del kept
    collector.collect(whole=False)
    assert lost() is not None
    collector.collect(whole=True)
    assert lost() is None


async def test_it_never_looks_through_everything_by_itself_and_leaves_all_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector, "EVERY_SECONDS", 0.0)
    before = gc.get_threshold()
    running = asyncio.create_task(collector.run())
    await asyncio.sleep(0)
    assert gc.get_threshold() == (*collector.NEW_OBJECTS, collector.NEVER)
    assert gc.get_freeze_count() > 0
    lost = cycle()
    async with asyncio.timeout(20):
        while lost() is not None:
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


async def test_where_much_is_new_it_looks_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look stops the process for as long as it takes to go through what is new."""
    monkeypatch.setattr(collector, "BUSY_SECONDS", 0.0)
    running = asyncio.create_task(collector.run())
    await asyncio.sleep(0)
    frozen = gc.get_freeze_count()
    kept = [[number] for number in range(40_000)]
    async with asyncio.timeout(collector.EVERY_SECONDS / 2):
        while gc.get_freeze_count() < frozen + len(kept):
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
