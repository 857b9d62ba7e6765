"""Where an engine does less than the field table (`fields/`) and the capabilities say, both of which follow SGLang."""

from collections.abc import Callable, Mapping
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
    """/v1/score reads query and item as a pair, as a reranker does, and has no scores of tokens: only Models that
    rerank serve it."""
    lacks: frozenset[str] = frozenset()
    """Capabilities that a Model does not have on it."""


NONE: Final = EngineDifferences()
