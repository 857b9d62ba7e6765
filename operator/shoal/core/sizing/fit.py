"""How many GPUs a replica needs on a class, and what is left for its KV cache."""

from shoal.api import reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Sizing
from shoal.core.sizing.types import GPU, Misfit, Sized, Tuning


def size(
    facts: ArtifactFacts | None,
    gpu: GPU,
    *,
    tensor: int | None,
    context_length: int | None,
    overrides: Sizing,
    tuning: Tuning,
) -> Sized | Misfit:
    """A replica of this model on this class.

    `tensor` is the number of GPUs that was asked for; None: the smallest that fits. `context_length` is what was asked
    for, in tokens; None: the config's. `overrides` win over what is computed.
    """
    return Misfit(reasons.SIZE_UNKNOWN, f"{gpu.name}: the sums are not there yet")
