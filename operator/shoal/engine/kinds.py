"""The engine kinds by `Model.spec.engine.type`: the only place that knows which adapters there are."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from shoal.api.meta import CELRule
from shoal.api.model import Model
from shoal.engine.port import EngineKind
from shoal.engine.sglang.kind import SGLANG
from shoal.engine.vllm.kind import VLLM

DEFAULT: Final = SGLANG
"""The kind of a Model that names none."""
KINDS: Final[Mapping[str, EngineKind]] = MappingProxyType({kind.type: kind for kind in (SGLANG, VLLM)})
"""By type."""


def engine_rules() -> tuple[CELRule, ...]:
    """The rules of all kinds on `spec.engine` of a Model, each for Models of its kind."""
    return tuple(
        CELRule(f"self.type != '{kind.type}' || {_whole(rule.rule)}", rule.message)
        for kind in KINDS.values()
        for rule in kind.pod.rules
    )


def _whole(rule: str) -> str:
    return rule if " || " not in rule else f"({rule})"


def kind_of(model: Model) -> EngineKind:
    """The kind of the Model's engine."""
    return KINDS[model.spec.engine.type]
