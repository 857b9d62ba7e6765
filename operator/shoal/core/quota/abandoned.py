"""What a request counts whose client left before its answer."""

import math
from typing import Final

TOKENS_PER_SECOND: Final = 250
"""Of one answer, at most: faster than engines write, so that to leave is never cheaper than to stay."""


def abandoned_tokens(answers: int, bound: int, seconds: float) -> int:
    """Tokens of `answers` of at most `bound` each that an engine may have written in so many seconds."""
    return answers * min(bound, math.ceil(max(0.0, seconds) * TOKENS_PER_SECOND))


def is_exact(prompt: int | None) -> bool:
    """Whether the counts with which an engine ends an aborted answer are of what it computed; `prompt` are its prompt's
    tokens. SGLang says none of a request that still waits, and of one whose prompt it computes in pieces: the first has
    cost nothing and the second something, and the counts do not tell which it was."""
    return bool(prompt)
