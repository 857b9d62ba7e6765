"""What the slots of LoRA adapters take of a decoder's layers; both engines lay them out alike.

numbers of one slot, per rank = layers x (input and output widths of the modules)
"""

from shoal.api.artifact import ArtifactFacts
from shoal.core.lora.format.layers import fused

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a decoder."""


def layer_numbers(facts: ArtifactFacts, gpus: int, attention: int, modules: tuple[str, ...]) -> int | None:
    """Numbers on each GPU, of all layers, for one slot and each unit of rank.

    `gpus` cut the feed-forward layers, `attention` of them the attention. None: the layers' widths are unknown.
    """
    widths, asked = facts.widths, fused(modules)
    if widths is None or facts.kv.head_dim is None:
        return None
    # A key-value head is never cut.
    keys = max(facts.kv.head_dim, widths.key // attention)
    hidden, layer = widths.hidden, 0
    if "qkv_proj" in asked:
        layer += 3 * hidden + widths.query // attention + 2 * keys
    if "o_proj" in asked:
        layer += widths.query // attention + hidden
    if asked & {"gate_up_proj", "down_proj"}:
        if widths.feed_forward is None:
            return None
        part = widths.feed_forward // gpus
        layer += 2 * hidden + 2 * part if "gate_up_proj" in asked else 0
        layer += part + hidden if "down_proj" in asked else 0
    return widths.layers * layer
