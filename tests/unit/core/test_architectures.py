"""What config.json says of a model's size. The bytes are SGLang's own for these configs: a contract test asks it."""

from typing import Any

import pytest

from shoal.api.artifact import ArtifactFacts
from shoal.core.architectures import UnknownConfig, facts_of, names
from tests.support import model_configs as configs


def facts(config: dict[str, Any], **more: Any) -> ArtifactFacts:
    return facts_of(config, source="hf://team/model", **more)


@pytest.mark.parametrize(
    ("name", "kind", "per_token"),
    [
        ("llama-8b", "Full", 131072),
        ("llama-70b", "Full", 327680),
        ("gemma2-9b", "Full", 344064),  # its windows save nothing in this version of SGLang
        ("gemma3-4b", "Full", 139264),  # heads come from the defaults of its type
        ("qwen2.5-vl-7b", "Full", 57344),
        ("gpt-oss-20b", "SlidingWindow", 44237),
        ("llama4-scout", "SlidingWindow", 167117),
        ("deepseek-v3", "MLA", 70272),
        ("deepseek-v3.2", "DSA", 78324),
        ("qwen3-next-80b", "Hybrid", 24576),
        ("nemotron-h-8b", "Hybrid", 16384),
        ("lfm2-1b", "Hybrid", 12288),
        ("kimi-linear", "Hybrid", 8064),
        ("bge-m3", "Full", 98304),
    ],
)
def test_bytes_of_one_token_in_the_cache(name: str, kind: str, per_token: int) -> None:
    found = facts(configs.ALL[name])
    assert (found.kv.kind, found.kv_bytes_per_token) == (kind, per_token)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("qwen3-next-80b", 77266944),
        ("nemotron-h-8b", 102137856),
        ("falcon-h1-7b", 139358208),
        ("granite-4-small", 152819712),
        ("lfm2-1b", 81920),
        ("kimi-linear", 43417600),
    ],
)
def test_state_of_a_request_in_a_hybrid_model(name: str, state: int) -> None:
    assert facts(configs.ALL[name]).kv.state_bytes_per_request == state


@pytest.mark.parametrize(
    ("change", "context"),
    [
        ({}, 131072),  # llama3 scaling: the length is already the long one
        ({"rope_scaling": None}, 131072),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 524288),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}, "rope_scaling": None}, 262144),
        ({"max_position_embeddings": None, "seq_length": 8192, "rope_scaling": None}, 8192),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_context_length(change: dict[str, Any], context: int | None) -> None:
    assert facts(configs.LLAMA_8B | change).context_length == context


def test_the_part_of_a_multimodal_config_that_is_the_language_model_counts() -> None:
    found = facts(configs.GEMMA3_4B)
    assert (found.context_length, found.kv.layers, found.kv.kv_heads, found.kv.head_dim) == (131072, 34, 4, 256)
    assert (found.vision_layers, found.vision_width) == (27, 1152)
    # SGLang serves this one as text unless --enable-multimodal is given.
    assert not found.multimodal
    assert facts(configs.QWEN25_VL_7B).multimodal


def test_an_unknown_architecture_is_a_fact_and_no_failure() -> None:
    found = facts(
        {"architectures": ["BrandNewForCausalLM"], "hidden_size": 64, "num_attention_heads": 4}, weight_bytes=7
    )
    assert found.kv.kind == "Unknown"
    assert found.kv_bytes_per_token is None
    assert (found.architecture, found.weight_bytes, found.attention_heads) == ("BrandNewForCausalLM", 7, 4)


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_attention_heads"])
def test_a_known_architecture_without_a_shape_is_unknown_and_not_guessed(missing: str) -> None:
    config = {k: v for k, v in configs.LLAMA_8B.items() if k not in (missing, "num_key_value_heads")}
    found = facts(config)
    assert found.kv.kind == "Unknown"
    assert found.kv_bytes_per_token is None


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "it is empty|its keys are"),
        ({"peft_type": "LORA", "r": 8}, "it describes 'LORA'"),
        ({"_class_name": "StableDiffusionPipeline"}, "it describes 'StableDiffusionPipeline'"),
        ({"architectures": [], "model_type": "llama"}, "it describes 'llama'"),
        ({"architectures": "LlamaForCausalLM"}, "names no `architectures`"),
    ],
)
def test_a_config_that_is_no_models_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UnknownConfig, match=says):
        facts(config)


@pytest.mark.parametrize("junk", ["many", -3, 2.5, True, [1], {"a": 1}])
def test_junk_where_a_number_belongs_is_not_read(junk: object) -> None:
    found = facts(configs.LLAMA_8B | {"num_hidden_layers": junk, "vocab_size": junk, "max_position_embeddings": junk})
    assert found.kv.kind == "Unknown"
    assert (found.vocabulary, found.context_length, found.embedding_bytes) == (None, None, None)


@pytest.mark.parametrize(
    ("table", "method"),
    [
        (None, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "compressed_tensors"}, "compressed-tensors"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt_fp4"),
        ({"quant_algo": "FP8"}, "modelopt_fp8"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt_mixed"),
    ],
)
def test_quantization_of_a_checkpoint(table: dict[str, Any] | None, method: str | None) -> None:
    assert facts(configs.LLAMA_8B | {"quantization_config": table}).quantization == method


def test_quantization_that_only_the_tensors_tell() -> None:
    mostly = facts(configs.LLAMA_8B, tensor_dtypes={"F8_E4M3": 7_000, "BF16": 2_000})
    barely = facts(configs.LLAMA_8B, tensor_dtypes={"F8_E4M3": 1_000, "BF16": 16_000})
    assert (mostly.quantization, barely.quantization) == ("fp8", None)


def test_a_cache_type_that_the_checkpoint_asks_for_halves_the_token() -> None:
    table = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    found = facts(configs.LLAMA_8B | {"quantization_config": table})
    assert (found.kv.dtype, found.kv_bytes_per_token) == ("fp8_e4m3", 65536)


def test_embeddings_are_counted_once_when_they_are_the_output_layer_too() -> None:
    apart = facts(configs.LLAMA_8B).embedding_bytes
    assert apart == 2 * 128256 * 4096 * 2
    assert facts(configs.LLAMA_8B | {"tie_word_embeddings": True}).embedding_bytes == apart // 2


def test_experts_and_what_they_divide_over() -> None:
    mixture = facts(configs.QWEN3_235B_FP8)
    # 1536 columns are twelve blocks of 128: four GPUs share an expert, eight do not.
    assert (mixture.experts, mixture.expert_divisor, mixture.tensor_divisor) == (128, 12, None)
    assert facts(configs.LLAMA_8B).experts is None
    # Without `moe_intermediate_size` the plain width is the experts'.
    assert (facts(configs.MIXTRAL).expert_divisor, facts(configs.MIXTRAL).tensor_divisor) == (14336, None)


def test_attentions_weights_in_their_own_type() -> None:
    v3 = facts(configs.DEEPSEEK_V3, parameters=671_000_000_000, weight_bytes=672_000_000_000).attention_bytes or 0
    # 61 layers of 187 million parameters in one byte each.
    assert v3 == pytest.approx(61 * 187_107_328, rel=0.01)
    # Packed weights count as fewer parameters: never more than 16 bits each.
    packed = facts(configs.QWEN25_7B_AWQ, parameters=1_900_000_000, weight_bytes=5_600_000_000).attention_bytes or 0
    assert packed == 28 * 3584 * 128 * 2 * (28 + 4) * 2


def test_what_embeds_and_what_generates() -> None:
    assert [facts(configs.ALL[n]).task for n in ("bge-m3", "e5-mistral", "llama-8b")] == ["Embed", "Embed", "Generate"]


def test_an_architecture_is_in_one_group_only() -> None:
    groups = [names.MLA, names.WINDOWED, names.HYBRID, names.FULL]
    assert sum(map(len, groups)) == len(frozenset().union(*groups))
    assert names.DSA <= names.MLA


def test_facts_stay_small_enough_for_a_termination_message() -> None:
    largest = max(
        len(facts(c, parameters=10**12, weight_bytes=10**12, file_bytes=10**12).model_dump_json(exclude_none=True))
        for c in configs.ALL.values()
    )
    assert largest < 1500
