"""What a request costs whose client disconnected before its answer."""

import math
from typing import Final

TOKENS_PER_SECOND: Final = 250
"""Of one answer, at most: faster than engines generate, so that a disconnect is never cheaper than the answer."""


def abandoned_tokens(answers: int, bound: int, seconds: float) -> int:
    """Tokens that an engine may have generated in so many seconds for `answers` answers of at most `bound` each."""
    return answers * min(bound, math.ceil(max(0.0, seconds) * TOKENS_PER_SECOND))


def is_exact(prompt: int | None) -> bool:
    """Whether an engine's counts for an aborted answer are of what it computed; `prompt`: its prompt tokens. SGLang
    reports none for a request that still waits, and none for one with prefill in chunks: the first has cost nothing,
    the second something, and the counts do not tell which it was."""
    return bool(prompt)
