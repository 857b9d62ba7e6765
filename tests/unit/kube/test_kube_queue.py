"""The work queue: once per key, never twice at a time, backing off by itself."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from shoal.kube import queue as module
from shoal.kube.queue import ROUND_SECONDS, Handler, TokenBucket, WorkQueue


@contextlib.asynccontextmanager
async def working(queue: WorkQueue, handle: Handler) -> AsyncGenerator[None]:
    task = asyncio.create_task(queue.run(handle))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(holds: object) -> None:
    async with asyncio.timeout(20):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_a_key_that_is_added_often_runs_once_and_again_if_it_was_added_while_it_ran() -> None:
    queue, runs, gate = WorkQueue("t"), [], asyncio.Event()

    async def handle(key: str) -> None:
        runs.append(key)
        await gate.wait()

    for _ in range(5):
        queue.add("a")
    async with working(queue, handle):
        await until(lambda: runs == ["a"])
        queue.add("a")
        queue.add("a")
        await asyncio.sleep(0.05)
        assert runs == ["a"]  # single flight
        gate.set()
        await until(lambda: runs == ["a", "a"])
        await until(queue.idle)
    assert runs == ["a", "a"]


async def test_a_failing_key_is_tried_again_and_does_not_hold_up_others(monkeypatch) -> None:
    monkeypatch.setattr("shoal.kube.queue.FIRST_BACKOFF", 0.02)
    queue, seen = WorkQueue("t", workers=1), {"bad": 0, "good": 0}

    async def handle(key: str) -> None:
        seen[key] += 1
        if key == "bad" and seen["bad"] < 3:
            raise RuntimeError("no")

    queue.add("bad")
    queue.add("good")
    async with working(queue, handle):
        await until(lambda: seen == {"bad": 3, "good": 1})


async def test_what_was_cut_short_is_done_by_the_next_leader() -> None:
    queue, runs, hang = WorkQueue("t"), [], asyncio.Event()

    async def handle(key: str) -> None:
        runs.append(key)
        await hang.wait()

    queue.add("a")
    async with working(queue, handle):
        await until(lambda: runs == ["a"])
    assert not queue.idle()
    hang.set()
    async with working(queue, handle):
        await until(lambda: runs == ["a", "a"])


async def test_a_reconcile_may_ask_to_be_called_later() -> None:
    queue, runs = WorkQueue("t"), []

    async def handle(key: str) -> float | None:
        runs.append(key)
        return 0.05 if len(runs) == 1 else None

    queue.add("a")
    async with working(queue, handle):
        await until(lambda: len(runs) == 2)


def test_the_bucket_lets_a_burst_through_and_then_the_rate() -> None:
    now = 0.0
    bucket = TokenBucket(rate=10, burst=2, clock=lambda: now)
    assert [round(bucket.take(), 3) for _ in range(4)] == [0.0, 0.0, 0.1, 0.2]
    now = 1.0
    assert bucket.take() == 0.0


async def test_what_goes_first_passes_what_waits_also_if_it_waited_itself_and_runs_once() -> None:
    queue = WorkQueue("test", workers=1)
    done: list[str] = []

    async def handle(key: str) -> None:
        done.append(key)
        if key == "a" and done.count("a") == 1:
            queue.add("a", first=True)  # while it runs

    for key in ("1", "2", "3", "a", "b"):
        queue.add(key)
    queue.add("a", first=True)
    queue.add("3", first=True)
    queue.add("a", first=True)
    queue.add("3")
    async with working(queue, handle):
        async with asyncio.timeout(20):
            while not queue.idle():
                await asyncio.sleep(0.001)
        assert done == ["a", "3", "a", "1", "2", "b"]
        queue.add("3")  # its old place in the line is nobody's
        async with asyncio.timeout(20):
            while not queue.idle():
                await asyncio.sleep(0.001)
        assert done[6:] == ["3"]


async def test_between_a_few_reconciles_everybody_else_has_a_turn() -> None:
    now = 0.0
    queue = WorkQueue("test", workers=8, clock=lambda: now)
    order: list[str] = []

    async def handle(key: str) -> None:
        nonlocal now
        now += ROUND_SECONDS / 2  # it computes, and waits for nothing
        order.append(key)

    async def somebody() -> None:
        while True:
            order.append("-")
            await asyncio.sleep(0)

    for number in range(40):
        queue.add(str(number))
    other = asyncio.create_task(somebody())
    async with working(queue, handle), asyncio.timeout(20):
        while not queue.idle():
            await asyncio.sleep(0)
    other.cancel()
    assert sorted(found for found in order if found != "-") == sorted(map(str, range(40)))
    rows = "".join("-" if found == "-" else "x" for found in order).strip("-").split("-")
    assert max(map(len, rows)) == 3


async def test_nothing_begins_while_a_queue_that_goes_first_has_work() -> None:
    first = WorkQueue("wake")
    queue = WorkQueue("model", behind=first)
    order, gate = list[str](), asyncio.Event()

    async def write(key: str) -> None:
        await gate.wait()
        order.append(f"wake {key}")

    async def handle(key: str) -> None:
        order.append(key)

    first.add("a")
    queue.add("b")
    async with working(first, write), working(queue, handle):
        for _ in range(20):
            await asyncio.sleep(0)
        assert order == []
        gate.set()
        await until(lambda: order == ["wake a", "b"])
        queue.add("c")
        await until(lambda: order == ["wake a", "b", "c"])


async def test_a_wake_that_hangs_does_not_hold_up_others_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEHIND_SECONDS", 0.01)
    first = WorkQueue("wake")
    queue = WorkQueue("model", behind=first)
    done: list[str] = []

    async def hangs(_key: str) -> None:
        await asyncio.Event().wait()

    async def handle(key: str) -> None:
        done.append(key)

    first.add("a")
    queue.add("b")
    async with working(first, hangs), working(queue, handle):
        await until(lambda: done == ["b"])
