"""A disk that takes its time to open the part of a file that is being fetched."""

import threading

import pytest

from shoal.artifacts.part import Part, Span


class SlowDisk:
    """Parts are opened at once, `quick` of them; from then on when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, quick: int = 0) -> None:
        self.asked, self.goes_on, self.done = threading.Event(), threading.Event(), threading.Event()
        opened, lock = Part.open, threading.Lock()
        left = quick

        def slow(part: Part) -> list[Span]:
            nonlocal left
            with lock:
                left -= 1
                if left >= 0:
                    return opened(part)
            self.asked.set()
            assert self.goes_on.wait(20)
            try:
                return opened(part)
            finally:
                self.done.set()

        monkeypatch.setattr(Part, "open", slow)
