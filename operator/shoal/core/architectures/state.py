"""Hybrid models: which layers keep tokens, and how large the state of one request is in the others.

State sizes follow SGLang's `mamba2_cache_params`: per layer a convolution window in bfloat16 and a recurrent state in
the config's `mamba_ssm_dtype` (float32 when it says none), on one GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core.architectures.config import MOST_LAYERS, Config, UnknownConfig, as_list, whole

_CONV_BYTES = 2
_SSM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Split:
    """The layers of a hybrid model."""

    depth: int
    full: int
    """Layers that keep every token."""
    state_bytes: int | None
    """Of one request over all layers that keep a state; None: the config does not say its widths."""


def split(config: Config) -> Split | None:
    """None when the config does not say which layers are which."""
    depth = config.number("num_hidden_layers")
    match config.architecture:
        case "NemotronHForCausalLM":
            return _nemotron(config)
        case "FalconH1ForCausalLM" if depth:
            return Split(depth, depth, _mamba2(config, depth))
        case "GraniteMoeHybridForCausalLM" if depth:
            kinds = config.strings("layer_types")
            count = kinds.count("mamba")
            return Split(depth, kinds.count("attention"), _mamba2(config, count)) if len(kinds) == depth else None
        case "KimiLinearForCausalLM" if depth:
            return _kimi(config, depth)
        case name if name.startswith("Lfm2") and depth:
            return _short_convolution(config, depth)
        case _:
            return _gated_delta(config, depth) if depth else None


def _product(values: Sequence[int | None]) -> int | None:
    total = 1
    for value in values:
        if value is None:
            return None
        total *= value
    return total


def _bytes(config: Config, layers: int, conv: int | None, ssm: int | None) -> int | None:
    if conv is None or ssm is None:
        return None
    ssm_bytes = _SSM_BYTES.get(str(config.text.get("mamba_ssm_dtype")), 4)
    return layers * (conv * _CONV_BYTES + ssm * ssm_bytes)


def _gated_delta(config: Config, depth: int) -> Split:
    """Qwen3-Next and Qwen3.5."""
    every = config.number("full_attention_interval") or 4
    full = sum((i + 1) % every == 0 for i in range(depth))
    key_dim = _product((config.number("linear_key_head_dim"), config.number("linear_num_key_heads")))
    value_dim = _product((config.number("linear_value_head_dim"), config.number("linear_num_value_heads")))
    kernel = config.number("linear_conv_kernel_dim")
    conv = (value_dim + 2 * key_dim) * (kernel - 1) if key_dim and value_dim and kernel else None
    ssm = _product((value_dim, config.number("linear_key_head_dim")))
    return Split(depth, full, _bytes(config, depth - full, conv, ssm))


def _mamba(
    config: Config, layers: int, inner: int | None, groups: int | None, state: int | None, kernel: int | None
) -> int | None:
    if inner is None or groups is None or state is None or not kernel:
        return None
    return _bytes(config, layers, (inner + 2 * groups * state) * (kernel - 1), inner * state)


def _mamba2(config: Config, layers: int) -> int | None:
    """Falcon H1 and Granite 4."""
    expanded = _product((config.number("mamba_expand"), config.number("hidden_size")))
    inner = config.number("mamba_d_ssm") or expanded
    groups, state, kernel = (config.number(k) for k in ("mamba_n_groups", "mamba_d_state", "mamba_d_conv"))
    return _mamba(config, layers, inner, groups, state, kernel)


def _nemotron(config: Config) -> Split | None:
    pattern = config.text.get("hybrid_override_pattern")
    if isinstance(pattern, str) and len(pattern) > MOST_LAYERS:
        raise UnknownConfig(f"config.json has {len(pattern)} layers in hybrid_override_pattern")
    kinds = config.strings("layers_block_type") or (
        tuple({"M": "mamba", "*": "attention"}.get(c, "mlp") for c in pattern) if isinstance(pattern, str) else ()
    )
    if not kinds:
        return None
    inner = _product((config.number("mamba_num_heads"), config.number("mamba_head_dim")))
    groups = config.number("n_groups", "mamba_n_groups")
    state, kernel = config.number("ssm_state_size"), config.number("conv_kernel", "mamba_d_conv")
    mamba = kinds.count("mamba")
    return Split(len(kinds), kinds.count("attention"), _mamba(config, mamba, inner, groups, state, kernel))


def _short_convolution(config: Config, depth: int) -> Split:
    """LFM2: a short convolution keeps a window of hidden states and nothing else."""
    kinds = config.strings("layer_types")
    full = kinds.count("full_attention") if kinds else len(config.strings("full_attn_idxs")) or depth
    hidden, kernel = config.number("hidden_size"), config.number("conv_L_cache") or 3
    conv = hidden * (kernel - 1) if hidden else None
    return Split(depth, full, _bytes(config, depth - full, conv, 0))


def _kimi(config: Config, depth: int) -> Split | None:
    """Kimi Linear: query, key and value each with a convolution window, and a state per head."""
    linear = config.table("linear_attn_config")
    layers, count, dim = linear.get("kda_layers"), whole(linear.get("num_heads")), whole(linear.get("head_dim"))
    kernel = whole(linear.get("short_conv_kernel_size"))
    if not as_list(layers):
        return None
    # The list counts from one.
    linear_layers = len({n for n in as_list(layers) if isinstance(n, int) and 1 <= n <= depth})
    if count is None or dim is None or kernel is None:
        return Split(depth, depth - linear_layers, None)
    conv = 3 * count * dim * (kernel - 1)
    return Split(depth, depth - linear_layers, _bytes(config, linear_layers, conv, count * dim * dim))
