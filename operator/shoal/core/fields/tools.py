"""`tools` and `tool_choice` of /v1/chat/completions."""

from dataclasses import dataclass
from typing import Any, Final

from shoal.core.fields.kinds import Choice, Facts, FieldProblem, Flag, ObjectField, Several, Text, wrong, wrong_type
from shoal.core.fields.schemas import Schema, reference_problem

_MARKS: Final = str.maketrans("", "", "_-.:/")
_MOST: Final = 128


@dataclass(frozen=True, slots=True)
class ToolName:
    """A name without what the formats of tool calls and their grammars are written with."""

    describe: str = "1 to 128 letters, digits and `_ - . : /`"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if not isinstance(value, str):
            return wrong_type(at, self.describe)
        plain = value.translate(_MARKS)
        fine = 1 <= len(value) <= 128 and plain.isascii() and (not plain or plain.isalnum())
        return None if fine else wrong(at, self.describe)


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Of one tool; `Tools` looks into those of all together."""

    describe: str = "a JSON schema"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        return None if isinstance(value, dict) else wrong_type(at, self.describe)


_CHOICES: Final = Choice(("auto", "none", "required"))
_NAMED: Final = ObjectField(
    {"type": Choice(("function",)), "function": ObjectField({"name": ToolName()}, needed=("name",))},
    needed=("function",),
)
_FUNCTION: Final = ObjectField(
    {
        "name": ToolName(),
        "description": Text(32_768),
        "parameters": _Parameters(),
        "strict": Flag(),
        "defer_loading": Flag(),
    },
    needed=("name",),
)
_TOOLS: Final = Several(
    ObjectField(
        {"type": Choice(("function",)), "function": _FUNCTION, "defer_loading": Flag()},
        needed=("function",),
        ignored=frozenset({"cache_control"}),
    ),
    _MOST,
)
_SCHEMA: Final = Schema()


@dataclass(frozen=True, slots=True)
class ToolChoice:
    describe: str = '"auto", "none", "required", or an object that names one function'

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        return (_CHOICES if isinstance(value, str) else _NAMED).check(value, at, facts)


@dataclass(frozen=True, slots=True)
class ToolsField:
    describe: str = (
        f"a list of at most {_MOST} functions with `name`, `description`, `parameters`; their parameters are all "
        f"together {_SCHEMA.describe}"
    )

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if (found := _TOOLS.check(value, at, facts)) is not None:
            return found
        # Together: one grammar is made of all of them.
        schemas = [schema for tool in value if (schema := tool["function"].get("parameters")) is not None]
        if (found := _SCHEMA.size({"anyOf": schemas}, at) or _SCHEMA.keywords(schemas, at)) is not None:
            return found
        return next((found for schema in schemas if (found := reference_problem(schema, at, tool=True))), None)
