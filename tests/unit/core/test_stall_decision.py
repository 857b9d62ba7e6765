"""Whether an engine is stalled: work, and nothing computed for it."""

from dataclasses import replace

import pytest

from shoal.core.stall import StallClock, Work, follow, stalled

LIMIT = 180.0
BUSY = Work(0.0, "load", running=1, waiting=2, active=3, computed=1000, kv_tokens_used=50, finished=10, published=7.0)
IDLE = replace(BUSY, running=0, waiting=0, active=0, kv_tokens_used=0)


def after(*looks: Work, every: float = 30.0) -> StallClock:
    """The looks come at these intervals, from 0 on."""
    progress: StallClock | None = None
    for number, look in enumerate(looks):
        progress = follow(progress, replace(look, at=number * every))
    assert progress is not None
    return progress


def test_work_without_progress_is_a_stall_when_the_time_is_over() -> None:
    progress = after(BUSY, BUSY, BUSY)
    assert not stalled(progress, LIMIT - 0.1, LIMIT)
    assert stalled(progress, LIMIT, LIMIT)


@pytest.mark.parametrize("moves", ["computed", "kv_tokens_used", "finished"])
def test_any_token_is_progress(moves: str) -> None:
    later = replace(BUSY, **{moves: getattr(BUSY, moves) + 1})
    assert after(BUSY, BUSY, later).since == 60.0


def test_a_client_that_leaves_is_no_progress() -> None:
    assert after(BUSY, replace(BUSY, running=0, kv_tokens_used=20)).since == 0.0


def test_without_work_nothing_stalls() -> None:
    assert after(*[IDLE] * 9).since == 240.0


def test_requests_that_a_hung_scheduler_never_took_are_work() -> None:
    hung = replace(IDLE, active=4)
    assert after(*[hung] * 7).since == 0.0
    # One that publishes is alive: a client that does not read its answer keeps a request active.
    alive = [replace(hung, published=float(number)) for number in range(7)]
    assert after(*alive).since == 180.0


def test_clients_that_give_up_do_not_heal_a_hung_scheduler() -> None:
    hung = replace(IDLE, active=1)
    assert after(hung, hung, IDLE, IDLE).since == 0.0
    assert after(hung, hung, replace(IDLE, published=8.0)).since == 60.0
    # Nothing was ever waiting: a version that does not publish while idle is not suspected.
    assert after(IDLE, IDLE, IDLE).since == 60.0


def test_where_a_scheduler_does_not_say_that_it_is_alive_requests_that_came_in_vain_are_work() -> None:
    mute = replace(IDLE, published=None)
    came = replace(mute, active=1)
    assert after(mute, came, came, came).since == 0.0
    assert after(mute, came, replace(came, computed=1001)).since == 60.0
    # Its clients have given up: nothing is known to wait for it.
    assert after(mute, came, came, mute).since == 90.0
    # One more came while the figures stood still.
    assert after(mute, replace(came, computed=1001), replace(came, active=2, computed=1001)).since == 30.0


def test_a_client_that_does_not_read_its_answer_is_no_work_for_such_a_scheduler() -> None:
    mute = replace(IDLE, published=None)
    answered = replace(mute, active=1, computed=2000)
    assert after(mute, answered, answered, answered).since == 90.0


def test_running_requests_for_which_nothing_moves_are_a_stall() -> None:
    mute = replace(BUSY, published=None)
    assert after(mute, mute, mute).since == 0.0


def test_an_engine_that_does_not_answer_is_stalled_after_the_limit_only() -> None:
    silent = Work(0.0, "none")
    assert after(IDLE, silent, silent).since == 0.0
    assert after(BUSY, silent, replace(BUSY, computed=1001)).since == 60.0
    assert after(BUSY, silent, BUSY).since == 0.0


def test_a_slow_engine_whose_counters_grow_is_not_stalled() -> None:
    silent = Work(0.0, "none", finished=11)
    assert after(BUSY, silent, replace(silent, finished=12)).since == 60.0
    assert after(BUSY, silent, silent).since == 30.0


@pytest.mark.parametrize(
    "look",
    [
        Work(0.0, "other"),
        replace(BUSY, computed=None, kv_tokens_used=None),
        replace(BUSY, running=None, waiting=None, active=None),
    ],
)
def test_what_cannot_be_judged_is_no_stall(look: Work) -> None:
    assert after(look, look, look).since == 60.0


def test_kv_use_stands_in_where_a_version_does_not_count() -> None:
    old = replace(BUSY, computed=None)
    assert after(old, old).since == 0.0
    assert after(old, replace(old, kv_tokens_used=51)).since == 30.0
