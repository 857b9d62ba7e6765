"""What vLLM's arguments mean for its memory."""

from typing import Any

import pytest

from shoal.api.model import Sizing
from shoal.core.architectures import facts_of
from shoal.core.sizing import GPU, AdapterSlots, Sized, VLLMTuning, size
from shoal.engine.vllm.launch import MAX_RUNNING, quantization_args
from shoal.engine.vllm.tuning import tuning_of
from tests.support.model_configs import ALL

GI = 2**30


@pytest.mark.parametrize(
    ("args", "changes"),
    [
        ([], {}),
        (["--gpu-memory-utilization=0.8"], {"gpu_memory_utilization": 0.8}),
        (["--gpu-memory-utilization=lots"], {}),
        (["--gpu-memory-utilization=nan"], {}),
        (["--kv-cache-memory-bytes=4G"], {"kv_cache_memory_bytes": 4 * GI}),
        (["--kv-cache-memory-bytes=1g"], {"kv_cache_memory_bytes": 10**9}),
        (["--kv-cache-dtype=fp8"], {"kv_cache_dtype": "fp8"}),
        (["--kv-cache-dtype=auto", "--dtype=auto"], {}),
        (["--dtype=float32"], {"dtype": "float32"}),
        (["--max-num-seqs=64"], {"max_running_requests": 64}),
        (["--max-num-batched-tokens=16k"], {"max_num_batched_tokens": 16000}),
        (["--block-size=32"], {"block_size": 32}),
        (["--num-gpu-blocks-override=512"], {"num_gpu_blocks_override": 512}),
        (["--enforce-eager"], {"graphs": False}),
        (["--enforce-eager", "--no-enforce-eager"], {}),
        (["--no-enable-chunked-prefill"], {"chunked_prefill": False}),
        (["--no-enable-prefix-caching"], {"prefix_cache": False}),
        (["--disable-hybrid-kv-cache-manager"], {"windows": False}),
        (["--enable-expert-parallel"], {"spread_experts": True}),
        (["--cpu-offload-gb=1.5"], {"cpu_offload_bytes": 3 * GI // 2}),
        (["--language-model-only"], {"multimodal": False}),
        (["--quantization=fp8"], {"quantization": "fp8"}),
        (['--hf-overrides={"rope_scaling": {}}'], {"longer_context": True}),
        (["--hf-overrides.rope_theta=1"], {"longer_context": True}),
        (['--speculative-config={"method": "eagle3", "model": "x"}'], {"draft": "eagle3", "speculates": True}),
        (['--speculative-config={"model": "x"}'], {"draft": "draft", "speculates": True}),
        (["--speculative-config.method=mtp"], {"draft": "mtp", "speculates": True}),
        (['--speculative-config={"method": "ngram"}'], {"speculates": True}),
        (["--speculative-config=nonsense"], {"draft": "draft", "speculates": True}),
        (["--enable-lora"], {"adapters": AdapterSlots(1, 16, ())}),
        (
            ["--enable-lora", "--max-loras=4", "--max-lora-rank=64", "--lora-target-modules", "q_proj", "k_proj"],
            {"adapters": AdapterSlots(4, 64, ("q_proj", "k_proj"))},
        ),
        (["--max-loras=4"], {}),
    ],
)
def test_arguments(args: list[str], changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"max_running_requests": MAX_RUNNING} | changes
    assert tuning_of(args) == VLLMTuning(**given)


def test_the_models_own_arguments_win_over_the_platforms() -> None:
    platform = ("--max-num-seqs", "16", "--block-size=128")
    found = tuning_of(["--max-num-seqs=4"], platform_args=platform)
    assert found == VLLMTuning(max_running_requests=4, block_size=128)


def test_the_environment() -> None:
    assert tuning_of([], env={"VLLM_TARGET_DEVICE": "cpu"}).device == "cpu"
    on_cpu = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "2"}
    assert tuning_of([], env=on_cpu).kv_cache_memory_bytes == 2 * GI
    assert tuning_of([], env={"VLLM_CPU_KVCACHE_SPACE": "2"}).kv_cache_memory_bytes is None, "of engines on CPUs only"
    assert tuning_of([], env=on_cpu | {"VLLM_CPU_KVCACHE_SPACE": "9" * 30}).kv_cache_memory_bytes is None
    assert tuning_of([], env={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}).longer_context
    assert not tuning_of([], env={"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"}).graphs_counted


def test_a_variants_quantization() -> None:
    assert quantization_args("FP8") == ("--quantization=fp8_per_tensor",)
    assert tuning_of([], quantization="FP8").quantization == "fp8_per_tensor"
    stored = facts_of(ALL["deepseek-v3"], source="x", weight_bytes=640 * 2**30)
    assert stored.quantization == "fp8"
    assert quantization_args("FP8", stored) == ("--quantization=fp8",), "vLLM refuses another name than the weights'"
    assert tuning_of([], quantization="FP8", facts=stored).quantization == "fp8"
    assert tuning_of([]).quantization is None


@pytest.mark.parametrize("name", ["gemma3-4b", "llama4-scout", "qwen2.5-vl-7b"])
def test_room_for_images_is_kept_for_each_model_that_reads_them(name: str) -> None:
    facts = facts_of(ALL[name], source="x", parameters=4 * 10**9, weight_bytes=8 * GI)
    held: list[int | None] = []
    for args in ([], ["--language-model-only"]):
        found = size(
            facts, GPU("a", 80 * GI), tensor=1, context_length=4096, overrides=Sizing(),
            tuning=tuning_of(args, facts=facts),
        )  # fmt: skip
        assert isinstance(found, Sized), found
        assert (found.breakdown.images > GI) == (not args)
        held.append(found.kv_tokens)
    assert held[0] is not None
    assert held[1] is not None
    assert held[0] < held[1]
