"""The last minute of routes: what counts, what is forgotten, and times to the first byte from a histogram."""

import pytest

from shoal.core.routing.routestats import TTFT_BOUNDS, WINDOW_SECONDS, RouteWindows, TargetKey, quantile

LLAMA = TargetKey("chat/front", "chat/llama", "target")
NEXT = TargetKey("chat/front", "chat/next", "canary")


def test_each_target_has_its_own_counts_and_a_window_that_was_not_full_yet() -> None:
    windows = RouteWindows(100.0)
    for outcome in ("answered", "failed", "refused", "expired", "cut", "rejected", "cancelled"):
        windows.note(101.0, LLAMA, outcome, 10, None)
    windows.note(102.0, NEXT, "answered", 5, 0.3)
    seconds, found = windows.read(110.0)
    assert seconds == 10.0
    assert (found[LLAMA].requests, found[LLAMA].failed, found[LLAMA].output_tokens) == (7, 4, 70)
    assert (found[NEXT].requests, found[NEXT].failed, sum(found[NEXT].first_bytes)) == (1, 0, 1)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    windows = RouteWindows(0.0)
    windows.note(100.0, LLAMA, "answered", 1, None)
    windows.note(120.0, LLAMA, "answered", 1, None)
    seconds, found = windows.read(159.0)
    assert (found[LLAMA].requests, seconds) == (2, 59.0)
    assert windows.read(160.0)[1][LLAMA].requests == 1
    assert windows.read(120.0 + WINDOW_SECONDS + 5)[1] == {}
    # A quiet hour between two requests leaves nothing behind.
    windows.note(4000.0, LLAMA, "answered", 1, None)
    assert windows.read(4001.0)[1][LLAMA].requests == 1


def test_targets_are_bounded_and_those_without_requests_make_room() -> None:
    windows = RouteWindows(0.0, most=2)
    keys = [TargetKey("chat/front", f"chat/m{number}", "target") for number in range(3)]
    for key in keys:
        windows.note(10.0, key, "answered", 1, None)
    assert set(windows.read(11.0)[1]) == set(keys[:2])
    windows.note(100.0, keys[2], "answered", 1, None)
    assert set(windows.read(101.0)[1]) == {keys[2]}


@pytest.mark.parametrize(("seconds", "share", "within"), [(0.02, 0.5, 0.05), (0.3, 0.99, 0.35), (59.0, 0.5, 60.0)])
def test_a_quantile_is_within_the_bounds_of_the_times(seconds: float, share: float, within: float) -> None:
    windows = RouteWindows(0.0)
    for _ in range(100):
        windows.note(1.0, LLAMA, "answered", 1, seconds)
    found = quantile(windows.read(2.0)[1][LLAMA].first_bytes, share)
    assert found is not None
    below = max([0.0, *(bound for bound in TTFT_BOUNDS if bound < within)])
    assert below < found <= within


def test_a_quantile_that_nobody_can_know_is_unknown() -> None:
    windows = RouteWindows(0.0)
    windows.note(1.0, LLAMA, "answered", 1, 0.1)
    windows.note(1.0, LLAMA, "answered", 1, 600.0)
    first_bytes = windows.read(2.0)[1][LLAMA].first_bytes
    assert quantile(first_bytes, 0.5) == pytest.approx(0.1)
    assert quantile(first_bytes, 0.99) is None
    assert quantile([0] * len(first_bytes), 0.5) is None
