"""What vLLM's arguments mean for its memory."""

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar, cast

from shoal.api.artifact import ArtifactFacts
from shoal.core.sizing import AdapterSlots, VLLMTuning
from shoal.engine.arguments import LONGEST, LONGEST_ARG, MOST_ARGS
from shoal.engine.vllm.arguments import ARGUMENTS
from shoal.engine.vllm.bounds import count
from shoal.engine.vllm.launch import MAX_RUNNING, quantization_args

_Value = TypeVar("_Value", int, float)
_GB: Final = 2**30
"""vLLM's --cpu-offload-gb counts in these."""
_LONGER: Final = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_COUNTED: Final = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"
_NO_DRAFT: Final = ("ngram", "ngram_gpu", "suffix")
"""Speculative methods that guess from the text itself, without a model."""
_OWN_LAYERS: Final = "mtp"
"""The one that uses layers of the checkpoint."""


def tuning_of(
    extra_args: Sequence[str],
    *,
    platform_args: Sequence[str] = (),
    quantization: Literal["FP8"] | None = None,
    env: Mapping[str, str] = MappingProxyType({}),
    facts: ArtifactFacts | None = None,
) -> VLLMTuning:
    """What these arguments change in the memory arithmetic; a later argument wins over an earlier one, and the Model's
    own win over the platform's. `env` is the environment that the Model gives its engine, `facts` are those of the
    weights. A value that is no number, or none within its bounds, is left out:
    `EngineArguments.problems` reports it."""
    args = [arg for arg in extra_args[:MOST_ARGS] if len(arg) <= LONGEST_ARG]
    given = ARGUMENTS.parsed([*platform_args, *quantization_args(quantization), *args])

    def number(name: str, read: Callable[[str], _Value]) -> _Value | None:
        value = given.get(name)
        if value is None or len(value) > LONGEST:
            return None
        try:
            found = read(value)
        except (ValueError, ArithmeticError):
            return None
        return found if ARGUMENTS.within(name, found) else None

    slots, rank = number("max-loras", int), number("max-lora-rank", int)
    method = _method(given)
    layers = facts.mtp_layers if facts is not None and method == _OWN_LAYERS else None
    multimodal = False if "language-model-only" in given else None
    return VLLMTuning(
        dtype=_unless(given.get("dtype"), "auto"),
        kv_cache_dtype=_unless(given.get("kv-cache-dtype"), "auto"),
        max_running_requests=number("max-num-seqs", count) or MAX_RUNNING,
        multimodal=multimodal,
        cpu_offload_bytes=int(_GB * (number("cpu-offload-gb", float) or 0)),
        quantization=given.get("quantization"),
        longer_context=env.get(_LONGER, "") == "1" or any(name.startswith("hf-overrides") for name in given),
        draft=method if method is not None and method not in _NO_DRAFT and not layers else None,
        speculates=method is not None,
        draft_layers=layers or 0,
        adapters=AdapterSlots(slots, rank, ()) if "enable-lora" in given and slots and rank else None,
        gpu_memory_utilization=number("gpu-memory-utilization", float),
        kv_cache_memory_bytes=number("kv-cache-memory-bytes", count),
        num_gpu_blocks_override=number("num-gpu-blocks-override", count),
        block_size=number("block-size", count),
        max_num_batched_tokens=number("max-num-batched-tokens", count),
        chunked_prefill="no-enable-chunked-prefill" not in given,
        graphs="enforce-eager" not in given,
        graphs_counted=env.get(_COUNTED, "1") != "0",
        windows="disable-hybrid-kv-cache-manager" not in given,
        prefix_cache="no-enable-prefix-caching" not in given,
        spread_experts="enable-expert-parallel" in given,
    )


def _method(given: Mapping[str, str]) -> str | None:
    """The speculative method; None: nothing is guessed."""
    if not any(name.startswith(("speculative-config", "spec-")) for name in given):
        return None
    method = given.get("speculative-config.method") or given.get("spec-method")
    if method is None:
        try:
            whole: object = json.loads(given.get("speculative-config", "{}"))
        except ValueError:
            return "draft_model"
        found = cast("dict[str, Any]", whole).get("method") if isinstance(whole, dict) else None
        method = found if isinstance(found, str) else "draft_model"
    return method


def _unless(value: str | None, default: str) -> str | None:
    return None if value == default else value
