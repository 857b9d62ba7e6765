"""A load that stays leads to a number that stays, and to one that can bear it."""

import importlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.scaling import Policy
from shoal.core.scaling.types import Speed
from tests.support.scaling_world import World

learn = importlib.import_module("shoal.core.scaling.learn")

_SETTLED = 3600.0
"""Seconds; each step down waits for its window, and the first one that is too much for what it shows."""


def _settles(rate: float, speed: float, cold: float) -> World:
    world = World(lambda _: rate, speed, cold_start=cold, policy=Policy(minimum=1, maximum=20))
    world.run(_SETTLED, step=5.0)
    world.run(1800.0, step=5.0)
    return world


@settings(max_examples=12, deadline=None)
@given(rate=st.floats(0.1, 20.0), speed=st.sampled_from([2.0, 5.0]), cold=st.sampled_from([10.0, 60.0, 240.0]))
def test_a_load_that_stays_leads_to_a_number_that_stays(rate: float, speed: float, cold: float) -> None:
    world = _settles(rate, speed, cold)

    assert world.changes(_SETTLED) == []
    assert world.queue <= world.policy.queued_per_replica * world.wanted
    assert world.wanted <= max(2, math.ceil(rate / (0.6 * speed)) + 1)


def test_who_never_learns_what_a_replica_can_do_tries_it_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn, "_with_rate", lambda *_: Speed())

    assert len(_settles(7.0, 2.0, 60.0).changes(_SETTLED)) > 4


@settings(max_examples=8, deadline=None)
@given(low=st.floats(0.2, 2.0), high=st.floats(4.0, 16.0))
def test_after_a_step_of_the_load_the_queue_goes_and_stays_away(low: float, high: float) -> None:
    world = World(lambda t: high if t > 600 else low, 2.0, policy=Policy(minimum=1, maximum=20))
    world.run(600 + 600, step=2.0)

    assert world.queue < 2 * world.policy.queued_per_replica * world.wanted
    assert world.wanted * world.speed >= high
