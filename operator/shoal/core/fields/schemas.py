"""JSON schemas that an answer or a tool's arguments must match. An engine compiles them into a grammar and walks it for
each token, in the loop that serves all requests."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import unquote

from shoal.core.fields.kinds import Facts, FieldProblem, wrong, wrong_type
from shoal.core.fields.patterns import MOST_CHARACTERS, MOST_PATTERNS, MOST_TOGETHER, TOO_LARGE, Patterns

_MOST_COUNT: Final = 1_000_000
"""Largest `maxLength` and the like: engines count, they do not unroll."""
_COUNTS: Final = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"}
)
_CHECKED: Final = _COUNTS | {"pattern", "patternProperties", "enum"}
_VALUES: Final = frozenset({"const", "default", "enum", "examples"})
"""Keywords that hold values: no engine reads a schema there, unless a reference leads to it."""
_NAMED: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keywords that hold schemas by name: a name such as `default` there is no keyword."""


@dataclass(frozen=True, slots=True)
class Schema:
    """A JSON schema, as an object."""

    nodes: int = 8192
    """Values in the schema, nested ones included."""
    depth: int = 64
    characters: int = 131_072
    """Characters of its keys and strings."""
    enums: int = 1000
    """Values of all `enum`s: compiling takes quadratic time."""

    @property
    def describe(self) -> str:
        return (
            f"a JSON schema of at most {self.nodes} values, {self.depth} levels, {self.characters} characters and "
            f"{self.enums} values of `enum`; `$ref` only within it (`#...`), to what is there and not back to itself; "
            f"`pattern` in RE2's syntax, at most {MOST_PATTERNS} different ones of {MOST_CHARACTERS} characters "
            f"together, whose repetitions unroll to at most {MOST_TOGETHER} steps"
        )

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if not isinstance(value, dict):
            return wrong_type(at, "a JSON schema")
        schema = cast(dict[str, Any], value)
        return self.size(schema, at) or self.keywords([schema], at) or reference_problem(schema, at)

    def size(self, schema: dict[str, Any], at: str) -> FieldProblem | None:
        """What is too large in the schema, values included."""
        nodes, characters, depth = 1, 0, 0
        level: list[Any] = [schema]
        """Objects and lists of one level."""
        while level:
            depth += 1
            if depth > self.depth:
                return _too_large(at, self)
            below: list[Any] = []
            for holder in level:
                nodes += len(holder)
                if nodes > self.nodes:
                    return _too_large(at, self)
                values: Iterable[Any] = holder
                if type(holder) is not list:
                    keyed = cast(dict[str, Any], holder)
                    values = keyed.values()
                    characters += sum(map(len, keyed))
                for value in values:
                    if isinstance(value, str):
                        characters += len(value)
                    elif isinstance(value, dict | list):
                        below.append(value)
            if characters > self.characters:
                return _too_large(at, self)
            level = below
        return None

    def keywords(self, schemas: Iterable[dict[str, Any]], at: str) -> FieldProblem | None:
        """What is not allowed in schemas of allowed size, apart from references. A value or the name of a property that
        looks like a keyword is none."""
        enums, patterns = 0, Patterns()
        for schema in schemas:
            for holder, names in _schemas(schema):
                if names or _CHECKED.isdisjoint(holder):
                    continue
                enums += _length(holder.get("enum"))
                if enums > self.enums:
                    return _too_large(at, self)
                for key in _CHECKED & holder.keys():
                    if (found := _keyword(key, holder[key], at, patterns)) is not None:
                        return found
        return None


@dataclass(frozen=True, slots=True)
class SchemaText:
    """A JSON schema in a string."""

    of: Schema = Schema()

    @property
    def describe(self) -> str:
        return f"a string with {self.of.describe}"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if not isinstance(value, str):
            return wrong_type(at, "a string with a JSON schema")
        # Each level opens with a bracket, so few brackets mean little depth; Python's parser recurses.
        if len(value) > 2 * self.of.characters or value.count("[") + value.count("{") > self.of.nodes:
            return _too_large(at, self.of)
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError):
            return wrong(at, "a string with a JSON schema")
        return self.of.check(schema, at, facts)


CIRCULAR: Final = "schema_circular"


def reference_problem(schema: dict[str, Any], at: str, *, tool: bool = False) -> FieldProblem | None:
    """Whether a reference of a schema leads nowhere, or back to itself before anything is written.

    Nothing matches a circular schema: the engine then allows no token, samples from NaN, and if any request in the same
    step uses `top_p`, `top_k` or `min_p`, it exits. The schema of a `tool` becomes part of a schema that the engine
    makes, below `items`: a reference that leads nowhere, or there, may lead to itself in that one. The schema's size
    has been checked.
    """
    done: set[int] = set()
    for holder, _ in _schemas(schema):
        reference = holder.get("$ref")
        if not isinstance(reference, str):
            continue
        if not reference.startswith("#"):
            return wrong(f"{at}...$ref", "a reference within the schema (`#...`)")
        if not _targets(reference, schema) or (tool and any(names[:1] == ["items"] for names in _readings(reference))):
            return FieldProblem(
                f"{at}...$ref", "A `$ref` must lead to something in its own schema.", "schema_reference"
            )
        if _returns(holder, schema, done):
            return FieldProblem(f"{at}...$ref", "A `$ref` must not lead back to itself.", CIRCULAR)
    return None


def _schemas(root: dict[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    """All that an engine may read as a schema: everything but values, and values that references lead to. Each with
    whether its keys are names of schemas instead of keywords."""
    waiting: list[tuple[Any, bool]] = [(root, False)]
    seen: set[tuple[int, bool]] = set()
    while waiting:
        holder, names = waiting.pop()
        if not isinstance(holder, dict | list) or (id(cast(object, holder)), names) in seen:
            continue
        seen.add((id(cast(object, holder)), names))
        if isinstance(holder, list):
            waiting += [(each, False) for each in cast(list[Any], holder)]
            continue
        keyed = cast(dict[str, Any], holder)
        yield keyed, names
        reference = keyed.get("$ref")
        if isinstance(reference, str):
            waiting += [(target, False) for target in _targets(reference, root)]
        waiting += [(value, not names and key in _NAMED) for key, value in keyed.items() if names or key not in _VALUES]


def _returns(start: dict[str, Any], root: dict[str, Any], done: set[int]) -> bool:
    path: list[tuple[int, list[dict[str, Any]]]] = [(id(start), _same_place(start, root))]
    on_path = {id(start)}
    while path:
        here, further = path[-1]
        if not further:
            path.pop()
            on_path.discard(here)
            done.add(here)
        elif id(following := further.pop()) in on_path:
            return True
        elif id(following) not in done:
            path.append((id(following), _same_place(following, root)))
            on_path.add(id(following))
    return False


def _same_place(schema: dict[str, Any], root: dict[str, Any]) -> list[dict[str, Any]]:
    """Schemas that apply to the same value as this one."""
    reference = schema.get("$ref")
    found = _targets(reference, root) if isinstance(reference, str) else []
    for key in ("anyOf", "oneOf", "allOf"):
        members = schema.get(key)
        if isinstance(members, list):
            found += cast(list[Any], members)
    return [cast(dict[str, Any], each) for each in found if isinstance(each, dict)]


def _targets(reference: str, root: dict[str, Any]) -> list[Any]:
    """Targets of a reference, for each way in which engines decode it."""
    return [found for names in _readings(reference) if (found := _target(names, root)) is not None]


def _readings(reference: str) -> list[list[str]]:
    """The steps of a reference, in each way in which an engine may read it. xgrammar drops empty steps."""
    if reference != "#" and not reference.startswith("#/"):
        return []
    steps = reference.split("/")[1:]
    plain = [unquote(step) for step in steps]
    readings = [steps, plain, [step.replace("~1", "/").replace("~0", "~") for step in plain]]
    return readings if all(steps) else [*readings, *([step for step in names if step] for names in readings)]


def _target(names: list[str], root: dict[str, Any]) -> Any:
    found: Any = root
    for name in names:
        if isinstance(found, dict):
            found = cast(dict[str, Any], found).get(name)
        elif isinstance(found, list) and name.isascii() and name.isdigit() and len(name) < 6:
            members = cast(list[Any], found)
            found = members[int(name)] if int(name) < len(members) else None
        else:
            return None
    return found


def _length(value: Any) -> int:
    return len(cast(list[Any], value)) if isinstance(value, list) else 0


def _keyword(key: str, value: Any, at: str, patterns: Patterns) -> FieldProblem | None:
    if key == "pattern" and isinstance(value, str):
        return patterns.problem(value, f"{at}...pattern")
    if key == "patternProperties" and isinstance(value, dict):
        for pattern in cast(dict[str, Any], value):
            if (found := patterns.problem(pattern, f"{at}...patternProperties")) is not None:
                what = "keyed by regular expressions in RE2's syntax"
                return found if found.code == TOO_LARGE else wrong(found.param, what)
    elif key in _COUNTS and isinstance(value, int | float) and not 0 <= value <= _MOST_COUNT:
        return wrong(f"{at}...{key}", f"a whole number from 0 to {_MOST_COUNT}")
    return None


def _too_large(at: str, bounds: Schema) -> FieldProblem:
    return FieldProblem(at, f"`{at}` must be {bounds.describe}.", "schema_too_large")
