"""Whether an engine is stalled: it has requests and computes nothing for them. Pure.

Counters may move only when requests end, so a long answer need not show there. What moves is the work done by prefill
and decode, and KV use, which grows with every token. A scheduler that hangs does not tell of requests that wait for it:
those are seen in the HTTP server's own count. Where a scheduler says when it published its load, one that is silent
hangs. Where it does not, its figures stand still either way: then requests that came since they last moved are waiting.
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Work:
    """What one look showed. None: unknown."""

    at: float
    """Seconds of a monotonic clock."""
    answer: Literal["load", "none", "other"]
    """load: the engine said its load. none: it did not answer in time. other: it gave an answer that says nothing of
    its load, or nothing listens; whatever that is, it is not a stall."""
    running: int | None = None
    waiting: int | None = None
    active: int | None = None
    """HTTP requests that it has not answered to the end."""
    computed: int | None = None
    """Work that prefill and decode have done since its start, in tokens or another unit."""
    kv_tokens_used: int | None = None
    finished: int | None = None
    """Tokens of the requests that have ended since its start, from its counters."""
    published: float | None = None
    """When its scheduler last published its load, by its own clock; None: the engine does not say it."""


@dataclass(frozen=True, slots=True)
class StallClock:
    """Since when nothing has moved."""

    since: float
    """The last look that showed progress, or that there was nothing to do."""
    last: Work
    active: int | None = None
    """HTTP requests at `since`."""


def follow(progress: StallClock | None, work: Work) -> StallClock:
    """Takes a further look."""
    if progress is None or work.answer == "other":
        return StallClock(work.at, work, work.active)
    last = progress.last
    if work.answer == "none":
        # What was seen before the silence is what the next answer is compared with; the counters may still speak.
        ended = _grew(last.finished, work.finished)
        since = work.at if ended else progress.since
        return replace(progress, since=since, last=replace(last, finished=work.finished or last.finished))
    counts = _moved(last, work) is False and (
        _busy(last, work)
        or (progress.since < last.at and _silent(last, work))
        or (work.published is None and _more(progress.active, work.active))
    )
    return replace(progress, last=work) if counts else StallClock(work.at, work, work.active)


def stalled(progress: StallClock, now: float, stall_seconds: float) -> bool:
    """Whether there has been work and no progress, or no answer at all, for `stall_seconds`."""
    return now - progress.since >= stall_seconds


def _busy(before: Work, now: Work) -> bool:
    # A client that does not read its answer keeps a request active, too: with a scheduler that goes on publishing.
    return bool(now.running or now.waiting) or (bool(now.active) and _silent(before, now))


def _silent(before: Work, now: Work) -> bool:
    """Whether the scheduler has published nothing in between; an idle one does every second. Once it is suspected, only
    a sign of life helps: that all clients have given up is none, and the next ones would wait as long."""
    return now.published is not None and now.published == before.published


def _more(before: int | None, now: int | None) -> bool:
    """Whether requests came for which nothing was done: those of a client that does not read its answer were there when
    their answer was computed."""
    return before is not None and now is not None and now > before


def _moved(before: Work, now: Work) -> bool | None:
    """Whether tokens were computed; None: the engine's metrics do not show it.

    Less KV use is no progress: that is what a client does that leaves.
    """
    grew = [
        _grew(before.computed, now.computed),
        _grew(before.kv_tokens_used, now.kv_tokens_used),
        _grew(before.finished, now.finished),
    ]
    if any(grew):
        return True
    return None if grew[:2] == [None, None] else False


def _grew(before: int | None, now: int | None) -> bool | None:
    return None if before is None or now is None else now > before
