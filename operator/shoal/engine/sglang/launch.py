"""The engine's command line: built here and nowhere else, and checked against what the engine itself accepts."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from shoal.api import names
from shoal.api.artifact import ArtifactFacts
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.api.sources import engine_model_path
from shoal.core import quantity
from shoal.core.architectures import names as architectures
from shoal.core.capabilities import EMBEDS_ARG, NO_PREFIX_CACHE, only_embeds
from shoal.engine.sglang.arguments import Argument, arguments_of, known_versions
from shoal.engine.sglang.bounds import BOUNDS, LONGEST, LONGEST_ARG, bounds, within
from shoal.engine.sglang.owned import OWNED, owner
from shoal.engine.sglang.tuning import quantization_args

__all__ = ["arguments_of", "check_extra_args", "engine_args", "engine_model_path", "known_versions", "pool_args"]

_MOST_ARGS: Final = 64
_LONGEST_SHOWN: Final = 64
"""Characters of a user's text in a message about it."""
_MOST_PROBLEMS: Final = 8
_ONE_PREFILL: Final = "--chunked-prefill-size=-1"


def engine_args(
    model: Model,
    version: str,
    *,
    model_path: str,
    port: int,
    tensor: int,
    platform_args: Sequence[str] = (),
    quantization: Literal["FP8"] | None = None,
    pool: LoRAPool | None = None,
    facts: ArtifactFacts | None = None,
    host: str = "0.0.0.0",  # noqa: S104 - the pod's own address
) -> tuple[str, ...]:
    """Arguments of the engine for this Model, without the command that starts it.

    `version` is the engine version that the Model gets, `platform_args` are those of its row in the engine table,
    `quantization` is that of the variant, `pool` the one whose adapters the engine gets, `facts` those of the weights;
    the Model's own extraArgs come last, so they win over those.
    """
    engine = model.spec.engine
    fields = {
        "context-length": engine.context_length,
        "tool-call-parser": engine.tool_call_parser,
        "reasoning-parser": engine.reasoning_parser,
    }
    return (
        f"--model-path={model_path}",
        f"--served-model-name={model.engine_model_name}",
        f"--host={host}",
        f"--port={port}",
        f"--tp-size={tensor}",
        # Two words: SGLang looks for exactly "--config" and would ignore --config=FILE, and with it the keys.
        "--config",
        names.ENGINE_CONFIG_FILE,
        "--enable-metrics",
        "--enable-cache-report",
        *(f"--{name}={value}" for name, value in fields.items() if value is not None),
        *platform_args,
        *quantization_args(quantization),
        *task_args(facts, engine.extra_args),
        *prefix_args(model, facts),
        *pool_args(pool),
        *engine.extra_args,
    )


def task_args(facts: ArtifactFacts | None, extra_args: Sequence[str]) -> tuple[str, ...]:
    """What SGLang needs for weights that do not generate, unless the Model's own arguments say it."""
    if facts is None or not only_embeds(facts, extra_args):
        return ()
    args = () if EMBEDS_ARG in extra_args else (EMBEDS_ARG,)
    name, _, _ = _ONE_PREFILL.partition("=")
    if facts.architecture in architectures.ENCODERS and not any(arg.startswith(name) for arg in extra_args):
        args += (_ONE_PREFILL,)
    return args


def prefix_args(model: Model, facts: ArtifactFacts | None = None) -> tuple[str, ...]:
    """An engine that does not generate takes no `cache_salt`: where tenants may not find each other's prompts it keeps
    none. An encoder never keeps any: what it computed of a text depends on the text's end."""
    extra_args = model.spec.engine.extra_args
    if NO_PREFIX_CACHE in extra_args:
        return ()
    encodes = facts is not None and facts.architecture in architectures.ENCODERS
    shared = model.spec.prefix_cache.isolation == "Shared"
    return (NO_PREFIX_CACHE,) if encodes or (only_embeds(facts, extra_args) and not shared) else ()


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


def check_extra_args(version: str, extra_args: Sequence[str]) -> list[str]:
    """What is wrong with these extraArgs, one sentence each for the person who wrote them; empty when all is well.

    Refused are names that the version does not know, abbreviations (argparse would complete them, and so let an owned
    argument through), arguments that Shoal owns, a value that is missing, not wanted or out of its bounds, a name given
    twice, and more or longer arguments than an admitted Model has.
    """
    if not extra_args:
        return []
    table = arguments_of(version)
    if table is None:
        known = ", ".join(known_versions())
        return [f"extraArgs cannot be checked for engine version {version}: this release of Shoal knows {known}"]
    if len(extra_args) > _MOST_ARGS:
        return [f"there are {len(extra_args)} of them, and {_MOST_ARGS} are the most"]
    problems: list[str] = []
    seen: set[str] = set()
    for arg in extra_args:
        if len(problems) == _MOST_PROBLEMS:
            return [*problems, "further ones are not looked at before these are mended"]
        spelling, equals, value = arg.removeprefix("--").partition("=")
        argument = table.get(spelling)
        if len(arg) > LONGEST_ARG:
            problems.append(f"{_shown(arg)} has {len(arg)} characters, and {LONGEST_ARG} are the most")
        elif not arg.startswith("--"):
            problems.append(f"{_shown(arg)} is not an argument: write '--name=value' or '--flag', one per item")
        elif argument is None:
            problems.append(_unknown(version, spelling, table))
        elif why := owner(argument.name):
            problems.append(f"--{spelling} is owned by Shoal: {why}")
        elif argument.name in seen:
            problems.append(f"--{argument.name} is given twice")
        elif problem := _value_problem(argument, spelling, value if equals else None):
            problems.append(problem)
        if argument is not None:
            seen.add(argument.name)
    return problems


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")


_OF_VLLM: Final[Mapping[str, str]] = {
    "max-model-len": "set spec.engine.contextLength of the Model",
    "gpu-memory-utilization": "Shoal sizes the GPU's memory by itself; SGLang's is --mem-fraction-static",
    "max-num-seqs": "SGLang's is --max-running-requests",
    "max-num-batched-tokens": "SGLang's is --chunked-prefill-size",
    "enable-prefix-caching": "SGLang's prefix cache is on by default",
    "no-enable-prefix-caching": "SGLang's is --disable-radix-cache",
    "enforce-eager": "SGLang's is --disable-cuda-graph",
    "lora-modules": "make a LoRAAdapter for each",
    "enable-auto-tool-choice": "set spec.engine.toolCallParser of the Model",
    "swap-space": "SGLang has nothing of the kind: leave it out",
    "guided-decoding-backend": "SGLang's is --grammar-backend",
    "limit-mm-per-prompt": "SGLang's is --limit-mm-data-per-request",
}
"""Arguments of vLLM -> what to do instead."""


def _unknown(version: str, spelling: str, table: Mapping[str, Argument]) -> str:
    if not spelling.strip():
        return "an item of extraArgs has no name: write '--name=value' or '--flag'"
    first, _, rest = spelling.partition(" ")
    if rest and first in table:
        return f"'--{spelling}' has a blank where '=' belongs: write --{first}={rest.strip()}"
    if len(spelling) > _LONGEST_SHOWN:
        return f"SGLang {version} has no argument --{spelling[:_LONGEST_SHOWN]}..."
    completions = sorted({table[name].name for name in table if name.startswith(spelling)})
    if completions:
        owned = next((name for name in completions if owner(name)), None)
        full = owned or completions[0]
        advice = f", which is owned by Shoal: {owner(owned)}" if owned else ": write it out"
        return f"--{spelling} is an abbreviation of --{full}{advice}"
    if (instead := _OF_VLLM.get(spelling.replace("_", "-"))) is not None:
        return f"SGLang {version} has no argument --{spelling}, which is vLLM's: {instead}"
    near = difflib.get_close_matches(spelling.replace("_", "-"), [*table, *OWNED], n=1, cutoff=0.7)
    hint = f"; did you mean --{near[0]}?" if near else ""
    return f"SGLang {version} has no argument --{spelling}{hint}"


def _value_problem(argument: Argument, spelling: str, value: str | None) -> str | None:
    if argument.takes == "none":
        return None if value is None else f"--{spelling} takes no value: write it without '='"
    if value is None:
        return None if argument.takes == "optional" else f"--{spelling} needs a value: write --{spelling}=VALUE"
    if argument.choices and value not in argument.choices:
        return f"--{spelling} must be one of {', '.join(argument.choices)}; got {_shown(value)}"
    if argument.type is None:
        return _text_problem(argument, spelling, value)
    wanted = "a whole number" if argument.type == "int" else "a number"
    number = _number(argument.type, value)
    if number is None:
        return f"--{spelling} must be {wanted}; got {_shown(value)}"
    if not within(argument.name, number):
        least, most = bounds(argument.name, whole=argument.type == "int")
        return f"--{spelling} must be {wanted} from {least:.15g} to {most:.15g}; got {_shown(value)}"
    return None


def _text_problem(argument: Argument, spelling: str, value: str) -> str | None:
    """Of a number that the engine takes as a word too, such as 64k. What is no number here is the engine's to judge."""
    if argument.name not in BOUNDS:
        return None
    try:
        number = quantity.count(value)
    except ValueError:
        return None
    least, most = bounds(argument.name, whole=True)
    beyond = f"--{spelling} must be from {least} to {most}; got {_shown(value)}"
    return None if within(argument.name, number) else beyond


def _number(kind: Literal["int", "float"], text: str) -> int | float | None:
    if len(text) > LONGEST:
        return None
    try:
        return int(text) if kind == "int" else float(text)
    except ValueError:
        return None
