"""vLLM's command line, as `vllm serve` reads it: the words behind `serve`, plus the simulation's own `--sim-` options.

Arguments that the simulator does not act on are accepted when the pinned vLLM knows them (the table in
`shoal/engine/vllm/vllm_args.json`) and refused otherwise, as vLLM refuses them: message on stderr, exit code 2.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, cast

import yaml

from shoal_dev.sim.args import EngineArgs, add_simulation, simulation_of
from shoal_dev.sim.timing import memory_mib

VERSION: Final = "0.32.0"
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What --max-lora-rank may be."""
_BIG_GPU_MIB: Final = 70 * 1024
"""From this memory on vLLM's defaults for the batch are larger."""
_READY_SECONDS: Final = 600.0
_SUFFIXES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DOTTED: Final = re.compile(r"--[a-z0-9-]+\.")


@dataclass(frozen=True, slots=True)
class AdapterArgs:
    """LoRA is enabled, with these limits."""

    slots: int
    """Distinct adapters in one batch; the base model takes no slot."""
    max_rank: int
    cached: int
    """Adapters in host memory."""
    at_start: tuple[tuple[str, str], ...] = ()
    """Names and paths."""


@dataclass(frozen=True, slots=True)
class VLLMArgs:
    """What the personality acts on."""

    engine: EngineArgs
    """What both personalities act on, under SGLang's names."""
    names: tuple[str, ...]
    """Served names of the base model, the first one is told in answers."""
    api_keys: tuple[str, ...]
    block_size: int
    num_blocks: int | None
    """--num-gpu-blocks-override."""
    kv_bytes: int | None
    """--kv-cache-memory-bytes, per GPU."""
    max_queued: int | None
    """Running and waiting requests together; None: no limit."""
    shutdown_timeout: float
    """Seconds that a stopping engine waits for its requests; 0: it cuts them."""
    ready_timeout: float
    """Seconds that a start may last."""
    adapters: AdapterArgs | None
    adapter_routes: bool
    """Whether there are paths that load and unload adapters while the engine runs, also in an engine without them."""
    echo_request_id: bool
    load_tracking: bool
    flops: bool
    tools: bool
    """Whether `tools` are taken without a forced choice."""
    dev_mode: bool
    most_stops: int
    """Strings of `stop` in a list."""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> VLLMArgs:
    """Parses what stands behind `vllm serve`. Prints to stderr and raises SystemExit(2) where vLLM would refuse it."""
    parser = _parser()
    try:
        words = _merge_config(_model_first(list(argv)))
        ns = parser.parse_args(_dotted(_dashes(words)))
        return _args(ns, environ)
    except ValueError as error:
        parser.error(str(error))


def whole(text: str) -> int:
    """`32k` is 32000, `32K` is 32768, `1.5k` is 1500, as vLLM reads a number. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])?", text.strip())
    if (
        match is None
        or (match[2] is None and "." in match[1])
        or (match[2] in ("K", "M", "G", "T") and "." in match[1])
    ):
        raise ValueError(f"invalid value: {text!r}")
    return int(float(match[1]) * _SUFFIXES[match[2]]) if match[2] else int(match[1])


def _optional(text: str | None) -> int | None:
    return None if text is None or text.lower() == "none" else whole(text)


def _args(ns: argparse.Namespace, environ: Mapping[str, str]) -> VLLMArgs:
    model = ns.model_tag or ns.model
    if model is None:
        raise ValueError("the following arguments are required: model")
    names = tuple(ns.served_model_name or (model,))
    simulation = simulation_of(ns, environ)
    memory = simulation["gpu_memory_mib"] or memory_mib(simulation["gpu"])
    batch, requests = (8192, 1024) if memory >= _BIG_GPU_MIB else (2048, 256)
    keys = tuple(ns.api_key or ([environ["VLLM_API_KEY"]] if environ.get("VLLM_API_KEY") else ()))
    engine = EngineArgs(
        model_path=model,
        served_model_name=names[0],
        host=ns.host or "0.0.0.0",  # noqa: S104 - vLLM's own default
        port=ns.port if ns.port is not None else 8000,
        context_length=None if ns.max_model_len in (None, "auto", "-1") else whole(ns.max_model_len),
        tp_size=ns.tensor_parallel_size or 1,
        api_key=None,
        admin_api_key=None,
        max_running_requests=requests if ns.max_num_seqs is None else ns.max_num_seqs,
        max_queued_requests=None,
        max_total_tokens=None,
        chunked_prefill_size=batch if ns.max_num_batched_tokens is None else whole(ns.max_num_batched_tokens),
        mem_fraction_static=0.92 if ns.gpu_memory_utilization is None else ns.gpu_memory_utilization,
        enable_metrics=not ns.disable_log_stats,
        enable_cache_report=bool(ns.enable_prompt_tokens_details),
        is_embedding=ns.runner == "pooling",
        include_usage_by_default=bool(ns.enable_force_include_usage),
        radix_cache=ns.enable_prefix_caching is not False,
        draft_tokens=0,
        lora=None,
        traces_endpoint=ns.otlp_traces_endpoint,
        traces_service=environ.get("OTEL_SERVICE_NAME") or "unknown_service",
        given={key: value for key, value in vars(ns).items() if not key.startswith("sim_")},
        **simulation,
    )
    return VLLMArgs(
        engine=engine,
        names=names,
        api_keys=keys,
        block_size=16 if ns.block_size is None else ns.block_size,
        num_blocks=_optional(ns.num_gpu_blocks_override),
        kv_bytes=_optional(ns.kv_cache_memory_bytes),
        max_queued=_optional(ns.max_num_queued_reqs),
        shutdown_timeout=float(ns.shutdown_timeout or 0),
        ready_timeout=float(environ.get("VLLM_ENGINE_READY_TIMEOUT_S") or _READY_SECONDS),
        adapters=_adapters(ns),
        adapter_routes=environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") in ("1", "true"),
        echo_request_id=bool(ns.enable_request_id_headers),
        load_tracking=bool(ns.enable_server_load_tracking),
        flops=bool(ns.enable_mfu_metrics),
        tools=bool(ns.enable_auto_tool_choice and ns.tool_call_parser),
        dev_mode=environ.get("VLLM_SERVER_DEV_MODE") == "1",
        most_stops=int(environ.get("VLLM_MAX_STOP_STRINGS") or 4),
    )


def _adapters(ns: argparse.Namespace) -> AdapterArgs | None:
    if not ns.enable_lora:
        return None
    slots = 1 if ns.max_loras is None else ns.max_loras
    rank = 16 if ns.max_lora_rank is None else int(ns.max_lora_rank)
    cached = slots if ns.max_cpu_loras is None else whole(ns.max_cpu_loras)
    if rank not in RANKS:
        raise ValueError(f"argument --max-lora-rank: invalid choice: {rank} (choose from {', '.join(map(str, RANKS))})")
    if cached < slots:
        raise ValueError(f"max_cpu_loras ({cached}) must be >= max_loras ({slots}).")
    at_start = tuple(_module(text) for text in cast("Sequence[str]", ns.lora_modules or ()))
    return AdapterArgs(slots, rank, cached, at_start)


def _module(text: str) -> tuple[str, str]:
    if text.lstrip().startswith("{"):
        entry: dict[str, Any] = json.loads(text)
        return str(entry["name"]), str(entry["path"])
    name, equals, path = text.partition("=")
    if not equals:
        raise ValueError(f"Invalid format for --lora-modules: {text}")
    return name, path


# --- what vLLM does with the words before argparse sees them ---------------------------------------------------------


def _model_first(argv: list[str]) -> list[str]:
    """Puts the value of --model where the first word would be."""
    for at, word in enumerate(argv):
        if word == "--model" and at + 1 < len(argv):
            return [argv[at + 1], *argv[:at], *argv[at + 2 :]]
        if word.startswith("--model="):
            return [word.removeprefix("--model="), *argv[:at], *argv[at + 1 :]]
    named = any(re.match(r"--served[-_]model[-_]name(=|$)", word) for word in argv)
    configured = any(re.match(r"--config(=|$)", word) for word in argv)
    if argv and argv[0].startswith("-") and named and not configured:
        raise ValueError(
            "`model` should be provided as the first positional argument when using `vllm serve`. i.e. "
            "`vllm serve <model> --<arg> <value>`."
        )
    return argv


def _merge_config(argv: list[str]) -> list[str]:
    """Puts the arguments of `--config FILE` behind the model. `--config=FILE` is left alone, and so has no effect."""
    if "--config" not in argv:
        return argv
    at = argv.index("--config")
    if at == len(argv) - 1:
        raise ValueError("No config file specified! Please check your command-line arguments.")
    path = Path(argv[at + 1])
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"Config file must be of a yaml/yml type. {path.suffix.removeprefix('.')} supplied")
    loaded: object = yaml.safe_load(path.read_text()) or {}
    merged: list[str] = []
    for key, value in (cast("dict[str, Any]", loaded) if isinstance(loaded, dict) else {}).items():
        if value is True:
            merged.append(f"--{key}")
        elif isinstance(value, list):
            merged += [f"--{key}", *(str(item) for item in cast("list[Any]", value))]
        elif value is not False and value is not None:
            merged += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    rest = argv[:at] + argv[at + 2 :]
    first = 0 if not rest or rest[0].startswith("-") else 1
    return [*rest[:first], *merged, *rest[first:]]


def _dashes(argv: list[str]) -> list[str]:
    """`--max_num_seqs` is `--max-num-seqs`."""
    found: list[str] = []
    for word in argv:
        if not word.startswith("--"):
            found.append(word)
            continue
        name, equals, value = word.partition("=")
        head, dot, keys = name.partition(".")
        found.append(head.replace("_", "-") + dot + keys + equals + value)
    return found


def _dotted(argv: list[str]) -> list[str]:
    """`--name.key VALUE` gives a field of an argument whose value is JSON."""
    found: list[str] = []
    fields: dict[str, dict[str, Any]] = {}
    words = iter(argv)
    for word in words:
        if _DOTTED.match(word.partition("=")[0]) is None:
            found.append(word)
            continue
        name, equals, value = word.partition("=")
        head, *keys = name.split(".")
        at = fields.setdefault(head, {})
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = value if equals else next(words, "")
    for head, content in fields.items():
        found += [head, json.dumps(content)]
    return found


def _parser() -> argparse.ArgumentParser:
    # Beginnings of names are taken, as long as they are unique.
    parser = argparse.ArgumentParser(prog="vllm serve", description="Simulates a vLLM server.")
    add_simulation(parser)
    engine = parser.add_argument_group("vLLM")
    engine.add_argument("model_tag", nargs="?", help="the model's folder")
    table: dict[str, dict[str, Any]] = json.loads(
        resources.files("shoal.engine.vllm").joinpath("vllm_args.json").read_text()
    )["arguments"]
    kinds: dict[str, type] = {"int": int, "float": float}
    for name, entry in table.items():
        spellings = [name, *entry.get("aliases", ())]
        flags = [text if text.startswith("-") else f"--{text}" for text in spellings]
        options: dict[str, Any] = {"dest": name.replace("-", "_"), "help": argparse.SUPPRESS}
        if entry["takes"] == "none":
            # None: not given, which is not the same as --no-x.
            options["action"] = argparse.BooleanOptionalAction if f"--no-{name}" in flags else "store_true"
            flags = [flag for flag in flags if not flag.startswith("--no-")]
            options["default"] = None
        else:
            options["nargs"] = {"one": None, "optional": "?", "list": "*"}[entry["takes"]]
            options["type"] = kinds.get(entry.get("type", ""))
            if entry.get("choices") and entry["takes"] == "one" and name != "max-lora-rank":
                options["choices"] = entry["choices"]
            options = {key: value for key, value in options.items() if value is not None or key == "nargs"}
        engine.add_argument(*flags, **options)
    return parser
