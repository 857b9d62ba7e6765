"""What the engine's arguments mean for its memory, and which arguments a quantization adds."""

from collections.abc import Sequence
from typing import Literal

from shoal.core.sizing import Tuning


def quantization_args(quantization: Literal["FP8"] | None) -> tuple[str, ...]:
    """Engine arguments that quantize the weights while they are loaded."""
    return ("--quantization=fp8",) if quantization == "FP8" else ()


def tuning_of(
    extra_args: Sequence[str], *, platform_args: Sequence[str] = (), quantization: Literal["FP8"] | None = None
) -> Tuning:
    """What these arguments change in the memory arithmetic; a later argument wins over an earlier one."""
    return Tuning()
