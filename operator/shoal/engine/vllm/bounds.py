"""Between which numbers an argument of vLLM must lie, and how vLLM reads a number.

Not every number that an engine would take makes sense, but each is bounded: what Shoal computes from it, and what an
engine sets aside for it, stays finite.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from shoal.engine.arguments import LONGEST, Bounds

_TOKENS: Final = (1, 10_000_000)
"""As many as the longest context."""
_BATCH: Final = (1, 65_536)
"""Requests in one batch."""
_SHARE: Final = (0.0, 1.0)
_GPUS: Final = (1, 64)
_BYTES: Final = (1, 2**50)

BOUNDS: Final[Mapping[str, Bounds]] = MappingProxyType(
    {
        "block-size": (1, 65_536),
        "cpu-offload-gb": (0.0, 65_536.0),
        "cudagraph-capture-sizes": (1, _BATCH[1]),
        "data-parallel-size": _GPUS,
        "decode-context-parallel-size": _GPUS,
        "gpu-memory-utilization": _SHARE,
        "kv-cache-memory-bytes": _BYTES,
        "kv-offloading-size": (0, 65_536),
        "long-prefill-token-threshold": (0, _TOKENS[1]),
        "max-cudagraph-capture-size": (0, _BATCH[1]),
        "max-logprobs": (-1, 1_000_000),
        "max-num-active-seqs": _BATCH,
        "max-num-batched-tokens": _TOKENS,
        "max-num-queued-reqs": (1, 1_000_000),
        "max-num-queued-tokens": (1, 10_000_000_000),
        "max-num-scheduled-tokens": _TOKENS,
        "max-num-seqs": _BATCH,
        "mm-ipc-gpu-memory-gb": (0.0, 65_536.0),
        "mm-processor-cache-gb": (0.0, 65_536.0),
        "num-gpu-blocks-override": (1, 100_000_000),
        "pipeline-parallel-size": _GPUS,
        "renderer-num-workers": (1, 256),
        "spec-tokens": (1, 1024),
        "stream-interval": (1, 65_536),
        "ubatch-size": (0, _BATCH[1]),
        "video-pruning-rate": _SHARE,
        "watermark": _SHARE,
    }
)
"""By an argument's canonical name: the least and the most that it may be."""

_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_SUFFIXES: Final = {letter: 1000**power for power, letter in enumerate("kmgt", 1)} | {
    letter: 1024**power for power, letter in enumerate("KMGT", 1)
}


def count(text: str) -> int:
    """A whole number as vLLM reads it: `32k` is 32000, `32K` is 32768, `1.5k` is 1500. Raises ValueError."""
    if len(text) > LONGEST:
        raise ValueError("longer than a number may be")
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return int(text)
    number, suffix = match.groups()
    return int(number) * _SUFFIXES[suffix] if suffix.isupper() else int(float(number) * _SUFFIXES[suffix])
