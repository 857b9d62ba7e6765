"""The arguments that an engine version takes, as its own parser lists them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an engine version."""

    name: str
    """Canonical spelling, without dashes."""
    takes: Literal["none", "one", "optional", "list"]
    type: Literal["int", "float"] | None = None
    choices: tuple[str, ...] = ()


@cache
def _tables() -> dict[str, dict[str, Argument]]:
    table = json.loads(files("shoal.engine.sglang").joinpath("sglang_args.json").read_text())
    by_spelling: dict[str, Argument] = {}
    for name, entry in table["arguments"].items():
        argument = Argument(name, entry["takes"], entry.get("type"), tuple(entry.get("choices", ())))
        by_spelling |= dict.fromkeys([name, *entry.get("aliases", ())], argument)
    return {table["version"]: by_spelling}


def known_versions() -> tuple[str, ...]:
    """Engine versions whose arguments are known."""
    return tuple(_tables())


def arguments_of(version: str) -> Mapping[str, Argument] | None:
    """The version's arguments by every spelling (without dashes), or None for a version that has no table.

    What follows the number, as in 0.5.23-cpu, names a build of the same version.
    """
    number = re.match(r"\d+\.\d+\.\d+(\.?(post|rc|dev)\d+)?", version)
    return _tables().get(number.group() if number else version)


def parsed(args: Sequence[str]) -> dict[str, str]:
    """Canonical name -> value of these arguments, the later one where a name is there twice; a flag has an empty value.
    Values may stand behind `=` or as words of their own."""
    table = arguments_of(known_versions()[-1]) or {}
    found: dict[str, str] = {}
    name: str | None = None
    for arg in args:
        if arg.startswith("--"):
            spelling, _, value = arg.removeprefix("--").partition("=")
            known = table.get(spelling)
            name = known.name if known else spelling
            found[name] = value
        elif name is not None:
            found[name] = f"{found[name]} {arg}".strip()
    return found
