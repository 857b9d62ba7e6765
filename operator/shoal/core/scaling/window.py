"""The most replicas that were enough at any time of the last seconds.

A recommendation is in force from when it was made until the next one. Kept are only those that can still be the most:
later entries are lower, so a window is short however often it is asked.
"""

Window = tuple[tuple[float, int], ...]


def push(window: Window, replicas: int, now: float, seconds: float) -> Window:
    """The window with `replicas` in force from `now` on. Entries whose time is over go."""
    if window:
        *rest, (_, last) = window
        window = (*rest, (now, last))
    kept = tuple((until, n) for until, n in window if n > replicas and until > now - seconds)
    return (*kept, (now, replicas))


def highest(window: Window) -> int:
    """What must stay."""
    return window[0][1]


def expires(window: Window, replicas: int, seconds: float) -> float:
    """When fewer than `replicas` will have been enough for `seconds`, if it stays as it is."""
    return max((until for until, n in window if n >= replicas), default=window[-1][0] - seconds) + seconds
