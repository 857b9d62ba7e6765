"""Types of request fields and their bounds. `table.py` assigns them to fields."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, cast

from shoal.core.enginedifferences import NONE, EngineDifferences

Medium = Literal["image", "audio"]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a Model from which bounds are derived. Unknown ones are None, and checked strictly."""

    vocabulary: int | None = None
    """Number of tokens; ids are below it."""
    context_length: int | None = None
    """Longest prompt plus answer, in tokens."""
    max_output_tokens: int | None = None
    """Cap of one answer, from the Model's limits."""
    media: frozenset[Medium] = frozenset()
    """Media that the Model reads besides text."""
    piped: bool = False
    """Places of media in its texts all look like `<|...|>`."""
    media_hosts: frozenset[str] = frozenset()
    """Hosts from which a gateway fetches media for the Model. Empty when a request is checked in the form that an
    engine gets: then only `data:` URLs pass."""
    capabilities: tuple[str, ...] = ()
    """What its list of models says of it, for messages."""
    deterministic: bool = False
    """The engine was started to give the same answer each time."""
    parses_calls: bool = True
    """The engine finds the calls of tools in what the model writes."""
    compiles_tools: bool = True
    """The engine may make a grammar of the schemas of tools where no call is forced and no tool is `strict`."""
    differences: EngineDifferences = NONE
    """Where its engine does less than the field table says."""

    @property
    def able(self) -> str:
        """What the Model can do, as the last sentence of a message; empty: unknown."""
        return f" Its capabilities are {', '.join(self.capabilities)}." if self.capabilities else ""


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """Why a request is refused."""

    param: str
    """The faulty field, such as `messages[0].content`."""
    message: str
    code: str = "invalid_value"


class FieldType(Protocol):
    """A type with bounds."""

    @property
    def describe(self) -> str:
        """The bounds, for messages and docs."""
        ...

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        """What is wrong with a value other than null; None: nothing."""
        ...


def wrong(at: str, must: str, code: str = "invalid_value") -> FieldProblem:
    return FieldProblem(at, f"`{at}` must be {must}.", code)


def wrong_type(at: str, must: str) -> FieldProblem:
    return wrong(at, must, "invalid_type")


@dataclass(frozen=True, slots=True)
class Flag:
    describe: str = "true or false"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        return None if value is True or value is False else wrong_type(at, self.describe)


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number; `also` lists exceptions such as `-1`."""

    least: int
    most: int
    also: tuple[int, ...] = ()

    @property
    def describe(self) -> str:
        also = "".join(f"{number} or " for number in self.also)
        return f"{also}a whole number from {self.least} to {self.most}"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        # Not isinstance: a bool is an int, too.
        if type(value) is not int:
            return wrong_type(at, self.describe)
        return None if self.least <= value <= self.most or value in self.also else wrong(at, self.describe)


@dataclass(frozen=True, slots=True)
class Number:
    least: float
    most: float

    @property
    def describe(self) -> str:
        return f"a number from {self.least:g} to {self.most:g}"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if type(value) is not float and type(value) is not int:
            return wrong_type(at, self.describe)
        # NaN fails every comparison.
        return None if self.least <= value <= self.most else wrong(at, self.describe)


@dataclass(frozen=True, slots=True)
class Choice:
    of: tuple[str, ...]

    @property
    def describe(self) -> str:
        return "one of " + ", ".join(f'"{word}"' for word in self.of)

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        return None if isinstance(value, str) and value in self.of else wrong(at, self.describe)


@dataclass(frozen=True, slots=True)
class Text:
    most: int | None = None
    """Characters; None: any number."""

    @property
    def describe(self) -> str:
        return "a string" if self.most is None else f"a string of at most {self.most} characters"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if not isinstance(value, str):
            return wrong_type(at, self.describe)
        return None if self.most is None or len(value) <= self.most else wrong(at, self.describe, "string_too_long")


@dataclass(frozen=True, slots=True)
class Stops:
    """Strings that end the answer: after each token SGLang searches the text for each of them."""

    most: int
    longest: int

    @property
    def describe(self) -> str:
        return f"a string, or a list of at most {self.most} strings, of 1 to {self.longest} characters"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        stops = cast(list[Any], [value] if isinstance(value, str) else value)
        if type(stops) is not list or not all(type(stop) is str for stop in stops):
            return wrong_type(at, self.describe)
        if len(stops) > self.most or any(not 1 <= len(stop) <= self.longest for stop in stops):
            return wrong(at, self.describe)
        return None


@dataclass(frozen=True, slots=True)
class OutputBound:
    """The bound of an answer's length."""

    describe: str = "a whole number of at least 1"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if type(value) is not int:
            return wrong_type(at, self.describe)
        if value < 1:
            return wrong(at, self.describe)
        return None if value <= MOST_TOKENS else wrong(at, f"a whole number of at most {MOST_TOKENS}")


@dataclass(frozen=True, slots=True)
class Within:
    """A number of tokens within the context."""

    @property
    def describe(self) -> str:
        return "a whole number from 0 to the model's context length"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if type(value) is not int:
            return wrong_type(at, self.describe)
        most = facts.context_length or _UNKNOWN_CONTEXT
        return None if 0 <= value <= most else wrong(at, f"a whole number from 0 to {most}")


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids of tokens: an id outside the vocabulary ends SGLang's scheduler."""

    most: int

    @property
    def describe(self) -> str:
        return f"a list of at most {self.most} ids of tokens in the model's vocabulary"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if type(value) is not list:
            return wrong_type(at, self.describe)
        ids = cast(list[Any], value)
        return wrong(at, self.describe) if len(ids) > self.most else outside(ids, at, facts)


@dataclass(frozen=True, slots=True)
class Bias:
    most: int
    width: float

    @property
    def describe(self) -> str:
        return (
            f"an object of at most {self.most} ids of tokens in the model's vocabulary, each with a number from "
            f"{-self.width:g} to {self.width:g}"
        )

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if not isinstance(value, dict):
            return wrong_type(at, self.describe)
        bias = cast(dict[str, Any], value)
        if len(bias) > self.most:
            return wrong(at, self.describe)
        ids: list[int] = []
        for token, by in bias.items():
            # In JSON's form: Python also accepts blanks, underscores and foreign digits in a number.
            if not (token.isascii() and token.isdigit() and len(token) <= _DIGITS):
                return wrong(f"{at}.{token[:_SHOWN]}", "the id of a token")
            if type(by) not in _NUMBERS or not -self.width <= by <= self.width:
                return wrong(f"{at}.{token}", f"a number from {-self.width:g} to {self.width:g}")
            ids.append(int(token))
        return outside(ids, at, facts)


@dataclass(frozen=True, slots=True)
class ObjectField:
    """An object with these keys and no others; those in `ignored` are allowed and not read."""

    keys: dict[str, FieldType]
    needed: tuple[str, ...] = ()
    ignored: frozenset[str] = frozenset()

    @property
    def describe(self) -> str:
        return "an object of " + ", ".join(f"`{key}`" for key in self.keys)

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if not isinstance(value, dict):
            return wrong_type(at, self.describe)
        for name, inner in cast(dict[str, Any], value).items():
            kind = self.keys.get(name)
            if kind is None:
                if name in self.ignored:
                    continue
                return unknown(f"{at}.{name[:_SHOWN]}")
            if inner is not None and (found := kind.check(inner, f"{at}.{name}", facts)) is not None:
                return found
        for name in self.needed:
            if cast(dict[str, Any], value).get(name) is None:
                return FieldProblem(f"{at}.{name}", f"You must provide `{at}.{name}`.", "missing_value")
        return None


@dataclass(frozen=True, slots=True)
class Several:
    """A list of values of one type."""

    of: FieldType
    most: int
    least: int = 0

    @property
    def describe(self) -> str:
        return f"a list of at most {self.most}, each {self.of.describe}"

    def check(self, value: Any, at: str, facts: Facts) -> FieldProblem | None:
        if not isinstance(value, list):
            return wrong_type(at, "a list")
        items = cast(Sequence[Any], value)
        if not self.least <= len(items) <= self.most:
            return wrong(at, f"a list of {self.least} to {self.most} items")
        for index, item in enumerate(items):
            if (found := self.of.check(item, f"{at}[{index}]", facts)) is not None:
                return found
        return None


MOST_TOKENS: Final = 10_000_000
"""The longest context that a Model may have."""
_UNKNOWN_CONTEXT: Final = 32_768
_DIGITS: Final = 9
_SHOWN: Final = 64
"""Characters shown of a name that the client chose."""
_NUMBERS: Final = (int, float)


def unknown(at: str) -> FieldProblem:
    return FieldProblem(at, f"Unrecognized request argument: `{at}`.", "unknown_field")


def outside(ids: Sequence[Any], at: str, facts: Facts) -> FieldProblem | None:
    """What is wrong with ids of tokens. All checks run in C: lists may be long."""
    if not ids:
        return None
    if set(map(type, ids)) != {int}:
        return wrong_type(at, "ids of tokens, which are whole numbers")
    if facts.vocabulary is None:
        # An id outside the vocabulary ends the engine for all clients, so guessing is no option.
        text = f"`{at}` cannot be used: the vocabulary of this model is not known, so ids of tokens cannot be checked."
        return FieldProblem(at, text, "vocabulary_unknown")
    if min(ids) < 0 or max(ids) >= facts.vocabulary:
        return wrong(at, f"ids of tokens from 0 to {facts.vocabulary - 1}", "token_out_of_vocabulary")
    return None
