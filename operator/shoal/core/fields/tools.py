"""`tools` and `tool_choice` of /v1/chat/completions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from shoal.core.fields.kinds import (
    Choice,
    Facts,
    FieldProblem,
    Flag,
    ObjectField,
    Several,
    Text,
    wrong,
    wrong_type,
)
from shoal.core.fields.schemas import Schema, reference_problem

_MARKS: Final = str.maketrans("", "", "_-.:/")
_MOST_TOOLS: Final = 128


@dataclass(frozen=True, slots=True)
class ToolName:
    """A function's name, without characters that formats of tool calls and their grammars use."""

    describe: str = "1 to 128 letters, digits and `_ - . : /`"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if not isinstance(value, str):
            return wrong_type(at, self.describe)
        plain = value.translate(_MARKS)
        fine = 1 <= len(value) <= 128 and plain.isascii() and (not plain or plain.isalnum())
        return None if fine else wrong(at, self.describe)


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Parameters of one tool; `ToolsField` checks those of all tools together."""

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
    _MOST_TOOLS,
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
        f"a list of at most {_MOST_TOOLS} functions with `name`, `description`, `parameters`; their parameters are all "
        f"together {_SCHEMA.describe}, as far as the engine may make a grammar of them"
    )

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if (found := _TOOLS.check(value, at, facts)) is not None:
            return found
        # All tools together: the engine makes one grammar of them.
        schemas = _schemas(value)
        if (found := _SCHEMA.size({"anyOf": schemas}, at)) is not None:
            return found
        return next((found for schema in schemas if (found := reference_problem(schema, at, tool=True))), None)


# --- together with other fields ---------------------------------------------------------------------------------------

_NO_PARSER: Final = (
    "`tools` cannot be used: this model's engine has no parser of tool calls, so they would come as text. Set "
    "`spec.engine.toolCallParser` of the Model. A call that `tool_choice` forces needs no parser."
)


def tools_problem(fields: Mapping[str, Any], facts: Facts) -> FieldProblem | None:
    """What is wrong with the tools of a chat, each of whose fields is fine; None: nothing."""
    if not fields.get("tools") or fields.get("tool_choice") == "none":
        return None
    forced = fields.get("tool_choice") not in (None, "auto")
    if not forced and not facts.parses_calls:
        return FieldProblem("tools", _NO_PARSER + facts.able, "unsupported_field")
    tools = cast("list[dict[str, Any]]", fields["tools"])
    if forced or facts.compiles_tools or any(tool["function"].get("strict") for tool in tools) or _other(fields):
        return _SCHEMA.keywords(_schemas(tools), "tools")
    return None


def _schemas(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [schema for tool in tools if (schema := tool["function"].get("parameters")) is not None]


def _other(fields: Mapping[str, Any]) -> bool:
    """Whether the answer has another grammar, of which some parsers make one with that of the tools."""
    return fields.get("regex") is not None or fields.get("response_format") is not None
