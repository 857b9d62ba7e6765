"""Request timeouts: one timer for all requests, because all have the same limit.

`asyncio.timeout` creates and cancels a timer per request; measured, that was 6 % of a request's CPU.
"""

import asyncio
from types import TracebackType


class Deadlines:
    """Create and use it in one event loop. A deadline is exact to one iteration of the loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        # asyncio.get_running_loop() is a system call each time (it asks for the process id).
        self.loop = asyncio.get_running_loop()
        # A dict keeps the order of insertion, so the first deadline is the next one.
        self._open: dict[Deadline, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> "Deadline":
        """A context manager around the awaits of this task.

        Raises:
            TimeoutError: at the end of the block, if it took longer.
        """
        return Deadline(self)

    def enter(self, deadline: "Deadline") -> float:
        """Returns when the deadline ends."""
        loop = self.loop
        self._open[deadline] = at = loop.time() + self.seconds
        if self._timer is None:
            self._timer = loop.call_at(at, self._check)
        return at

    def leave(self, deadline: "Deadline") -> None:
        self._open.pop(deadline, None)

    def _check(self) -> None:
        loop = self.loop
        now = loop.time()
        self._timer = None
        for deadline, at in self._open.items():
            if at > now:
                self._timer = loop.call_at(at, self._check)
                break
            deadline.cut()


class Deadline:
    """The time that one request may take. A part that has a bound of its own stops the clock."""

    __slots__ = ("_at", "_deadlines", "_left", "_task", "_timer", "held_since", "passed", "seconds")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._task: asyncio.Task[object] | None = None
        self._at = 0.0
        self._left = 0.0
        self._timer: asyncio.TimerHandle | None = None
        """Of a deadline that is no longer in the order of `Deadlines`."""
        self.passed = False
        self.seconds = deadlines.seconds
        """All of the time, for messages."""
        self.held_since: float | None = None
        """When the request first waited for a replica (`time.monotonic`); its waits together have one bound."""

    def cut(self) -> None:
        if self.passed:
            return
        self.passed = True
        if self._task is not None:
            self._task.cancel()

    def __enter__(self) -> "Deadline":
        self._task = asyncio.current_task(self._deadlines.loop)
        self._at = self._deadlines.enter(self)
        return self

    def left(self) -> float:
        """Seconds that are left, while the clock runs."""
        return max(0.0, self._at - self._deadlines.loop.time())

    def pause(self) -> None:
        """Stops the clock, for a part that has its own bound."""
        self._left = self._at - self._deadlines.loop.time()
        self._stop()

    def restart(self) -> None:
        """Goes on with what was left of the time."""
        self._run_until(self._deadlines.loop.time() + self._left)

    def shorten(self, seconds: float) -> bool:
        """From now on, it takes at most `seconds` more. Returns whether less than before is left."""
        at = self._deadlines.loop.time() + seconds
        if at >= self._at:
            return False
        self._stop()
        self._run_until(at)
        self.seconds = seconds
        return True

    def _run_until(self, at: float) -> None:
        self._at = at
        if not self.passed:
            self._timer = self._deadlines.loop.call_at(at, self.cut)

    def _stop(self) -> None:
        self._deadlines.leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop()
        # If another cancellation came on top of ours (the process stops), it must stay a cancellation. asyncio.timeout
        # does the same.
        if (
            self.passed
            and self._task is not None
            and self._task.uncancel() <= 0
            and kind is not None
            and issubclass(kind, asyncio.CancelledError)
        ):
            raise TimeoutError from error
