"""How many tokens fit into the KV cache of the model that is served, on the GPU that is imitated.

The sums are the ones by which Shoal predicts an engine's memory (`core/sizing`), of the model's own config.json and
weights: what an engine says of itself in a lab agrees with what was predicted, and calibration has what it needs.
With `--sim-kv=llama-3.1-8b` it is the cache of that model instead, whatever is served: a tiny model's own cache never
fills, and pressure on it is what some tests want.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from shoal.api import reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.model import Sizing
from shoal.artifacts import ArtifactError, safetensors
from shoal.core.architectures import UnknownConfig, facts_of
from shoal.core.sizing import GPU, Sized, size
from shoal.engine.sglang.tuning import tuning_of
from shoal_dev.sim import timing
from shoal_dev.sim.args import EngineArgs

_GIB: Final = 2**30
_MIB: Final = 2**20
NO_MEMORY: Final = "Not enough memory. Please try to increase --mem-fraction-static. Current value: {}"
_OTHERS: Final = ("model_path", "served_model_name", "host", "port", "api_key", "admin_api_key", "config")


@dataclass(frozen=True, slots=True)
class SimMemory:
    """Of one replica."""

    kv_tokens: int
    max_requests: int
    """That run at once, as far as memory is concerned."""
    weight_bytes: int
    """On each GPU."""
    kv_bytes: int


def of(args: EngineArgs) -> SimMemory:
    """Raises ValueError in SGLang's words where the weights leave no room."""
    facts = None if args.kv_of == "llama-3.1-8b" else facts_in(Path(args.model_path))
    sized = None if facts is None else _sized(facts, args)
    if sized is None or sized.kv_tokens is None:
        return _llama(args)
    if sized.kv_tokens <= 0:
        raise ValueError(NO_MEMORY.format(args.mem_fraction_static))
    return SimMemory(
        kv_tokens=sized.kv_tokens,
        max_requests=max(1, sized.max_requests or sized.kv_tokens // 2),
        weight_bytes=sized.weight_bytes_per_gpu,
        kv_bytes=sized.kv_tokens * sized.kv_bytes_per_token,
    )


def _llama(args: EngineArgs) -> SimMemory:
    tokens = args.max_total_tokens or timing.kv_tokens(args.gpu, args.tp_size, args.mem_fraction_static)
    return SimMemory(
        kv_tokens=tokens,
        max_requests=max(1, min(4096, tokens // 2)),
        weight_bytes=int(timing.weight_gb(args.gpu) * _GIB),
        kv_bytes=int(timing.kv_gb(tokens) * _GIB),
    )


def _sized(facts: ArtifactFacts, args: EngineArgs) -> Sized | None:
    """None: of this architecture the KV cache is not known."""
    memory = args.gpu_memory_mib or timing.memory_mib(args.gpu)
    given = [argument(name, value) for name, value in args.given.items() if name not in _OTHERS]
    tuning = tuning_of([text for text in given if text])
    # An engine starts with whatever fits; that a whole context should is only what a class is chosen by.
    for context in (args.context_length, 1):
        found = size(
            facts,
            GPU(args.gpu, memory * _MIB),
            tensor=args.tp_size,
            context_length=context,
            overrides=Sizing.model_validate({}),
            tuning=tuning,
        )
        if isinstance(found, Sized):
            return found
    if found.reason == reasons.NO_FIT:
        raise ValueError(NO_MEMORY.format(args.mem_fraction_static))
    return None


def argument(name: str, value: object) -> str | None:
    """A parsed argument as it was written; None where it was not given, or is a flag that is off."""
    flag = f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return None
    if isinstance(value, list):
        return f"{flag}={' '.join(str(item) for item in cast('list[object]', value))}"
    return flag if value is True else f"{flag}={value}"


def facts_in(folder: Path) -> ArtifactFacts | None:
    """What the model's files say of its memory; None where that is not known."""
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
        parts = [_header(file) for file in sorted(folder.glob("*.safetensors"))]
        if not isinstance(config, dict) or not parts:
            return None
        tensors = safetensors.total(parts)
        facts = facts_of(
            cast("dict[str, Any]", config),
            source=str(folder),
            parameters=tensors.parameters,
            weight_bytes=tensors.bytes,
            tensor_dtypes=tensors.by_type,
        )
    except (OSError, ValueError, UnknownConfig, ArtifactError):
        return None
    return None if facts.kv.kind == "Unknown" else facts


def _header(path: Path) -> safetensors.Tensors:
    with path.open("rb") as file:
        total = path.stat().st_size
        length = safetensors.header_bytes(file.read(safetensors.PREFIX_BYTES), total, path.name)
        return safetensors.tensors(file.read(length), total, path.name)
