"""What fits where, by SGLang's arithmetic, and what a person is told when it does not."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.api import reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Sizing
from shoal.core.architectures import facts_of
from shoal.core.sizing import GPU, AdapterSlots, Misfit, SGLangTuning, Sized, Tuning, size
from tests.support import model_configs as configs

MI, GI = 2**20, 2**30
L40S, H100, H200, L4 = 46068, 81559, 143771, 23034
"""MiB, as nvidia-smi says."""
CATALOGUE = Path(__file__).resolve().parents[3] / "examples" / "catalogue"
LLAMA_70B_PARAMETERS = 70_553_706_496


def facts(config: dict[str, Any], **more: Any) -> ArtifactFacts:
    return facts_of(config, source="hf://team/model", **more)


def gpu(mib: int = H100, nodes: int | None = 8, **more: Any) -> GPU:
    return GPU("a", mib * MI, largest_node=nodes, **more)


def sized(found: ArtifactFacts | None, on: GPU, **asked: Any) -> Sized:
    result = ask(found, on, **asked)
    assert isinstance(result, Sized), result
    return result


def misfit(found: ArtifactFacts | None, on: GPU, **asked: Any) -> Misfit:
    result = ask(found, on, **asked)
    assert isinstance(result, Misfit), result
    return result


def ask(found: ArtifactFacts | None, on: GPU, **asked: Any) -> Sized | Misfit:
    defaults: dict[str, Any] = {"tensor": None, "context_length": None, "overrides": Sizing(), "tuning": SGLangTuning()}
    return size(found, on, **(defaults | asked))


# Worked examples of a reading of SGLang 0.5.23's source. GiB of weights per GPU, GPUs, fraction, cell, KV tokens.
WORKED = [
    ("llama-8b", L40S, 14.96, 1, SGLangTuning(), 0.843, 131_072, 184_000),
    ("llama-70b", H100, 32.85, 4, SGLangTuning(), 0.819, 81_920, 411_000),
    ("llama-70b", H100, 32.85, 4, SGLangTuning(kv_cache_dtype="fp8_e4m3"), 0.819, 40_960, 823_000),
    ("qwen3-32b-fp8", H100, 31.9, 1, SGLangTuning(), 0.830, 262_144, 138_000),
    ("deepseek-v3", H200, 79, 8, SGLangTuning(), 0.886, 70_272, 673_000),
    ("deepseek-v3", H200, 79, 8, SGLangTuning(kv_cache_dtype="fp8_e4m3"), 0.886, 35_136, 1_347_000),
    ("qwen2.5-7b-awq", L4, 5.2, 1, SGLangTuning(), 0.684, 57_344, 183_000),
    (
        "qwen2.5-7b-awq",
        L4,
        5.2,
        1,
        SGLangTuning(chunked_prefill_size=2048, cuda_graph_max_bs=32),
        0.821,
        57_344,
        239_000,
    ),
]


@pytest.mark.parametrize(("name", "mib", "weights", "gpus", "tuning", "fraction", "cell", "tokens"), WORKED)
def test_worked_examples(
    name: str, mib: int, weights: float, gpus: int, tuning: Tuning, fraction: float, cell: int, tokens: int
) -> None:
    found = facts(configs.ALL[name], weight_bytes=int(weights * gpus * GI))
    # The published figures were worked out with 0.6 GiB in use before the engine.
    result = sized(found, gpu(mib, overhead_bytes=6 * GI // 10), tensor=gpus, tuning=tuning)
    assert result.breakdown.fraction == pytest.approx(fraction, abs=5e-4)
    assert result.kv_bytes_per_token == cell
    assert result.kv_tokens == pytest.approx(tokens, rel=3e-3)


def test_the_smallest_number_of_gpus_that_fits_is_taken() -> None:
    llama = facts(configs.LLAMA_70B, parameters=LLAMA_70B_PARAMETERS, weight_bytes=2 * LLAMA_70B_PARAMETERS)
    assert [sized(llama, gpu(mib)).gpus for mib in (H200, H100, L40S)] == [2, 4, 8]


def test_a_model_that_fits_nowhere_is_told_the_sum() -> None:
    llama = facts(configs.LLAMA_70B, parameters=LLAMA_70B_PARAMETERS, weight_bytes=2 * LLAMA_70B_PARAMETERS)
    assert misfit(llama, gpu(L40S, nodes=2)) == Misfit(
        reasons.NO_FIT,
        "on 2 GPUs with 44.99 GiB each, weights need 65.71 GiB; no node has more than 2 GPUs",
    )
    assert misfit(llama, gpu(L4)) == Misfit(
        reasons.NO_FIT,
        "on 8 GPUs with 22.49 GiB each, weights 16.43 GiB, SGLang's reserve 7.44 GiB and the driver's 2.1 GiB leave "
        "nothing for the KV cache; no node has more than 8 GPUs",
    )


def test_a_context_that_the_cache_cannot_hold_is_told_with_what_it_needs() -> None:
    llama = facts(configs.LLAMA_8B, weight_bytes=16_060_522_496)
    found = misfit(llama, gpu(L4, nodes=1, overhead_bytes=6 * GI // 10), context_length=32768)
    assert found == Misfit(
        reasons.NO_FIT,
        "on 1 GPU with 22.49 GiB, weights 14.96 GiB, SGLang's reserve 6.92 GiB and the driver's 0.6 GiB leave KV cache "
        "for 147 tokens; one request of 32768 needs 4 GiB; no node has more than 1 GPU",
    )
    assert sized(llama, gpu(L4, nodes=1), context_length=4096, tuning=SGLangTuning(mem_fraction_static=0.9)).gpus == 1


def test_a_smaller_context_fits_where_the_configs_does_not() -> None:
    llama = facts(configs.LLAMA_8B, weight_bytes=16_060_522_496)
    one = gpu(L4, nodes=1)
    tuned = SGLangTuning(chunked_prefill_size=2048, cuda_graph_max_bs=8)
    too_long = misfit(llama, one, tuning=tuned)
    assert "one request of 131072 needs 16 GiB" in too_long.why
    assert sized(llama, one, context_length=16384, tuning=tuned).context_length == 16384


def test_a_context_longer_than_the_config_allows_is_refused_as_the_engine_would() -> None:
    qwen = facts(configs.QWEN25_7B_AWQ, weight_bytes=6 * GI)
    found = misfit(qwen, gpu(), context_length=131072)
    assert found.reason == reasons.INVALID
    assert "contextLength 131072 is more than the 32768 tokens that the model's config allows" in found.why
    assert "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1" in found.why
    assert sized(qwen, gpu(), context_length=131072, tuning=SGLangTuning(longer_context=True)).context_length == 131072


def test_a_number_of_gpus_that_was_asked_for() -> None:
    qwen = facts(configs.QWEN25_7B_AWQ, weight_bytes=6 * GI)  # 28 heads, 4 of them key-value; widths of 148 groups
    assert sized(qwen, gpu(), tensor=4).gpus == 4
    three = misfit(qwen, gpu(), tensor=3)
    assert (three.reason, three.why) == (
        reasons.INVALID,
        "`tensor` is 3: 28 attention heads do not divide over 3 GPUs; it can be 1, 2, 4",
    )
    assert "4 key-value heads neither divide over 7 GPUs nor repeat on them" in misfit(qwen, gpu(), tensor=7).why
    assert misfit(qwen, gpu(nodes=2), tensor=4) == Misfit(
        reasons.NO_FIT, "`tensor` is 4, and the largest node has 2 GPUs: a replica is on one node"
    )


def test_blocks_of_a_quantization_are_not_cut() -> None:
    moe = facts(configs.QWEN3_235B_FP8, weight_bytes=236 * GI)
    whole = misfit(moe, gpu(H200), tensor=8)
    assert whole.reason == reasons.INVALID
    assert "an expert's width divides over 12 at most, not over 8 GPUs; --ep-size would spread whole" in whole.why
    assert sized(moe, gpu(H200), tensor=8, tuning=SGLangTuning(expert_parallel=8)).gpus == 8
    assert [sized(moe, gpu(mib)).gpus for mib in (H200, H100)] == [2, 4]
    assert "it would take" not in misfit(moe, gpu(L40S)).why


@pytest.mark.parametrize(
    ("quantization", "capability", "needs"),
    [("fp8", (7, 5), "8.0"), ("awq", (7, 0), "7.5"), ("modelopt_fp8", (8, 0), "8.9"), ("mxfp8", (9, 0), "10.0")],
)
def test_a_quantization_that_the_gpus_cannot_run(quantization: str, capability: tuple[int, int], needs: str) -> None:
    table = {"quant_method": "modelopt", "quant_algo": "FP8"} if "modelopt" in quantization else {}
    found = facts(configs.LLAMA_8B | {"quantization_config": {"quant_method": quantization} | table}, weight_bytes=GI)
    has = ".".join(map(str, capability))
    assert misfit(found, gpu(compute_capability=capability)) == Misfit(
        reasons.NO_FIT, f"{quantization} weights need compute capability {needs}, this class has {has}"
    )
    assert sized(found, gpu(compute_capability=(12, 0)), context_length=8192)
    # Not known is not too small.
    assert sized(found, gpu(), context_length=8192)


def test_quantizing_while_loading_halves_all_but_the_embeddings_and_needs_the_whole_first() -> None:
    llama = facts(configs.LLAMA_8B, parameters=8_030_261_248, weight_bytes=16_060_522_496)
    plain, small = (sized(llama, gpu(), tuning=SGLangTuning(quantization=q)) for q in (None, "fp8"))
    embeddings = 2 * 128256 * 4096 * 2
    assert plain.weight_bytes_per_gpu == 16_060_522_496
    assert small.weight_bytes_per_gpu == embeddings + (16_060_522_496 - embeddings) // 2
    assert small.peak_bytes_per_gpu == plain.weight_bytes_per_gpu
    big = facts(configs.LLAMA_70B, parameters=LLAMA_70B_PARAMETERS, weight_bytes=2 * LLAMA_70B_PARAMETERS)
    # Quantized they would leave room for a cache on 128 GiB; they do not get there.
    refused = misfit(big, gpu(128 * 1024, nodes=1), context_length=1024, tuning=SGLangTuning(quantization="fp8"))
    assert refused.why == (
        "on 1 GPU with 128 GiB, weights need 131 GiB while they are loaded; no node has more than 1 GPU"
    )
    assert sized(big, gpu(H200, nodes=1), context_length=1024, tuning=SGLangTuning(quantization="fp8")).gpus == 1


def test_a_checkpoint_that_is_quantized_already_is_not_quantized_again() -> None:
    awq = facts(configs.QWEN25_7B_AWQ, weight_bytes=6 * GI)
    found = misfit(awq, gpu(), tuning=SGLangTuning(quantization="fp8"))
    assert (found.reason, found.why.split(":")[0]) == (
        reasons.INVALID,
        "the checkpoint is quantized with awq already",
    )
    same = facts(configs.QWEN3_32B_FP8, weight_bytes=33 * GI)
    fp8, plain = (sized(same, gpu(), tuning=SGLangTuning(quantization=q)) for q in ("fp8", None))
    assert fp8.kv_tokens == plain.kv_tokens


def test_float32_weights_run_in_sixteen_bits_unless_asked() -> None:
    found = facts(configs.BGE_M3, parameters=567_754_752, weight_bytes=4 * 567_754_752)
    assert sized(found, gpu(L4)).weight_bytes_per_gpu == 2 * 567_754_752
    whole = sized(found, gpu(L4), tuning=SGLangTuning(dtype="float32"))
    assert (whole.weight_bytes_per_gpu, whole.kv_bytes_per_token) == (4 * 567_754_752, 2 * 98304)


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        (None, "nothing is known of its weights yet"),
        (facts(configs.LLAMA_8B), "say it in `sizing.weightBytes`"),
        (
            facts({"architectures": ["NewForCausalLM"]}, weight_bytes=GI),
            "of NewForCausalLM takes in the KV cache is not",
        ),
    ],
)
def test_what_is_not_known_is_asked_for(found: ArtifactFacts | None, missing: str) -> None:
    answer = misfit(found, gpu())
    assert answer.reason == reasons.SIZE_UNKNOWN
    assert missing in answer.why


def test_numbers_of_ones_own_win() -> None:
    own = Sizing(weight_bytes="15Gi", kv_bytes_per_token=100_000)
    for found in (None, facts({"architectures": ["NewForCausalLM"]}), facts(configs.LLAMA_8B, weight_bytes=900 * GI)):
        result = sized(found, gpu(), overrides=own)
        assert (result.weight_bytes_per_gpu, result.kv_bytes_per_token) == (15 * GI, 100_000)


def test_a_draft_model_of_unknown_size_is_asked_for() -> None:
    llama = facts(configs.LLAMA_8B, weight_bytes=16 * GI)
    drafting = SGLangTuning(draft="EAGLE3")
    assert "EAGLE3 loads a draft model whose size is not known" in misfit(llama, gpu(), tuning=drafting).why
    half = Sizing(weight_bytes="17Gi")
    assert "`sizing.kvBytesPerToken`" in misfit(llama, gpu(), tuning=drafting, overrides=half).why
    assert sized(llama, gpu(), tuning=drafting, overrides=Sizing(weight_bytes="17Gi", kv_bytes_per_token=135_168))


def test_an_engine_on_the_cpu_fits_everywhere() -> None:
    tiny = facts(configs.LLAMA_70B, weight_bytes=140 * GI)
    on_cpu = SGLangTuning(device="cpu", max_total_tokens=20000)
    result = sized(tiny, gpu(1024), tuning=on_cpu)
    assert (result.gpus, result.kv_tokens, result.weight_bytes_per_gpu) == (1, 20000, 0)
    assert sized(tiny, gpu(1024), tuning=SGLangTuning(device="cpu")).concurrent(100) is None
    assert sized(tiny, gpu(1024), tensor=4, tuning=on_cpu).gpus == 4


def test_attention_data_parallelism_repeats_attention_and_splits_the_cache() -> None:
    v3 = facts(configs.DEEPSEEK_V3, weight_bytes=632 * GI, parameters=671_000_000_000)
    plain, split = (sized(v3, gpu(H200), tensor=8, tuning=SGLangTuning(attention_dp=n)) for n in (1, 8))
    assert plain.kv_tokens is not None
    assert split.kv_tokens is not None
    assert split.weight_bytes_per_gpu > plain.weight_bytes_per_gpu
    assert split.kv_tokens > 3 * plain.kv_tokens
    assert split.attention_groups == 8
    # A request lives in one group.
    assert split.concurrent(split.kv_tokens // 8) == 8


def test_large_gpus_keep_ten_gib_free_however_small_the_batches() -> None:
    llama = facts(configs.LLAMA_8B, weight_bytes=16 * GI)
    small = SGLangTuning(chunked_prefill_size=2048, cuda_graph_max_bs=8)
    assert sized(llama, gpu(H100), tuning=small).breakdown.fraction == round((H100 - 10 * 1024) / H100, 3)


def test_heads_that_are_fewer_than_the_gpus_are_repeated() -> None:
    two_heads = facts(configs.QWEN3_NEXT_80B, weight_bytes=152 * GI)
    cells = [sized(two_heads, gpu(H200), tensor=n).kv_bytes_per_token for n in (2, 4, 8)]
    assert cells == [12288] * 3


def test_windows_and_states() -> None:
    oss = facts(configs.GPT_OSS_20B, weight_bytes=13 * GI)
    with_windows, without = (sized(oss, gpu(L40S), tuning=SGLangTuning(windows=w)) for w in (True, False))
    assert (with_windows.kv_bytes_per_token, without.kv_bytes_per_token) == (44237, 49152)
    narrow = misfit(oss, gpu(L40S, nodes=1), context_length=100, tuning=SGLangTuning(max_total_tokens=128))
    assert "less than one window of 128 needs" in narrow.why
    hybrid = sized(facts(configs.QWEN3_NEXT_80B, weight_bytes=152 * GI), gpu(H200), tensor=2)
    assert hybrid.breakdown.state == pytest.approx(0.9 * hybrid.breakdown.kv, rel=0.02)
    # A request of any length takes a state, so short ones are limited by those.
    assert hybrid.concurrent(1) == hybrid.max_requests
    assert hybrid.max_requests is not None
    assert hybrid.max_requests < 1000


def test_image_models_leave_room_for_their_encoder() -> None:
    vl = facts(configs.QWEN25_VL_7B, weight_bytes=16 * GI)
    both, text = (sized(vl, gpu(L40S), tuning=SGLangTuning(multimodal=m)) for m in (None, False))
    assert both.breakdown.images == 100 * MI
    assert (both.kv_tokens or 0) < (text.kv_tokens or 0)


def test_max_total_tokens_bounds_the_cache() -> None:
    llama = facts(configs.LLAMA_8B, weight_bytes=16 * GI)
    assert (
        sized(llama, gpu(), context_length=4096, tuning=SGLangTuning(max_total_tokens=5000, page_size=64)).kv_tokens
        == 4992
    )
    assert misfit(llama, gpu(), context_length=8192, tuning=SGLangTuning(max_total_tokens=5000)).why == (
        "--max-total-tokens 5000 is less than one request of 8192 tokens needs"
    )


def test_the_sums_add_up() -> None:
    for name, config in configs.ALL.items():
        sums = sized(facts(config, weight_bytes=30 * GI), gpu(H200), context_length=2048).breakdown
        parts = sums.overhead + sums.reserve + sums.weights + sums.images + sums.state + sums.kv
        assert parts == sums.memory, name


def test_whisper_is_sized_with_every_attention_layer() -> None:
    whisper = facts(configs.WHISPER_TURBO, parameters=808_878_080)
    found = sized(whisper, gpu(L4))
    # Keys and values of 32 layers of the encoder, and of both kinds in 4 of the decoder: 20 heads of 64 numbers.
    assert found.kv_bytes_per_token == (32 + 2 * 4) * 2 * 20 * 64 * 2
    assert (found.gpus, found.context_length) == (1, None)
    assert (found.kv_tokens or 0) > 50_000
    assert (found.concurrent(1500 + 448) or 0) > 20
    assert sized(whisper, gpu(L4), tensor=2).kv_bytes_per_token == found.kv_bytes_per_token // 2
    assert "20 attention heads do not divide over 8 GPUs" in misfit(whisper, gpu(L4), tensor=8).why
    # A config that lacks a part is not guessed.
    lacking = {key: value for key, value in configs.WHISPER_TURBO.items() if key != "decoder_layers"}
    assert misfit(facts(lacking, parameters=808_878_080), gpu(L4)).reason == reasons.SIZE_UNKNOWN


MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MEASURED: list[tuple[str, dict[str, Any], int]] = [
    ("llama-3-1-8b", {}, 906_067),
    ("llama-3-1-8b", {"quantization": "fp8"}, 957_171),
    ("llama-3-1-8b", {"adapters": AdapterSlots(8, 64, MODULES)}, 885_363),
    ("qwen2-5-0-5b", {}, 10_890_110),
]
"""`KV Cache is allocated` of SGLang 0.5.23 on an H200 (143,771 MiB, driver 580), random weights, a context of 32768."""


@pytest.mark.parametrize(("name", "given", "tokens"), MEASURED)
def test_an_engine_on_a_real_gpu_holds_what_is_predicted(name: str, given: dict[str, Any], tokens: int) -> None:
    manifest = yaml.safe_load((CATALOGUE / f"{name}.yaml").read_text())
    found = size(
        ArtifactFacts.model_validate(manifest["status"]["artifact"]), gpu(H200, compute_capability=(9, 0)), tensor=1,
        context_length=32768, overrides=Sizing(), tuning=SGLangTuning(**given),
    )  # fmt: skip
    assert isinstance(found, Sized)
    assert abs((found.kv_tokens or 0) - tokens) < 0.005 * tokens
