"""The longest that a request may take: one timer for all requests, because all have the same time.

`asyncio.timeout` arms and cancels a timer of its own per request; measured, that was 6 % of a request's CPU.
"""

import asyncio
from types import TracebackType


class Deadlines:
    """Make and use it in one event loop. A limit is kept to within the time that one turn of the loop takes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        # asyncio.get_running_loop() is a system call each time (it asks for the process id).
        self._loop = asyncio.get_running_loop()
        # A dict keeps the order of insertion, so the first deadline is the next one.
        self._running: dict[Deadline, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> "Deadline":
        """A context manager around the awaits of this task.

        Raises:
            TimeoutError: at its end, where they took longer.
        """
        return Deadline(self)

    def enter(self, deadline: "Deadline") -> None:
        loop = self._loop
        self._running[deadline] = loop.time() + self.seconds
        if self._timer is None:
            self._timer = loop.call_later(self.seconds, self._look)

    def leave(self, deadline: "Deadline") -> None:
        self._running.pop(deadline, None)

    def _look(self) -> None:
        loop = self._loop
        now = loop.time()
        self._timer = None
        for deadline, at in self._running.items():
            if at > now:
                self._timer = loop.call_at(at, self._look)
                break
            if not deadline.passed:
                deadline.cut()


class Deadline:
    __slots__ = ("_all", "_task", "passed")

    def __init__(self, all: Deadlines) -> None:
        self._all = all
        self._task: asyncio.Task[object] | None = None
        self.passed = False

    def cut(self) -> None:
        self.passed = True
        if self._task is not None:
            self._task.cancel()

    def __enter__(self) -> "Deadline":
        self._task = asyncio.current_task()
        self._all.enter(self)
        return self

    def pause(self) -> None:
        """Stops the clock: what follows is bounded otherwise."""
        self._all.leave(self)

    def restart(self) -> None:
        """Begins the whole time anew."""
        self._all.enter(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._all.leave(self)
        # Somebody else's cancellation on top of ours (the process stops) stays one; asyncio.timeout does the same.
        if (
            self.passed
            and self._task is not None
            and self._task.uncancel() <= 0
            and kind is not None
            and issubclass(kind, asyncio.CancelledError)
        ):
            raise TimeoutError from error
