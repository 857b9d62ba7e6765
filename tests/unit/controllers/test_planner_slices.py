"""A plan is made bit by bit, and is of one moment all the same."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from shoal.api.model import Model
from shoal.controllers import planner as module
from shoal.controllers.calibration import Calibration
from shoal.controllers.planner import Planner
from shoal.core.placement import Moves
from tests.unit.controllers.test_scale_writes import UID, Plane


@pytest.fixture(autouse=True)
def _one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_SECONDS", 0.0)


@asynccontextmanager
async def planning(plane: Plane) -> AsyncGenerator[None]:
    """Its first plan is under way: all is decided, and nothing counts yet."""
    asked = asyncio.Event()

    def asks(_model: Model) -> int:
        asked.set()
        return plane.wanted

    task = asyncio.create_task(Planner(plane.world, plane.state, asks, plane.wake, Moves()).run())
    try:
        async with asyncio.timeout(20):
            await asked.wait()
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until_planned(plane: Plane) -> None:
    async with asyncio.timeout(20):
        while plane.state.record(UID).placement is None:
            await asyncio.sleep(0)


async def test_others_have_their_turn_while_a_plan_is_made() -> None:
    plane = Plane(replicas=1)
    async with planning(plane):
        assert plane.state.record(UID).placement is None
        await until_planned(plane)
        decided = plane.state.record(UID).placement
        assert decided is not None
        assert decided.wanted == 1


async def test_a_number_that_changes_while_a_plan_is_made_is_for_the_next_one() -> None:
    plane = Plane(replicas=1)
    async with planning(plane):
        plane.wanted = 2
        await until_planned(plane)
        decided = plane.state.record(UID).placement
        assert decided is not None
        assert decided.wanted == 1
        assert plane.state.target(UID, "l4", 0) == 1


async def test_what_wakes_while_a_plan_is_made_is_not_lowered_by_it() -> None:
    plane = Plane()
    async with planning(plane):
        plane.state.reserve_wake(UID, "l4", 1, 1)
        plane.state.wake_written(UID)
        await until_planned(plane)
        assert plane.state.target(UID, "l4", 0) == 1  # the plan was of the moment before
    plane.planner.plan()
    assert plane.state.woken(UID, "l4") == 0  # this one has seen it


async def test_a_model_that_goes_while_a_plan_is_made_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = Plane(replicas=1)
    ended = asyncio.Event()
    monkeypatch.setattr(Calibration, "measure", lambda *_: ended.set())
    async with planning(plane):
        ended.clear()
        plane.state.withdraw(UID)
        async with asyncio.timeout(20):
            await ended.wait()
        assert plane.state.record(UID).placement is None
        assert plane.state.record(UID).considered is None
