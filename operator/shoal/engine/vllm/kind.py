"""vLLM as an engine kind."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal

import aiohttp

from shoal.api.artifact import ArtifactFacts
from shoal.api.config import Engines, EngineTable
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import CELRule
from shoal.api.model import Engine, Model
from shoal.core.capabilities import capabilities
from shoal.core.lora.format.rules import AdapterRules
from shoal.core.sizing import Tuning
from shoal.engine.fields import parser_problems
from shoal.engine.port import NO_FIELDS, EngineConnection, EngineKind, EngineLaunch, EngineTracing
from shoal.engine.vllm.adapters import VLLMAdapters
from shoal.engine.vllm.arguments import ARGUMENTS
from shoal.engine.vllm.client import VLLMClient
from shoal.engine.vllm.fields import CEL, field_args, problems
from shoal.engine.vllm.launch import (
    engine_args,
    environment,
    in_memory,
    max_running,
    pool_args,
    pool_problem,
    task_args,
)
from shoal.engine.vllm.tuning import tuning_of
from shoal.engine.vllm.wire import WIRE

_OPEN: Final = (
    "vLLM checks its key only on paths that begin with /v1, and answers requests (/invocations) and loads adapters "
    "(/adapters) without one"
)


class VLLMPod:
    """Command line, pod and memory of a vLLM engine."""

    command: tuple[str, ...] = ("vllm", "serve")
    ready_path: str = WIRE.ready_path
    serving_paths: tuple[str, ...] = tuple(dict.fromkeys(WIRE.paths.values()))
    needs_mtls: str | None = _OPEN
    # A single SIGTERM while the engine loads is lost. Where it had its effect, a further one changes nothing.
    repeat_stop_seconds: float | None = 3.0
    keys_suffix: str = "-vllm"
    # `PEFTHelper` reads use_rslora and the patterns, and takes modules from the tensors' names.
    adapter_rules: AdapterRules = AdapterRules("vLLM", frozenset({"initialization"}))
    rules: tuple[CELRule, ...] = CEL

    @property
    def versions(self) -> tuple[str, ...]:
        return ARGUMENTS.versions

    def keys_file(self, api_key: str, admin_key: str) -> Mapping[str, str]:
        return {"api-key": api_key}

    def table(self, engines: Engines) -> EngineTable:
        return engines.vllm

    def environment(self, *, pool: bool) -> Mapping[str, str]:
        return environment(pool=pool)

    def tracing(self, endpoint: str) -> EngineTracing:
        return EngineTracing(
            (f"--otlp-traces-endpoint={endpoint}/v1/traces",),
            {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_TRACES_SAMPLER": "parentbased_always_off"},
        )

    def args(self, launch: EngineLaunch) -> tuple[str, ...]:
        return engine_args(launch)

    def field_args(self, engine: Engine) -> tuple[str, ...]:
        return field_args(engine, "")

    def problems(self, model: Model, version: str, facts: ArtifactFacts | None) -> list[str]:
        useless = _no_endpoint(model, facts)
        return [*useless, *parser_problems(ARGUMENTS, version, model.spec.engine), *problems(model, facts)]

    def extra_args_problems(self, version: str, extra_args: Sequence[str]) -> list[str]:
        return ARGUMENTS.problems(version, extra_args)

    def given(self, args: Sequence[str]) -> Mapping[str, str]:
        return ARGUMENTS.parsed(args)

    def tuning(
        self,
        extra_args: Sequence[str],
        *,
        platform_args: Sequence[str] = (),
        quantization: Literal["FP8"] | None = None,
        env: Mapping[str, str] = MappingProxyType({}),
        pool: LoRAPool | None = None,
        facts: ArtifactFacts | None = None,
        engine: Engine = NO_FIELDS,
    ) -> Tuning:
        args = [*task_args(facts), *pool_args(pool), *extra_args]
        before = [*platform_args, *field_args(engine, "")]
        return tuning_of(args, platform_args=before, quantization=quantization, env=env, facts=facts)

    def max_running(self, args: Sequence[str]) -> int | None:
        return max_running(args)

    def pool_problem(self, pool: LoRAPool, given: Mapping[str, str], env: Mapping[str, str]) -> str | None:
        return pool_problem(pool, given)

    def adapters_in_memory(self, pool: LoRAPool) -> int:
        return in_memory(pool)


def _no_endpoint(model: Model, facts: ArtifactFacts | None) -> list[str]:
    """Whether replicas would start, and no request could be sent to them."""
    engine, shares = model.spec.engine, model.spec.prefix_cache.isolation == "Shared"
    if capabilities(facts, engine.extra_args, shares_prefixes=shares, differences=WIRE.differences):
        return []
    what = "model" if facts is None or facts.architecture is None else facts.architecture
    return [f"spec.engine.type: no endpoint is for {what} with vLLM: use SGLang"]


class VLLMAgent:
    """Calls to a vLLM engine."""

    # An adapter that was evicted is read again from its files; an engine that does not find them dies.
    files_before_unload: bool = False

    def connect(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        api_key: str | None,
        admin_key: str | None,
        max_running: int | None = None,
    ) -> EngineConnection:
        client = VLLMClient(session, url, api_key=api_key, max_running=max_running)
        return EngineConnection(client, VLLMAdapters(client))


VLLM: Final = EngineKind("vLLM", pod=VLLMPod(), agent=VLLMAgent())
