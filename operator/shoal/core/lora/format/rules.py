"""What an engine serves of adapters beyond the plain ones: PEFT has more than any engine does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from shoal.api.adapterfacts import Need


@dataclass(frozen=True, slots=True)
class AdapterRules:
    """One engine's rules; `engine.port.PodSide` has those of each kind."""

    engine: str
    """Its name, for messages."""
    lacks: frozenset[Need]
    """What it does not serve, or would serve wrongly."""

    def refusal(self, needs: Mapping[Need, str]) -> str | None:
        """Why the engine does not serve an adapter with these needs; None: it does."""
        return next(
            (say(needs[n], self.engine) for n, say in _REFUSALS.items() if n in needs and n in self.lacks), None
        )


_REFUSALS: Final[Mapping[Need, Callable[[str, str], str]]] = {
    "rsLoRA": lambda detail, engine: (
        f"it is scaled by alpha / sqrt(r) (use_rslora), which {engine} ignores: {detail} mean the same"
    ),
    "rankPattern": lambda _, engine: f"its modules have different ranks (rank_pattern), which {engine} ignores",
    "alphaPattern": lambda _, engine: f"its modules have different alphas (alpha_pattern), which {engine} ignores",
    "targetPattern": lambda detail, engine: (
        f"target_modules of adapter_config.json is the pattern {detail}: {engine} wants a list of module names"
    ),
    "partOfAttention": lambda detail, engine: (
        f"{detail}: {engine} stacks q_proj, k_proj and v_proj, and needs at least q_proj and v_proj"
    ),
    "partOfGate": lambda detail, engine: f"{detail}: {engine} stacks the two and needs gate_proj",
    "initialization": lambda detail, engine: (
        f"its init_lora_weights is {detail}, which {engine} takes for one that changed the base: set it to true if the "
        "base is the plain one"
    ),
}  # fmt: skip
"""Need -> the sentence, from its detail and the engine's name."""
