"""Sizes of parts of a model that parallelism and quantization treat differently, from the shapes in its config."""

from math import gcd

from shoal.api.artifact import KVGeometry, LayerWidths
from shoal.core.architectures import names, quantization
from shoal.core.architectures.config import Config
from shoal.core.architectures.geometry import head_dim, heads, kv_heads, width

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}


def item_bytes(dtype: str | None) -> int:
    """Bytes of one number in the type that computations run in. float32 runs in 16 bits unless --dtype says
    otherwise, as does a config that names no type."""
    return _ITEM_BYTES.get(dtype or "float16", 2)


def embedding_bytes(config: Config, dtype: str | None) -> int | None:
    """Embeddings, and the output layer unless it is the same tensor."""
    vocabulary, hidden = config.number("vocab_size"), width(config)
    if not vocabulary or not hidden:
        return None
    tables = 1 if config.text.get("tie_word_embeddings") is True else 2
    return vocabulary * hidden * tables * item_bytes(dtype)


def attention_parameters(config: Config, kv: KVGeometry) -> int | None:
    """Weights of all attention layers that keep tokens; None when a width is not known."""
    hidden, query_heads = width(config), heads(config)
    depth = kv.full_layers if kv.kind == "Hybrid" else kv.layers
    if hidden is None or query_heads is None or depth is None:
        return None
    if kv.kv_lora_rank is not None:
        rope, nope = kv.qk_rope_head_dim or 0, config.number("qk_nope_head_dim")
        value = config.number("v_head_dim")
        if nope is None or value is None:
            return None
        low_rank = config.number("q_lora_rank")
        query = query_heads * (nope + rope)
        queries = low_rank * (hidden + query) if low_rank else hidden * query
        latent = hidden * (kv.kv_lora_rank + rope) + kv.kv_lora_rank * query_heads * (nope + value)
        return depth * (queries + latent + query_heads * value * hidden)
    dim, count = head_dim(config), kv_heads(config)
    if dim is None or count is None:
        return None
    return depth * hidden * dim * 2 * (query_heads + count)


def widths(config: Config, kv: KVGeometry) -> LayerWidths | None:
    """Widths of the layers that adapters change, where SGLang looks for them (`get_default_hidden_dim`): it takes all
    layers for alike. None: they are not, or one width is not in the config, or the model generates no text."""
    alike = kv.kind == "Full" or (kv.kind == "SlidingWindow" and not (kv.swa_kv_heads or kv.swa_head_dim))
    alike = alike and config.architecture not in names.EMBEDS
    depth, hidden = config.number("num_hidden_layers"), config.number("hidden_size")
    query_heads, dim, count = config.number("num_attention_heads"), kv.head_dim, kv.kv_heads
    if not alike or kv.v_head_dim or not depth or not hidden or not query_heads or not dim or not count:
        return None
    feed_forward = config.number("intermediate_size") if experts(config) is None else None
    return LayerWidths(
        layers=depth, hidden=hidden, query=query_heads * dim, key=count * dim, feed_forward=feed_forward or None
    )


def divisors(config: Config) -> tuple[int | None, int | None]:
    """What tensor parallelism must divide: of the dense layers, and of the experts. None: no such layers.

    A width is counted in blocks of the quantization, since SGLang refuses to cut a block in two.
    """
    block = quantization.block(config)

    def common(widths: list[int | None]) -> int | None:
        units = [max(1, w // block if w % block == 0 else 1) for w in widths if w]
        return gcd(*units) if units else None

    dense = config.number("intermediate_size", "ffn_hidden_size", "n_inner")
    expert = config.number("moe_intermediate_size")
    is_moe = experts(config) is not None
    if is_moe and expert is None:
        # Mixtral and its kin: the plain width is the experts'.
        expert, dense = dense, None
    mixed = bool(config.number("first_k_dense_replace")) or (config.number("decoder_sparse_step") or 1) > 1
    if is_moe and not mixed and not config.text.get("mlp_only_layers"):
        dense = None
    shared = config.number("shared_expert_intermediate_size")
    if expert and (count := config.number("n_shared_experts")):
        shared = expert * count
    return common([dense, shared if is_moe else None]), common([expert]) if is_moe else None


def experts(config: Config) -> int | None:
    """Routed experts; None for a dense model."""
    count = config.number("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    return count if count and count > 1 else None
