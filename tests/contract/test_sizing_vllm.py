"""Sizing beside the real vLLM on the CPU: the same config and arguments, the same KV cache to the token.

What the engine measures on a GPU (activations, graphs) cannot be seen here; its blocks, their bytes and its groups of
layers can.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.api.artifact import KVGeometry
from shoal.api.model import Sizing
from shoal.core.architectures import facts_of
from shoal.core.sizing import GPU, Sized, VLLMTuning, size
from shoal.core.sizing.vllm import profile
from shoal.engine.vllm.tuning import tuning_of
from tests.support.engines import ROOT, vllm_launcher
from tests.support.model_configs import ALL
from tests.support.sizing import ask_vllm
from tests.support.vllm_cpu import cache_info, model_folder, running

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(900)]

MI = 2**20
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
OTHERS = ("bge-m3", "whisper-turbo")
"""vLLM keeps no KV cache for an encoder, and only the decoder's for Whisper: less than is expected of it."""


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]
    args: tuple[str, ...]
    mib: int = 64
    context: int = 4096


CASES = {
    "float32": Case(LLAMA, ("--dtype=float32",)),
    "bfloat16, one key-value head, three layers": Case(
        LLAMA | {"num_key_value_heads": 1, "num_hidden_layers": 3}, ("--dtype=bfloat16",), mib=37
    ),
    "wide heads, block 32, an odd context, guesses": Case(
        LLAMA | {"head_dim": 128},
        (
            "--dtype=bfloat16", "--block-size=32",
            '--speculative-config={"method":"ngram","num_speculative_tokens":4}',
        ),
        mib=21,
        context=1000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_engine_says_what_was_predicted(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    args = [*case.args, f"--kv-cache-memory-bytes={case.mib * MI}", "--max-num-batched-tokens=2048"]
    predicted = size(
        facts_of(case.config, source="x"),
        GPU("cpu", 0),
        tensor=1,
        context_length=case.context,
        overrides=Sizing(),
        tuning=tuning_of(args, env={"VLLM_TARGET_DEVICE": "cpu"}),
    )
    assert isinstance(predicted, Sized)
    with running(model_folder(tmp_path / "model", case.config), *args, f"--max-model-len={case.context}") as url:
        said = cache_info(url)
    assert predicted.kv_tokens == int(said["kv_cache_size_tokens"]) - int(said["block_size"]), said


# --- vLLM's own functions, for models that no CPU runs ----------------------------------------------------------------

H200 = GPU("h200", 143771 * MI)
BYTES, BATCH = 40 * 2**30, 2048
GPUS = (
    (22.5, "nvidia l4"),
    (79.6, "nvidia h100"),
    (80.0, "nvidia a100"),
    (140.0, "nvidia h200"),
    (179.0, "nvidia b200"),
)


def layers_of(kv: KVGeometry, tensor: int, size: int) -> list[dict[str, Any]]:
    """The layers of a model as vLLM describes them, on one of `tensor` GPUs."""
    depth = kv.layers or 0
    if kv.kv_lora_rank is not None:
        return [
            {"kind": "latent", "heads": 1, "dim": kv.kv_lora_rank + (kv.qk_rope_head_dim or 0), "size": size}
        ] * depth
    full = {"kind": "full", "heads": max(1, (kv.kv_heads or 1) // tensor), "dim": kv.head_dim, "size": size}
    if kv.kind == "SlidingWindow":
        window = full | {"kind": "window", "window": kv.sliding_window}
        return [full] * (kv.full_layers or 0) + [window] * (depth - (kv.full_layers or 0))
    return [full] * depth


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, config in ALL.items():
        kv = facts_of(config, source="x").kv
        own_shape = kv.swa_head_dim is not None or kv.swa_kv_heads is not None
        if kv.kind in ("Hybrid", "DSA", "Unknown") or own_shape or name in OTHERS:
            continue
        for tensor, block, dtype in ((1, 16, None), (2, 16, "fp8"), (4, 32, None), (8, 64, None)):
            context = {1: 8192, 2: 32_768, 4: 1000, 8: 4096}[tensor]
            layers = layers_of(kv, tensor, 1 if dtype or kv.dtype == "fp8_e4m3" else 2)
            found.append(
                {"name": name, "config": config, "tensor": tensor, "block": block, "dtype": dtype, "context": context,
                 "layers": layers, "bytes": BYTES, "batch": BATCH}
            )  # fmt: skip
    return found


@pytest.fixture(scope="module")
def vllm() -> dict[str, Any]:
    return ask_vllm([{k: v for k, v in case.items() if k != "config"} for case in cases()], GPUS)


def test_blocks_and_groups_are_those_of_the_engine(vllm: dict[str, Any]) -> None:
    assert len(cases()) > 40
    differ: list[str] = []
    for case, theirs in zip(cases(), vllm["capacities"], strict=True):
        tuning = VLLMTuning(
            block_size=case["block"], kv_cache_dtype=case["dtype"], kv_cache_memory_bytes=BYTES,
            max_num_batched_tokens=BATCH,
        )  # fmt: skip
        facts = facts_of(case["config"], source="x")
        ours = tuning.memory(facts, H200, case["tensor"], 0, Sizing(), case["context"])
        if ours.tokens != theirs["tokens"] - case["block"]:
            differ.append(f"{case['name']} on {case['tensor']}: {ours.tokens} and {theirs}")
    assert differ == []


def test_a_block_of_states_is_shared_as_the_engine_shares_it() -> None:
    facts = facts_of(ALL["qwen3-next-80b"], source="x")
    tuning = VLLMTuning(kv_cache_memory_bytes=BYTES, max_num_batched_tokens=BATCH)
    layout, _ = tuning.blocks(facts, H200, 1, 0, 32_768)
    full, depth = facts.kv.full_layers or 0, facts.kv.layers or 0
    page = layout.bytes // full
    token = {"kind": "full", "heads": facts.kv.kv_heads, "dim": facts.kv.head_dim, "size": 2}
    state = {"kind": "state", "bytes": (facts.kv.state_bytes_per_request or 0) // (depth - full), "padded": page}
    case = {"layers": [token] * full + [state] * (depth - full), "block": layout.block, "bytes": BYTES,
            "context": 32_768, "batch": BATCH}  # fmt: skip
    (theirs,) = ask_vllm([case], ())["capacities"]
    assert layout.tokens(theirs["blocks"], 32_768) == theirs["tokens"] - layout.block
    assert theirs["blocks"] == BYTES // layout.bytes


def test_the_largest_batch_is_the_engines_choice(vllm: dict[str, Any]) -> None:
    for (gib, name), theirs in zip(GPUS, vllm["batches"], strict=True):
        gpu = GPU(name, int(gib * 2**30), compute_capability=(8, 0) if "a100" in name else None)
        ours = profile.batch(gpu, 100_000, VLLMTuning())
        assert [ours.tokens, ours.requests] == theirs, name


def test_the_committed_table_is_what_this_engine_accepts() -> None:
    """Renew it with: python images/engine-cpu/dump_vllm_args.py > operator/shoal/engine/vllm/vllm_args.json"""
    done = subprocess.run(
        [vllm_launcher().parent / "python", ROOT / "images" / "engine-cpu" / "dump_vllm_args.py"],
        env=os.environ | {"VLLM_NO_USAGE_STATS": "1"}, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    committed = (ROOT / "operator" / "shoal" / "engine" / "vllm" / "vllm_args.json").read_text()
    assert json.loads(done.stdout) == json.loads(committed)


def test_capabilities_are_those_of_the_quantizations(vllm: dict[str, Any]) -> None:
    theirs = vllm["capabilities"]
    assert theirs == VLLMTuning.min_capability
    assert not VLLMTuning.unreadable & set(theirs)
    assert VLLMTuning.halving <= set(theirs)
