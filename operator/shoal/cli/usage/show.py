"""Tables of counts and amounts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from shoal.cli import output

NONE: Final = "-"
_FIELDS: Final = {"class": "gpuClass", "key": "keyName"}
"""What `--by` and the ledger's API call a dimension, and its field in the output, as in every other command."""
_DIMENSIONS: Final = {field: dimension for dimension, field in _FIELDS.items()}


def console() -> Console:
    """Console for tables. It prints texts literally: a note such as "[ticket 7]" is not markup."""
    return output.console(markup=False)


def dimensions(by: str) -> str:
    """The value of `--by` for the ledger. It may have the names of the output too."""
    return ",".join(_DIMENSIONS.get(name, name) for name in by.split(","))


def fields(page: Mapping[str, Any]) -> dict[str, Any]:
    """The ledger's answer for programs: with the field names of every other command."""
    rows = [_renamed(row) for row in page["rows"]]
    total = {"total": _renamed(page["total"])} if "total" in page else {}
    return {**page, "by": [_FIELDS.get(name, name) for name in page["by"]], "rows": rows, **total}


def _renamed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {_FIELDS.get(name, name): value for name, value in row.items()}


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
