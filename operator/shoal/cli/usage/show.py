"""Tables of counts and amounts."""

from collections.abc import Iterable, Sequence
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from shoal.cli import output

NONE: Final = "-"


def console() -> Console:
    """Console for tables. It prints texts literally: a note such as "[ticket 7]" is not markup."""
    return output.console(markup=False)


def warn_of_refused(mistakes: Sequence[str]) -> None:
    """Tells on stderr that the ledger refuses the price lists in its folder."""
    if mistakes:
        click.echo(
            "Warning: the ledger refuses its price lists, all together; those that it accepted before stay in force:",
            err=True,
        )
        for mistake in mistakes:
            click.echo(f"  {mistake}", err=True)


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


def seconds(milliseconds: int) -> str:
    """Whole milliseconds as seconds: 3200 is 3.2."""
    whole, rest = divmod(milliseconds, 1000)
    return f"{whole:,}" + (f".{rest:03}".rstrip("0") if rest else "")
