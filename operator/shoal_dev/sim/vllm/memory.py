"""How many blocks of KV cache a simulated vLLM has.

vLLM measures its weights and activations in a run of the model at the start; the simulator takes the sums that describe
them. `--kv-cache-memory-bytes` and `--num-gpu-blocks-override` fix the size, as in the engine.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.api.artifact import ArtifactFacts
from shoal.core.sizing.cell import bytes_per_token
from shoal_dev.sim import timing
from shoal_dev.sim.memory import facts_in
from shoal_dev.sim.vllm.args import VLLMArgs

_MIB: Final = 2**20
_CONTEXT: Final = int(0.7 * 2**30)
_ACTIVATIONS: Final = int(1.5 * 2**30)
_GRAPHS: Final = 2**30
_LLAMA_BYTES: Final = 131072.0
"""Of one token of Llama-3.1-8B."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Of one replica."""

    blocks: int
    """With block 0, which holds nothing."""
    block_bytes: int
    weight_bytes: int
    """On each GPU."""


def of(args: VLLMArgs, context_length: int) -> BlockMemory:
    """Raises ValueError in vLLM's words where not even one request of the longest length fits."""
    facts = None if args.engine.kv_of == "llama-3.1-8b" else facts_in(Path(args.engine.model_path))
    per_token = _per_token(facts, args)
    block_bytes = int(per_token * args.block_size)
    weights = int(timing.weight_gb(args.engine.gpu) * 2**30) if facts is None else facts.weight_bytes
    per_gpu = (weights or 0) // args.engine.tp_size
    blocks = args.num_blocks
    if blocks is None:
        blocks = (args.kv_bytes if args.kv_bytes is not None else _left(args, per_gpu)) // block_bytes
    if blocks * args.block_size < context_length:
        need, have = context_length * per_token / 2**30, blocks * block_bytes / 2**30
        raise ValueError(
            f"To serve at least one request with the model's max seq len ({context_length}), ({need:.2f} GiB KV cache "
            f"is needed, which is larger than the available KV cache memory ({have:.2f} GiB). Based on the available "
            f"memory, the estimated maximum model length is {max(0, blocks * args.block_size)}."
        )
    return BlockMemory(blocks, block_bytes, per_gpu)


def _per_token(facts: ArtifactFacts | None, args: VLLMArgs) -> float:
    if facts is None:
        return _LLAMA_BYTES / args.engine.tp_size
    given = args.engine.given
    float32 = given.get("dtype") in ("float32", "float")
    found = bytes_per_token(
        facts.kv, attention_tensor=args.engine.tp_size, kv_dtype=given.get("kv_cache_dtype"), kept_float32=float32
    )
    return found or _LLAMA_BYTES / args.engine.tp_size


def _left(args: VLLMArgs, weights: int) -> int:
    total = (args.engine.gpu_memory_mib or timing.memory_mib(args.engine.gpu)) * _MIB
    return int(total * args.engine.mem_fraction_static) - weights - _CONTEXT - _ACTIVATIONS - _GRAPHS
