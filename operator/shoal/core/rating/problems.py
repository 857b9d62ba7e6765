"""Mistakes in price lists, by line."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class PriceProblem:
    """One mistake in one line of a file."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


class PricesRefused(Exception):
    """Price lists that cannot be used; the message has one line per mistake."""

    def __init__(self, problems: Iterable[PriceProblem]) -> None:
        self.problems = tuple(sorted(problems))
        super().__init__("\n".join(map(str, self.problems)))
