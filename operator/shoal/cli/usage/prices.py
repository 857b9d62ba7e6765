"""`shoal prices check`: validates price lists before they are committed."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from shoal.cli.output import emit, output_option
from shoal.core.rating.files import PriceList, parse
from shoal.core.rating.problems import PriceProblem, PricesRefused
from shoal.core.rating.schedule import conflicts, dropped

_SUFFIXES: Final = (".yaml", ".yml")
_COLUMNS: Final = ("kind", "file", "line", "message", "name", "currency", "prices", "from", "until")


@click.group()
def prices() -> None:
    """Check price lists: files in Git, mounted into the ledger (docs/billing.md)."""


@prices.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@output_option()
def check(paths: tuple[Path, ...], output: str) -> None:
    """Check whether these price lists (files or folders) are valid together, as the ledger does.

    Each error is printed with file and line, and the exit code is 1: for CI. Lists with mistakes of their own are not
    compared with the others. Prices that a later list drops cause a warning.
    """
    problems: list[PriceProblem] = []
    found: list[PriceList] = []
    refused: list[str] = []
    for path, text in gathered(paths):
        try:
            found.append(parse(str(path), text))
        except PricesRefused as error:
            problems += error.problems
            refused.append(str(path))
    problems = sorted([*problems, *conflicts(found, complete=not refused)])
    if problems:
        alone = len(found) + len(refused) == 1
        _emit(output, (), problems, (), () if alone else refused)
        for problem in problems:
            click.echo(str(problem), err=True)
        if refused and not alone:
            click.echo(f"Not compared with other lists: {', '.join(refused)}", err=True)
        raise click.ClickException(f"{len(problems)} error{'s' if len(problems) > 1 else ''}")
    found.sort(key=lambda one: one.starts)
    warnings = dropped(found)
    for warning in warnings:
        click.echo(f"{warning.file}:{warning.line}: warning: {warning.message}", err=True)
    if _emit(output, found, (), warnings):
        return
    for one in found:
        rates = one.prices.rates
        click.echo(
            f"{one.file}: {len(rates)} price{'s' if len(rates) > 1 else ''} in {one.prices.currency}, "
            f"from {_text(one.starts)}{f' until {_text(one.ends)}' if one.ends is not None else ''}"
        )


def _emit(
    output: str,
    found: Iterable[PriceList],
    errors: Iterable[PriceProblem],
    warnings: Iterable[PriceProblem],
    refused: Iterable[str] = (),
) -> bool:
    lists: list[dict[str, Any]] = [
        {
            "file": one.file,
            "name": one.name,
            "currency": one.prices.currency,
            "prices": len(one.prices.rates),
            "from": _text(one.starts),
            "until": None if one.ends is None else _text(one.ends),
        }
        for one in found
    ]
    document = {
        "priceLists": lists,
        "errors": [asdict(each) for each in errors],
        "warnings": [asdict(each) for each in warnings],
    }
    not_compared = list(refused)
    kinds = {"priceLists": "priceList", "errors": "error", "warnings": "warning"}
    rows = [{"kind": kinds[name]} | each for name, listed in document.items() for each in listed]
    rows += [{"kind": "notCompared", "file": file} for file in not_compared]
    return emit(output, document | {"notCompared": not_compared}, rows, _COLUMNS)


def gathered(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """The given files, and the files of given folders. Raises ClickException."""
    for path in paths:
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES) if path.is_dir() else [path]
        if not files:
            raise click.ClickException(f"{path} has no .yaml file")
        for file in files:
            try:
                yield file, file.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise click.ClickException(f"{file} cannot be read: {error}") from None


def _text(moment: int) -> str:
    return datetime.fromtimestamp(moment / 1000, UTC).strftime("%Y-%m-%dT%H:%MZ")
