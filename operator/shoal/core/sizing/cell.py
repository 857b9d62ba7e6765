"""Bytes that one token takes in the KV cache of one GPU, as SGLang's `pool_configurator` of 0.5.23 computes them; the
shapes are the model's, so vLLM's are the same but for how tokens are packed into blocks."""

from shoal.api.artifact import KVGeometry

SWA_FULL_TOKENS_RATIO = 0.8
"""Tokens of the sliding-window layers' pool over those of the full pool (--swa-full-tokens-ratio)."""
_DSA_BLOCK = 128
_FP8 = ("fp8_e4m3", "fp8_e5m2", "fp8")
_FP4 = ("nvfp4", "fp4_mx_block16")


def element_bytes(kv_dtype: str | None) -> int:
    """Bytes of one number; 2 for every type that is not listed: SGLang runs float32 models in 16 bits."""
    return 1 if kv_dtype in (*_FP8, *_FP4, "mxfp8") else 2


def bytes_per_token(
    kv: KVGeometry,
    *,
    attention_tensor: int,
    kv_dtype: str | None,
    swa_ratio: float = SWA_FULL_TOKENS_RATIO,
    kept_float32: bool = False,
) -> float | None:
    """Bytes of one token over all layers on one GPU. None: the geometry is unknown.

    `attention_tensor`: tensor parallelism divided by attention's data parallelism; fewer KV heads than that are
    repeated. The two pools of a sliding-window model are counted together, so the result need not be whole.
    `kept_float32`: --dtype float32 was given, and the cache has the model's type.
    """
    size = 4 if kept_float32 and element_bytes(kv_dtype) == 2 else element_bytes(kv_dtype)
    depth = kv.full_layers if kv.kind == "Hybrid" else kv.layers
    if kv.kind == "Unknown" or depth is None:
        return None
    if kv.kv_lora_rank is not None:
        return _latent(kv, depth, size, kv_dtype)
    if kv.kv_heads is None or kv.head_dim is None:
        return None
    key, value = kv.head_dim, kv.v_head_dim or kv.head_dim
    full = _heads(kv.kv_heads, attention_tensor, key, value, size, kv_dtype)
    if kv.kind != "SlidingWindow":
        return float(depth * full)
    if kv.full_layers is None:
        return None
    swa_key = kv.swa_head_dim or key
    swa_value = kv.swa_v_head_dim or (kv.swa_head_dim or value)
    window = _heads(kv.swa_kv_heads or kv.kv_heads, attention_tensor, swa_key, swa_value, size, kv_dtype)
    return kv.full_layers * full + swa_ratio * (depth - kv.full_layers) * window


def layer_bytes(
    kv: KVGeometry, *, attention_tensor: int, kv_dtype: str | None, kept_float32: bool = False
) -> int | None:
    """Bytes of one token in one layer that keeps every token, on one GPU; None with a latent, and where the geometry is
    unknown. Parameters as of `bytes_per_token`."""
    if kv.kind == "Unknown" or kv.kv_lora_rank is not None or kv.kv_heads is None or kv.head_dim is None:
        return None
    size = 4 if kept_float32 and element_bytes(kv_dtype) == 2 else element_bytes(kv_dtype)
    return _heads(kv.kv_heads, attention_tensor, kv.head_dim, kv.v_head_dim or kv.head_dim, size, kv_dtype)


def _heads(count: int, tensor: int, key: int, value: int, size: int, kv_dtype: str | None) -> int:
    """Bytes of one layer with separate keys and values."""
    numbers = max(1, count // tensor) * (key + value)
    if kv_dtype in _FP4:
        # Half a byte each, and a scale of one byte per sixteen numbers.
        return numbers // 2 + numbers // 16
    return numbers * size + (numbers // 32 if kv_dtype == "mxfp8" else 0)


def _latent(kv: KVGeometry, depth: int, size: int, kv_dtype: str | None) -> float:
    rank, rope = kv.kv_lora_rank or 0, kv.qk_rope_head_dim or 0
    if kv.kind != "DSA":
        if kv_dtype in _FP4:
            return float(depth * (rank + rope) // 2 + depth * ((rank + rope) // 16))
        return float(depth * (rank + rope) * size)
    # With 8 bits the latent has a 4-byte scale per block, and the positional part stays in 16 bits.
    latent = rank + rank // _DSA_BLOCK * 4 + rope * 2 if size == 1 else (rank + rope) * size
    index = kv.index_head_dim or 0
    index_layers = depth if kv.index_layers is None else kv.index_layers
    return float(depth * latent + index_layers * (index + index // _DSA_BLOCK * 4))
