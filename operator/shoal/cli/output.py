"""How commands print: tables for people, and JSON, YAML or CSV for programs.

Field names are those of the Kubernetes API (camelCase), in every format of every command. Without a terminal a table
is as wide as its content: a wrapped cell would break `grep` and `awk`.
"""

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, ParamSpec, TypeVar, cast

import click
import orjson
import yaml
from pydantic.alias_generators import to_camel
from rich.console import Console

from shoal.core import cells

P = ParamSpec("P")
R = TypeVar("R")

_TRAILING: Final = re.compile(r" +$", re.MULTILINE)
UNBOUNDED: Final = 10_000
"""Width of the output without a terminal."""
_DECIMALS: Final = 6
"""Of measured numbers in JSON, YAML and CSV. Money is text, and exact."""


def output_option(*more: str, help: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Adds the parameter `output`: table, json, yaml or csv. `more`: further formats."""
    choices = click.Choice(["table", *more, "json", "yaml", "csv"])
    return click.option("-o", "--output", type=choices, default="table", show_default=True, help=help)


class _Unpadded(Console):
    """For a pipe or a file. A table pads each line to the longest one, which may have thousands of characters."""

    def print(self, *objects: Any, **options: Any) -> None:
        with self.capture() as printed:
            super().print(*objects, **options)
        self.file.write(_TRAILING.sub("", printed.get()))
        self.file.flush()


def console(*, markup: bool = True) -> Console:
    """The console for tables. Without `markup`, texts are printed literally: a note such as "[ticket 7]" is none."""
    if Console().is_terminal:
        return Console(highlight=False, markup=markup, emoji=False)
    return _Unpadded(highlight=False, markup=markup, emoji=False, width=UNBOUNDED)


def emit(output: str, document: object, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> bool:
    """Prints `document` as JSON or YAML, or `rows` as CSV. Returns False for a table, which the caller prints."""
    if output == "csv":
        write_csv(columns, ([row.get(name) for name in columns] for row in rows))
    elif output in ("json", "yaml"):
        click.echo(dump(document, output))
    else:
        return False
    return True


def emit_each(output: str, documents: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> bool:
    """Prints documents to which others may follow: JSON with one per line, YAML as items of one list, CSV without the
    header. Returns False for a table, which the caller prints."""
    if output == "csv":
        write_csv(columns, ([each.get(name) for name in columns] for each in documents), header=False)
    elif output in ("json", "yaml"):
        for each in documents:
            click.echo(orjson.dumps(each).decode() if output == "json" else dump([each], output))
    else:
        return False
    return True


def dump(document: object, output: str) -> str:
    """JSON or YAML, with measured numbers rounded."""
    data = _rounded(document)
    if output == "json":
        return json.dumps(data, indent=2, ensure_ascii=False)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120).rstrip()


def write_csv(names: Sequence[str], rows: Iterable[Sequence[object]], *, header: bool = True) -> None:
    """Writes CSV to standard output. A list becomes one cell, its items separated by spaces."""
    text = io.StringIO(newline="")
    writer = cells.CSVWriter(text, lineterminator="\n")
    if header:
        writer.row(names)
    writer.rows([_cell(value) for value in row] for row in rows)
    click.echo(text.getvalue(), nl=False)


def none_of(kind: str, namespace: str | None) -> str:
    """What is printed instead of an empty table. `namespace` None: all were looked at."""
    return f"there is no {kind}" if namespace is None else f"there is no {kind} in namespace {namespace}; -A shows all"


def camel(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a dataclass under their names in the API: `gpu_class` -> `gpuClass`. Values are not changed."""
    return {to_camel(name): value for name, value in fields.items()}


def _rounded(value: object) -> object:
    match value:
        case float():
            return round(value, _DECIMALS)
        case dict():
            return {name: _rounded(each) for name, each in cast("dict[str, object]", value).items()}
        case list() | tuple():
            return [_rounded(each) for each in cast("Sequence[object]", value)]
        case _:
            return value


def _cell(value: object) -> object:
    match value:
        case float():
            return round(value, _DECIMALS)
        case list() | tuple():
            return " ".join(str(each) for each in cast("Sequence[object]", value))
        case _:
            return value
