"""What vLLM measures at its start instead of computing it: estimates, each rather too large than too small.

At its start vLLM computes its largest batch once, with dummy tokens and without a KV cache, and captures a few CUDA
graphs. What that took is subtracted from its share of the memory. Without a GPU these figures cannot be known exactly;
they are bounded from the shapes of the model, so that the KV cache is at least as large as predicted. The constants
hold for five engines of vLLM 0.32.0 that were measured on an H200 (docs/sizing.md).
"""

from dataclasses import dataclass
from typing import Final

from shoal.api.artifact import ArtifactFacts
from shoal.core.sizing.types import GPU
from shoal.core.sizing.units import GI
from shoal.core.sizing.vllm.arguments import VLLMArguments
from shoal.core.sizing.weights import runs_in

_BUFFERS: Final = 3 * GI // 4
"""Work spaces of attention and matrix products, and NCCL's buffers that the first batch allocates."""
_ADAPTERS: Final = 3 * GI // 8
"""More of them with adapters: 0.39 GiB more were measured with 7 slots of rank 64."""
_SAMPLER: Final = 16
"""Bytes per request and word of the vocabulary: logits in 16 and 32 bits, probabilities, and random numbers."""
_NO_VOCABULARY: Final = 262_144
"""Words, where the size of the vocabulary is not known."""
_NO_WIDTH: Final = 8192
"""Hidden size, where it is not known."""
_OF_EXPERTS: Final = 16
"""Vectors of the hidden size that a layer of experts keeps of each token: its copies for the chosen experts."""
_GRAPHS: Final = 4 * GI // 10
_GRAPH: Final = GI // 8192
"""Of one batch size and layer."""
_NO_LAYERS: Final = 80
_LARGEST_GRAPH: Final = 512
_MOST_GRAPHS: Final = 51
"""Batch sizes captured up to the largest: 1, 2, 4, steps of 8 below 256 and of 16 from there."""
_MODES: Final = 2
"""Graphs of whole batches, and of the pieces between attention layers."""
_IMAGES: Final = GI
"""The image encoder's own batch, besides the embeddings that it writes."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The largest batch of the engine."""

    tokens: int
    requests: int


def batch(gpu: GPU, context: int, tuning: VLLMArguments) -> Batch:
    """As the arguments say, or as the engine chooses by the GPU's memory (`get_batch_defaults`)."""
    memory, a100 = gpu.memory_bytes, gpu.compute_capability == (8, 0)
    if memory >= 160 * GI:
        tokens, requests = 16384, 1024
    elif memory >= 70 * GI and not a100:
        tokens, requests = 8192, 1024
    else:
        tokens, requests = 2048, 256
    requests = tuning.max_running_requests or requests
    if tuning.max_num_batched_tokens is not None:
        tokens = tuning.max_num_batched_tokens
    else:
        tokens = tokens if tuning.chunked_prefill else max(tokens, context)
        tokens = min(tokens, requests * context)
    return Batch(tokens, min(requests, tokens) if tuning.max_running_requests is None else requests)


def activations(facts: ArtifactFacts, largest: Batch, gpus: int, tuning: VLLMArguments) -> int:
    """Bytes on each GPU while the largest batch is computed, and the engine's buffers.

    The layers and the sampler do not need theirs at once.
    """
    size = 4 if runs_in(facts, tuning) == "float32" else 2
    layers = largest.tokens * size * _numbers(facts, gpus)
    vocabulary = facts.vocabulary or _NO_VOCABULARY
    checked = 2 if tuning.speculates else 1
    requests = min(largest.requests, largest.tokens)
    sampler = 0 if facts.task == "Embed" else checked * requests * vocabulary * _SAMPLER
    return _BUFFERS + (0 if tuning.adapters is None else _ADAPTERS) + max(layers, sampler)


def _numbers(facts: ArtifactFacts, gpus: int) -> int:
    """Numbers that one token takes in the widest layer of one GPU: the residual, its norm, and the layer's own."""
    widths = facts.widths
    if widths is None or widths.feed_forward is None:
        return _OF_EXPERTS * _hidden(facts)
    attention = (widths.query + 2 * widths.key) // gpus
    return 4 * widths.hidden + max(3 * widths.feed_forward // gpus, 2 * attention)


def _hidden(facts: ArtifactFacts) -> int:
    """The hidden size, or what it is at most: of two tables of embeddings as of one."""
    if facts.widths is not None:
        return facts.widths.hidden
    if facts.embedding_bytes and facts.vocabulary:
        return min(2 * _NO_WIDTH, -(-facts.embedding_bytes // (2 * facts.vocabulary)))
    return _NO_WIDTH


def images(facts: ArtifactFacts, largest: Batch, tuning: VLLMArguments) -> int:
    """Bytes on each GPU for images: the encoder's batch and its embeddings; 0 for an engine that reads none."""
    return _IMAGES + 2 * 2 * largest.tokens * _hidden(facts) if tuning.reads_media(facts) else 0


def graphs(facts: ArtifactFacts, largest: Batch, tuning: VLLMArguments) -> int:
    """Bytes of the CUDA graphs on each GPU."""
    if not tuning.graphs:
        return 0
    most = min(2 * largest.requests, _LARGEST_GRAPH, largest.tokens)
    sizes = min(_MOST_GRAPHS, 4 + most // 8)
    with_adapters = 1 if tuning.adapters is None else 2
    return _GRAPHS + with_adapters * _MODES * sizes * (facts.kv.layers or _NO_LAYERS) * _GRAPH
