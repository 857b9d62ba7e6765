"""What fits where by vLLM's arithmetic: whole blocks, its share of the memory, and estimates that err to one side."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.api import reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Sizing
from shoal.core.architectures import facts_of
from shoal.core.sizing import GPU, AdapterSlots, Misfit, SGLangTuning, Sized, VLLMTuning, implied_overhead, size
from shoal.core.sizing.units import RESERVED
from tests.support import model_configs as configs

MI, GI = 2**20, 2**30
L4, H100, B200 = 23034, 81559, 183359
"""MiB, as nvidia-smi says."""
CPU = {"device": "cpu"}
CATALOGUE = Path(__file__).resolve().parents[3] / "examples" / "catalogue"


def gpu(mib: int = H100, nodes: int | None = 8, **more: Any) -> GPU:
    return GPU("a", mib * MI, largest_node=nodes, **more)


def ask(config: dict[str, Any], on: GPU, tuning: VLLMTuning | None = None, **asked: Any) -> Sized | Misfit:
    known = {name: asked.pop(name) for name in ("parameters", "weight_bytes") if name in asked}
    found = facts_of(config, source="hf://team/model", **known)
    given: dict[str, Any] = {"tensor": None, "context_length": None, "overrides": Sizing()} | asked
    return size(found, on, tuning=tuning or VLLMTuning(), **given)


def sized(*given: Any, **asked: Any) -> Sized:
    found = ask(*given, **asked)
    assert isinstance(found, Sized), found
    return found


def misfit(*given: Any, **asked: Any) -> Misfit:
    found = ask(*given, **asked)
    assert isinstance(found, Misfit), found
    return found


TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 4096, "torch_dtype": "float32",
}  # fmt: skip

# What vLLM 0.32.0 said on a CPU: changes of the config, its arguments, context, and the label `kv_cache_size_tokens`
# of its `vllm:cache_config_info`. One block of it is never used.
RECORDED: list[tuple[dict[str, Any], dict[str, Any], int, int, int]] = [
    ({}, {"dtype": "float32", "kv_cache_memory_bytes": 64 * MI}, 4096, 65_536, 128),
    ({"head_dim": 16}, {"dtype": "bfloat16", "kv_cache_memory_bytes": GI}, 4096, 4_194_304, 128),
]


@pytest.mark.parametrize(("changes", "given", "context", "tokens", "block"), RECORDED)
def test_the_cache_of_a_given_size_is_the_engines_own_to_the_token(
    changes: dict[str, Any], given: dict[str, Any], context: int, tokens: int, block: int
) -> None:
    found = sized(TINY | changes, gpu(), VLLMTuning(**CPU, **given), context_length=context)
    assert found.kv_tokens == tokens - block


def test_a_token_takes_as_much_as_with_sglang() -> None:
    known = facts_of(configs.LLAMA_8B, source="x", weight_bytes=15 * GI)
    asked: dict[str, Any] = {"tensor": 1, "context_length": 4096, "overrides": Sizing()}
    both = [size(known, gpu(), tuning=t, **asked) for t in (SGLangTuning(), VLLMTuning())]
    assert {s.kv_bytes_per_token for s in both if isinstance(s, Sized)} == {131_072}


def test_the_parts_add_up_and_the_estimates_are_named() -> None:
    found = sized(configs.LLAMA_8B, gpu(), weight_bytes=15 * GI, tensor=1)
    s = found.breakdown
    parts = s.overhead + s.reserve + s.weights + s.images + s.state + s.adapters + s.activations + s.graphs + s.kv
    assert parts == s.memory
    # vLLM takes its share of what CUDA shows, which is without the driver's own.
    assert s.kv + s.weights + s.activations + s.graphs == pytest.approx(0.92 * (s.memory - RESERVED), abs=2)
    assert found.estimates == ("overhead", "activations", "graphs")
    measured = sized(configs.LLAMA_8B, gpu(overhead_bytes=GI), weight_bytes=15 * GI, tensor=1)
    assert measured.estimates == ("activations", "graphs")
    assert found.max_requests == 1024


def test_whole_blocks_and_one_of_them_is_never_used() -> None:
    one_request = VLLMTuning(kv_cache_memory_bytes=131_072 * 4096)
    assert misfit(configs.LLAMA_8B, gpu(), one_request, weight_bytes=15 * GI, context_length=4096, tensor=1).why == (
        f"--kv-cache-memory-bytes {131_072 * 4096} is less than one request of 4096 tokens needs"
    )
    and_a_block = VLLMTuning(kv_cache_memory_bytes=131_072 * (4096 + 16 + 15))
    found = sized(configs.LLAMA_8B, gpu(), and_a_block, weight_bytes=15 * GI, context_length=4096)
    assert found.kv_tokens == 4096


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ({"gpu_memory_utilization": 0.95}, True),
        ({"gpu_memory_utilization": 0.5}, False),
        ({"max_num_batched_tokens": 65_536}, False),
        ({"max_running_requests": 64}, True),
        ({"graphs": False}, True),
        ({"graphs_counted": False}, True),
        ({"kv_cache_dtype": "fp8"}, True),
        ({"quantization": "fp8"}, True),
        ({"adapters": AdapterSlots(8, 64, ())}, False),
    ],
)
def test_what_an_argument_does_to_the_cache(given: dict[str, Any], more: bool) -> None:
    plain, other = (
        sized(configs.LLAMA_8B, gpu(), VLLMTuning(**g), parameters=8_030_261_248, context_length=4096).kv_tokens or 0
        for g in ({}, given)
    )
    assert (other > plain) == more
    assert other != plain


H200 = 143771
MEASURED: list[tuple[str, dict[str, Any], int]] = [
    ("llama-3-1-8b", {}, 912_416),
    ("llama-3-1-8b", {"quantization": "fp8"}, 965_680),
    ("llama-3-1-8b", {"adapters": AdapterSlots(7, 64, ())}, 887_952),
    ("qwen2-5-0-5b", {}, 11_060_176),
    ("qwen3-30b-a3b", {}, 761_728),
]
"""`GPU KV cache size` of vLLM 0.32.0 on an H200 (driver 580), random weights, --max-num-seqs=256 and a context of 32768
(`python -m tests.bench.bench_gpu`)."""


@pytest.mark.parametrize(("name", "given", "tokens"), MEASURED)
def test_an_engine_on_a_real_gpu_holds_at_least_what_is_predicted_and_hardly_more(
    name: str, given: dict[str, Any], tokens: int
) -> None:
    manifest = yaml.safe_load((CATALOGUE / f"{name}.yaml").read_text())
    found = size(
        ArtifactFacts.model_validate(manifest["status"]["artifact"]), gpu(H200, compute_capability=(9, 0)), tensor=1,
        context_length=32768, overrides=Sizing(), tuning=VLLMTuning(max_running_requests=256, **given),
    )  # fmt: skip
    assert isinstance(found, Sized)
    assert 0.99 * tokens < (found.kv_tokens or 0) <= tokens


def test_slots_have_room_for_every_module_unless_they_are_named() -> None:
    def slots(*modules: str) -> int:
        tuning = VLLMTuning(adapters=AdapterSlots(4, 16, modules))
        return sized(configs.LLAMA_8B, gpu(), tuning, weight_bytes=15 * GI, context_length=4096).breakdown.adapters

    attention = slots("q_proj", "k_proj", "v_proj", "o_proj")
    layers = slots("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    # 4 x 16 x 2 bytes x 32 layers x (3 x 4096 + 4096 + 2 x 1024 + 4096 + 4096)
    assert attention == 4 * 16 * 2 * 32 * (3 * 4096 + 4096 + 2 * 1024 + 4096 + 4096)
    assert attention < layers < slots()


def test_a_share_that_is_not_free_at_the_start_is_refused_with_one_that_is() -> None:
    found = misfit(configs.LLAMA_8B, gpu(L4, nodes=1), VLLMTuning(gpu_memory_utilization=0.99), weight_bytes=4 * GI,
                   context_length=4096)  # fmt: skip
    assert found.reason == reasons.NO_FIT
    assert "vLLM does not start: its share is 21.68 GiB and about 21.29 GiB are free" in found.why
    assert "--gpu-memory-utilization=0.97 in extraArgs" in found.why
    lower = VLLMTuning(gpu_memory_utilization=0.97)
    assert sized(configs.LLAMA_8B, gpu(L4, nodes=1), lower, weight_bytes=4 * GI, context_length=4096)


def test_a_cache_that_is_fixed_beyond_the_memory_is_refused() -> None:
    found = misfit(configs.LLAMA_8B, gpu(L4, nodes=1), VLLMTuning(kv_cache_memory_bytes=16 * GI), weight_bytes=8 * GI,
                   context_length=4096)  # fmt: skip
    assert "more than there is" in found.why


def test_a_model_that_does_not_fit_is_told_the_sum_in_the_engines_words() -> None:
    found = misfit(configs.LLAMA_8B, gpu(L4, nodes=1), weight_bytes=16_060_522_496)
    assert found.why == (
        "on 1 GPU with 22.49 GiB, weights 14.96 GiB, activations 1.24 GiB (estimated), CUDA graphs 0.8 GiB (estimated) "
        "and what vLLM leaves free 2.35 GiB leave KV cache for 25760 tokens; one request of 131072 needs 16 GiB; no "
        "node has more than 1 GPU"
    )


def test_layers_with_windows_share_the_pool_with_the_others() -> None:
    windowed = sized(configs.ALL["gpt-oss-20b"], gpu(), weight_bytes=13 * GI, context_length=131_072)
    all_full = sized(configs.ALL["gpt-oss-20b"], gpu(), VLLMTuning(windows=False), weight_bytes=13 * GI,
                     context_length=131_072)  # fmt: skip
    # Half of the layers keep 128 tokens and the batches under way (2 x 8192) instead of 131072.
    gain = 131_072 * 2 / (131_072 + 16_511)
    assert (windowed.kv_tokens or 0) / (all_full.kv_tokens or 1) == pytest.approx(gain, 0.01)


def test_the_engines_own_name_of_the_argument_is_told() -> None:
    found = misfit(configs.ALL["qwen2.5-7b-awq"], gpu(), weight_bytes=6 * GI, context_length=131_072)
    assert "vLLM does not start with it; set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in found.why


def test_an_engines_figure_says_nothing_of_its_class() -> None:
    found = sized(configs.LLAMA_8B, gpu(), weight_bytes=15 * GI, context_length=4096)
    assert implied_overhead(gpu(), found, (found.kv_tokens or 0) + 50_000, VLLMTuning()) is None


def test_weights_that_vllm_does_not_read_are_refused() -> None:
    config = configs.LLAMA_8B | {"quantization_config": {"quant_method": "bitsandbytes"}}
    assert misfit(config, gpu(), weight_bytes=6 * GI).why == "vLLM does not read bitsandbytes weights"


def test_a_hybrid_model_takes_blocks_as_large_as_a_state() -> None:
    config = configs.ALL["qwen3-next-80b"]
    found = sized(config, gpu(B200, nodes=1), VLLMTuning(kv_cache_memory_bytes=4 * GI), weight_bytes=150 * GI,
                  context_length=32_768)  # fmt: skip
    # 12 layers keep tokens, 2 KiB of each, and 36 a state: groups of 12 layers. A request takes its tokens' blocks
    # once, and with the prefix cache two blocks of states in each of three groups.
    state = (facts_of(config, source="x").kv.state_bytes_per_request or 0) // 36
    block = -(-state // (2048 * 16)) * 16
    blocks = 4 * GI // (12 * block * 2048)
    assert found.kv_tokens == blocks * 32_768 // (-(-32_768 // block) + 6) - block


@pytest.mark.parametrize("name", ["nemotron-h-8b", "falcon-h1-7b", "kimi-linear"])
def test_states_whose_layout_is_not_known_are_said_to_be_unknown(name: str) -> None:
    found = misfit(configs.ALL[name], gpu(), weight_bytes=16 * GI, context_length=4096)
    assert found.reason == reasons.SIZE_UNKNOWN
    assert "say in `sizing.kvBytesPerToken`" in found.why
    given = Sizing.model_validate({"kvBytesPerToken": 100_000})
    assert sized(configs.ALL[name], gpu(), weight_bytes=16 * GI, context_length=4096, overrides=given).kv_tokens
