"""APIs other than chat completions that an external target serves itself: what of a request goes there, and what its
answers count. `anthropic/native.py` and `responses/native.py` have them.

All tenants of a route share its key. So nothing goes out that names what a provider has stored, which may be another
tenant's; that runs at the provider, and so costs what no usage object counts; or that says who the client is. Media are
data, as in chats. What is left of a request is the provider's to check.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from shoal.core.translation import Json, NotTranslatable, StreamFailure, objects_of, quoted

MOST_NESTED: Final = 8
"""Contents in contents, such as a document in the result of a tool."""


class NotCounted(Exception):
    """A usage object that no honest answer has."""


class NativeAnswer(NamedTuple):
    """A whole answer."""

    body: Json
    """With the client's name of the model."""
    usage: Json | None
    """As engines write it; None: it has none, or none that can be believed."""
    text: str
    """What the model wrote."""
    finish: str | None
    """Why it ended."""


class NativeEvents(ABC):
    """The events of one streamed answer."""

    __slots__ = ("_counts", "_model", "complete", "failed", "finish")

    def __init__(self, model_name: str) -> None:
        """`model_name`: the client's name of the model."""
        self._model = model_name
        self._counts: Json = {}
        """The API's own usage object, as far as it is known."""
        self.finish: str | None = None
        """Why the answer ended."""
        self.complete = False
        """The answer has reached its end."""
        self.failed = False
        """The provider ended it with an error."""

    @property
    @abstractmethod
    def usage(self) -> Json | None:
        """What was counted so far, as engines write it; None: nothing, or nothing that can be believed."""

    @abstractmethod
    def take(self, event: Json) -> tuple[bool, str]:
        """Reads an event, and puts the client's name of the model into it. Returns whether it was changed, and the text
        that it adds."""

    @abstractmethod
    def error(self, failure: StreamFailure) -> bytes:
        """The last event of a stream that failed, after those that were read."""


@dataclass(frozen=True, slots=True)
class NativeApi:
    """One endpoint of such an API."""

    endpoint: str
    """A target serves it that lists this one in `endpoints`."""
    provider: str
    """`gen_ai.provider.name` in traces."""
    bound: str
    """The field with the longest answer in tokens."""
    request: Callable[[Mapping[str, Any]], Json]
    """What goes out. Raises NotTranslatable."""
    answer: Callable[[Json, str], NativeAnswer]
    """From the target's answer, and the client's name of the model."""
    events: Callable[[str], NativeEvents]
    """With the client's name of the model."""
    turns: Callable[[Mapping[str, Any]], list[Json]]
    """The texts, images, sounds and files of a body as messages of a chat, also of one that has no translation and has
    not been checked. Estimates and sessions go by it; it is not sent."""


def counted(block: Mapping[str, object], name: str, default: int | None = None) -> int:
    """A count of a usage object. Raises NotCounted: it is missing and has no default, or is no count."""
    value = block.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 0:  # the exact type: True is no number
        raise NotCounted
    return value


def texts_of(value: object, text: Callable[[Json], str]) -> str:
    """What the model wrote in a list of blocks; empty where it is none."""
    return "".join(map(text, objects_of(value)))


def usage_of(read: int, cached: int, written: int, reasoning: int | None = None) -> Json:
    """Counts as engines write them: tokens read, those of them that a cache had, and tokens written."""
    out: Json = {
        "prompt_tokens": read,
        "completion_tokens": written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning is not None:
        out["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return out


def at_provider(at: str, kind: object) -> NotTranslatable:
    """The error for what would run at the provider, or is stored there."""
    return NotTranslatable(
        f"{at}.type",
        f"`{at}.type`: {quoted(kind)} is not forwarded: it runs or is stored where this request goes, under a key that "
        "others use too.",
    )


def only_data(at: str) -> NotTranslatable:
    """The error for media that the provider would fetch or look up."""
    return NotTranslatable(at, f"`{at}`: media are accepted as data only, not by URL or file id.")
