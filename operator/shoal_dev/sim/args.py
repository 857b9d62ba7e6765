"""The simulator's command line: SGLang's own arguments, plus a few of its own that begin with `--sim-`.

Arguments that the simulator does not act on are accepted when the pinned SGLang knows them (the table in
`shoal/engine/sglang/sglang_args.json`) and refused otherwise, as SGLang refuses them: message on stderr, exit code 2.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, TypedDict, cast

import yaml

from shoal.core import quantity
from shoal_dev.sim import loraargs

SGLANG_VERSION: Final = "0.5.23"
KV_OF: Final = ("model", "llama-3.1-8b")
_DRAFT_TOKENS: Final = 12
"""SGLang's default for NGRAM."""
_NUMBER: Final = re.compile(r"\d+|\d+(\.\d+)?[kMGT]|\d+[KMGT]i")

_ACTED_ON: Final[dict[str, type | None]] = {
    "model-path": str, "served-model-name": str, "host": str, "port": int, "context-length": str, "tp-size": int,
    "api-key": str, "admin-api-key": str, "max-running-requests": int, "max-queued-requests": int,
    "max-total-tokens": str, "chunked-prefill-size": int, "mem-fraction-static": float, "config": str,
    "enable-metrics": None, "enable-cache-report": None, "is-embedding": None,
    "stream-response-default-include-usage": None, "disable-radix-cache": None, "enable-lora": None,
    "lora-paths": str, "max-lora-rank": int, "lora-target-modules": str, "max-loras-per-batch": int,
    "max-loaded-loras": int, "enable-trace": None, "otlp-traces-endpoint": str, "otlp-service-name": str,
}  # fmt: skip
"""SGLang's arguments that matter here, with their types; None: a flag."""


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """What the simulator acts on. Times are seconds of real time."""

    model_path: str
    served_model_name: str
    host: str
    port: int
    context_length: int | None
    """None: from the model's config.json."""
    tp_size: int
    api_key: str | None
    admin_api_key: str | None
    max_running_requests: int | None
    max_queued_requests: int | None
    """None: no limit."""
    max_total_tokens: int | None
    """None: from the GPU's memory."""
    chunked_prefill_size: int
    mem_fraction_static: float
    enable_metrics: bool
    enable_cache_report: bool
    is_embedding: bool
    include_usage_by_default: bool
    radix_cache: bool
    draft_tokens: int
    """Tokens that a step guesses, and the one that the check itself yields; 0: there is no speculation."""
    lora: loraargs.LoRAArgs | None
    """None: adapters are refused."""
    gpu: str
    """Key of engine_params_llama31_8b.json, such as `h100_sxm:bfloat16`."""
    gpu_memory_mib: int | None
    """Of one GPU; None: what `gpu` has."""
    kv_of: str
    """Whose KV cache is counted: `model`, the one that is served, or `llama-3.1-8b`."""
    speed: float
    """Simulated seconds per second."""
    seed: int
    load_seconds: float
    """Until the port opens."""
    warmup_seconds: float
    """From then until /ready answers 200."""
    drain_poll_seconds: float
    journal: str | None
    traces_endpoint: str | None
    """URL of a collector's traces; None: there are none."""
    traces_service: str
    given: Mapping[str, Any]
    """Every argument as parsed, for /server_info."""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> EngineArgs:
    """Parses a command line. Prints to stderr and raises SystemExit(2) where SGLang would refuse it."""
    parser = _parser()
    try:
        merged = _merge_config(parser, list(argv))
    except ValueError as error:
        parser.error(str(error))
    ns = parser.parse_args(merged)
    name = ns.served_model_name or ns.model_path
    if ":" in name and (ns.enable_lora or ns.lora_paths):
        parser.error("served-model-name cannot contain a colon (:) when LoRA is enabled")
    try:
        return EngineArgs(
            model_path=ns.model_path,
            served_model_name=name,
            host=ns.host or "127.0.0.1",
            port=ns.port if ns.port is not None else 30000,
            context_length=_tokens("context-length", ns.context_length),
            tp_size=ns.tp_size or 1,
            api_key=ns.api_key,
            admin_api_key=ns.admin_api_key,
            max_running_requests=ns.max_running_requests,
            max_queued_requests=ns.max_queued_requests,
            max_total_tokens=_tokens("max-total-tokens", ns.max_total_tokens),
            chunked_prefill_size=ns.chunked_prefill_size or 8192,
            mem_fraction_static=ns.mem_fraction_static or 0.9,
            enable_metrics=ns.enable_metrics,
            enable_cache_report=ns.enable_cache_report,
            is_embedding=ns.is_embedding,
            include_usage_by_default=ns.stream_response_default_include_usage,
            radix_cache=not ns.disable_radix_cache,
            draft_tokens=(ns.speculative_num_draft_tokens or _DRAFT_TOKENS) if ns.speculative_algorithm else 0,
            lora=loraargs.of(ns),
            **simulation_of(ns, environ),
            traces_endpoint=_traces_endpoint(ns.otlp_traces_endpoint, environ) if ns.enable_trace else None,
            traces_service=ns.otlp_service_name or environ.get("OTEL_SERVICE_NAME") or "sglang",
            given={key: value for key, value in vars(ns).items() if not key.startswith("sim_")},
        )
    except ValueError as error:
        parser.error(str(error))


class Simulation(TypedDict):
    """The options of the simulation, which every engine's personality has; see EngineArgs."""

    gpu: str
    gpu_memory_mib: int | None
    kv_of: str
    speed: float
    seed: int
    load_seconds: float
    warmup_seconds: float
    drain_poll_seconds: float
    journal: str | None


def simulation_of(ns: argparse.Namespace, environ: Mapping[str, str]) -> Simulation:
    """From the command line, else from the environment. Raises ValueError."""
    speed = _number(ns.sim_speed, environ, "SHOAL_SIM_SPEED", 1.0)
    if speed <= 0:
        raise ValueError("--sim-speed must be above 0")
    return Simulation(
        gpu=canonical_gpu(ns.sim_gpu or environ.get("SHOAL_SIM_GPU") or "h100"),
        gpu_memory_mib=int(_number(ns.sim_gpu_memory_mib, environ, "SHOAL_SIM_GPU_MEMORY_MIB", 0)) or None,
        kv_of=_kv_of(ns.sim_kv or environ.get("SHOAL_SIM_KV") or KV_OF[0]),
        speed=speed,
        seed=int(_number(ns.sim_seed, environ, "SHOAL_SIM_SEED", 0)),
        load_seconds=_number(ns.sim_load_seconds, environ, "SHOAL_SIM_LOAD_SECONDS", 2.0),
        warmup_seconds=_number(ns.sim_warmup_seconds, environ, "SHOAL_SIM_WARMUP_SECONDS", 0.5),
        drain_poll_seconds=_number(ns.sim_drain_poll_seconds, environ, "SHOAL_SIM_DRAIN_POLL_SECONDS", 5.0),
        journal=ns.sim_journal or environ.get("SHOAL_SIM_JOURNAL"),
    )


def engine_params() -> dict[str, dict[str, float]]:
    """Fitted step-time parameters by `gpu:dtype` (milliseconds; see timing.py)."""
    text = resources.files("shoal_dev.sim").joinpath("engine_params_llama31_8b.json").read_text()
    return json.loads(text)


def canonical_gpu(name: str) -> str:
    """`h100` -> `h100_sxm:bfloat16`. Raises ValueError that lists the known ones."""
    known = list(engine_params())
    gpu, _, dtype = name.lower().replace("-", "_").partition(":")
    dtype = {"": "bfloat16", "bf16": "bfloat16"}.get(dtype, dtype)
    for candidate in known:
        base, _, kind = candidate.partition(":")
        if kind == dtype and gpu in (base, base.removesuffix("_sxm")):
            return candidate
    raise ValueError(f"unknown GPU {name!r}; known: {', '.join(known)}")


def _kv_of(name: str) -> str:
    if name not in KV_OF:
        raise ValueError(f"--sim-kv (or SHOAL_SIM_KV) is {' or '.join(KV_OF)}, not {name!r}")
    return name


def _traces_endpoint(given: str | None, environ: Mapping[str, str]) -> str:
    variable = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    if environ.get(variable) != "http/protobuf":
        raise ValueError(f"--enable-trace: the simulator knows no gRPC; set {variable}=http/protobuf")
    if given is None or not given.startswith(("http://", "https://")):
        raise ValueError("--otlp-traces-endpoint must be a URL, such as http://otel-collector:4318/v1/traces")
    return given


def _number(given: float | None, environ: Mapping[str, str], variable: str, default: float) -> float:
    if given is not None:
        return given
    text = environ.get(variable)
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{variable} must be a number, got {text!r}") from None


def _tokens(name: str, text: str | None) -> int | None:
    """As SGLang reads a number of tokens: `32k` is 32000, `32Ki` is 32768, `1.5k` is 1500. Raises ValueError."""
    if text is None:
        return None
    if not _NUMBER.fullmatch(text.strip()):
        raise ValueError(f"argument --{name}: invalid value: {text!r}")
    return quantity.count(text)


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """The options of the simulation itself, the same for every engine."""
    own = parser.add_argument_group("simulation")
    own.add_argument(
        "--sim-gpu", help="h100, h200, a100, l40s, l4, a10g, rtxpro; with :fp8 for that type (env SHOAL_SIM_GPU)"
    )
    own.add_argument(
        "--sim-gpu-memory-mib", type=float, help="of one GPU; default that of --sim-gpu (env SHOAL_SIM_GPU_MEMORY_MIB)"
    )
    own.add_argument(
        "--sim-kv", help="whose KV cache is counted: model (the one that is served) or llama-3.1-8b (env SHOAL_SIM_KV)"
    )
    own.add_argument("--sim-speed", type=float, help="times faster than the GPU; default 1 (env SHOAL_SIM_SPEED)")
    own.add_argument("--sim-seed", type=float, help="seed of the answers; default 0 (env SHOAL_SIM_SEED)")
    own.add_argument(
        "--sim-load-seconds", type=float, help="until the port opens; default 2 (env SHOAL_SIM_LOAD_SECONDS)"
    )
    own.add_argument(
        "--sim-warmup-seconds", type=float, help="then until ready; default 0.5 (env SHOAL_SIM_WARMUP_SECONDS)"
    )
    own.add_argument(
        "--sim-drain-poll-seconds", type=float, help="default 5, as SGLang (env SHOAL_SIM_DRAIN_POLL_SECONDS)"
    )
    own.add_argument(
        "--sim-journal",
        help="append JSON lines on requests to this file, or to one in this folder (env SHOAL_SIM_JOURNAL)",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal sim engine", description="Simulates an SGLang server.")
    add_simulation(parser)
    engine = parser.add_argument_group("SGLang")
    table: dict[str, dict[str, Any]] = json.loads(
        resources.files("shoal.engine.sglang").joinpath("sglang_args.json").read_text()
    )["arguments"]
    missing = set(_ACTED_ON) - set(table)
    if missing:
        raise RuntimeError(f"SGLang {SGLANG_VERSION} has no such arguments: {sorted(missing)}")
    for name, entry in table.items():
        if name == "help":
            continue
        flags = [f"--{spelling}" for spelling in [name, *entry.get("aliases", [])]]
        options: dict[str, Any] = {
            # Another dest than the first flag's would hide an argument that shares its meaning.
            "dest": name.replace("-", "_"),
            "help": argparse.SUPPRESS if name not in _ACTED_ON else "as in SGLang",
        }
        if name == "model-path":
            options["required"] = True
        if entry["takes"] == "none":
            options["action"] = "store_true"
        else:
            options["nargs"] = {"one": None, "optional": "?", "list": "*"}[entry["takes"]]
            kinds: dict[str, type] = {"int": int, "float": float}
            kind = _ACTED_ON.get(name) or kinds.get(entry.get("type", ""))
            if kind is not None:
                options["type"] = kind
            if entry.get("choices"):
                options["choices"] = entry["choices"]
        engine.add_argument(*flags, **options)
    return parser


def _merge_config(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """Puts the arguments of `--config FILE` before the others, so that the command line wins."""
    if "--config" not in argv:
        return argv
    at = argv.index("--config")
    if "--config" in argv[at + 1 :]:
        raise ValueError("Multiple config files specified! Only one allowed.")
    if at == len(argv) - 1:
        raise ValueError("No config file specified after --config flag!")
    path = Path(argv[at + 1])
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ValueError(f"Config file must be YAML format, got: {path.suffix}")
    if not path.exists():
        raise ValueError(f"Config file not found: {path}")
    loaded: object = yaml.safe_load(path.read_text()) or {}
    if not isinstance(loaded, dict):
        raise ValueError("Config file must contain a dictionary at root level")
    merged: list[str] = []
    for key, value in cast(dict[str, Any], loaded).items():
        flag = f"--{key.replace('_', '-')}"
        if value is None or value is False:
            continue
        if value is True:
            merged.append(flag)
        elif isinstance(value, list):
            merged += [flag, *(str(item) for item in cast(list[Any], value))]
        else:
            # "=" keeps a value that begins with a dash a value.
            merged.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return merged + argv[:at] + argv[at + 2 :]
