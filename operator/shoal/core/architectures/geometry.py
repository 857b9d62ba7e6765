"""How many bytes one token takes in the KV cache, out of a config: layers, heads, widths."""

from typing import Any

from shoal.api.artifact import KVGeometry
from shoal.core.architectures import names, state
from shoal.core.architectures.config import Config, as_mapping, whole


def geometry(config: Config) -> KVGeometry:
    """The geometry; kind Unknown for an architecture that is not known, and for one whose config lacks what it must
    say: a guess would place a model where it does not fit."""
    architecture = config.architecture
    if architecture in names.MLA or _pixtral_mla(config):
        found = _latent(config)
    elif architecture in names.WINDOWED:
        found = _windowed(config)
    elif architecture in names.HYBRID:
        found = _hybrid(config)
    elif architecture in names.FULL:
        found = _full(config)
    elif architecture in names.ENCODER_DECODER:
        found = _encoder_decoder(config)
    else:
        found = None
    if found is None:
        return _make(kind="Unknown")
    return found.model_copy(update={"dtype": _declared_dtype(config)})


def _make(**fields: Any) -> KVGeometry:
    return KVGeometry.model_validate(fields)


def _pixtral_mla(config: Config) -> bool:
    return config.architecture == "PixtralForConditionalGeneration" and config.number("kv_lora_rank") is not None


def kv_heads(config: Config) -> int | None:
    """Key-value heads of the whole model, where SGLang looks for them."""
    falcon_new = config.text.get("new_decoder_architecture") is True
    if config.text.get("multi_query") is True and not falcon_new:
        return 1
    keys = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
    return config.number(*keys) or config.number("num_attention_heads", "n_head", "n_heads")


def heads(config: Config) -> int | None:
    """Query heads."""
    return config.number("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads")


def width(config: Config) -> int | None:
    """Hidden size."""
    return config.number("hidden_size", "n_embd", "d_model")


def layers(config: Config) -> int | None:
    return config.number("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def head_dim(config: Config) -> int | None:
    own = config.number("head_dim", "attention_head_dim")
    if own:
        return own
    hidden, query_heads = width(config), heads(config)
    return hidden // query_heads if hidden and query_heads else None


def _full(config: Config) -> KVGeometry | None:
    depth, count, dim = layers(config), kv_heads(config), head_dim(config)
    if not depth or not count or not dim:
        return None
    v_dim = config.number("v_head_dim")
    return _make(kind="Full", layers=depth, kv_heads=count, head_dim=dim, v_head_dim=v_dim if v_dim != dim else None)


def _encoder_decoder(config: Config) -> KVGeometry | None:
    """SGLang keeps keys and values of every attention layer for every token of audio and text: of the encoder's too,
    which nothing reads again, and of both kinds in the decoder (`num_attention_layers`). vLLM keeps the decoder's only,
    so that this is the most that it needs."""
    encoder, decoder = config.number("encoder_layers"), config.number("decoder_layers")
    count, dim = heads(config), head_dim(config)
    if not encoder or not decoder or not count or not dim:
        return None
    return _make(kind="Full", layers=encoder + 2 * decoder, kv_heads=count, head_dim=dim)


def _latent(config: Config) -> KVGeometry | None:
    depth, rank, rope = layers(config), config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
    if config.architecture == "DeepseekVL2ForCausalLM" and config.text.get("use_mla") is False:
        return _full(config)
    if not depth or not rank or rope is None:
        return None
    index = config.number("index_head_dim")
    if config.architecture not in names.DSA or config.number("index_topk") is None or not index:
        return _make(kind="MLA", layers=depth, kv_lora_rank=rank, qk_rope_head_dim=rope)
    return _make(
        kind="DSA",
        layers=depth,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        index_head_dim=index,
        index_layers=_index_layers(config, depth),
    )


def _index_layers(config: Config, depth: int) -> int:
    """Layers with an index of their own; the others use that of an earlier one (`dsa_layer_skips_topk`)."""
    types = config.strings("indexer_types")
    if types:
        return depth - types[:depth].count("shared")
    every = config.number("cli_factor")
    if every and every > 1:
        return -(-depth // every)
    pattern = config.text.get("index_topk_pattern")
    marks = pattern if isinstance(pattern, str) else config.strings("index_topk_pattern")
    if marks:
        return depth - marks[:depth].count("S")
    frequency = config.number("index_topk_freq") or 1
    offset = config.number("index_skip_topk_offset")
    return sum(max(i - offset + 1 if offset else i - 1, 0) % frequency == 0 for i in range(depth))


def _windowed(config: Config) -> KVGeometry | None:
    base = _full(config)
    depth = layers(config)
    if base is None or not depth:
        return None
    if config.architecture == "Llama4ForConditionalGeneration":
        full = sum((i + 1) % 4 == 0 for i in range(depth))
        window = config.number("attention_chunk_size") or 8192
    elif pattern := config.strings("hybrid_layer_pattern"):
        full = pattern[:depth].count("0")
        window = config.number("sliding_window", "sliding_window_size")
    else:
        kinds = config.strings("layer_types")[:depth]
        full = kinds.count("full_attention")
        window = config.number("sliding_window", "sliding_window_size")
        if len(kinds) != depth:
            return None
    if full == depth or (config.architecture == "LagunaForCausalLM" and not window):
        return base
    if not full or not window:
        return None
    fields: dict[str, Any] = base.model_dump(by_alias=False) | {
        "kind": "SlidingWindow", "full_layers": full, "sliding_window": window
    }  # fmt: skip
    return _make(**(fields | _window_shape(config)))


def _window_shape(config: Config) -> dict[str, int | None]:
    """Shapes of windowed layers where they are their own."""
    if config.architecture.startswith("Gemma4"):
        # Gemma 4 writes the windowed layers' shape as the plain one and names that of the others.
        plain_dim, plain_heads = config.number("head_dim"), config.number("num_key_value_heads")
        dim = config.number("global_head_dim") or plain_dim
        count = config.number("num_global_key_value_heads") or plain_heads
        return {"head_dim": dim, "kv_heads": count, "swa_head_dim": plain_dim, "swa_kv_heads": plain_heads}
    other = as_mapping(config.text.get("attention_other_setting")) or {}
    return {
        "swa_kv_heads": config.number("swa_num_key_value_heads") or whole(other.get("num_attention_groups")),
        "swa_head_dim": config.number("swa_head_dim"),
        "swa_v_head_dim": config.number("swa_v_head_dim"),
    }


def _hybrid(config: Config) -> KVGeometry | None:
    split = state.split(config)
    if split is None or not split.depth:
        return None
    base = _latent(config) if config.architecture == "KimiLinearForCausalLM" else _full(config)
    if base is None:
        return None
    fields: dict[str, Any] = base.model_dump(by_alias=False) | {
        "kind": "Hybrid",
        "layers": split.depth,
        "full_layers": split.full,
        "state_bytes_per_request": split.state_bytes,
    }
    return _make(**fields)


def _declared_dtype(config: Config) -> str | None:
    quantization = config.table("quantization_config")
    algorithm = quantization.get("kv_cache_quant_algo") or quantization.get("kv_cache_scheme")
    named = isinstance(algorithm, str) and algorithm.upper() == "FP8"
    # NVIDIA's tool writes a table where it once wrote a name; compressed-tensors' table of the same name is not read
    # as a type by SGLang.
    table = as_mapping(algorithm)
    modelopt = table is not None and quantization.get("quant_method") == "modelopt" and table.get("num_bits") == 8
    return "fp8_e4m3" if named or modelopt else None
