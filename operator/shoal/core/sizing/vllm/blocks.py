"""The KV cache of vLLM in whole blocks: their size in bytes, how many a request takes, and how many tokens that makes.

One pool of blocks serves all layers. Layers that keep every token share a block of each `block` tokens; where a model
also has layers with a window or with states, its layers form groups of equal size, and each group takes blocks of its
own from the pool. Block 0 is never used.
"""

from dataclasses import dataclass
from typing import Final

from shoal.api.artifact import ArtifactFacts, KVGeometry
from shoal.api.model import Sizing
from shoal.core.sizing.cell import bytes_per_token, layer_bytes
from shoal.core.sizing.vllm.arguments import VLLMArguments
from shoal.core.sizing.weights import runs_in

_GPU_BLOCK: Final = 16
CPU_BLOCK: Final = 128
_EIGHT_BITS: Final = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla")
"""Types of one byte a number. Every other one that is not a plain type counts as 16 bits: never too few bytes."""
_CONCURRENT: Final = 2
"""Batches under way at once: each may hold blocks that a window has left behind."""
_MORE_PADDING: Final = 1.5


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The blocks of one GPU."""

    block: int
    """Tokens of a block, in a layer that keeps every token."""
    bytes: int
    """Bytes of a block over the layers of one group."""
    full: int = 1
    """Groups of layers that keep every token."""
    windows: int = 0
    """Groups of layers that keep a window."""
    window: int = 0
    """Tokens of a window, with those of the batches under way."""
    states: int = 0
    """Blocks with states that each request takes, over all groups."""

    def per_request(self, context: int) -> int:
        """Blocks that a request of `context` tokens takes."""
        whole = -(-context // self.block)
        kept = min(-(-self.window // self.block), whole) + 1
        return max(1, self.full * whole + self.windows * kept + self.states)

    def tokens(self, blocks: int, context: int) -> int:
        """Tokens of requests of `context` tokens in this many blocks, one of them unused: `kv_cache_size_tokens` of the
        engine's own metric, less one block."""
        return blocks * context // self.per_request(context) - self.block

    def cell(self, context: int) -> float:
        """Bytes of one token of a request of `context` tokens."""
        if not self.windows and not self.states:
            return self.bytes * self.full / self.block
        return self.bytes * self.per_request(context) / context


def kv_dtype(facts: ArtifactFacts, tuning: VLLMArguments) -> str:
    """The cache's type in the names of `cell`: as the arguments say, as the checkpoint says, or the model's own."""
    asked = tuning.kv_cache_dtype
    found = asked if asked not in (None, "auto") else facts.kv.dtype or "bfloat16"
    return "fp8_e4m3" if found in _EIGHT_BITS else "bfloat16"


def pool(facts: ArtifactFacts, gpus: int, batch_tokens: int, overrides: Sizing, tuning: VLLMArguments) -> BlockLayout:
    """The pool on one of the GPUs that cut the attention; what one token takes must be known."""
    block = tuning.block_size or (CPU_BLOCK if tuning.device == "cpu" else _GPU_BLOCK)
    if overrides.kv_bytes_per_token is not None:
        return BlockLayout(block, block * overrides.kv_bytes_per_token)
    kv, dtype = facts.kv, kv_dtype(facts, tuning)
    float32 = runs_in(facts, tuning) == "float32"
    one = layer_bytes(kv, attention_tensor=gpus, kv_dtype=dtype, kept_float32=float32)
    if kv.kind == "SlidingWindow" and kv.full_layers and kv.layers and one and tuning.windows and _alike(kv):
        return _windowed(kv, block, one, batch_tokens)
    if kv.kind == "Hybrid" and kv.full_layers and kv.layers and one:
        return _hybrid(kv, block, one, gpus, tuning)
    # Windows whose shape differs count as layers that keep every token: never too few bytes.
    cell = bytes_per_token(kv, attention_tensor=gpus, kv_dtype=dtype, swa_ratio=1.0, kept_float32=float32)
    drafts = 1 + tuning.draft_layers / (kv.layers or 1)
    return BlockLayout(block, max(1, -int(-block * (cell or 1.0) * drafts // 1)))


def _alike(kv: KVGeometry) -> bool:
    """Whether layers with a window have the shape of the others."""
    pairs = ((kv.swa_kv_heads, kv.kv_heads), (kv.swa_head_dim, kv.head_dim), (kv.swa_v_head_dim, kv.v_head_dim))
    return all(own in (None, others) for own, others in pairs)


def _group(one: int, other: int) -> int:
    """Layers of a group, of a model with this many layers of two kinds."""
    fewer, more = sorted((one, other))
    return more if more < _MORE_PADDING * fewer else fewer


def _windowed(kv: KVGeometry, block: int, one: int, batch_tokens: int) -> BlockLayout:
    full = kv.full_layers or 0
    windows = (kv.layers or 0) - full
    group = _group(full, windows)
    return BlockLayout(
        block,
        block * one * group,
        full=-(-full // group),
        windows=-(-windows // group),
        window=(kv.sliding_window or 1) - 1 + _CONCURRENT * batch_tokens,
    )


def _hybrid(kv: KVGeometry, block: int, one: int, gpus: int, tuning: VLLMArguments) -> BlockLayout:
    """A block is as large as the state of one layer, so that both fit into one pool."""
    full = kv.full_layers or 0
    states = (kv.layers or 0) - full
    state = -(-(kv.state_bytes_per_request or 0) // (states * gpus))
    block = max(block, -(-state // (block * one)) * block)
    group = _group(full, states)
    # With a prefix cache a request keeps the state of its last block beside the one that it works on.
    held = 2 if tuning.prefix_cache else 1
    return BlockLayout(block, block * one * group, full=-(-full // group), states=held * -(-states // group))
