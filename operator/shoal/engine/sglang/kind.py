"""SGLang as an engine kind."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, Literal

import aiohttp

from shoal.api import names
from shoal.api.artifact import ArtifactFacts
from shoal.api.config import Engines, EngineTable
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import CELRule
from shoal.api.model import Engine, Model
from shoal.core.lora.format.rules import AdapterRules
from shoal.core.sizing import Tuning
from shoal.engine.fields import parser_problems
from shoal.engine.port import NO_FIELDS, EngineConnection, EngineKind, EngineLaunch, EngineTracing
from shoal.engine.sglang.adapters import SGLangAdapters
from shoal.engine.sglang.arguments import ARGUMENTS
from shoal.engine.sglang.client import SGLangClient
from shoal.engine.sglang.fields import CEL, field_args, problems
from shoal.engine.sglang.launch import ENVIRONMENT, engine_args, pool_args, task_args
from shoal.engine.sglang.pool import RULES, pool_problem
from shoal.engine.sglang.tuning import tuning_of
from shoal.engine.sglang.wire import WIRE


class SGLangPod:
    """Command line, pod and memory of an SGLang engine."""

    command: tuple[str, ...] = ("python3", "-m", "sglang.launch_server")
    # Does no generation; /health does, and takes over a second.
    ready_path: str = WIRE.ready_path
    serving_paths: tuple[str, ...] = names.SERVING_PATHS
    needs_mtls: str | None = None
    # A second signal could cut what runs.
    repeat_stop_seconds: float | None = None
    keys_suffix: str = ""
    adapter_rules: AdapterRules = RULES
    rules: tuple[CELRule, ...] = CEL

    @property
    def versions(self) -> tuple[str, ...]:
        return ARGUMENTS.versions

    def keys_file(self, api_key: str, admin_key: str) -> Mapping[str, str]:
        return {"api-key": api_key, "admin-api-key": admin_key}

    def table(self, engines: Engines) -> EngineTable:
        return EngineTable(default_version=engines.default_version, versions=engines.versions)

    def environment(self, *, pool: bool) -> Mapping[str, str]:
        return ENVIRONMENT

    def tracing(self, endpoint: str) -> EngineTracing:
        args = ("--enable-trace", f"--otlp-traces-endpoint={endpoint}/v1/traces")
        # Only what the gateway samples: probes and warm-up requests carry no trace, and would start one each.
        env = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_TRACES_SAMPLER": "parentbased_always_off"}
        return EngineTracing(args, env)

    def args(self, launch: EngineLaunch) -> tuple[str, ...]:
        return engine_args(launch)

    def extra_args_problems(self, version: str, extra_args: Sequence[str]) -> list[str]:
        return ARGUMENTS.problems(version, extra_args)

    def field_args(self, engine: Engine) -> tuple[str, ...]:
        return field_args(engine, "", None)

    def problems(self, model: Model, version: str, facts: ArtifactFacts | None) -> list[str]:
        return [*parser_problems(ARGUMENTS, version, model.spec.engine), *problems(model, facts)]

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
        args = [*task_args(facts, extra_args), *pool_args(pool), *extra_args]
        before = [*platform_args, *field_args(engine, "", None)]
        found = tuning_of(args, platform_args=before, quantization=quantization, env=env, facts=facts)
        return replace(found, spread_experts=True) if engine.parallelism.expert else found

    def max_running(self, args: Sequence[str]) -> int | None:
        return None

    def pool_problem(self, pool: LoRAPool, given: Mapping[str, str], env: Mapping[str, str]) -> str | None:
        return pool_problem(given, env)

    def adapters_in_memory(self, pool: LoRAPool) -> int:
        return pool.spec.cached


class SGLangAgent:
    """Calls to an SGLang engine."""

    # From then on a late request cannot make the engine load the adapter again.
    files_before_unload: bool = True

    def connect(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        api_key: str | None,
        admin_key: str | None,
        max_running: int | None = None,
    ) -> EngineConnection:
        client = SGLangClient(session, url, api_key=api_key, admin_key=admin_key)
        return EngineConnection(client, SGLangAdapters(client))


SGLANG: Final = EngineKind("SGLang", pod=SGLangPod(), agent=SGLangAgent())
