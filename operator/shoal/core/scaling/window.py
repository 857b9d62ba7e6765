"""A sliding maximum: the most replicas that were enough at any time of the last seconds.

A recommendation is in force from when it was made until the next one. Only entries that can still be the maximum are
kept: later entries are lower, so a window stays short.
"""

Window = tuple[tuple[float, int], ...]


def push(window: Window, replicas: int, now: float, seconds: float) -> Window:
    """The window with `replicas` in force from `now` on, without expired entries."""
    if window:
        *rest, (_, last) = window
        window = (*rest, (now, last))
    kept = tuple((until, n) for until, n in window if n > replicas and until > now - seconds)
    return (*kept, (now, replicas))


def highest(window: Window) -> int:
    """Replicas that must stay."""
    return window[0][1]


def expires(window: Window, replicas: int, seconds: float) -> float:
    """When fewer than `replicas` will have been enough for `seconds`, if nothing higher is pushed."""
    return max((until for until, n in window if n >= replicas), default=window[-1][0] - seconds) + seconds
