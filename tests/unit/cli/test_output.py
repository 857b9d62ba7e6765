"""What programs read from any command: the same formats, the same field names, and no cell that wraps."""

import csv
import importlib
import io
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import click
import pytest
import yaml
from click.testing import CliRunner
from rich.table import Table

from shoal import cli
from shoal.cli import output
from shoal.cli.main import main
from shoal.core import cells

RUNTIME = {"operator", "gateway", "ledger", "agent", "cache", "sim", "lab", "demo", "generate"}
"""Commands of processes and of developers."""
CAMEL = re.compile("[a-z]+([A-Z0-9][a-z0-9]*)*")
PATCHES = {f"keys {verb}" for verb in ("create", "rotate", "disable", "expire", "remove")}
"""Commands whose output is a patch for Git, and not a table, unless another format is asked for."""
OWN = {"render": "prints objects, as YAML", "export focus": "prints the CSV that FOCUS defines"}
"""Commands whose output has one form."""


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        if not path and name in RUNTIME:
            continue
        command = group.get_command(context, name)
        assert command is not None
        here = " ".join((*path, name))
        yield here, command
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)


def formats(command: click.Command) -> set[str]:
    found = [each.type for each in command.params if each.name == "output"]
    return {str(choice) for kind in found if isinstance(kind, click.Choice) for choice in kind.choices}


def test_no_line_of_a_table_ends_with_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("NAME", "MESSAGE", box=None)
    table.add_row("a", "x" * 300)
    table.add_row("b", "short")
    output.console().print(table, "last  ")
    assert capsys.readouterr().out.split("\n") == [" NAME  MESSAGE", f" a     {'x' * 300}", " b     short", "last", ""]


def test_every_command_has_the_same_formats() -> None:
    found = {
        name: formats(command)
        for name, command in commands(main)
        if name not in OWN and not (isinstance(command, click.Group) and not command.invoke_without_command)
    }
    lacking = {
        name: has
        for name, has in found.items()
        if not has >= {"patch" if name in PATCHES else "table", "json", "yaml", "csv"}
    }
    assert lacking == {}
    assert set(found) >= {"status", "top", "logs", "logs delete", "wake", "cordon gpu", "credits add", "support bundle"}


def test_what_a_process_prints_for_people_has_the_same_formats() -> None:
    groups = {name: main.get_command(click.Context(main), name) for name in ("operator", "gateway", "ledger", "agent")}
    found = {
        name: formats(command)
        for process, group in groups.items()
        if isinstance(group, click.Group)
        for name, command in commands(group, process)
        if formats(command)
    }
    assert found == {f"{name} records": {"table", "json", "yaml", "csv"} for name in ("gateway", "ledger")}


def test_no_command_prints_tables_in_a_way_of_its_own() -> None:
    """`output.console` is the one that does not wrap."""
    folder = Path(output.__file__).parent
    makers = re.compile(r"\bConsole\(")
    elsewhere = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if path.name != "output.py" and makers.search(path.read_text())
    }
    assert elsewhere == set()


def shown(document: object, rows: list[dict[str, Any]], columns: list[str], form: str) -> str:
    @click.command()
    def command() -> None:
        if not output.emit(form, document, rows, columns):
            output.console().print("a table")

    return CliRunner().invoke(command).output


ROWS = [{"name": "chat", "ageSeconds": 3.0641324910000094, "stale": ["a", "b"], "note": "über, all"}, {"name": "idle"}]
COLUMNS = ["name", "ageSeconds", "stale", "note"]


def test_one_document_in_each_format() -> None:
    rounded = [{**ROWS[0], "ageSeconds": 3.064132}, ROWS[1]]
    assert json.loads(shown({"models": ROWS}, ROWS, COLUMNS, "json")) == {"models": rounded}
    assert yaml.safe_load(shown({"models": ROWS}, ROWS, COLUMNS, "yaml")) == {"models": rounded}
    first, second = csv.DictReader(io.StringIO(shown({}, ROWS, COLUMNS, "csv")))
    assert first == {"name": "chat", "ageSeconds": "3.064132", "stale": "a b", "note": "über, all"}
    assert second == {"name": "idle", "ageSeconds": "", "stale": "", "note": ""}
    assert shown({}, ROWS, COLUMNS, "table") == "a table\n"


def test_a_name_that_a_spreadsheet_would_run_is_a_text() -> None:
    written = shown({}, [{"name": "=cmd()"}], ["name"], "csv")
    plain = io.StringIO()
    cells.CSVWriter(plain, lineterminator="\n").row(["=cmd()"])
    assert written == f"name\n{plain.getvalue()}"
    assert not written.splitlines()[1].startswith("=")


@pytest.mark.parametrize("length", [200, 3000])
def test_without_a_terminal_no_line_is_wrapped(length: int) -> None:
    @click.command()
    def command() -> None:
        output.console().print("x" * length + " " + "y" * length)

    assert CliRunner().invoke(command).output.splitlines() == ["x" * length + " " + "y" * length]


def test_fields_have_the_names_of_the_api() -> None:
    assert output.camel({"gpu_class": "l4", "cold_start_seconds": 3}) == {"gpuClass": "l4", "coldStartSeconds": 3}


OTHER_NAMES = {
    "namespace": "the kind, such as `model`, with namespace/name",
    "class": "gpuClass",
    "kvTokens": "kvTokensPerReplica",
    "percent": "sharePercent, or of what it is a percentage",
    "why": "message",
}
"""Names that a thing had in one command, and the one that it has in all."""
SECRET = "shoal.cli.keys.carry"
"""Where `key` is a key itself, and not its name."""


def test_a_thing_has_one_name_in_all_commands() -> None:
    """The columns of all commands. `name` alone stands only beside the kind that it is a name of."""
    wrong: list[str] = []
    seen = 0
    for module in pkgutil.walk_packages(cli.__path__, f"{cli.__name__}."):
        for constant, columns in vars(importlib.import_module(module.name)).items():
            if not constant.endswith(("COLUMNS", "_FIELDS")) or not isinstance(columns, tuple):
                continue
            seen += 1
            names = cast("tuple[str, ...]", columns)
            others = {**OTHER_NAMES, **({} if "kind" in names else {"name": "its kind"})}
            others |= {} if module.name == SECRET else {"key": "keyName"}
            wrong += [f"{module.name}: {each} is {others[each]}" for each in names if each in others]
            wrong += [f"{module.name}: {each} is not camelCase" for each in names if not CAMEL.fullmatch(each)]
    assert wrong == []
    assert seen >= 20


def test_explain_names_a_class_as_status_and_cordon_do() -> None:
    manifest = Path(__file__).parents[3] / "examples" / "catalogue" / "qwen3-8b.yaml"

    def printed(form: str) -> str:
        return CliRunner(catch_exceptions=False).invoke(main, ["explain", "-f", str(manifest), "-o", form]).stdout

    document = printed("json")
    assert '"gpuClass"' in document
    assert '"class"' not in document
    header = printed("csv").splitlines()[0].split(",")
    assert "gpuClass" in header
    assert "class" not in header
