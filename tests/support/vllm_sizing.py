# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportOptionalMemberAccess=false
"""vLLM's own sizing code, asked for its figures. Runs in the engine's environment, not in ours.

Reads {"cases": [{"layers": [...], "block": 16, "bytes": ..., "context": ..., "batch": ...}, ...]} from stdin and writes
the answers after a line of its own. Nothing is computed here: the functions are vLLM's, and only what would ask a GPU
or a model is given to them. A layer is {"kind": "full" | "window" | "latent" | "state", ...}.
"""

import json
import logging
import sys
from types import SimpleNamespace
from unittest import mock

logging.disable(logging.WARNING)

import torch  # noqa: E402
from vllm.engine import arg_utils  # noqa: E402
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.v1.core import kv_cache_utils as caches  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

TYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}


def spec_of(layer, block):
    """vLLM's spec of one layer."""
    kind = layer["kind"]
    if kind == "state":
        return MambaSpec(
            block_size=block, shapes=((layer["bytes"],),), dtypes=(torch.int8,), page_size_padded=layer["padded"],
            mamba_cache_mode="align",
        )  # fmt: skip
    given = {
        "block_size": block, "num_kv_heads": layer["heads"], "head_size": layer["dim"], "dtype": TYPES[layer["size"]]
    }  # fmt: skip
    if kind == "latent":
        return MLAAttentionSpec(**given)
    return (
        SlidingWindowSpec(**given, sliding_window=layer["window"]) if kind == "window" else FullAttentionSpec(**given)
    )


def capacity_of(case):
    """Blocks, tokens and requests at once, as the engine logs them."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=case["context"]),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None, prefix_cache_retention_interval=None, mamba_cache_mode="align",
            block_size=case["block"], get_resolved_kv_cache_layout=lambda: LAYOUT,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not case.get("windows", True)),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None, max_in_flight_tokens=2 * case["batch"],
        kv_transfer_config=None, kv_events_config=None,
    )  # fmt: skip
    specs = {f"layer.{i}": spec_of(layer, case["block"]) for i, layer in enumerate(case["layers"])}
    with mock.patch.multiple(
        caches, get_hisparse_kv_cache_groups=lambda *_: [], _annotate_eagle_groups=lambda *_a, **_k: None,
        _uses_trailing_mtp_layers=lambda *_: False, _warn_if_unannotated_eagle_mamba=lambda *_: None,
    ):  # fmt: skip
        groups = caches.get_kv_cache_groups(config, specs)
        found = caches.get_kv_cache_config_from_groups(config, groups, case["bytes"])
        tokens, requests = caches.get_kv_cache_capacity(config, found)
    return {"blocks": found.num_blocks, "tokens": tokens, "requests": requests}


def batch_of(gib, name):
    """Tokens and requests of the largest batch that vLLM chooses for a GPU."""
    platform = SimpleNamespace(
        get_device_total_memory=lambda: int(gib * 2**30), get_device_name=lambda: name, is_tpu=lambda: False,
        is_cpu=lambda: False, is_xpu=lambda: False,
    )  # fmt: skip
    with (
        mock.patch("vllm.platforms.current_platform", platform),
        mock.patch.object(arg_utils, "current_platform", platform, create=True),
    ):
        tokens, requests = arg_utils.EngineArgs.get_batch_defaults(1)
    return [tokens[UsageContext.OPENAI_API_SERVER], requests[UsageContext.OPENAI_API_SERVER]]


def capability_of(method):
    try:
        return get_quantization_config(method).get_min_capability()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

LAYOUT = next(layout for layout in KVCacheLayout if not layout.is_block_outermost)
asked = json.load(sys.stdin)
answers = {
    "capacities": [capacity_of(case) for case in asked["cases"]],
    "batches": [batch_of(*gpu) for gpu in asked["gpus"]],
    "capabilities": {method: capability_of(method) for method in QUANTIZATION_METHODS},
}
print("\n=====\n" + json.dumps(answers))
