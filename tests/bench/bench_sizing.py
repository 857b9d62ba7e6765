"""Sizing beside the real engine: what one token takes in the KV cache, predicted and as the engine itself says.

python -m tests.bench.bench_sizing [--tokens 16384]

1. Three generated architectures (grouped heads, as many key-value heads as query heads, one latent) on SGLang's CPU
   engine: the bytes of the cache that it really allocated.
2. SGLang's own sizing functions, asked for GPUs that are not here.
3. Worked examples of the arithmetic for real models and GPUs.

A CPU proves the bytes of a token and the code that was read, not what a GPU has free: for that, a class learns from the
first engine that starts on it.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from shoal.api.model import Sizing
from shoal.core.architectures import facts_of
from shoal.core.sizing import GPU, SGLangTuning, Sized, size
from shoal.core.sizing.cell import bytes_per_token
from shoal.core.sizing.sglang.fraction import static_fraction
from tests.support import model_configs as configs
from tests.support.engines import MODEL, make_models, running_engine, sglang_launcher
from tests.support.sizing import ask_sglang

GI, MI = 2**30, 2**20
_BASE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "max_position_embeddings": 4096, "bos_token_id": 0,
    "eos_token_id": 1, "tie_word_embeddings": False, "attention_bias": False, "rope_theta": 10000.0,
}  # fmt: skip
_LLAMA = _BASE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False, "head_dim": 64}
GENERATED: dict[str, dict[str, Any]] = {
    "GQA (Llama, 8 heads, 2 kv)": _LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 2},
    "MHA (Llama, 8 heads, 8 kv)": _LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 8},
    "MLA (DeepSeek-V2, rank 512)": _BASE | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_attention_heads": 4,
        "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64, "v_head_dim": 64, "moe_intermediate_size": 64, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 8,
        "moe_layer_freq": 1,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "beta_fast": 32,
                         "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}  # fmt: skip
WORKED = [
    ("Llama-3.1-8B bf16, 1 x L40S", "llama-8b", 46068, 14.96, 1, SGLangTuning(), 184_000),
    ("Llama-3.1-70B bf16, 4 x H100", "llama-70b", 81559, 32.85, 4, SGLangTuning(), 411_000),
    ("  with an fp8 cache", "llama-70b", 81559, 32.85, 4, SGLangTuning(kv_cache_dtype="fp8_e4m3"), 823_000),
    ("Qwen3-32B FP8, 1 x H100", "qwen3-32b-fp8", 81559, 31.9, 1, SGLangTuning(), 138_000),
    ("DeepSeek-V3 FP8, 8 x H200", "deepseek-v3", 143771, 79, 8, SGLangTuning(), 673_000),
    ("Qwen2.5-7B AWQ, 1 x L4", "qwen2.5-7b-awq", 23034, 5.2, 1, SGLangTuning(), 183_000),
    (
        "  smaller batches",
        "qwen2.5-7b-awq", 23034, 5.2, 1, SGLangTuning(chunked_prefill_size=2048, cuda_graph_max_bs=32), 239_000,
    ),
]  # fmt: skip


def engines_own(config: dict[str, Any], folder: Path, tokens: int) -> tuple[float, int]:
    """Bytes of one token and tokens, as a CPU engine says that it allocated them."""
    model = folder / "model"
    model.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODEL / name, model / name)
    (model / "config.json").write_text(json.dumps(config))
    # Random weights, and no warm-up: the CPU build allocates a latent cache but has no kernel that computes with one.
    more = ["--model-path", str(model), "--load-format", "dummy", "--dtype", "bfloat16", "--skip-server-warmup"]
    with (
        running_engine("sglang", folder, *more, "--max-total-tokens", str(tokens)) as engine,
        urllib.request.urlopen(f"{engine.url}/metrics", timeout=30) as response,
    ):
        text = response.read().decode()
    size_gb, held = (_metric(text, name) for name in ("kv_cache_memory_usage_gb", "max_total_num_tokens"))
    # One more page (here of one token) is allocated for what is padded.
    return size_gb * GI / (held + 1), int(held)


def _metric(text: str, name: str) -> float:
    found = re.search(rf"^sglang:{name}\{{[^}}]*\}} (\S+)$", text, re.M)
    if found is None:
        raise RuntimeError(f"the engine has no metric sglang:{name}")
    return float(found[1])


def beside_the_engine(tokens: int) -> bool:
    print("1. KV bytes per token on SGLang's CPU engine (bf16)")
    print(f"   {'architecture':30} {'predicted':>10} {'engine':>12} {'ratio':>8}   tokens")
    good = True
    for name, config in GENERATED.items():
        predicted = facts_of(config, source="generated").kv_bytes_per_token or 0
        with tempfile.TemporaryDirectory(prefix="shoal-sizing-") as folder:
            own, held = engines_own(config, Path(folder), tokens)
        ratio = predicted / own
        good &= abs(ratio - 1) < 1e-3
        print(f"   {name:30} {predicted:10d} {own:12.1f} {ratio:8.5f}   {held}", flush=True)
    return good


def beside_its_functions() -> bool:
    cases: list[dict[str, Any]] = [
        {"name": n, "config": c, "tensor": t, "memory_mib": m, "kv_dtype": "auto"}
        for n, c in configs.ALL.items()
        for t in (1, 2, 4, 8)
        if (facts_of(c, source="x").attention_heads or 1) % t == 0
        for m in (23034, 46068, 81559, 143771)
    ]
    fractions, cells = [0.0], [0.0]
    for case, theirs in zip(cases, ask_sglang(cases)["answers"], strict=True):
        facts = facts_of(case["config"], source="x")
        ours = static_fraction(facts, case["memory_mib"], case["tensor"], SGLangTuning())
        cell = bytes_per_token(facts.kv, attention_tensor=case["tensor"], kv_dtype=facts.kv.dtype) or 0
        fractions.append(abs(ours - theirs["fraction"]))
        cells.append(abs(cell / theirs["cell"] - 1))
    print(
        f"\n2. SGLang's own functions, {len(configs.ALL)} configs x GPUs of 22 to 140 GiB x 1 to 8 GPUs: {len(cases)}"
    )
    print(f"   largest difference of mem_fraction_static {max(fractions):.6f}, of KV bytes per token {max(cells):.6%}")
    return max(fractions) < 1e-6 and max(cells) < 1e-6


def worked_examples() -> bool:
    print("\n3. Worked examples (0.6 GiB overhead, and 0.3 more for each doubling of the GPUs)")
    print(
        f"   {'model and GPUs':32} {'f':>6} {'cell B':>8} {'KV GiB':>7} {'KV tokens':>10} {'expected':>10} {'ratio':>7}"
    )
    good = True
    for name, key, mib, weights, gpus, tuning, expected in WORKED:
        facts = facts_of(configs.ALL[key], source="x", weight_bytes=int(weights * gpus * GI))
        gpu = GPU("any", mib * MI, overhead_bytes=6 * GI // 10)
        found = size(facts, gpu, tensor=gpus, context_length=None, overrides=Sizing(), tuning=tuning)
        if not isinstance(found, Sized):
            print(f"   {name:32} {found.why}")
            return False
        ratio = (found.kv_tokens or 0) / expected
        good &= abs(ratio - 1) < 0.005
        print(
            f"   {name:32} {found.breakdown.fraction:6.3f} {found.kv_bytes_per_token:8d} "
            f"{found.breakdown.kv / GI:7.2f} {found.kv_tokens:10d} {expected:10d} {ratio:7.4f}"
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of the CPU engines' KV cache")
    options = parser.parse_args()
    good = True
    try:
        sglang_launcher()
    except FileNotFoundError as missing:
        print(f"1. and 2. left out: {missing}")
    else:
        make_models()
        good &= beside_the_engine(options.tokens)
        good &= beside_its_functions()
    good &= worked_examples()
    print("\nNo GPU was used: a CPU proves the bytes of a token, not what a GPU has free when an engine starts on it.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
