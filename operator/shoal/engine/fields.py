"""Fields of `spec.engine` that become arguments of an engine. For the adapters beside this file.

An argument may say more than a field: `extraArgs` may then set it, unless the field can say the same or is set.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Engine
from shoal.engine.arguments import EngineArguments


@dataclass(frozen=True, slots=True)
class FieldArgument:
    """An argument that a field sets."""

    name: str
    """Canonical name of the argument."""
    field: str
    """Path below `spec.engine`, as in `quantization.kvCache`."""
    values: frozenset[str] | None
    """Values that the field can say, in lower case. None: the argument is the field's alone."""


def refused(fields: Sequence[FieldArgument], engine: Engine, given: Mapping[str, str]) -> list[str]:
    """What `extraArgs` may not say because a field says it, one sentence each; `given` are those by canonical name."""
    found: list[str] = []
    for each in fields:
        value = given.get(each.name)
        if value is None:
            continue
        if each.values is None or value.lower() in each.values or _set(engine, each.field):
            found.append(f"spec.engine.extraArgs: --{each.name} is owned by Shoal: use spec.engine.{each.field}")
    return found


def no_experts(engine: Engine, facts: ArtifactFacts | None) -> str | None:
    """Why experts cannot be spread; None: nothing was asked, or nothing is wrong."""
    if not engine.parallelism.expert or facts is None or facts.experts is not None or facts.kv.kind == "Unknown":
        return None
    return "spec.engine.parallelism.expert: this model has no experts: leave it out"


def parser_problems(arguments: EngineArguments, version: str, engine: Engine) -> list[str]:
    """Which parsers the engine's version does not have, one sentence each; empty for a version whose arguments are not
    known, and for parsers of a plug-in."""
    table, given = arguments.table(version) or {}, arguments.parsed(engine.extra_args)
    found: list[str] = []
    for field, name, asked in (
        ("toolCallParser", "tool-call-parser", engine.tool_call_parser),
        ("reasoningParser", "reasoning-parser", engine.reasoning_parser),
    ):
        known = table[name].choices if name in table else ()
        plugin = f"{name.replace('-call', '')}-plugin"
        if asked is None or not known or asked in known or plugin in given:
            continue
        near = difflib.get_close_matches(asked, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        has = f"{arguments.engine} {version} has no parser {asked}{hint}; it has {', '.join(known)}"
        found.append(f"spec.engine.{field}: {has}")
    return found


def _set(engine: Engine, field: str) -> bool:
    value: object = engine.model_dump(by_alias=True, exclude_defaults=True)
    for part in field.split("."):
        value = cast("dict[str, object]", value).get(part) if isinstance(value, dict) else None
    return value is not None
