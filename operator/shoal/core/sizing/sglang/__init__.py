"""SGLang's memory arithmetic (0.5.23): a fraction of what is free, and a reserve that its arguments fix.

What an engine reports at its start equals what is predicted here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Sizing
from shoal.core.sizing.sglang import kvcache
from shoal.core.sizing.sglang.arguments import SGLangArguments
from shoal.core.sizing.sglang.calibrate import overhead_of
from shoal.core.sizing.sglang.slots import slot_bytes
from shoal.core.sizing.types import GPU, Memory, MemoryBreakdown, Sized
from shoal.core.sizing.units import gib

_CAPABILITY: Mapping[str, int] = {
    "awq": 75, "awq_marlin": 80, "auto-round": 60, "auto-round-int8": 75, "bitsandbytes": 70, "blockwise_int8": 80,
    "compressed-tensors": 70, "fp8": 80, "gguf": 60, "gptq": 60, "gptq_marlin": 80, "humming": 75, "modelopt": 89,
    "modelopt_fp4": 80, "modelopt_fp8": 89, "modelopt_mixed": 80, "moe_wna16": 70, "mxfp4": 80, "mxfp8": 100,
    "nvfp4_online": 100, "petit_nvfp4": 90, "quark": 70, "w4afp8": 90, "w8a8_fp8": 89, "w8a8_int8": 75,
}  # fmt: skip
"""`get_min_capability` of SGLang 0.5.23. 4-bit floats also run below 10.0: there only the weights are 4 bits wide and
are widened for each product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangTuning(SGLangArguments):
    """SGLang's arguments, with its arithmetic."""

    engine: ClassVar[str] = "SGLang"
    longer_context_by: ClassVar[str] = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
    attention_dp_by: ClassVar[str] = "`attentionData` (--attn-dp-size)"
    experts_by: ClassVar[str] = "--ep-size"
    min_capability: ClassVar[Mapping[str, int]] = _CAPABILITY
    halving: ClassVar[frozenset[str]] = frozenset({"fp8", "mxfp8", "w8a8_fp8"})
    reads_as_fp8: ClassVar[tuple[str, ...]] = ("modelopt",)

    def expert_groups(self, gpus: int) -> int:
        return gpus if self.spread_experts else self.expert_parallel

    def slot_bytes(self, facts: ArtifactFacts, gpus: int) -> int | None:
        return slot_bytes(facts, gpus, self)

    def memory(
        self, facts: ArtifactFacts, gpu: GPU, gpus: int, weights: int, overrides: Sizing, context: int
    ) -> Memory:
        cell = kvcache.cell(facts, gpu, gpus, overrides, self)
        sums, slots = kvcache.breakdown(facts, gpu, gpus, weights, self)
        tokens = kvcache.tokens(facts, sums.kv, cell, self)
        return Memory(
            breakdown=sums,
            cell=cell,
            tokens=tokens,
            requests=kvcache.requests(tokens, slots, context, self),
            estimates=("overhead",) if gpu.overhead_bytes is None else (),
        )

    def cpu_tokens(self, facts: ArtifactFacts, overrides: Sizing, context: int) -> int | None:
        return self.max_total_tokens

    def unsized(self, facts: ArtifactFacts) -> str | None:
        return None

    def refusal(self, facts: ArtifactFacts, sized: Sized, context: int) -> str | None:
        tokens = (sized.kv_tokens or 0) // sized.attention_groups
        if tokens >= context and not kvcache.window_fits(facts, tokens, self):
            return f"less than one window of {facts.kv.sliding_window} needs"
        return None

    def limit(self) -> str | None:
        return None if self.max_total_tokens is None else f"--max-total-tokens {self.max_total_tokens}"

    def parts(self, breakdown: MemoryBreakdown) -> tuple[str, ...]:
        found = [f"SGLang's reserve {gib(breakdown.reserve)}"]
        if breakdown.state > 0:
            found.append(f"states of requests {gib(breakdown.state)}")
        if breakdown.images > 0:
            found.append(f"images {gib(breakdown.images)}")
        if breakdown.adapters > 0:
            found.append(f"places for adapters {gib(breakdown.adapters)}")
        return (*found, f"the driver's {gib(breakdown.overhead)}")

    def overhead_of(self, gpu: GPU, sized: Sized, engine_tokens: int) -> int | None:
        return overhead_of(gpu, sized, engine_tokens, self)
