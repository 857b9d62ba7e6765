"""Fields of /v1/rerank and /v1/score: a query, and texts that the engine reads together with it, one sequence each."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, cast

from shoal.core.fields.kinds import Facts, FieldProblem, outside, wrong, wrong_type

MOST_PAIRS: Final = 1024
MOST_LABELS: Final = 128


@dataclass(frozen=True, slots=True)
class Query:
    """SGLang refuses a blank text. Ids of tokens are for scoring only."""

    ids: bool = False

    @property
    def describe(self) -> str:
        return "a string that is not blank" + (
            ", or a list of ids of tokens in the model's vocabulary" if self.ids else ""
        )

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if isinstance(value, str):
            return wrong(at, "a string that is not blank") if not value or value.isspace() else None
        if not self.ids or not isinstance(value, list):
            return wrong_type(at, self.describe)
        return outside(cast(list[Any], value), at, facts) if value else wrong(at, "a query that is not empty")


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts to read with the query."""

    most: int = MOST_PAIRS

    @property
    def describe(self) -> str:
        return f"a list of 1 to {self.most} strings that are not blank"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if not isinstance(value, list):
            return wrong_type(at, self.describe)
        items = cast(list[Any], value)
        if not 1 <= len(items) <= self.most:
            return wrong(at, f"a list of 1 to {self.most} strings", "too_many_documents" if items else "invalid_value")
        for index, item in enumerate(items):
            if type(item) is not str:
                return wrong_type(f"{at}[{index}]", "a string")
            if not item or item.isspace():
                return wrong(f"{at}[{index}]", "a string that is not blank")
        return None


@dataclass(frozen=True, slots=True)
class Items:
    """Items to score: a text, texts, or lists of ids of tokens."""

    most: int = MOST_PAIRS

    @property
    def describe(self) -> str:
        return (
            f"a string that is not blank, or a list of 1 to {self.most} of them or of lists of ids of tokens in the "
            "model's vocabulary"
        )

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if isinstance(value, str):
            return Query().check(value, at, facts)
        if not isinstance(value, list):
            return wrong_type(at, self.describe)
        items = cast(list[Any], value)
        if set(map(type, items)) != {list}:
            return Texts(self.most).check(items, at, facts)
        if len(items) > self.most:
            return wrong(at, f"at most {self.most} items", "too_many_documents")
        if not all(items):
            return wrong(at, "items that are not empty")
        return outside(list(chain.from_iterable(items)), at, facts)


@dataclass(frozen=True, slots=True)
class Labels:
    """Tokens whose probabilities are the score. SGLang refuses one that is given twice."""

    most: int

    @property
    def describe(self) -> str:
        return f"a list of 1 to {self.most} different ids of tokens in the model's vocabulary"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if type(value) is not list:
            return wrong_type(at, self.describe)
        ids = cast(list[Any], value)
        if not 1 <= len(ids) <= self.most:
            return wrong(at, self.describe)
        if (found := outside(ids, at, facts)) is not None:
            return found
        return wrong(at, self.describe) if len(set(ids)) < len(ids) else None


def write_documents(fields: dict[str, Any]) -> None:
    """Makes texts of documents that are objects with a text alone, as some clients send them, in place. All other
    documents are left to the check."""
    documents: object = fields.get("documents")
    if isinstance(documents, list):
        fields["documents"] = [_plain(document) for document in cast(list[object], documents)]


def _plain(document: object) -> object:
    if not isinstance(document, dict):
        return document
    given = cast(dict[str, object], document)
    return given["text"] if given.keys() == {"text"} else given


def pairs_of(fields: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The query and the texts of a checked body."""
    texts: Any = fields.get("documents", fields.get("items"))
    return fields.get("query"), [texts] if isinstance(texts, str) else texts


def mixed(fields: Mapping[str, Any]) -> FieldProblem | None:
    """Whether the query is a text and the items are ids of tokens, or the other way round: SGLang would read the list
    as a text."""
    query, texts = pairs_of(fields)
    if query is None or isinstance(query, str) == isinstance(texts[0], str):
        return None
    return FieldProblem("items", "`query` and `items` must both be text, or both ids of tokens.", "conflicting_fields")


def repeated(fields: Mapping[str, Any]) -> int:
    """Bytes that the engine reads beyond those of the body, about: the query once more for each further text."""
    query, texts = pairs_of(fields)
    # An id of a token is 4 bytes, as `BYTES_PER_TOKEN` counts them.
    size = len(query) if isinstance(query, str) else 4 * len(query or ())
    return size * (len(texts) - 1)


def written_out(fields: Mapping[str, Any]) -> int:
    """Bytes of the query with each text, one after the other, about."""
    query, texts = pairs_of(fields)
    each = _bytes(query) * len(texts)
    return each + sum(map(_bytes, texts))


def _bytes(text: Any) -> int:
    """Of a text, or of ids with their commas."""
    if isinstance(text, str):
        return len(text) if text.isascii() else len(text.encode())
    return 8 * len(text or ())


def not_scored(fields: Mapping[str, Any], most_bytes: int) -> FieldProblem | None:
    """Why the tokens of labels are not scored, of an engine that cannot say it itself."""
    if fields.get("label_token_ids") is None:
        text = "You must provide `label_token_ids`: this model scores by the tokens that may follow."
        return FieldProblem("label_token_ids", text, "missing_value")
    if fields.get("temperature") not in (None, 1) and not fields.get("apply_softmax"):
        return FieldProblem("temperature", "`temperature` needs `apply_softmax`.", "conflicting_fields")
    if written_out(fields) > most_bytes:
        text = f"`query` with each of `items` is more than {most_bytes} bytes. Send fewer items at a time."
        return FieldProblem("items", text, "too_much_work")
    return None
