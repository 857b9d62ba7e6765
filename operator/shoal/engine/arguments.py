"""The arguments that an engine takes, and the check of those that a Model gives it. For the adapters beside this file:
what is an engine's own, they give as `EngineArguments`."""

import difflib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, Literal, TypeVar, cast

Number = int | float
Bounds = tuple[Number, Number]
"""The least and the most that a number may be."""

MOST_INT: Final = 2**31 - 1
MOST_FLOAT: Final = 1e9
MOST_ARGS: Final = 256
"""Arguments of one engine: a Model's own 64, and those of its pool."""
LONGEST_ARG: Final = 256
"""Characters of one, as in the Model's schema."""
LONGEST: Final = 32
"""Characters of a number."""
_MOST_OWN: Final = 64
"""Arguments of a Model's own."""
_LONGEST_SHOWN: Final = 64
"""Characters of a user's text in a message about it."""
_MOST_PROBLEMS: Final = 8
_JSON: Final = frozenset({"parse_dataclass", "union_dict_and_str", "loads", "_parse_type"})
"""Parsers of values that are JSON, as a dump of the arguments names them."""
_Value = TypeVar("_Value", int, float)
_VERSION: Final = re.compile(r"\d+\.\d+\.\d+(\.?(post|rc|dev)\d+)?")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an engine version."""

    name: str
    """Canonical spelling, without dashes."""
    takes: Literal["none", "one", "optional", "list"]
    type: Literal["int", "float"] | None = None
    choices: tuple[str, ...] = ()
    json: bool = False
    """The value is a JSON object, whose members may be given as `--name.member=value`."""


Table = Mapping[str, Argument]
"""An engine version's arguments by every spelling, without the leading dashes."""


def read_table(package: str, file: str) -> dict[str, Table]:
    """Version -> its arguments, from a dump of the engine's parser beside the adapter. Spellings with one dash are left
    out: an argument of a Model begins with two."""
    table = json.loads(files(package).joinpath(file).read_text())
    by_spelling: dict[str, Argument] = {}
    for name, entry in table["arguments"].items():
        holds_json = entry.get("parse") in _JSON or name.endswith("-config")
        argument = Argument(name, entry["takes"], entry.get("type"), tuple(entry.get("choices", ())), holds_json)
        spellings = [name, *(alias for alias in entry.get("aliases", ()) if not alias.startswith("-"))]
        by_spelling |= dict.fromkeys(spellings, argument)
    return {table["version"]: by_spelling}


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """The arguments of one engine, and what Shoal makes of them."""

    engine: str
    """The engine's name, for messages."""
    tables: Callable[[], Mapping[str, Table]]
    """Version -> its arguments, the default version last."""
    owned: Mapping[str, str]
    """Canonical name -> why a Model may not set it, or what to use instead."""
    families: Sequence[tuple[str, str]]
    """The same for every argument that begins with a prefix."""
    bounds: Mapping[str, Bounds]
    """Canonical name -> bounds of its number; any other takes what fits into 32 bits."""
    count: Callable[[str], int]
    """Reads a whole number as the engine does, with its suffixes. Raises ValueError or ArithmeticError."""
    foreign: Mapping[str, tuple[str, str]]
    """Argument of another engine -> that engine, and what to do instead."""
    may_be_off: Collection[str] = ()
    """Of those that are `owned`: a Model may switch them off, which changes nothing."""
    underscores: bool = False
    """The engine takes `_` for `-` in names. Shoal does not, so that an argument has one spelling."""

    @property
    def versions(self) -> tuple[str, ...]:
        """Engine versions whose arguments are known."""
        return tuple(self.tables())

    def table(self, version: str) -> Table | None:
        """The version's arguments by every spelling (without dashes), or None for a version that has no table.

        What follows the number, as in 0.5.23-cpu, names a build of the same version.
        """
        number = _VERSION.match(version)
        return self.tables().get(number.group() if number else version)

    def owner(self, name: str) -> str | None:
        """Why a Model may not set this argument (canonical name without dashes), or None when it may."""
        if name in self.owned:
            return self.owned[name]
        return next((why for prefix, why in self.families if name.startswith(prefix)), None)

    def is_harmless(self, spelling: str, argument: Argument) -> bool:
        """Whether a spelling of an argument that Shoal owns may be given all the same: it switches the argument off."""
        return argument.name in self.may_be_off and spelling == f"no-{argument.name}"

    def limits(self, name: str, *, whole: bool) -> Bounds:
        """The least and the most that this argument may be."""
        return self.bounds.get(name) or ((-MOST_INT, MOST_INT) if whole else (-MOST_FLOAT, MOST_FLOAT))

    def within(self, name: str, value: Number) -> bool:
        """Whether the argument may have this value; a float that is no number or has no end may not."""
        least, most = self.limits(name, whole=isinstance(value, int))
        return math.isfinite(value) and least <= value <= most

    def parsed(self, args: Sequence[str]) -> dict[str, str]:
        """Canonical name -> value of these arguments, the later one where a name is there twice; a flag has an empty
        value, and one that is switched off by `--no-NAME` stands under `no-NAME`. Values may stand behind `=` or as
        words of their own."""
        tables = self.tables()
        table = tables[list(tables)[-1]]
        found: dict[str, str] = {}
        name: str | None = None
        for arg in args:
            if arg.startswith("--"):
                spelling, _, value = arg.removeprefix("--").partition("=")
                known = table.get(spelling)
                name = known.name if known else spelling
                if known is not None and spelling == f"no-{name}":
                    found.pop(name, None)
                    name = spelling
                else:
                    found.pop(f"no-{name}", None)
                found[name] = value
            elif name is not None:
                found[name] = f"{found[name]} {arg}".strip()
        return found

    def bounded(self, extra_args: Sequence[str]) -> list[str]:
        """Those of the arguments that an admitted Model may have."""
        return [arg for arg in extra_args[:MOST_ARGS] if len(arg) <= LONGEST_ARG]

    def number(self, given: Mapping[str, str], name: str, read: Callable[[str], _Value]) -> _Value | None:
        """The number of an argument in `given`, which is `parsed`; None: none is given, or no number, or none within
        its bounds."""
        value = given.get(name)
        if value is None or len(value) > LONGEST:
            return None
        try:
            found = read(value)
        except (ValueError, ArithmeticError):
            return None
        return found if self.within(name, found) else None

    # --- the check ----------------------------------------------------------------------------------------------------

    def problems(self, version: str, extra_args: Sequence[str]) -> list[str]:
        """What is wrong with these extraArgs, one sentence each for the person who wrote them; empty when all is well.

        Refused are names that the version does not know, abbreviations (argparse would complete them, and so let an
        owned argument through), arguments that Shoal owns, a value that is missing, not wanted or out of its bounds, a
        name given twice, and more or longer arguments than an admitted Model has.
        """
        if not extra_args:
            return []
        table = self.table(version)
        if table is None:
            known = ", ".join(self.versions)
            return [f"extraArgs cannot be checked for engine version {version}: this release of Shoal knows {known}"]
        if len(extra_args) > _MOST_OWN:
            return [f"there are {len(extra_args)} of them, and {_MOST_OWN} are the most"]
        problems: list[str] = []
        seen: set[str] = set()
        for arg in extra_args:
            if len(problems) == _MOST_PROBLEMS:
                return [*problems, "further ones are not looked at before these are mended"]
            spelling, equals, value = arg.removeprefix("--").partition("=")
            argument, member = self._named(spelling, table)
            if len(arg) > LONGEST_ARG:
                problems.append(f"{_shown(arg)} has {len(arg)} characters, and {LONGEST_ARG} are the most")
            elif not arg.startswith("--"):
                problems.append(f"{_shown(arg)} is not an argument: write '--name=value' or '--flag', one per item")
            elif argument is None:
                problems.append(self._unknown(version, spelling, table))
            elif (why := self.owner(argument.name)) and not self.is_harmless(spelling, argument):
                problems.append(f"--{spelling} is owned by Shoal: {why}")
            elif f"{argument.name}{member}" in seen:
                problems.append(f"--{argument.name}{member} is given twice")
            elif member and not equals:
                problems.append(f"--{spelling} needs a value: write --{spelling}=VALUE")
            elif not member and (problem := self._value_problem(argument, spelling, value if equals else None)):
                problems.append(problem)
            if argument is not None:
                seen.add(f"{argument.name}{member}")
        return problems

    def _named(self, spelling: str, table: Table) -> tuple[Argument | None, str]:
        """The argument of a spelling, and the member of its JSON value with the dot before it."""
        if spelling in table or "." not in spelling:
            return table.get(spelling), ""
        first, _, member = spelling.partition(".")
        argument = table.get(first)
        return (argument, f".{member}") if argument is not None and argument.json and member else (None, "")

    def _unknown(self, version: str, spelling: str, table: Table) -> str:
        if not spelling.strip():
            return "an item of extraArgs has no name: write '--name=value' or '--flag'"
        first, _, rest = spelling.partition(" ")
        if rest and first in table:
            return f"'--{spelling}' has a blank where '=' belongs: write --{first}={rest.strip()}"
        lacks = f"{self.engine} {version} has no argument"
        if len(spelling) > _LONGEST_SHOWN:
            return f"{lacks} --{spelling[:_LONGEST_SHOWN]}..."
        completions = {_full(name, table): name for name in sorted(table) if name.startswith(spelling)}
        if completions:
            owned = {full: why for full in sorted(completions) if (why := self._refused(completions[full], table))}
            full = min(owned or completions)
            advice = f", which is owned by Shoal: {owned[full]}" if owned else ": write it out"
            return f"--{spelling} is an abbreviation of --{full}{advice}"
        dashed = spelling.replace("_", "-")
        if self.underscores and dashed in table:
            if why := self._refused(dashed, table):
                return f"--{spelling} is owned by Shoal: {why}"
            return f"write --{spelling} with dashes: --{_full(dashed, table)}"
        if (other := self.foreign.get(dashed)) is not None:
            whose, instead = other
            return f"{lacks} --{spelling}, which is {whose}'s: {instead}"
        off = f"no-enable-{dashed.removeprefix('disable-')}"
        if dashed.startswith("disable-") and off in table:
            near = [off]  # the nearest name would switch it on
        else:
            near = difflib.get_close_matches(dashed, [*table, *self.owned], n=1, cutoff=0.7)
        hint = f"; did you mean --{near[0]}?" if near else ""
        return f"{lacks} --{spelling}{hint}"

    def _refused(self, spelling: str, table: Table) -> str | None:
        """Why a Model may not give this spelling, which the table has; None: it may."""
        argument = table[spelling]
        return None if self.is_harmless(spelling, argument) else self.owner(argument.name)

    def _value_problem(self, argument: Argument, spelling: str, value: str | None) -> str | None:
        if argument.takes == "none":
            return None if value is None else f"--{spelling} takes no value: write it without '='"
        if value is None:
            return None if argument.takes == "optional" else f"--{spelling} needs a value: write --{spelling}=VALUE"
        if argument.choices and value not in argument.choices:
            return f"--{spelling} must be one of {', '.join(argument.choices)}; got {_shown(value)}"
        if argument.type is None:
            return self._text_problem(argument, spelling, value)
        wanted = "a whole number" if argument.type == "int" else "a number"
        number = _number(argument.type, value)
        if number is None:
            return f"--{spelling} must be {wanted}; got {_shown(value)}"
        if not self.within(argument.name, number):
            least, most = self.limits(argument.name, whole=argument.type == "int")
            return f"--{spelling} must be {wanted} from {least:.15g} to {most:.15g}; got {_shown(value)}"
        return None

    def _text_problem(self, argument: Argument, spelling: str, value: str) -> str | None:
        """Of a number that the engine takes as a word too, such as 64k. What is no number here is the engine's to
        judge."""
        if argument.name not in self.bounds or len(value) > LONGEST_ARG:
            return None
        try:
            number = self.count(value)
        except (ValueError, ArithmeticError):
            return None
        least, most = self.limits(argument.name, whole=True)
        beyond = f"--{spelling} must be from {least} to {most}; got {_shown(value)}"
        return None if self.within(argument.name, number) else beyond


def json_object(text: str | None) -> Mapping[str, Any]:
    """The object that an argument's value is; an empty one for anything else."""
    try:
        value: object = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def unless(value: str | None, default: str) -> str | None:
    """The value, or None where it says the engine's own default."""
    return None if value == default else value


def _full(spelling: str, table: Table) -> str:
    """The canonical spelling of one that the table has; of one that switches an argument off, one that does so too."""
    name = table[spelling].name
    return spelling if spelling == f"no-{name}" else name


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")


def _number(kind: Literal["int", "float"], text: str) -> int | float | None:
    if len(text) > LONGEST:
        return None
    try:
        return int(text) if kind == "int" else float(text)
    except ValueError:
        return None
