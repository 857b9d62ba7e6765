"""Whether an adapter fits a pool, its base and its engine: what the engine would refuse, or accept and compute wrongly.

SGLang checks the rank and the modules that the config names. It accepts tensors of another width, of a layer that the
base does not have or of a module without a buffer, and its process ends at the first request for them. vLLM refuses
more, and answers with wrong weights for narrower tensors and further layers. Therefore the operator and the agent check
adapters here first.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from shoal.api import reasons
from shoal.api.adapterfacts import AdapterFacts
from shoal.api.adapters import AdapterSettings
from shoal.api.artifact import LayerWidths
from shoal.core.lora.format import layers
from shoal.core.lora.format.rules import AdapterRules
from shoal.core.status.observed import ModelProblem

_OTHER_NAMES: Final[Mapping[str, str]] = {
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "unembed_tokens": "lm_head",
}
"""Other names of the same modules that SGLang accepts."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a pool."""

    pool: str
    """Its name, for messages."""
    max_rank: int
    target_modules: tuple[str, ...]
    """("all",): every module."""
    rules: AdapterRules
    max_bytes: int | None = None
    """Bytes of one adapter's files, at most; None: not known here."""


@dataclass(frozen=True, slots=True)
class BaseModelFacts:
    """Facts of the base; unknown ones are not compared."""

    widths: LayerWidths | None = None
    vocabulary: int | None = None


def of_settings(settings: AdapterSettings, rules: AdapterRules) -> tuple[Limits, BaseModelFacts]:
    """The limits and base facts in an agent's settings; `rules` are the engine's."""
    limits = Limits(settings.pool, settings.max_rank, settings.target_modules, rules, settings.max_bytes)
    return limits, BaseModelFacts(settings.widths, settings.vocabulary)


def check_adapter(facts: AdapterFacts, limits: Limits, base: BaseModelFacts) -> ModelProblem | None:
    """Why an adapter does not fit this pool and base; None: nothing known speaks against it."""
    if (refusal := limits.rules.refusal(facts.needs)) is not None:
        return ModelProblem(reasons.UNSUPPORTED, refusal)
    if facts.rank > limits.max_rank:
        return ModelProblem(
            reasons.RANK_TOO_HIGH,
            f"{facts.rank} > {limits.max_rank} of pool {limits.pool}: raise the pool's maxRank, which rolls its Model, "
            "or train the adapter with a lower rank",
        )
    if missing := _not_in_pool(facts, limits.target_modules, base):
        return ModelProblem(
            reasons.MODULES_NOT_IN_POOL,
            f"{', '.join(missing)}: add to targetModules of pool {limits.pool}, which rolls its Model, or train the "
            f"adapter without (the pool has {', '.join(limits.target_modules)})",
        )
    if (mismatch := _mismatch(facts, base)) is not None:
        named = f"; its config names {facts.base} as its base" if facts.base else ""
        return ModelProblem(reasons.BASE_MISMATCH, f"{mismatch}: it was trained for another base{named}")
    if base.vocabulary is not None and facts.added_token is not None and facts.added_token >= base.vocabulary:
        return ModelProblem(
            reasons.UNSUPPORTED,
            f"its added_tokens.json has token {facts.added_token} and the base ends at {base.vocabulary - 1}: "
            f"{limits.rules.engine} serves no adapters that add tokens",
        )
    if limits.max_bytes is not None and facts.file_bytes > limits.max_bytes:
        return too_large(facts.file_bytes, limits.max_bytes, limits.pool)
    return None


def too_large(size: int, limit: int, pool: str) -> ModelProblem:
    """The problem of an adapter whose files have `size` bytes, where replicas have room for `limit` per adapter."""
    return ModelProblem(
        reasons.TOO_LARGE,
        f"its files have {_mib(size)} and pool {pool} has room for {_mib(limit)} of each adapter: look for "
        "weights that do not belong to it, or save it in 16 bits",
    )


def buffers(modules: Iterable[str]) -> frozenset[str]:
    """SGLang's buffers for these modules; an expert's module begins with `experts.`."""
    plain = (module.removeprefix("experts.") for module in modules)
    return layers.fused(_OTHER_NAMES.get(module, module) for module in plain)


def _not_in_pool(facts: AdapterFacts, allowed: tuple[str, ...], base: BaseModelFacts) -> list[str]:
    if "all" in allowed and base.widths is None:
        return []  # what `all` means depends on the base, which is unknown here
    there = layers.fused(allowed)
    wanted = {module.removeprefix("experts.") for module in facts.modules} | (set(facts.targets) - {"all"})
    return sorted(module for module in wanted if not buffers([module]) <= there)


def _mismatch(facts: AdapterFacts, base: BaseModelFacts) -> str | None:
    if base.widths is None:
        return None
    if facts.layers > base.widths.layers:
        return f"it changes layer {facts.layers - 1} and the base has layers 0 to {base.widths.layers - 1}"
    shapes = layers.shapes(base.widths, base.vocabulary)
    for module, found in sorted(facts.modules.items()):
        wanted = shapes.get(module)
        if wanted is None or found == wanted:
            continue
        if found is None:
            return f"its tensors for {module} differ in width, and all layers of the base are alike"
        return f"{module} is {found[0]} to {found[1]} wide and the base's is {wanted[0]} to {wanted[1]}"
    return None


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**17 else f"{count} bytes"
