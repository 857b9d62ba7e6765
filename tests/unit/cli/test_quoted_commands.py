"""Every `shoal` command that advice quotes is one that the command line takes."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from shoal.cli.main import main

ROOT = Path(__file__).parents[3] / "operator" / "shoal"
ROOMS = ("core/layers", "core/doctor")
QUOTED = re.compile(r"`(?:kubectl )?shoal ([^`]+)`")


def texts(path: Path) -> Iterator[str]:
    """The texts of a file. What is put in when they are made stands as X."""
    tree = ast.parse(path.read_text())
    parts = {id(each) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for each in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else "X" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def quoted() -> set[str]:
    files = [path for room in ROOMS for path in (ROOT / room).glob("*.py")]
    return {command for path in files for text in texts(path) for command in QUOTED.findall(text)}


def parse(line: str) -> None:
    """Parses a command line and runs nothing. One that only names a command needs no arguments. Raises UsageError."""
    command: click.Command = main
    context = click.Context(main, info_name="shoal")
    args = shlex.split(line)
    while isinstance(command, click.Group) and args:
        name, *args = args
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"there is no command {name}")
        command, context = found, click.Context(found, context, info_name=name)
    if args:
        command.make_context(command.name, args, parent=context.parent)


def test_there_are_some() -> None:
    assert {"doctor", "status -w", "why model/NAME"} <= quoted()


@pytest.mark.parametrize("line", sorted(quoted()))
def test_a_quoted_command_can_be_run(line: str) -> None:
    parse(line)


@pytest.mark.parametrize("line", ["keys create TENANT", "keys enable", "nosuch", "status --nosuch"])
def test_a_wrong_one_would_be_found(line: str) -> None:
    with pytest.raises(click.UsageError):
        parse(line)
