"""Where an engine does less than the field table (`fields/`) and the capabilities say, both of which follow SGLang; and
which of its arguments decide what a Model can do."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final


@dataclass(frozen=True, slots=True, eq=False)
class EngineDifferences:
    """What requests for a Model may not ask of its engine."""

    fields: Mapping[str, Mapping[str, Callable[[Any], bool]]] = field(default_factory=lambda: MappingProxyType({}))
    """By endpoint and field: whether the engine does what a value asks for. It would ignore any other value, and the
    client would take the answer for what it asked for."""
    pairs_score: bool = False
    """/v1/score of a Model that generates nothing reads query and item as a pair, as a reranker does: only Models that
    rerank serve it."""
    generating: "EngineDifferences | None" = None
    """The same for Models that generate, where that is another; they score by tokens then, also where tenants do
    not share the prefix cache."""
    most_scored_bytes: int | None = None
    """/v1/score by tokens is asked of the engine with the query written out before each item, at most so many bytes;
    None: the engine does that itself."""
    not_transcribed: frozenset[str] = frozenset()
    """Architectures with which it does not transcribe, though SGLang does."""
    embeds_arg: str | None = None
    """Argument of a Model that makes the engine embed instead of generate; None: a Model can give none."""
    no_prefix_cache_arg: str | None = None
    """Argument of a Model that switches the prefix cache off."""
    deterministic_args: tuple[str, ...] = ()
    """Beginnings of arguments that make it give the same answer each time."""
    free_parsers: frozenset[str] = frozenset()
    """Parsers of tool calls with which it makes no grammar of the schemas of tools, unless a call is forced or a tool
    is `strict`."""
    strict_settings: tuple[str, ...] = ()
    """Beginnings of arguments and names of environment variables that can make each tool `strict`."""

    def compiles_tools(self, parser: str | None, settings: Iterable[str]) -> bool:
        """Whether it may make a grammar of the schemas of tools where no call is forced and no tool is `strict`.
        `settings`: its arguments, and the names of its environment variables."""
        strict = any(setting.startswith(self.strict_settings) for setting in settings)
        return strict or parser not in self.free_parsers

    @property
    def salts_scores(self) -> bool:
        """Tenants may score by tokens because a `cache_salt` separates them, not because they share the cache."""
        return self.most_scored_bytes is not None


NONE: Final = EngineDifferences()
