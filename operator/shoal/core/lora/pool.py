"""Whether a LoRAPool fits the engines of its Model, and the settings and memory that follow from it."""

from collections.abc import Mapping
from decimal import ROUND_UP, Decimal
from typing import Final

from shoal.api import reasons
from shoal.api.adapters import AdapterSettings
from shoal.api.artifact import ArtifactFacts, LayerWidths
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.core.lora.format.layers import ALL, FEED_FORWARD, fused, largest_adapter
from shoal.core.status.observed import ModelProblem

_LOADED: Final = ("auto", "safetensors", "fastsafetensors", "instanttensor")
"""--load-format: SGLang reads adapters in the base's format, and adapters are safetensors with names of their own."""
_SPECULATIVE: Final = ("NGRAM", "EAGLE", "NEXTN", "EAGLE3", "DFLASH", "DSPARK")
"""--speculative-algorithm that works with adapters (`check_lora_speculative_compatibility` of SGLang 0.5.23)."""
_RAGGED: Final = "SGLANG_RAGGED_VERIFY_MODE"
_PLAN_STREAM: Final = "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
_TRTLLM: Final = "experimental_sgl_trtllm"
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
_SLACK: Final = 2**20
"""Bytes of an adapter's files besides its tensors: headers, adapter_config.json."""
_MI: Final = 2**20


def pool_problem(
    pool: LoRAPool,
    model: Model,
    facts: ArtifactFacts | None,
    *,
    given: Mapping[str, str],
    env: Mapping[str, str],
) -> ModelProblem | None:
    """Why the Model's engines cannot serve the pool's adapters; None: they can, or the Model's facts are not read yet.

    `given`: the engine's arguments, the platform's and the Model's, by canonical name (`engine.port.PodSide.given`);
    `env`: the engine's environment. Whether another pool claims the Model is not checked here.
    """
    arguments = _arguments(given, env)
    if arguments is not None:
        return ModelProblem(reasons.ENGINE_REFUSES, f"Model {model.key}: {arguments}")
    why = _embeds(given, facts) or _layers(pool, facts)
    return None if why is None else ModelProblem(reasons.ENGINE_REFUSES, f"Model {model.key}: {why}")


def _arguments(given: Mapping[str, str], env: Mapping[str, str]) -> str | None:
    """The first argument that SGLang refuses together with adapters, and what to do; None: there is none."""
    if _number(given, "dp-size") > 1:
        return "with --dp-size SGLang loads no adapters while it runs: use spec.scaling for more replicas"
    if _number(given, "tokenizer-worker-num") > 1:
        return "with --tokenizer-worker-num each worker knows only the adapters that it was told of: leave it out"
    if _number(given, "attn-dp-size") > 1 or "enable-dp-attention" in given:
        return "with --attn-dp-size SGLang runs only adapters that are never evicted: leave it out"
    load_format = given.get("load-format", "auto")
    if load_format not in _LOADED:
        return (
            f"--load-format={load_format} is how SGLang would read adapters too, and it cannot: "
            f"use {', '.join(_LOADED[:-1])} or {_LOADED[-1]}"
        )
    if given.get("startup-weight-load-mode") == "overlap":
        return "--startup-weight-load-mode=overlap does not go with adapters: leave it out"
    if "dllm-algorithm" in given:
        return "with --dllm-algorithm SGLang starts without adapters: leave it out"
    backend = given.get("moe-runner-backend", "")
    if backend.startswith("lora") and given.get("lora-backend") != "triton_v2":
        return f"--moe-runner-backend={backend} needs another LoRA backend than SGLang's default: leave it out"
    return _speculation(given, env)


def _speculation(given: Mapping[str, str], env: Mapping[str, str]) -> str | None:
    algorithm = given.get("speculative-algorithm", "").upper()
    if not algorithm:
        return None
    if algorithm not in _SPECULATIVE:
        return (
            f"--speculative-algorithm={algorithm} does not go with adapters: "
            f"use {', '.join(_SPECULATIVE[:-1])} or {_SPECULATIVE[-1]}, or leave it out"
        )
    runner = given.get("speculative-moe-runner-backend", "")
    if runner.startswith("lora"):
        return f"--speculative-moe-runner-backend={runner} is for adapters, which the draft has not: leave it out"
    if algorithm == "NGRAM":
        return None
    if "speculative-adaptive" in given:
        return "--speculative-adaptive does not go with adapters: leave it out"
    if _TRTLLM in (given.get("moe-runner-backend"), runner):
        return (
            f"the MoE runner {_TRTLLM} does not go with adapters and --speculative-algorithm={algorithm}: leave it out"
        )
    if env.get(_PLAN_STREAM, "").lower() in ("1", "true", "yes", "y", "t"):
        return f"{_PLAN_STREAM} does not go with adapters and --speculative-algorithm={algorithm}: leave it out"
    if algorithm == "DSPARK" and env.get(_RAGGED, "static") != "static":
        return f"{_RAGGED} must be 'static' for DSPARK with adapters"
    return None


def _embeds(given: Mapping[str, str], facts: ArtifactFacts | None) -> str | None:
    if "is-embedding" in given or (facts is not None and facts.task == "Embed"):
        return "it embeds, and adapters are served for generation only"
    return None


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


def _number(given: Mapping[str, str], name: str) -> int:
    try:
        return int(given.get(name) or 0)
    except ValueError:
        return 0


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


def host_bytes(pool: LoRAPool, facts: ArtifactFacts) -> int:
    """Bytes of host memory for the adapters of one engine process, which is also the size of their files: as many as
    the pool keeps, each of the largest rank in 16 bits."""
    spec = pool.spec
    return spec.cached * 2 * largest_adapter(_widths(facts), facts.vocabulary, spec.target_modules, spec.max_rank)


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
    """Whether the engine pods are the same with either pool; who may join the pool does not change them."""
    if one is None or other is None:
        return one is other
    if one is other:
        return True
    left, right = one.spec, other.spec
    return one.metadata.name == other.metadata.name and left == right.model_copy(
        update={"allowed_namespaces": left.allowed_namespaces}
    )
