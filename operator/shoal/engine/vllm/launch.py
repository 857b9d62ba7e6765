"""vLLM's command line and environment: built here and nowhere else."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from shoal.api import names
from shoal.api.artifact import ArtifactFacts
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.core.capabilities import takes_no_salt
from shoal.core.fields.recordings import MOST_SAMPLES, MOST_SECONDS
from shoal.core.fields.table import MOST_STOPS
from shoal.core.lora.pool import EMBEDS
from shoal.engine.arguments import LONGEST
from shoal.engine.port import STARTUP_SECONDS, EngineLaunch
from shoal.engine.vllm.arguments import ARGUMENTS
from shoal.engine.vllm.fields import field_args
from shoal.engine.vllm.wire import NO_PREFIX_CACHE, WIRE

MAX_RUNNING: Final = 256
"""--max-num-seqs where nothing else is said. vLLM's own default depends on the GPU, and its metrics do not tell it."""
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank."""
_TMP: Final = "/tmp"  # noqa: S108 - a volume of its own in each pod

_FLOAT: Final = 4
"""Bytes of a sample that it has unpacked."""
_MOST_FILE: Final = 1024
"""MiB of a recording; the gateway's bound of a body is lower."""

ENVIRONMENT: Final[Mapping[str, str]] = {
    "HOME": names.HOME_DIR,
    "TMPDIR": _TMP,
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Its own limit of a start is ten minutes.
    "VLLM_ENGINE_READY_TIMEOUT_S": str(STARTUP_SECONDS),
    # Its own limit is 4.
    "VLLM_MAX_STOP_STRINGS": str(MOST_STOPS),
    # Gateways bound what a recording unpacks to. Its own limits are 25 MiB of a file, ten minutes and 256 MiB.
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": str(_MOST_FILE),
    "VLLM_MAX_AUDIO_DECODE_DURATION_S": str(MOST_SECONDS),
    "VLLM_MAX_AUDIO_DECODE_BYTES": str(MOST_SAMPLES * _FLOAT),
}
_OF_POOL: Final[Mapping[str, str]] = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
"""Without it the routes that load adapters do not exist."""
_OBSERVED: Final = (
    "--enable-prompt-tokens-details",
    "--enable-request-id-headers",
    "--enable-server-load-tracking",
    "--enable-mfu-metrics",
    "--disable-fastapi-docs",
)


def environment(*, pool: bool) -> dict[str, str]:
    """Environment of the engine's container."""
    return {**ENVIRONMENT, **(_OF_POOL if pool else {})}


def engine_args(launch: EngineLaunch) -> tuple[str, ...]:
    """See `PodSide.args`."""
    model, engine = launch.model, launch.model.spec.engine
    given = ARGUMENTS.parsed([*launch.platform_args, *engine.extra_args])
    return (
        launch.model_path,
        f"--served-model-name={model.engine_model_name}",
        f"--host={launch.host}",
        f"--port={launch.port}",
        f"--tensor-parallel-size={launch.tensor // engine.parallelism.attention_data}",
        # Two words: vLLM looks for exactly "--config" and would ignore --config=FILE, and with it the keys.
        "--config",
        names.ENGINE_CONFIG_FILE,
        f"--shutdown-timeout={model.spec.drain_seconds}",
        *_OBSERVED,
        *([] if "max-num-seqs" in given else [f"--max-num-seqs={MAX_RUNNING}"]),
        *_of_fields(model),
        *launch.platform_args,
        *quantization_args(launch.weights, launch.facts),
        *field_args(engine, launch.model_path),
        *task_args(launch.facts),
        *prefix_args(model, launch.facts),
        *pool_args(launch.pool),
        *engine.extra_args,
    )


def _of_fields(model: Model) -> tuple[str, ...]:
    engine = model.spec.engine
    parser = engine.tool_call_parser
    return (
        *([] if engine.context_length is None else [f"--max-model-len={engine.context_length}"]),
        *([] if parser is None else ["--enable-auto-tool-choice", f"--tool-call-parser={parser}"]),
        *([] if engine.reasoning_parser is None else [f"--reasoning-parser={engine.reasoning_parser}"]),
    )


def quantization_args(quantization: Literal["FP8"] | None, facts: ArtifactFacts | None = None) -> tuple[str, ...]:
    """Engine arguments that quantize the weights while they are loaded. `fp8` is vLLM's word for weights that are
    stored so; for others it is an old one of `fp8_per_tensor`, and logs a warning."""
    if quantization is None:
        return ()
    stored = facts is not None and facts.quantization is not None
    return ("--quantization=fp8",) if stored else ("--quantization=fp8_per_tensor",)


def task_args(facts: ArtifactFacts | None) -> tuple[str, ...]:
    """What vLLM needs for weights that do not generate: it takes a bare body of layers for a model that does."""
    return ("--runner=pooling",) if facts is not None and facts.task == "Embed" else ()


def prefix_args(model: Model, facts: ArtifactFacts | None) -> tuple[str, ...]:
    """Where tenants may not find each other's prompts, an engine that does not generate keeps none: gateways send such
    requests without a salt."""
    if NO_PREFIX_CACHE in model.spec.engine.extra_args:
        return ()
    shared = model.spec.prefix_cache.isolation == "Shared"
    return (NO_PREFIX_CACHE,) if takes_no_salt(facts, (), WIRE.differences) and not shared else ()


def pool_args(pool: LoRAPool | None) -> tuple[str, ...]:
    """Arguments that make room for a pool's adapters; none without a pool, and for one whose rank vLLM does not serve.
    Without --lora-target-modules: vLLM would pass over the other modules of an adapter without a word."""
    if pool is None or (rank := rank_of(pool.spec.max_rank)) is None:
        return ()
    return (
        "--enable-lora",
        f"--max-lora-rank={rank}",
        f"--max-loras={slots(pool)}",
        f"--max-cpu-loras={in_memory(pool)}",
    )


def rank_of(rank: int) -> int | None:
    """The least rank of vLLM's list that holds `rank`; None: there is none."""
    return next((listed for listed in RANKS if listed >= rank), None)


def slots(pool: LoRAPool) -> int:
    """Adapters in GPU memory: in a pool's slots the base has one, and in vLLM it takes none."""
    return pool.spec.slots_per_replica - 1


def in_memory(pool: LoRAPool) -> int:
    """Adapters in host memory: those that are loaded, and those that were unloaded lately, which stay until others take
    their place. One that is loaded and finds no place is read again inside a step of the engine."""
    return pool.spec.cached + slots(pool)


def pool_problem(pool: LoRAPool, given: Mapping[str, str]) -> str | None:
    """See `PodSide.pool_problem`."""
    if rank_of(pool.spec.max_rank) is None:
        return f"vLLM serves adapters up to rank {RANKS[-1]}, and the pool's spec.maxRank is {pool.spec.max_rank}"
    if given.get("runner") == "pooling":
        return EMBEDS
    if given.get("data-parallel-size", "1") != "1":
        return "with parallelism.attentionData vLLM says of a load only what its first group answers: leave it out"
    if "enable-dbo" in given:
        return "vLLM serves no adapters with --enable-dbo: leave it out"
    if "adaptive" in given.get("speculative-config", "") or any(
        name.startswith("speculative-config.enable_adaptive") for name in given
    ):
        return "vLLM serves no adapters with adaptive verification: take it out of --speculative-config"
    return None


def max_running(args: Sequence[str]) -> int | None:
    """See `PodSide.max_running`."""
    text = ARGUMENTS.parsed(args).get("max-num-seqs", "")
    if not text.isdecimal() or len(text) > LONGEST:
        return None
    return int(text) if ARGUMENTS.within("max-num-seqs", int(text)) else None
