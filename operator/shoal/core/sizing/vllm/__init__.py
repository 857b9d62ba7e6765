"""vLLM's memory arithmetic (0.32 and 0.33): its share of all memory, less what it measures at its start.

share = ceil(memory as CUDA counts it x gpu_memory_utilization)      the start fails where less is free
kv    = share - weights - adapters - images - activations - graphs, in whole blocks

Activations and graphs are measured by the engine and estimated here (`profile.py`): the KV cache of an engine is at
least what is predicted. With --kv-cache-memory-bytes the figure is the engine's own to the byte.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Sizing
from shoal.core.sizing.types import GPU, Memory, MemoryBreakdown, Sized
from shoal.core.sizing.units import before, gib, usable
from shoal.core.sizing.vllm import profile
from shoal.core.sizing.vllm.arguments import VLLMArguments
from shoal.core.sizing.vllm.blocks import BlockLayout, pool
from shoal.core.sizing.vllm.slots import slot_bytes

UTILIZATION: Final = 0.92
"""vLLM's own --gpu-memory-utilization."""
_CAPABILITY: Mapping[str, int] = {
    "awq": 75, "awq_marlin": 75, "auto_awq": 75, "auto_gptq": 60, "compressed-tensors": 70, "deepseek_v4_fp8": 75,
    "experts_int8": 80, "fbgemm_fp8": 80, "fp8": 75, "fp8_per_block": 75, "fp8_per_channel": 75, "fp8_per_tensor": 75,
    "fp_quant": 100, "gpt_oss_mxfp4": 80, "gptq": 60, "gptq_marlin": 60, "humming": 75, "inc": 60,
    "int8_per_channel_weight_only": 75, "modelopt": 80, "modelopt_fp4": 75, "modelopt_mixed": 75, "modelopt_mxfp8": 80,
    "moe_wna16": 70, "mxfp4": 80, "mxfp8": 80, "nvfp4_per_token": 75, "online": 75, "quark": 70, "torchao": 75,
}  # fmt: skip
"""`get_min_capability` of vLLM 0.32.0."""
_IRREGULAR: Final = ("NemotronHForCausalLM", "FalconH1ForCausalLM")
"""Hybrid models with layers of a third kind, or of both kinds at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMTuning(VLLMArguments):
    """vLLM's arguments, with its arithmetic."""

    engine: ClassVar[str] = "vLLM"
    longer_context_by: ClassVar[str] = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
    attention_dp_by: ClassVar[str] = "`attentionData` (--data-parallel-size)"
    experts_by: ClassVar[str] = "--enable-expert-parallel"
    min_capability: ClassVar[Mapping[str, int]] = _CAPABILITY
    halving: ClassVar[frozenset[str]] = frozenset(
        {"fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "int8_per_channel_weight_only", "mxfp8"}
    )
    unreadable: ClassVar[frozenset[str]] = frozenset({"bitsandbytes", "gguf"})

    def expert_groups(self, gpus: int) -> int:
        return gpus if self.spread_experts else 1

    def dense_parts(self, gpus: int) -> int:
        return gpus // self.attention_dp

    def repeats(self, facts: ArtifactFacts) -> int | None:
        # Everything but the experts, whose size the facts do not have.
        return None if self.attention_dp > 1 else 0

    def slot_bytes(self, facts: ArtifactFacts, gpus: int) -> int | None:
        return slot_bytes(facts, gpus, self)

    def blocks(self, facts: ArtifactFacts, gpu: GPU, gpus: int, weights: int, context: int) -> tuple[BlockLayout, int]:
        """The blocks of one GPU and how many there are, the unused one included; below zero where the weights alone are
        too much. Parameters as of `memory`."""
        largest = profile.batch(gpu, context, self)
        layout = pool(facts, gpus // self.attention_dp, largest.tokens, Sizing(), self)
        return layout, self._breakdown(facts, gpu, gpus, weights, layout, largest).kv // layout.bytes

    def memory(
        self, facts: ArtifactFacts, gpu: GPU, gpus: int, weights: int, overrides: Sizing, context: int
    ) -> Memory:
        largest = profile.batch(gpu, context, self)
        blocks = pool(facts, gpus // self.attention_dp, largest.tokens, overrides, self)
        sums = self._breakdown(facts, gpu, gpus, weights, blocks, largest)
        return Memory(
            breakdown=sums,
            cell=blocks.cell(context),
            tokens=blocks.tokens(sums.kv // blocks.bytes, context),
            requests=largest.requests,
            estimates=self._estimates(gpu, sums),
        )

    def _breakdown(
        self, facts: ArtifactFacts, gpu: GPU, gpus: int, weights: int, blocks: BlockLayout, largest: profile.Batch
    ) -> MemoryBreakdown:
        overhead = before(gpu, gpus * self.pipeline)
        fraction = UTILIZATION if self.gpu_memory_utilization is None else self.gpu_memory_utilization
        images = profile.images(facts, largest, self)
        adapters = self.slot_bytes(facts, gpus) or 0
        activations = profile.activations(facts, largest, gpus, self)
        graphs = profile.graphs(facts, largest, self)
        used = weights + images + adapters + activations + graphs
        kv = self._fixed(blocks)
        if kv is None:
            kv = min(_share(gpu.memory_bytes, overhead, fraction), gpu.memory_bytes - overhead) - used
            # Graphs that the engine does not count are captured beside its share.
            kv += 0 if self.graphs_counted else graphs
        return MemoryBreakdown(
            memory=gpu.memory_bytes,
            overhead=overhead,
            reserve=gpu.memory_bytes - overhead - used - kv,
            weights=weights,
            images=images,
            state=0,
            adapters=adapters,
            kv=kv,
            fraction=fraction,
            activations=activations,
            graphs=graphs,
        )

    def _fixed(self, blocks: BlockLayout) -> int | None:
        if self.num_gpu_blocks_override is not None:
            return self.num_gpu_blocks_override * blocks.bytes
        return self.kv_cache_memory_bytes

    def _estimates(self, gpu: GPU, sums: MemoryBreakdown) -> tuple[str, ...]:
        parts = {"overhead": gpu.overhead_bytes is None, "images": sums.images > 0, "activations": True}
        return tuple(name for name, estimated in (parts | {"graphs": sums.graphs > 0}).items() if estimated)

    def cpu_tokens(self, facts: ArtifactFacts, overrides: Sizing, context: int) -> int | None:
        if overrides.kv_bytes_per_token is None and (facts.kv.kind == "Unknown" or self.unsized(facts)):
            return None
        blocks = pool(facts, 1, self.max_num_batched_tokens or 2048, overrides, self)
        fixed = self._fixed(blocks)
        return None if fixed is None else max(0, blocks.tokens(fixed // blocks.bytes, context))

    def unsized(self, facts: ArtifactFacts) -> str | None:
        kv, name = facts.kv, facts.architecture
        if self.draft_layers and kv.kind in ("Hybrid", "SlidingWindow"):
            return (
                f"how vLLM lays out the layers of {name or 'this architecture'} for multi-token prediction is not "
                "known: say in `sizing.kvBytesPerToken` how many bytes one token takes of each GPU"
            )
        split = kv.kv_lora_rank is None and kv.state_bytes_per_request and 0 < (kv.full_layers or 0) < (kv.layers or 0)
        if kv.kind != "Hybrid" or (split and name not in _IRREGULAR):
            return None
        return (
            f"how vLLM lays out the states of {name or 'this architecture'} beside its tokens is not known: say in "
            "`sizing.kvBytesPerToken` how many bytes one token takes of each GPU (an engine that has run on it says so "
            "in its log)"
        )

    def refusal(self, facts: ArtifactFacts, sized: Sized, context: int) -> str | None:
        sums = sized.breakdown
        share, free = _share(sums.memory, sums.overhead, sums.fraction), sums.memory - sums.overhead
        if share > free:
            lower = math.floor(100 * free / usable(sums.memory, sums.overhead)) / 100
            return (
                f"but vLLM does not start: its share is {gib(share)} and about {gib(free)} are free; "
                f"--gpu-memory-utilization={lower} in extraArgs lowers it"
            )
        if sums.reserve < 0:
            return f"which is {gib(-sums.reserve)} more than there is"
        return None

    def limit(self) -> str | None:
        if self.num_gpu_blocks_override is not None:
            return f"--num-gpu-blocks-override {self.num_gpu_blocks_override}"
        if self.kv_cache_memory_bytes is not None:
            return f"--kv-cache-memory-bytes {self.kv_cache_memory_bytes}"
        return None

    def parts(self, breakdown: MemoryBreakdown) -> tuple[str, ...]:
        found = [f"activations {gib(breakdown.activations)} (estimated)"]
        if breakdown.graphs > 0:
            found.append(f"CUDA graphs {gib(breakdown.graphs)} (estimated)")
        if breakdown.images > 0:
            found.append(f"images {gib(breakdown.images)} (estimated)")
        if breakdown.adapters > 0:
            found.append(f"places for adapters {gib(breakdown.adapters)}")
        left = breakdown.overhead + max(0, breakdown.reserve)
        return (*found, f"what vLLM leaves free {gib(left)}")

    def overhead_of(self, gpu: GPU, sized: Sized, engine_tokens: int) -> int | None:
        # What was in use before lies outside vLLM's share: its cache says nothing of it.
        return None


def _share(memory: int, overhead: int, fraction: float) -> int:
    return math.ceil(usable(memory, overhead) * fraction)
