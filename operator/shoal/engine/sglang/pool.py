"""Which arguments of SGLang do not go with adapters, and which adapters it does not serve."""

from collections.abc import Mapping
from typing import Final

from shoal.core.lora.format.rules import AdapterRules
from shoal.core.lora.pool import EMBEDS

RULES: Final = AdapterRules(
    "SGLang",
    frozenset({"rsLoRA", "rankPattern", "alphaPattern", "targetPattern", "partOfAttention", "partOfGate"}),
)
"""It reads r, lora_alpha and target_modules of an adapter's config, and stacks parts of layers before it looks."""
_LOADED: Final = ("auto", "safetensors", "fastsafetensors", "instanttensor")
"""--load-format: SGLang reads adapters in the base's format, and adapters are safetensors with names of their own."""
_SPECULATIVE: Final = ("NGRAM", "EAGLE", "NEXTN", "EAGLE3", "DFLASH", "DSPARK")
"""--speculative-algorithm that works with adapters (`check_lora_speculative_compatibility` of SGLang 0.5.23)."""
_RAGGED: Final = "SGLANG_RAGGED_VERIFY_MODE"
_PLAN_STREAM: Final = "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
_TRTLLM: Final = "experimental_sgl_trtllm"


def pool_problem(given: Mapping[str, str], env: Mapping[str, str]) -> str | None:
    """The first argument that SGLang refuses together with adapters, and what to do; None: there is none."""
    if _number(given, "dp-size") > 1:
        return "with --dp-size SGLang loads no adapters while it runs: use spec.scaling for more replicas"
    if _number(given, "tokenizer-worker-num") > 1:
        return "with --tokenizer-worker-num each worker knows only the adapters that it was told of: leave it out"
    if _number(given, "attn-dp-size") > 1 or "enable-dp-attention" in given:
        split = "parallelism.attentionData (--attn-dp-size)"
        return f"with {split} SGLang runs only adapters that are never evicted: leave it out"
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
    return _speculation(given, env) or (EMBEDS if "is-embedding" in given else None)


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


def _number(given: Mapping[str, str], name: str) -> int:
    try:
        return int(given.get(name) or 0)
    except ValueError:
        return 0
