"""What vLLM's arguments mean for its memory."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final, Literal

from shoal.api.artifact import ArtifactFacts
from shoal.core.sizing import AdapterSlots, VLLMTuning
from shoal.engine.arguments import LONGEST, json_object, unless
from shoal.engine.vllm.arguments import ARGUMENTS
from shoal.engine.vllm.launch import MAX_RUNNING, quantization_args
from shoal.engine.vllm.wire import WIRE

_LONGER: Final = VLLMTuning.longer_context_by
_GRAPHS_COUNTED: Final = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"
_DEVICE: Final = "VLLM_TARGET_DEVICE"
_CPU_SPACE: Final = "VLLM_CPU_KVCACHE_SPACE"
_NO_DRAFT: Final = ("ngram", "ngram_gpu", "suffix")
"""Speculative methods that guess from the text itself, without a model."""
_OWN_LAYERS: Final = "mtp"
"""The one that uses layers of the checkpoint."""
_RANK: Final = 16
"""vLLM's own --max-lora-rank."""
_SLOTS: Final = 1
"""vLLM's own --max-loras."""
_GB: Final = 2**30
"""vLLM's --cpu-offload-gb and VLLM_CPU_KVCACHE_SPACE count in these."""
_MOST_SPACE: Final = 65_536


def tuning_of(
    extra_args: Sequence[str],
    *,
    platform_args: Sequence[str] = (),
    quantization: Literal["FP8"] | None = None,
    env: Mapping[str, str] = MappingProxyType({}),
    facts: ArtifactFacts | None = None,
) -> VLLMTuning:
    """What these arguments change in the memory arithmetic; a later argument wins over an earlier one, and the Model's
    own win over the platform's.

    `env` is the environment of the engine, `facts` are those of the weights. A value that is no number, or none within
    its bounds, is left out: the check of `extraArgs` reports it.
    """
    given = ARGUMENTS.parsed([*platform_args, *quantization_args(quantization, facts), *ARGUMENTS.bounded(extra_args)])
    number = partial(ARGUMENTS.number, given)
    count = ARGUMENTS.count
    cpu = env.get(_DEVICE, "").lower() == "cpu"
    method = _speculative_method(given)
    layers = facts.mtp_layers if facts is not None and method == _OWN_LAYERS else None
    offload = number("cpu-offload-gb", float)
    return VLLMTuning(
        device="cpu" if cpu else "cuda",
        dtype=unless(given.get("dtype"), "auto"),
        kv_cache_dtype=unless(given.get("kv-cache-dtype"), "auto"),
        max_running_requests=number("max-num-seqs", count) or MAX_RUNNING,
        pipeline=max(1, number("pipeline-parallel-size", int) or 1),
        attention_dp=max(1, number("data-parallel-size", int) or 1),
        multimodal=WIRE.differences.reads_media(facts, [*platform_args, *extra_args]),
        cpu_offload_bytes=int(_GB * (offload or 0.0)),
        quantization=given.get("quantization"),
        longer_context=env.get(_LONGER, "").lower() in ("1", "true") or _names(given, "hf-overrides"),
        draft=method if method and method not in _NO_DRAFT and not layers else None,
        speculates=method is not None,
        draft_layers=layers or 0,
        adapters=_adapters(given, number("max-loras", count), number("max-lora-rank", count)),
        gpu_memory_utilization=number("gpu-memory-utilization", float),
        kv_cache_memory_bytes=number("kv-cache-memory-bytes", count) or (_cpu_space(env) if cpu else None),
        num_gpu_blocks_override=number("num-gpu-blocks-override", count),
        block_size=number("block-size", count),
        max_num_batched_tokens=number("max-num-batched-tokens", count),
        chunked_prefill="no-enable-chunked-prefill" not in given,
        graphs="enforce-eager" not in given,
        graphs_counted=env.get(_GRAPHS_COUNTED, "1") != "0",
        windows="disable-hybrid-kv-cache-manager" not in given,
        prefix_cache="no-enable-prefix-caching" not in given,
        spread_experts="enable-expert-parallel" in given,
    )


def _adapters(given: Mapping[str, str], slots: int | None, rank: int | None) -> AdapterSlots | None:
    """None without adapters."""
    if "enable-lora" not in given:
        return None
    modules = tuple(given.get("lora-target-modules", "").split())
    return AdapterSlots(slots or _SLOTS, rank or _RANK, modules)


def _speculative_method(given: Mapping[str, str]) -> str | None:
    """The method of --speculative-config, as one JSON value or by its members; "draft" where only a model is named."""
    method = (
        given.get("spec-method")
        or given.get("speculative-config.method")
        or json_object(given.get("speculative-config")).get("method")
    )
    if isinstance(method, str):
        return method[:LONGEST]
    return "draft" if _names(given, "speculative-config") else None


def _names(given: Mapping[str, str], name: str) -> bool:
    """Whether an argument is there, as one value or by a member."""
    return name in given or any(key.startswith(f"{name}.") for key in given)


def _cpu_space(env: Mapping[str, str]) -> int | None:
    """Bytes of the KV cache of an engine on CPUs, as its environment says."""
    text = env.get(_CPU_SPACE, "")
    whole = int(text) if text.isascii() and text.isdecimal() and len(text) <= LONGEST else 0
    return _GB * whole if 0 < whole <= _MOST_SPACE else None
