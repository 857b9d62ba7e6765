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

    def enter(self, deadline: "Deadline") -> None:
        loop = self.loop
        self._open[deadline] = loop.time() + self.seconds
        if self._timer is None:
            self._timer = loop.call_later(self.seconds, self._check)

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
            if not deadline.passed:
                deadline.cut()


class Deadline:
    __slots__ = ("_deadlines", "_task", "passed")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._task: asyncio.Task[object] | None = None
        self.passed = False

    def cut(self) -> None:
        self.passed = True
        if self._task is not None:
            self._task.cancel()

    def __enter__(self) -> "Deadline":
        self._task = asyncio.current_task(self._deadlines.loop)
        self._deadlines.enter(self)
        return self

    def pause(self) -> None:
        """Stops the clock, for a part that has its own bound."""
        self._deadlines.leave(self)

    def restart(self) -> None:
        """Starts the full time again."""
        self._deadlines.enter(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._deadlines.leave(self)
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
