"""`messages` and `tools` of /v1/chat/completions."""

from dataclasses import dataclass
from typing import Any, Final, cast

from shoal.core.fields.kinds import (
    Choice,
    Facts,
    FieldProblem,
    FieldType,
    ObjectField,
    Several,
    Text,
    Whole,
    unknown,
    wrong,
    wrong_type,
)
from shoal.core.fields.media import KINDS, MOST_MEDIA, NOTHING, Load, media_part, too_much_media

_ROLES: Final = frozenset({"system", "user", "assistant", "tool", "developer", "function"})
_PLAIN: Final = frozenset({"role", "content"})
_MOST_MESSAGES: Final = 4096
_MOST_PARTS: Final = 1024
_NAME: Final = Text(256)
_ARGUMENTS_DEPTH: Final = 64


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a tool's call: JSON in a string, or an object."""

    describe: str = "a string, or an object"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if isinstance(value, str):
            # An engine parses it, and its template writes it again: both recurse.
            return wrong(at, f"at most {_ARGUMENTS_DEPTH} levels deep") if _deep_text(value) else None
        if not isinstance(value, dict):
            return wrong_type(at, self.describe)
        return wrong(at, f"at most {_ARGUMENTS_DEPTH} levels deep") if _deep(value) else None


# What engines and SDKs put into an answer's message, and clients send back with it: no engine reads it.
_ECHOED: Final = frozenset(
    {"refusal", "annotations", "reasoning", "reasoning_details", "parsed", "provider_specific_fields"}
)
_CALL: Final = ObjectField(
    {
        "id": _NAME,
        "index": Whole(0, 4096),
        "type": Choice(("function",)),
        "function": ObjectField({"name": _NAME, "arguments": Arguments()}, ignored=frozenset({"parsed_arguments"})),
    },
    needed=("function",),
)
_REST: Final[dict[str, FieldType]] = {
    "name": _NAME,
    "tool_call_id": _NAME,
    "reasoning_content": Text(),
    "tool_calls": Several(_CALL, 128),
    "phase": Choice(("commentary", "final_answer")),
}
_TEXT_PART: Final = ObjectField({"type": Choice(("text",)), "text": Text()}, ("text",), frozenset({"cache_control"}))
_THOUGHT_PART: Final = ObjectField({"type": Choice(("thinking", "reasoning")), "thinking": Text(), "text": Text()})


@dataclass(frozen=True, slots=True)
class Messages:
    describe: str = (
        f"a list of 1 to {_MOST_MESSAGES} messages; a message has `role` and `content` (a string, or a list of at most "
        f"{_MOST_PARTS} parts, of which {MOST_MEDIA} images and sounds in all), `name`, `tool_calls`, "
        "`tool_call_id`, `reasoning_content`"
    )

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if not isinstance(value, list):
            return wrong_type(at, "a list of messages")
        messages = cast(list[Any], value)
        if not 1 <= len(messages) <= _MOST_MESSAGES:
            return wrong(at, f"a list of 1 to {_MOST_MESSAGES} messages")
        load = NOTHING
        for index, message in enumerate(messages):
            # Almost all messages: a role, and a text.
            if type(message) is dict:
                plain = cast(dict[str, Any], message)
                if plain.keys() == _PLAIN and type(plain["content"]) is str:
                    role = plain["role"]
                    if type(role) is str and role in _ROLES:
                        continue
            load = _message(message, at, f"{at}[{index}]", facts, load)
            if isinstance(load, FieldProblem):
                return load
        return None


def _message(message: Any, whole: str, at: str, facts: Facts, load: Load) -> FieldProblem | Load:
    """The load of media with that of this message; `load` is that of the messages before it."""
    if not isinstance(message, dict):
        return wrong_type(at, "an object")
    for key, value in cast(dict[str, Any], message).items():
        found = None
        if key == "role":
            if not isinstance(value, str) or value not in _ROLES:
                found = wrong(f"{at}.role", "one of " + ", ".join(f'"{role}"' for role in sorted(_ROLES)))
        elif value is None or key in _ECHOED:
            continue
        elif key == "content":
            after = _content(value, whole, f"{at}.content", facts, load)
            if isinstance(after, FieldProblem):
                return after
            load = after
        elif (kind := _REST.get(key)) is None:
            found = unknown(f"{at}.{key[:64]}")
        else:
            found = kind.check(value, f"{at}.{key}", facts)
        if found is not None:
            return found
    if "role" not in message:
        return FieldProblem(f"{at}.role", f"You must provide `{at}.role`.", "missing_value")
    return load


def _content(content: Any, whole: str, at: str, facts: Facts, load: Load) -> FieldProblem | Load:
    if isinstance(content, str):
        return load
    if not isinstance(content, list):
        return wrong_type(at, "a string or a list of parts")
    parts = cast(list[Any], content)
    if len(parts) > _MOST_PARTS:
        return wrong(at, f"at most {_MOST_PARTS} parts")
    for index, part in enumerate(parts):
        here = f"{at}[{index}]"
        if not isinstance(part, dict):
            return wrong_type(here, "an object")
        kind = cast(dict[str, Any], part).get("type")
        if kind == "text":
            found = _TEXT_PART.check(part, here, facts)
        elif kind in ("thinking", "reasoning"):
            found = _THOUGHT_PART.check(part, here, facts)
        elif isinstance(kind, str) and kind in KINDS:
            more = media_part(cast(dict[str, Any], part), kind, here, facts)
            if isinstance(more, FieldProblem):
                return more
            load += more
            # At once: what is too much already is not read to its end.
            found = too_much_media(load, whole)
        else:
            known = ", ".join(f'"{each}"' for each in ("text", *KINDS))
            found = wrong(f"{here}.type", f"one of {known}")
        if found is not None:
            return found
    return load


def _deep_text(text: str) -> bool:
    """Whether JSON in a text is too deep; the brackets inside its strings count too, which errs on the safe side only
    where there are more of them than any call has."""
    if text.count("{") + text.count("[") <= _ARGUMENTS_DEPTH:
        return False
    depth = 0
    quoted = escaped = False
    for character in text:
        if quoted:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                quoted = False
        elif character == '"':
            quoted = True
        elif character in "{[":
            depth += 1
            if depth > _ARGUMENTS_DEPTH:
                return True
        elif character in "}]":
            depth -= 1
    return False


def _deep(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(_ARGUMENTS_DEPTH):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += cast(dict[str, Any], each).values()
            elif isinstance(each, list):
                below += cast(list[Any], each)
        if not below:
            return False
        level = below
    return True
