"""So many at a time, in order; what hangs keeps nobody else from a turn."""

import asyncio

from shoal.artifacts.fetchslots import FetchSlots
from tests.support.waiting import until_async


async def test_so_many_at_a_time_and_the_first_first() -> None:
    turns, began, ends = FetchSlots(2), list[int](), [asyncio.Event() for _ in range(4)]

    async def one(number: int) -> None:
        async with turns.slot():
            began.append(number)
            await ends[number].wait()

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(one(number))
        await until_async(lambda: len(began) == 2)
        ends[1].set()
        await until_async(lambda: began == [0, 1, 2])
        for end in ends:
            end.set()
    assert began == [0, 1, 2, 3]


async def test_what_takes_long_passes_its_turn_on_once_and_goes_on() -> None:
    turns, began, end = FetchSlots(1, seconds=0.02), list[int](), asyncio.Event()

    async def one(number: int) -> None:
        async with turns.slot():
            began.append(number)
            await end.wait()

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(one(number))
        await until_async(lambda: began == [0, 1, 2])
        end.set()
    inside = 0

    async def after() -> None:
        nonlocal inside
        async with turns.slot():
            inside += 1
            assert inside == 1, "as many turns as before"
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(after() for _ in range(3)))
