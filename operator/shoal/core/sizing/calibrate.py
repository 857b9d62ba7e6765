"""Learning from what an engine said of its KV cache."""

from shoal.core.sizing.types import GPU, Sized, Tuning


def implied_overhead(gpu: GPU, sized: Sized, engine_tokens: int, tuning: Tuning) -> int | None:
    """Bytes of one GPU that must have been gone before the engine started, for it to find room for `engine_tokens`.

    None: the figure says nothing of the class, or is not plausible.
    """
    return None
