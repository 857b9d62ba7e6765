"""Parameters of a model and bytes of its tensors, counted from the shapes in its config.json: layer by layer, as the
models' own code makes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Count:
    parameters: int
    """Numbers of the model, each counted once, however it is packed."""
    bytes: int


def count(config: Mapping[str, Any]) -> Count:
    """Raises KeyError for an architecture whose layers are not described here."""
    architecture = config["architectures"][0]
    if architecture == "GptOssForCausalLM":
        return _gpt_oss(config)
    if architecture == "DeepseekV3ForCausalLM":
        return _deepseek(config)
    numbers = {
        "Qwen2_5_VLForConditionalGeneration": lambda c: _decoder(c) + _qwen_vision(c["vision_config"]),
        "WhisperForConditionalGeneration": _whisper,
        "XLMRobertaModel": lambda c: _xlm_roberta(c) + _linear(c["hidden_size"], c["hidden_size"]),
        "XLMRobertaForSequenceClassification": lambda c: (
            _xlm_roberta(c) + _linear(c["hidden_size"], c["hidden_size"]) + _linear(c["hidden_size"], 1)
        ),
        # The embedding models' decoder has no output layer.
        "MistralModel": lambda c: _decoder(c) - c["vocab_size"] * c["hidden_size"],
    }.get(architecture, _decoder)(config)
    return Count(numbers, numbers * {"float32": 4, "float16": 2, "bfloat16": 2}[config["torch_dtype"]])


def _linear(inputs: int, outputs: int, *, bias: bool = True) -> int:
    return inputs * outputs + (outputs if bias else 0)


_NORMS = {"Gemma2ForCausalLM": 4}
_QKV_BIAS = {"Qwen2ForCausalLM", "Qwen2_5_VLForConditionalGeneration"}
_QK_NORM = {"Qwen3ForCausalLM", "Qwen3MoeForCausalLM"}
_TIED = {"Gemma2ForCausalLM"}
_DECODERS = {
    "Gemma2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "MistralModel", "MixtralForCausalLM",
    "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
}  # fmt: skip


def _decoder(config: Mapping[str, Any]) -> int:
    """Llama and its relatives, with one feed-forward block or with experts."""
    name, hidden = config["architectures"][0], config["hidden_size"]
    if name not in _DECODERS:
        raise KeyError(name)
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    bias = name in _QKV_BIAS
    attention = _linear(hidden, query, bias=bias) + 2 * _linear(hidden, key, bias=bias) + query * hidden
    attention += 2 * dim if name in _QK_NORM else 0
    experts = config.get("num_experts") or config.get("num_local_experts")
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    block = 3 * hidden * width
    feed_forward = experts * (block + hidden) if experts else block
    layer = attention + feed_forward + _NORMS.get(name, 2) * hidden
    tied = config.get("tie_word_embeddings") or name in _TIED
    return config["num_hidden_layers"] * layer + config["vocab_size"] * hidden * (1 if tied else 2) + hidden


def _qwen_vision(vision: Mapping[str, Any]) -> int:
    hidden, width, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    patches = hidden * vision["in_chans"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    attention = _linear(hidden, 3 * hidden) + _linear(hidden, hidden)
    block = 2 * hidden + attention + 2 * _linear(hidden, width) + _linear(width, hidden)
    merged = hidden * vision["spatial_merge_size"] ** 2
    return patches + vision["depth"] * block + hidden + _linear(merged, merged) + _linear(merged, out)


def _xlm_roberta(config: Mapping[str, Any]) -> int:
    hidden, width = config["hidden_size"], config["intermediate_size"]
    tables = config["vocab_size"] + config["max_position_embeddings"] + config["type_vocab_size"]
    layer = 4 * _linear(hidden, hidden) + _linear(hidden, width) + _linear(width, hidden) + 4 * hidden
    return tables * hidden + 2 * hidden + config["num_hidden_layers"] * layer


def _whisper(config: Mapping[str, Any]) -> int:
    hidden = config["d_model"]
    attention = 4 * hidden * hidden + 3 * hidden  # keys have no bias

    def layer(attentions: int, width: int) -> int:
        return attentions * (attention + 2 * hidden) + _linear(hidden, width) + _linear(width, hidden) + 2 * hidden

    convolutions = _linear(3 * config["num_mel_bins"], hidden) + _linear(3 * hidden, hidden)
    encoder = convolutions + config["max_source_positions"] * hidden + 2 * hidden
    encoder += config["encoder_layers"] * layer(1, config["encoder_ffn_dim"])
    decoder = (config["vocab_size"] + config["max_target_positions"]) * hidden + 2 * hidden
    return encoder + decoder + config["decoder_layers"] * layer(2, config["decoder_ffn_dim"])


def _gpt_oss(config: Mapping[str, Any]) -> Count:
    """Experts have 4 bits, with a scale of one byte for 32 numbers; the rest has 16 bits."""
    hidden, width, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    query, key = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    attention = _linear(hidden, query) + 2 * _linear(hidden, key) + _linear(query, hidden)
    sinks = config["num_attention_heads"]
    plain = attention + sinks + _linear(hidden, experts) + experts * (2 * width + hidden) + 2 * hidden
    packed = experts * (2 * width * hidden + hidden * width)
    layers, rest = config["num_hidden_layers"], 2 * config["vocab_size"] * hidden + hidden
    return Count(layers * (plain + packed) + rest, 2 * (layers * plain + rest) + layers * packed * 17 // 32)


def _deepseek(config: Mapping[str, Any]) -> Count:
    """8-bit blocks of 128 x 128 numbers with a scale of 4 bytes each. The scales are tensors, and count as numbers. The
    layer for speculative decoding has embeddings and an output layer of its own."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    numbers, size = 0, 0

    def add(count: int, width: int) -> None:
        nonlocal numbers, size
        numbers, size = numbers + count, size + count * width

    def blocks(outputs: int, inputs: int, times: int = 1) -> None:
        add(times * outputs * inputs, 1)
        add(times * -(-outputs // 128) * -(-inputs // 128), 4)

    def block(width: int, times: int = 1) -> None:
        blocks(width, hidden, 2 * times)
        blocks(hidden, width, times)

    def layer(*, dense: bool) -> None:
        blocks(q_rank, hidden)
        blocks(heads * (nope + rope), q_rank)
        blocks(kv_rank + rope, hidden)
        blocks(heads * (nope + value), kv_rank)
        blocks(hidden, heads * value)
        add(q_rank + kv_rank + 2 * hidden, 2)
        if dense:
            return block(config["intermediate_size"])
        experts = config["n_routed_experts"]
        block(config["moe_intermediate_size"], experts + config["n_shared_experts"])
        add(experts * hidden, 2)
        return add(experts, 4)

    for number in range(config["num_hidden_layers"]):
        layer(dense=number < config["first_k_dense_replace"])
    for _ in range(config["num_nextn_predict_layers"]):
        layer(dense=False)
        add(2 * hidden * hidden + 3 * hidden + 2 * config["vocab_size"] * hidden, 2)
    add(2 * config["vocab_size"] * hidden + hidden, 2)
    return Count(numbers, size)
