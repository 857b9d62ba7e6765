"""A limit on the work that one object may cause, counted in steps: never in time, so that it is the same everywhere."""

from typing import Final

SIZING_STEPS: Final = 20_000
"""Replicas that are sized for one Model: each number of GPUs on each class is one."""


class TooExpensive(Exception):
    """An object asks for more work than it may cause. The message says what to change."""


class StepBudget:
    """Steps that are left. `advice` is what a person should do where they do not suffice."""

    __slots__ = ("_advice", "_left", "_steps", "_what")

    def __init__(self, steps: int, what: str, advice: str) -> None:
        self._steps = self._left = steps
        self._what, self._advice = what, advice

    def spend(self, steps: int) -> None:
        """Before the work. Raises TooExpensive."""
        self._left -= steps
        if self._left < 0:
            raise TooExpensive(f"{self._what} takes more than {self._steps} steps, which is the most: {self._advice}")
