"""What the engine's arguments mean for its memory."""

from typing import Any

import pytest

from shoal.core.sizing import SGLangTuning
from shoal.engine.sglang.tuning import quantization_args, tuning_of


@pytest.mark.parametrize(
    ("args", "changes"),
    [
        ([], {}),
        (["--mem-fraction-static=0.7"], {"mem_fraction_static": 0.7}),
        (["--kv-cache-dtype=fp8_e4m3"], {"kv_cache_dtype": "fp8_e4m3"}),
        (["--kv-cache-dtype=auto", "--dtype=auto"], {}),
        (["--chunked-prefill-size=-1"], {"chunked_prefill_size": -1}),
        (["--max-total-tokens=25.6k"], {"max_total_tokens": 25600}),
        (["--max-total-tokens=1Ki"], {"max_total_tokens": 1024}),
        (["--attention-data-parallel-size=4"], {"attention_dp": 4}),
        (["--ep=8"], {"expert_parallel": 8}),
        (["--cpu-offload-gb=2"], {"cpu_offload_bytes": 2 * 2**30}),
        (["--disable-cuda-graph"], {"decode_graphs": False, "prefill_graphs": False}),
        (["--disable-cuda-graph", "--cuda-graph-backend-decode=full"], {"prefill_graphs": False}),
        (["--cuda-graph-max-bs-decode=16"], {"cuda_graph_max_bs": 16}),
        (["--cuda-graph-bs-decode", "1", "2", "64"], {"cuda_graph_max_bs": 64}),
        (['--cuda-graph-config={"decode": {"max_bs": 8}}'], {"cuda_graph_max_bs": 8}),
        (['--cuda-graph-config={"prefill": {"backend": "disabled"}}'], {"prefill_graphs": False}),
        (["--disable-radix-cache", "--disable-hybrid-swa-memory"], {"radix_cache": False, "windows": False}),
        (["--language-model-only"], {"multimodal": False}),
        (["--enable-multimodal"], {"multimodal": True}),
        (["--speculative-algorithm=EAGLE3"], {"draft": "EAGLE3", "speculates": True}),
        (["--speculative-algorithm=NGRAM"], {"speculates": True}),
        (["--json-model-override-args={}"], {"longer_context": True}),
        (["--mem-fraction-static=lots", "--page-size=big"], {}),
        (["--cuda-graph-config=nonsense"], {}),
    ],
)
def test_arguments(args: list[str], changes: dict[str, Any]) -> None:
    assert tuning_of(args) == SGLangTuning(**changes)


def test_the_models_own_arguments_win_over_the_platforms() -> None:
    platform = ("--device", "cpu", "--max-running-requests=4")
    found = tuning_of(["--max-running-requests=16"], platform_args=platform)
    assert found == SGLangTuning(device="cpu", max_running_requests=16)


def test_a_variants_quantization() -> None:
    assert quantization_args("FP8") == ("--quantization=fp8",)
    assert quantization_args(None) == ()
    assert tuning_of([], quantization="FP8").quantization == "fp8"
    assert tuning_of(["--quantization=unquant"]).quantization is None


def test_a_longer_context_is_allowed_through_the_environment() -> None:
    name = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
    assert tuning_of([], env={name: "1"}).longer_context
    assert not tuning_of([], env={name: "0"}).longer_context
