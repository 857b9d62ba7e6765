"""SGLang's arguments, as its own parser lists them, and the check of those that a Model gives it."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from shoal.core import quantity
from shoal.engine.arguments import EngineArguments, Table, read_table
from shoal.engine.sglang.bounds import BOUNDS
from shoal.engine.sglang.owned import FAMILIES, FOREIGN, OWNED


@cache
def _tables() -> Mapping[str, Table]:
    return read_table("shoal.engine.sglang", "sglang_args.json")


ARGUMENTS: Final = EngineArguments(
    "SGLang",
    tables=_tables,
    owned=OWNED,
    families=FAMILIES,
    bounds=BOUNDS,
    count=quantity.count,
    foreign=FOREIGN,
)


def known_versions() -> tuple[str, ...]:
    """Engine versions whose arguments are known."""
    return ARGUMENTS.versions


def arguments_of(version: str) -> Table | None:
    """See `EngineArguments.table`."""
    return ARGUMENTS.table(version)


def parsed(args: Sequence[str]) -> dict[str, str]:
    """See `EngineArguments.parsed`."""
    return ARGUMENTS.parsed(args)


def check_extra_args(version: str, extra_args: Sequence[str]) -> list[str]:
    """See `EngineArguments.problems`."""
    return ARGUMENTS.problems(version, extra_args)
