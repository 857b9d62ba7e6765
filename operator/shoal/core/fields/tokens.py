"""Fields of /v1/tokenize and /v1/detokenize: no model computes anything, but the work is done in the process that
serves every request of an engine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, cast

from shoal.core.fields.chat import Messages
from shoal.core.fields.kinds import Facts, FieldProblem, Medium, outside, wrong, wrong_type
from shoal.core.fields.media import NOT_READ

MOST_TEXTS: Final = 128
MOST_IDS: Final = 131_072
_NO_MEDIA: Final[frozenset[Medium]] = frozenset()


@dataclass(frozen=True, slots=True)
class PlainTexts:
    """Texts, which may be empty."""

    most: int = MOST_TEXTS

    @property
    def describe(self) -> str:
        return f"a string, or a list of 1 to {self.most} strings"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if isinstance(value, str):
            return None
        if not isinstance(value, list) or set(map(type, cast(list[Any], value))) - {str}:
            return wrong_type(at, self.describe)
        return None if 1 <= len(cast(list[Any], value)) <= self.most else wrong(at, self.describe)


@dataclass(frozen=True, slots=True)
class TextMessages:
    """Messages without media: an engine would count their placeholders."""

    describe: str = "as on /v1/chat/completions, without images and sounds"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        found = Messages().check(value, at, replace(facts, media=_NO_MEDIA))
        if found is not None and found.code == NOT_READ:
            return FieldProblem(found.param, f"`{found.param}` must be text: only text is tokenized.", NOT_READ)
        return found


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Ids of tokens to turn into text: one list, or several."""

    most: int = MOST_IDS
    """Ids in all."""
    lists: int = MOST_TEXTS

    @property
    def describe(self) -> str:
        return (
            f"a list of ids of tokens in the model's vocabulary, or a list of at most {self.lists} such lists; at most "
            f"{self.most} ids in all"
        )

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if type(value) is not list:
            return wrong_type(at, self.describe)
        ids = cast(list[Any], value)
        if not ids:
            return wrong(at, "a list that is not empty")
        if set(map(type, ids)) == {list}:
            if len(ids) > self.lists:
                return wrong(at, f"at most {self.lists} lists")
            if not all(ids):
                return wrong(at, "lists that are not empty")
            ids = list(chain.from_iterable(cast(list[list[Any]], ids)))
        return wrong(at, f"at most {self.most} ids of tokens") if len(ids) > self.most else outside(ids, at, facts)


def not_one_text(fields: Mapping[str, Any]) -> FieldProblem | None:
    """What to tokenize is either text or messages."""
    if (fields.get("prompt") is None) != (fields.get("messages") is None):
        return None
    if fields.get("prompt") is None:
        return FieldProblem("prompt", "You must provide `prompt` or `messages`.", "missing_value")
    return FieldProblem("messages", "`prompt` and `messages` cannot be used together.", "conflicting_fields")
