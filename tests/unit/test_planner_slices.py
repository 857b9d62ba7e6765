"""A plan is made bit by bit, and is of one moment all the same."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from shoal.controllers import planner as module
from shoal.controllers.planner import Planner
from tests.unit.test_scale_writes import UID, Plane


@pytest.fixture(autouse=True)
def _one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_SECONDS", 0.0)


@asynccontextmanager
async def planning(planner: Planner) -> AsyncGenerator[None]:
    """Its first plan is under way: all is decided, and nothing counts yet."""
    asked = asyncio.Event()
    wanted = planner.wanted

    def asks(model: object) -> int:
        asked.set()
        return wanted(model)  # type: ignore[arg-type]

    planner.wanted = asks
    task = asyncio.create_task(planner.run())
    try:
        async with asyncio.timeout(20):
            await asked.wait()
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until_planned(planner: Planner) -> None:
    async with asyncio.timeout(20):
        while planner.latest(UID) is None:
            await asyncio.sleep(0)


async def test_others_have_their_turn_while_a_plan_is_made() -> None:
    plane = Plane(replicas=1)
    async with planning(plane.planner):
        assert plane.planner.latest(UID) is None
        await until_planned(plane.planner)
        decided = plane.planner.latest(UID)
        assert decided is not None
        assert decided.wanted == 1


async def test_a_number_that_changes_while_a_plan_is_made_is_for_the_next_one() -> None:
    plane = Plane(replicas=1)
    async with planning(plane.planner):
        plane.wanted = 2
        await until_planned(plane.planner)
        decided = plane.planner.latest(UID)
        assert decided is not None
        assert decided.wanted == 1
        assert plane.planner.target(UID, "l4", 0) == 1


async def test_what_wakes_while_a_plan_is_made_is_not_lowered_by_it() -> None:
    plane = Plane()
    async with planning(plane.planner):
        plane.planner.replica_states.reserve(UID, "l4", 1, 1)
        plane.planner.replica_states.written(UID)
        await until_planned(plane.planner)
        assert plane.planner.target(UID, "l4", 0) == 1  # the plan was of the moment before
    plane.planner.plan()
    assert plane.planner.replica_states.reserved(UID, "l4") == 0  # this one has seen it


async def test_a_model_that_goes_while_a_plan_is_made_is_not_remembered() -> None:
    plane = Plane(replicas=1)
    ended = asyncio.Event()
    plane.planner.calibration.measure = lambda *_: ended.set()  # type: ignore[method-assign]
    async with planning(plane.planner):
        ended.clear()
        plane.planner.leave(UID)
        async with asyncio.timeout(20):
            await ended.wait()
        assert plane.planner.latest(UID) is None
        assert plane.planner.considered(UID) is None
