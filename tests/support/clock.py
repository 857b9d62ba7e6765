"""A clock that a test moves."""


class Clock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now
        """Seconds."""

    def __call__(self) -> float:
        return self.now
