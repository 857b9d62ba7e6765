"""Pipeline parallelism: what the largest stage of a replica holds.

Both engines give each stage the same number of layers, and the rest to some. The first stage has the embeddings, the
last the output layer. The stage with the most layers and the larger of the two tables counts: the KV cache of a replica
holds as many tokens as that of its fullest stage.
"""

from typing import Final

from shoal.api.artifact import ArtifactFacts
from shoal.core.sizing.types import Tuning

_UNEVEN: Final = ("SlidingWindow", "Hybrid")
_FLOAT32: Final = ("float32", "float")


def share(facts: ArtifactFacts, tuning: Tuning) -> tuple[int, int]:
    """Layers of the largest stage, and of the model; (1, stages) where the model's number is not known."""
    layers = facts.kv.layers or tuning.pipeline
    return -(-layers // tuning.pipeline), layers


def table(facts: ArtifactFacts) -> int:
    """Bytes of the embeddings or of the output layer, whichever is larger. Where the checkpoint has one table for
    both, the first and the last stage hold it each."""
    both, widths = facts.embedding_bytes or 0, facts.widths
    if widths is None or facts.vocabulary is None:
        return both
    return min(both, facts.vocabulary * widths.hidden * (4 if facts.dtype in _FLOAT32 else 2))


def largest(facts: ArtifactFacts, tuning: Tuning) -> ArtifactFacts:
    """The facts of the largest stage, as far as they determine its KV cache."""
    if tuning.pipeline == 1 or facts.kv.layers is None:
        return facts
    most, _ = share(facts, tuning)
    index = facts.kv.index_layers
    layers = {"layers": most, "index_layers": None if index is None else min(index, most)}
    return facts.model_copy(update={"kv": facts.kv.model_copy(update=layers)})


def uneven(facts: ArtifactFacts, tuning: Tuning) -> bool:
    """Whether a stage's part of the KV cache does not follow from its number of layers."""
    return tuning.pipeline > 1 and (facts.kv.kind in _UNEVEN or tuning.draft_layers > 0)
