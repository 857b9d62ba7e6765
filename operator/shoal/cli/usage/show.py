"""Output of tables and CSV."""

import io
from collections.abc import Iterable, Sequence
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from shoal.core import cells

WIDTH: Final = 160
"""Width of the output without a terminal."""
NONE: Final = "-"


def console() -> Console:
    """Console for tables. It prints texts literally: a note such as "[ticket 7]" is not markup."""
    width = None if Console().is_terminal else WIDTH
    return Console(highlight=False, markup=False, emoji=False, width=width)


def table(
    words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]], total: Sequence[str] = ()
) -> Table:
    """A table with the columns `words`, then `numbers`; `total` is an optional last line."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_footer=False)
    for word in words:
        found.add_column(word, overflow="fold")
    for number in numbers:
        found.add_column(number, justify="right", no_wrap=True)
    listed = list(rows)
    for row in listed:
        found.add_row(*row)
    if total and len(listed) > 1:
        found.add_section()
        found.add_row(*total, style="bold")
    return found


def count(number: int) -> str:
    return f"{number:,}"


def write_csv(names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Writes CSV to standard output."""
    text = io.StringIO(newline="")
    writer = cells.CSVWriter(text, lineterminator="\n")
    writer.row(names)
    writer.rows(rows)
    click.echo(text.getvalue(), nl=False)
