"""Whether a LoRAPool fits the engines of its Model, and the settings and memory that follow from it."""

from collections.abc import Mapping
from decimal import ROUND_UP, Decimal
from typing import Final

from shoal.api import reasons
from shoal.api.adapters import AdapterSettings
from shoal.api.artifact import ArtifactFacts, LayerWidths
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.core.enginerevision import pool_settings
from shoal.core.lora.format.layers import ALL, FEED_FORWARD, fused, largest_adapter
from shoal.core.status.observed import ModelProblem

_UNLIKE: Final[Mapping[str, str]] = {
    "MLA": "{} keeps a latent in place of keys and values (MLA)",
    "DSA": "{} keeps a latent in place of keys and values (MLA)",
    "Hybrid": "some layers of {} keep a state in place of keys and values (Mamba, linear attention)",
    "SlidingWindow": "the attention layers of {} are of several widths",
    "Unknown": "Shoal does not know the layers of {}",
    "Full": "the config of {} does not say how wide its layers are, or they are of several widths",
}
"""By `KVGeometry.kind`, for bases whose layers are not all alike. SGLang loads adapters for many of them, and its
process ends at the first request for an adapter that does not fit, which cannot be known before."""
EMBEDS: Final = "it embeds, and adapters are served for generation only"
_SLACK: Final = 2**20
"""Bytes of an adapter's files besides its tensors: headers, adapter_config.json."""
_MI: Final = 2**20


def pool_problem(
    pool: LoRAPool, model: Model, facts: ArtifactFacts | None, *, refusal: str | None
) -> ModelProblem | None:
    """Why the Model's engines cannot serve the pool's adapters; None: they can, or the Model's facts are not read yet.

    `refusal`: what the engine refuses together with adapters (`engine.port.PodSide.pool_problem`). Whether another pool
    claims the Model is not checked here.
    """
    why = refusal or _embeds(facts) or _layers(pool, facts)
    return None if why is None else ModelProblem(reasons.ENGINE_REFUSES, f"Model {model.key}: {why}")


def _embeds(facts: ArtifactFacts | None) -> str | None:
    return EMBEDS if facts is not None and facts.task == "Embed" else None


def _layers(pool: LoRAPool, facts: ArtifactFacts | None) -> str | None:
    """Why the base lacks layers that the pool's adapters may change; None: it has them, or is not known yet."""
    if facts is None:
        return None
    name = facts.architecture or "this architecture"
    if facts.widths is None:
        why = _UNLIKE[facts.kv.kind].format(name)
        return f"{why}, so that no adapter can be checked against it: merge the fine-tune, and serve it as a Model"
    asked = fused(pool.spec.target_modules)
    if unknown := sorted(asked - ALL):
        return f"{name} has no {', '.join(unknown)}: take it out of spec.targetModules"
    if facts.widths.feed_forward is None and asked & FEED_FORWARD:
        what = "experts, whose" if facts.experts else "feed-forward layers of several widths, whose"
        return (
            f"{name} has {what} adapters are not supported: "
            "set spec.targetModules to those of attention, q_proj, k_proj, v_proj and o_proj"
        )
    if facts.vocabulary is None and asked & {"embed_tokens", "lm_head"}:
        return f"the vocabulary of {name} is not known: take embed_tokens and lm_head out of spec.targetModules"
    return None


def usable(facts: ArtifactFacts | None) -> bool:
    """Whether enough is known of the base to serve adapters."""
    return facts is not None and facts.widths is not None


def settings(pool: LoRAPool, facts: ArtifactFacts) -> AdapterSettings:
    """The settings of the Model's agents. The caller has checked that the pool has no problem."""
    spec, widths = pool.spec, _widths(facts)
    parameters = largest_adapter(widths, facts.vocabulary, spec.target_modules, spec.max_rank)
    return AdapterSettings(
        pool=f"{pool.metadata.namespace}/{pool.metadata.name}",
        slots=spec.slots_per_replica,
        cached=spec.cached,
        max_rank=spec.max_rank,
        target_modules=spec.target_modules,
        # Many adapters are stored with 32 bits per number.
        max_bytes=4 * parameters + _SLACK,
        credentials=tuple(c.uri_prefix for c in spec.credentials),
        architecture=facts.architecture,
        widths=widths,
        vocabulary=facts.vocabulary,
    )


def host_bytes(pool: LoRAPool, facts: ArtifactFacts, adapters: int | None = None) -> int:
    """Bytes of host memory for the adapters of one engine process, which is also the size of their files: of as many
    `adapters`, None: as the pool keeps, each of the largest rank in 16 bits."""
    spec = pool.spec
    count = spec.cached if adapters is None else adapters
    return count * 2 * largest_adapter(_widths(facts), facts.vocabulary, spec.target_modules, spec.max_rank)


def folder_bytes(settings: AdapterSettings) -> int:
    """Most bytes that the adapters' folder of one replica may hold; the pod is evicted beyond that. Twice what is kept:
    new adapters are fetched before old ones go, and retiring ones go when their last request ends."""
    return 2 * settings.cached * settings.max_bytes


def whole_mebibytes(size: int) -> Decimal:
    """Bytes rounded up to MiB, so that Kubernetes returns the quantity unchanged."""
    return (Decimal(size) / _MI).to_integral_value(ROUND_UP) * _MI


def _widths(facts: ArtifactFacts) -> LayerWidths:
    if facts.widths is None:
        raise ValueError("a pool is given only to a base whose layers are known")
    return facts.widths


def same_engines(one: LoRAPool | None, other: LoRAPool | None) -> bool:
    """Whether the engine pods are the same with either pool."""
    return one is other or pool_settings(one) == pool_settings(other)
