"""Every `shoal` command that advice quotes is one that the command line takes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.support.commandline import parse

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


def test_there_are_some() -> None:
    assert {"doctor", "status -w", "why model/NAME"} <= quoted()


@pytest.mark.parametrize("line", sorted(quoted()))
def test_a_quoted_command_can_be_run(line: str) -> None:
    parse(line)


@pytest.mark.parametrize("line", ["keys create TENANT", "keys enable", "nosuch", "status --nosuch"])
def test_a_wrong_one_would_be_found(line: str) -> None:
    with pytest.raises(click.UsageError):
        parse(line)
