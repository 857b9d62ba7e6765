"""How many blocks of KV cache a simulated vLLM has, by the sums with which Shoal predicts it (`core/sizing/vllm`): in a
lab, prediction and report agree.

`--kv-cache-memory-bytes` and `--num-gpu-blocks-override` fix the size, as in the engine.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.api.artifact import ArtifactFacts
from shoal.core.sizing import GPU, VLLMTuning
from shoal.engine.vllm.tuning import tuning_of
from shoal_dev.sim import timing
from shoal_dev.sim.memory import argument, facts_in
from shoal_dev.sim.vllm.args import VLLMArgs

_MIB: Final = 2**20
_LLAMA: Final = ArtifactFacts.model_validate(
    {
        "source": "llama-3.1-8b",
        "dtype": "bfloat16",
        "vocabulary": 128256,
        "widths": {"layers": 32, "hidden": 4096, "query": 4096, "key": 1024, "feedForward": 14336},
        "kv": {"kind": "Full", "layers": 32, "kvHeads": 8, "headDim": 128},
    }
)
"""What counts where the model that is served is not known."""
_OTHERS: Final = ("model_path", "served_model_name", "host", "port", "api_key", "admin_api_key", "config")


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
    known = None if args.engine.kv_of == "llama-3.1-8b" else facts_in(Path(args.engine.model_path))
    facts = known or _LLAMA
    weights = int(timing.weight_gb(args.engine.gpu) * 2**30) if known is None else known.weight_bytes or 0
    per_gpu = weights // args.engine.tp_size
    gpu = GPU(args.engine.gpu, (args.engine.gpu_memory_mib or timing.memory_mib(args.engine.gpu)) * _MIB)
    layout, blocks = _tuning(args).blocks(facts, gpu, args.engine.tp_size, per_gpu, context_length)
    if blocks < layout.per_request(context_length):
        whole = max(0, blocks) * layout.block
        need, have = layout.per_request(context_length) * layout.bytes / 2**30, blocks * layout.bytes / 2**30
        raise ValueError(
            f"To serve at least one request with the model's max seq len ({context_length}), ({need:.2f} GiB KV cache "
            f"is needed, which is larger than the available KV cache memory ({have:.2f} GiB). Based on the available "
            f"memory, the estimated maximum model length is {whole}."
        )
    return BlockMemory(blocks, layout.bytes, per_gpu)


def _tuning(args: VLLMArgs) -> VLLMTuning:
    given = [argument(name, value) for name, value in args.engine.given.items() if name not in _OTHERS]
    return tuning_of([*(text for text in given if text), f"--block-size={args.block_size}"])
