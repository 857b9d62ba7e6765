"""Calibration: the memory overhead of a GPU class, from the KV cache size that an engine reported."""

from shoal.core.sizing.types import GPU, Sized, Tuning


def implied_overhead(gpu: GPU, sized: Sized, engine_tokens: int, tuning: Tuning) -> int | None:
    """Bytes of one GPU that must have been in use before the engine started, given that it has room for `engine_tokens`
    (the engine's own figure, over all attention groups). The part of NCCL that grows with a replica's GPUs is left out,
    so that replicas of all sizes correct the same value of their class.

    None: the report says nothing about the class. That is so when the arguments set the size of the cache, when the
    engine runs on CPUs, when its arithmetic does not subtract what was in use before, and when the result is not
    plausible (below zero, or above an eighth of the memory and 4 GiB): the cause is then another, such as a simulator
    or wrong facts of the weights.
    """
    return tuning.overhead_of(gpu, sized, engine_tokens)
