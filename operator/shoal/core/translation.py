"""What the translations of other APIs into chat completions share (`anthropic/`, `responses/`)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

Json = dict[str, Any]
_MOST_COUNT: Final = 2**53
"""A larger one counts nothing, and cannot be written everywhere."""


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


_TOOL: Final = re.compile(r"tools\[(\d+)\]")


def renamed(param: str, message: str, names: Names, tools: Sequence[int]) -> tuple[str, str]:
    """The field at fault and the message of an error, in the words of the client's API. `tools`: the places of the
    chat's tools in the client's list, which may have others between them."""
    own = param
    if (tool := _TOOL.match(param)) is not None and int(tool[1]) < len(tools):
        own = f"tools[{tools[int(tool[1])]}]{param[tool.end() :]}"
    for pattern, name in names:
        if pattern.match(own):
            own = pattern.sub(name, own, count=1)
            break
    return own, message.replace(f"`{param}`", f"`{own}`")


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


class UnreadableAnswer(Exception):
    """What came with status 200 is no answer of the API."""


def answered(completion: Mapping[str, Any]) -> tuple[Json, Json]:
    """The only choice of a whole completion, and its message. Raises UnreadableAnswer."""
    choice = first_choice(completion)
    if not isinstance(choice.get("message"), dict):
        raise UnreadableAnswer
    return choice, choice["message"]


def first_choice(completion: Mapping[str, Any]) -> Json:
    """The only choice of a completion or chunk; empty where there is none."""
    empty: Json = {}
    return next(objects_of(completion.get("choices")), empty)


def inner(block: Mapping[str, object], name: str) -> Json:
    """An object in an object; empty where there is none."""
    value = block.get(name)
    return cast(Json, value) if isinstance(value, dict) else {}


def objects_of(value: object) -> Iterator[Json]:
    """The objects in a list; none where it is no list."""
    for each in cast(list[object], value) if isinstance(value, list) else ():
        if isinstance(each, dict):
            yield cast(Json, each)


def text_in(block: Mapping[str, object], name: str) -> str:
    """A text in an object; empty where there is none."""
    value = block.get(name)
    return value if isinstance(value, str) else ""


def count_in(block: Mapping[str, object], name: str) -> int:
    """A count in an object; 0 where there is none."""
    value = block.get(name)
    return value if type(value) is int and 0 <= value <= _MOST_COUNT else 0
