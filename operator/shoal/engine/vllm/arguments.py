"""vLLM's arguments, as its own parser lists them, and the check of those that a Model gives it."""

from collections.abc import Mapping
from functools import cache
from typing import Final

from shoal.engine.arguments import EngineArguments, Table, read_table
from shoal.engine.vllm.bounds import BOUNDS, count
from shoal.engine.vllm.owned import FAMILIES, FOREIGN, MAY_BE_OFF, OWNED


@cache
def _tables() -> Mapping[str, Table]:
    return read_table("shoal.engine.vllm", "vllm_args.json")


ARGUMENTS: Final = EngineArguments(
    "vLLM",
    tables=_tables,
    owned=OWNED,
    families=FAMILIES,
    bounds=BOUNDS,
    count=count,
    foreign=FOREIGN,
    may_be_off=MAY_BE_OFF,
    underscores=True,
)
