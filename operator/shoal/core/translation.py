"""What the translations of other APIs into chat completions share (`anthropic/`, `responses/`)."""

import re
from typing import Any, NamedTuple, cast

Json = dict[str, Any]


class StreamFailure(NamedTuple):
    """Why a streamed answer ends before its end."""

    status: int
    """The HTTP status that it would have had."""
    message: str
    type: str
    code: str | None
    param: str | None
    retry_after: int | None
    """Seconds; None: unknown."""
    request_id: str


class NotTranslatable(Exception):
    """The body asks for something that a chat completion has no words for. `param` is the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


Names = tuple[tuple[re.Pattern[str], str], ...]
"""Fields of a chat completion, and what each is called in a client's API; the first that matches counts."""


def renamed(param: str, message: str, names: Names) -> tuple[str, str]:
    """The field at fault and the message of an error, in the words of the client's API."""
    for pattern, name in names:
        if pattern.match(param):
            own = pattern.sub(name, param, count=1)
            return own, message.replace(f"`{param}`", f"`{own}`")
    return param, message


def as_object(value: object, at: str) -> Json:
    """A field's object; empty where the field is missing. Raises NotTranslatable."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise NotTranslatable(at, f"`{at}` must be an object.")
    return cast(Json, value)


def as_list(value: object, at: str) -> list[object]:
    """A field's list. Raises NotTranslatable."""
    if not isinstance(value, list):
        raise NotTranslatable(at, f"`{at}` must be a list.")
    return cast(list[object], value)


def as_text(value: object, at: str) -> str:
    """A field's string. Raises NotTranslatable."""
    if not isinstance(value, str):
        raise NotTranslatable(at, f"`{at}` must be a string.")
    return value


def quoted(value: object) -> str:
    """A name from a request, for a message."""
    return f'"{value[:50]}"' if isinstance(value, str) else "unknown"


def first_choice(completion: Json) -> Json:
    """The only choice of a completion or chunk; empty where there is none."""
    choices: object = completion.get("choices")
    return cast(Json, choices[0]) if isinstance(choices, list) and choices else {}
