"""Between which numbers an argument of SGLang must lie.

Not every number that an engine would take makes sense, but each is bounded: what Shoal computes from it, and what an
engine sets aside for it, stays finite.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from shoal.engine.arguments import Bounds

_PORT: Final = (1, 65535)
_SHARE: Final = (0.0, 1.0)
_GPUS: Final = (1, 64)
"""As many as the largest replica has."""
_BATCH: Final = (1, 65_536)
"""Requests in one batch."""
_TOKENS: Final = (-1, 10_000_000)
"""As many as the longest context; -1 switches off."""

BOUNDS: Final[Mapping[str, Bounds]] = MappingProxyType(
    {
        "attn-cp-size": _GPUS,
        "attn-dp-size": _GPUS,
        "chunked-prefill-size": _TOKENS,
        "cpu-offload-gb": (0, 65_536),
        "cuda-graph-bs-decode": _BATCH,
        "cuda-graph-bs-prefill": (1, _TOKENS[1]),
        "cuda-graph-max-bs-decode": _BATCH,
        "cuda-graph-max-bs-prefill": (1, _TOKENS[1]),
        "dcp-size": _GPUS,
        "disaggregation-bootstrap-port": _PORT,
        "encoder-bootstrap-port": _PORT,
        "engine-info-bootstrap-port": _PORT,
        "ep-size": _GPUS,
        "hicache-ratio": (0.0, 1000.0),
        "hicache-size": (0, 65_536),
        "mamba-full-memory-ratio": (0.0, 1000.0),
        "max-ep-size": _GPUS,
        "max-lora-rank": (1, 4096),
        "max-loras-per-batch": (1, 4096),
        "max-mamba-cache-size": (1, 10_000_000),
        "max-queued-requests": (1, 1_000_000),
        "max-running-requests": (1, 1_000_000),
        "max-total-tokens": (1, 10_000_000_000),
        "mem-fraction-static": _SHARE,
        "moe-dense-tp-size": _GPUS,
        "moe-dp-size": _GPUS,
        "nccl-port": _PORT,
        "page-size": (1, 65_536),
        "pp-size": _GPUS,
        "speculative-eagle-topk": (1, 1024),
        "speculative-num-draft-tokens": (1, 1024),
        "speculative-num-steps": (0, 1024),
        "swa-full-tokens-ratio": (0.0, 1000.0),
        "torch-compile-max-bs": _BATCH,
    }
)
"""By an argument's canonical name: the least and the most that it may be."""
