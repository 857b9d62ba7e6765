"""`prompt` of /v1/completions, `input` of /v1/embeddings and /v1/classify: a text, token ids, or a list of either."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from shoal.core.fields.kinds import Facts, FieldProblem, outside, wrong, wrong_type


@dataclass(frozen=True, slots=True)
class Prompts:
    most: int
    """Prompts of one request."""
    lists: bool = True
    """Several prompts may also be given as ids of tokens."""

    @property
    def describe(self) -> str:
        several = f"a list of at most {self.most} {'of either' if self.lists else 'strings'}"
        return f"a string, a list of ids of tokens in the model's vocabulary, or {several}"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if isinstance(value, str):
            return None if value else wrong(at, "a prompt that is not empty")
        if not isinstance(value, list):
            return wrong_type(at, "a string or a list")
        items = cast(list[Any], value)
        if not items:
            return wrong(at, "a prompt that is not empty")
        kinds = set(map(type, items))
        if kinds == {int}:
            return outside(items, at, facts)
        if kinds != {str} and not (self.lists and kinds == {list}):
            lists = ", or lists of ids of tokens" if self.lists else ""
            return wrong_type(at, f"strings, or ids of tokens{lists}, and no mix of them")
        if len(items) > self.most:
            return wrong(at, f"at most {self.most} prompts", "too_many_prompts")
        if not all(items):
            return wrong(at, "prompts that are not empty")
        return outside(list(chain.from_iterable(items)), at, facts) if kinds == {list} else None


def prompts_of(fields: Mapping[str, Any]) -> list[Any]:
    """The prompts of a checked body; a chat has one."""
    given: Any = fields.get("prompt", fields.get("input"))
    if not isinstance(given, list):
        return [given]
    items = cast(list[Any], given)
    return [items] if isinstance(items[0], int) else items


def texts(fields: Mapping[str, Any]) -> tuple[int, int]:
    """(characters, token ids) that the engine reads, in a checked body, without media."""
    several = fields.get("prompt", fields.get("input"))
    if several is None:
        return sum(map(_characters, fields.get("messages") or ())) + _written(fields.get("tools")), 0
    if isinstance(several, str):
        return len(several), 0
    items = cast(Sequence[Any], several)
    if isinstance(items[0], int):
        return 0, len(items)
    total = sum(map(len, items))
    return (total, 0) if isinstance(items[0], str) else (0, total)


def _characters(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    read = len(content) if isinstance(content, str) else 0
    if isinstance(content, list):
        for part in cast(list[Mapping[str, Any]], content):
            read += len(part.get("text") or "") + len(part.get("thinking") or "")
    thoughts = len(message.get("reasoning_content") or "") + len(message.get("reasoning") or "")
    return read + thoughts + _written(message.get("tool_calls"))


def _written(value: Any) -> int:
    """Characters of a value's keys and strings; its depth is bounded."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(_written, cast(list[Any], value)))
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        return sum(map(len, fields)) + sum(map(_written, fields.values()))
    return 1
