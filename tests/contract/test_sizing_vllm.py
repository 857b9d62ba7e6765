"""Sizing beside the real vLLM on the CPU: the same config and arguments, the same KV cache to the token.

What the engine measures on a GPU (activations, graphs) cannot be seen here; its blocks, their bytes and its groups of
layers can.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shoal.api.model import Sizing
from shoal.core.architectures import facts_of
from shoal.core.sizing import GPU, Sized, size
from shoal.engine.vllm.tuning import tuning_of
from tests.support.vllm_cpu import cache_info, model_folder, running

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(400)]

MI = 2**20
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
GPT_OSS: dict[str, Any] = LLAMA | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 6, "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 128, "num_local_experts": 4,
    "num_experts_per_tok": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3: dict[str, Any] = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 128,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "torch_dtype": "bfloat16",
    "query_pre_attn_scalar": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]
    args: tuple[str, ...] = ()
    mib: int = 64
    context: int = 4096
    exact: bool = True
    """False: the prediction is a lower bound, since these windows count as layers that keep every token."""
    env: dict[str, str] = field(default_factory=dict[str, str])


CASES = {
    "float32": Case(LLAMA, ("--dtype=float32",)),
    "bfloat16, one key-value head, three layers": Case(
        LLAMA | {"num_key_value_heads": 1, "num_hidden_layers": 3}, ("--dtype=bfloat16",), mib=37
    ),
    "wide heads, block 32, an odd context": Case(
        LLAMA | {"head_dim": 128}, ("--dtype=bfloat16", "--block-size=32"), mib=21, context=1000
    ),
    "windows in a pool of their own": Case(GPT_OSS, ("--dtype=bfloat16",), context=4096),
    "windows that count in full": Case(GEMMA3, ("--dtype=bfloat16",), exact=False),
}


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
    held = int(said["kv_cache_size_tokens"]) - int(said["block_size"])
    if case.exact:
        assert predicted.kv_tokens == held, said
    else:
        assert 0 < (predicted.kv_tokens or 0) <= held, said
