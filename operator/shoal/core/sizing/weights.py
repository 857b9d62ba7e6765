"""GPU memory of the weights, while they are loaded and afterwards."""

from dataclasses import dataclass
from typing import Final

from shoal.api import reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Sizing
from shoal.core import quantity
from shoal.core.sizing import stages
from shoal.core.sizing.types import GPU, Misfit, Tuning

_ITEM_BYTES: Final = {"float32": 4, "float": 4}


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of the weights over all GPUs of one replica."""

    total: int
    peak: int
    """The maximum while they are loaded."""
    repeated: int
    """Part of `total` that each attention group holds in full."""
    tables: int = 0
    """Embeddings and output layer, which belong to no layer."""
    table: int = 0
    """The larger of the two."""

    def per_gpu(self, tensor: int, attention_dp: int, share: tuple[int, int] = (1, 1)) -> int:
        """Bytes on each GPU of the stage with this share of the layers: its own number of the model's."""
        return self._part(self.total + self.repeated * (attention_dp - 1), tensor, share)

    def peak_per_gpu(self, tensor: int, attention_dp: int, share: tuple[int, int] = (1, 1)) -> int:
        repeated = self.repeated * self.peak // max(1, self.total)
        return self._part(self.peak + repeated * (attention_dp - 1), tensor, share)

    def _part(self, size: int, tensor: int, share: tuple[int, int]) -> int:
        own, layers = share
        if own < layers:
            tables = min(self.tables, size)
            size = -(-(size - tables) * own // layers) + min(self.table, tables)
        return -(-size // tensor)


def runs_in(facts: ArtifactFacts, tuning: Tuning) -> str:
    """The type of the computations: float32 models run in 16 bits unless --dtype asks for 32."""
    asked = tuning.dtype if tuning.dtype not in (None, "auto") else None
    if asked:
        return "float32" if asked in _ITEM_BYTES else asked
    return "float16" if facts.dtype in (None, *_ITEM_BYTES) else facts.dtype or "float16"


def weights(facts: ArtifactFacts, gpu: GPU, overrides: Sizing, tuning: Tuning) -> Weights | Misfit:
    """The weights on this GPU, or why they cannot be used or sized. Raises ValueError for an override that is no
    quantity."""
    asked, stored = tuning.quantization, facts.quantization
    if (
        asked in ("fp8", "fp8_per_tensor")
        and stored not in (None, "fp8")
        and not stored.startswith(tuning.reads_as_fp8)
    ):
        why = f"the checkpoint is quantized with {stored} already: {tuning.engine} refuses to quantize it with fp8"
        why += " on top"
        return Misfit(reasons.INVALID, f"{why}; leave the quantization out, or use weights that are not quantized")
    method = asked or stored
    if method in tuning.unreadable:
        return Misfit(reasons.INVALID, f"{tuning.engine} does not read {method} weights")
    if misfit := _unable(method, gpu, tuning):
        return misfit
    if overrides.weight_bytes is not None:
        given = int(quantity.parse(overrides.weight_bytes))
        return Weights(given, given, 0)
    if tuning.draft:
        why = f"{tuning.draft} loads a draft model whose size is not known: say in `sizing.weightBytes` and"
        return Misfit(reasons.SIZE_UNKNOWN, f"{why} `sizing.kvBytesPerToken` what both need together")
    total = _stored(facts, tuning)
    if total is None:
        why = "how large its weights are is not known (safetensors or their index would say it)"
        return Misfit(reasons.SIZE_UNKNOWN, f"{why}: say it in `sizing.weightBytes`")
    attention = tuning.repeats(facts)
    if attention is None and tuning.attention_dp > 1:
        why = f"how much of the weights {tuning.engine} repeats with {tuning.attention_dp_by} is not known"
        return Misfit(reasons.SIZE_UNKNOWN, f"{why}: say in `sizing.weightBytes` what one replica needs with it")
    tables, table = min(total, facts.embedding_bytes or 0), stages.table(facts)
    if stored is None and method in tuning.halving:
        return Weights(tables + -(-(total - tables) // 2), total, (attention or 0) // 2, tables, table)
    return Weights(total, total, attention or 0, tables, table)


def _stored(facts: ArtifactFacts, tuning: Tuning) -> int | None:
    """Bytes of all weights: plain ones are cast to the type of the computations, quantized ones stay as stored."""
    if facts.quantization is None and facts.parameters:
        return facts.parameters * (4 if runs_in(facts, tuning) == "float32" else 2)
    return facts.weight_bytes


def _unable(method: str | None, gpu: GPU, tuning: Tuning) -> Misfit | None:
    least = tuning.min_capability.get(method or "")
    if least is None or gpu.compute_capability is None:
        return None
    major, minor = gpu.compute_capability
    if 10 * major + minor >= least:
        return None
    why = f"{method} weights need compute capability {least // 10}.{least % 10}, this class has {major}.{minor}"
    return Misfit(reasons.NO_FIT, why)
