"""Tables as CSV that people open in a spreadsheet: a name that a user chose is never run there as a formula."""

import csv
import re
from collections.abc import Iterable
from typing import Any, Final, Protocol

_BEGINS: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""A spreadsheet takes a cell that begins so for a formula, some of them after dropping white space."""
_NUMBER: Final = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


class _Text(Protocol):
    def write(self, text: str, /) -> object: ...


def safe(value: object) -> object:
    """The cell as it may stand in a table: a text that a spreadsheet would run has an apostrophe before it. Numbers
    stay numbers, also those that are written as text."""
    if not isinstance(value, str) or not value.lstrip(" ").startswith(_BEGINS) or _NUMBER.fullmatch(value):
        return value
    return f"'{value}"


class CSVWriter:
    """`csv.writer`, with every cell safe. The only one that writes CSV."""

    def __init__(self, text: _Text, *, lineterminator: str = "\r\n") -> None:
        self._writer: Any = csv.writer(text, lineterminator=lineterminator)

    def row(self, cells: Iterable[object]) -> None:
        self._writer.writerow([safe(cell) for cell in cells])

    def rows(self, rows: Iterable[Iterable[object]]) -> None:
        for cells in rows:
            self.row(cells)
