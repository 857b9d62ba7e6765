"""The layers of a base that LoRA adapters change, and their widths: for checks, sizes and memory."""

from collections.abc import Iterable
from typing import Final

from shoal.api.artifact import LayerWidths

_FUSED: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa",
}
"""Modules that SGLang fuses into one layer (`get_normalized_target_modules` of 0.5.23): allowing one allows all."""
ALL: Final = frozenset({"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"})
"""`all`, for a base whose layers are all alike."""
FEED_FORWARD: Final = frozenset({"gate_up_proj", "down_proj"})


def fused(modules: Iterable[str]) -> frozenset[str]:
    """SGLang's names of these modules; `all` is every module."""
    named = frozenset(_FUSED.get(name, name) for name in modules)
    return ALL if "all" in named else named


def shapes(widths: LayerWidths, vocabulary: int | None) -> dict[str, tuple[int, int]]:
    """Module, as adapters name it -> (input width, output width). Modules of unknown width are left out."""
    hidden, query, key, feed = widths.hidden, widths.query, widths.key, widths.feed_forward
    found = {
        "q_proj": (hidden, query),
        "k_proj": (hidden, key),
        "v_proj": (hidden, key),
        "qkv_proj": (hidden, query + 2 * key),
        "o_proj": (query, hidden),
    }
    if feed is not None:
        found |= {
            "gate_proj": (hidden, feed),
            "up_proj": (hidden, feed),
            "gate_up_proj": (hidden, 2 * feed),
            "down_proj": (feed, hidden),
        }
    if vocabulary is not None:
        found |= {"embed_tokens": (vocabulary, hidden), "lm_head": (hidden, vocabulary)}
    return found


def largest_adapter(widths: LayerWidths, vocabulary: int | None, modules: Iterable[str], rank: int) -> int:
    """Parameters of an adapter of this rank that changes every allowed module."""
    known, allowed = shapes(widths, vocabulary), fused(modules)
    layer = tables = 0
    for name, (reads, writes) in known.items():
        if name in _FUSED.values() or _FUSED.get(name, name) not in allowed:
            continue  # a fused layer is counted by its parts
        if name in ("embed_tokens", "lm_head"):
            tables += reads + writes
        else:
            layer += reads + writes
    return rank * (widths.layers * layer + tables)
