"""SGLang's command line: built here and nowhere else."""

from collections.abc import Mapping, Sequence
from typing import Final

from shoal.api import names
from shoal.api.artifact import ArtifactFacts
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.core.architectures import names as architectures
from shoal.core.capabilities import only_embeds, takes_no_salt
from shoal.engine.port import EngineLaunch
from shoal.engine.sglang.fields import field_args
from shoal.engine.sglang.tuning import quantization_args
from shoal.engine.sglang.wire import EMBEDS_ARG, NO_PREFIX_CACHE, WIRE

ENVIRONMENT: Final[Mapping[str, str]] = {
    "HOME": names.HOME_DIR,
    # When no token is left for a request in a step, as with a grammar that nothing matches, only that request fails.
    # Without this setting SGLang samples from NaN and the engine exits.
    "SGLANG_SANITIZE_NAN_LOGITS": "1",
}
"""Environment of the engine's container."""
_ONE_PREFILL: Final = "--chunked-prefill-size=-1"


def engine_args(launch: EngineLaunch) -> tuple[str, ...]:
    """See `PodSide.args`."""
    model, engine = launch.model, launch.model.spec.engine
    fields = {
        "context-length": engine.context_length,
        "tool-call-parser": engine.tool_call_parser,
        "reasoning-parser": engine.reasoning_parser,
    }
    return (
        f"--model-path={launch.model_path}",
        f"--served-model-name={model.engine_model_name}",
        f"--host={launch.host}",
        f"--port={launch.port}",
        f"--tp-size={launch.tensor}",
        # Two words: SGLang looks for exactly "--config" and would ignore --config=FILE, and with it the keys.
        "--config",
        names.ENGINE_CONFIG_FILE,
        "--enable-metrics",
        "--enable-cache-report",
        *(f"--{name}={value}" for name, value in fields.items() if value is not None),
        *launch.platform_args,
        *quantization_args(launch.weights),
        *field_args(engine, launch.model_path, launch.tensor),
        *task_args(launch.facts, engine.extra_args),
        *prefix_args(model, launch.facts),
        *pool_args(launch.pool),
        *engine.extra_args,
    )


def task_args(facts: ArtifactFacts | None, extra_args: Sequence[str]) -> tuple[str, ...]:
    """What SGLang needs for weights that do not generate, unless the Model's own arguments say it."""
    if facts is None or not only_embeds(facts, extra_args, WIRE.differences):
        return ()
    args = () if EMBEDS_ARG in extra_args else (EMBEDS_ARG,)
    name, _, _ = _ONE_PREFILL.partition("=")
    if facts.architecture in architectures.ENCODERS and not any(arg.startswith(name) for arg in extra_args):
        args += (_ONE_PREFILL,)
    return args


def prefix_args(model: Model, facts: ArtifactFacts | None = None) -> tuple[str, ...]:
    """An engine that embeds or transcribes takes no `cache_salt`: where tenants may not find each other's prompts it
    keeps none. An encoder never keeps any: what it computed of a text depends on the text's end."""
    extra_args = model.spec.engine.extra_args
    if NO_PREFIX_CACHE in extra_args:
        return ()
    encodes = facts is not None and facts.architecture in architectures.ENCODERS
    shared = model.spec.prefix_cache.isolation == "Shared"
    return (NO_PREFIX_CACHE,) if encodes or (takes_no_salt(facts, extra_args, WIRE.differences) and not shared) else ()


def pool_args(pool: LoRAPool | None) -> tuple[str, ...]:
    """Arguments that make room for a pool's adapters; none without a pool."""
    if pool is None:
        return ()
    spec = pool.spec
    return (
        "--enable-lora",
        f"--max-lora-rank={spec.max_rank}",
        "--lora-target-modules",  # a list: one word each
        *spec.target_modules,
        f"--max-loras-per-batch={spec.slots_per_replica}",
        f"--max-loaded-loras={spec.cached}",
    )
