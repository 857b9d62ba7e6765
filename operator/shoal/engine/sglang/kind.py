"""SGLang as an engine kind."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal

import aiohttp

from shoal.api.artifact import ArtifactFacts
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.core.sizing import Tuning
from shoal.engine.port import EngineConnection, EngineKind
from shoal.engine.sglang.adapters import SGLangAdapters
from shoal.engine.sglang.arguments import ARGUMENTS
from shoal.engine.sglang.client import SGLangClient
from shoal.engine.sglang.launch import engine_args, pool_args, task_args
from shoal.engine.sglang.tuning import tuning_of


class SGLangPod:
    """Command line and memory of an SGLang engine."""

    @property
    def versions(self) -> tuple[str, ...]:
        return ARGUMENTS.versions

    def args(
        self,
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
        return engine_args(
            model,
            version,
            model_path=model_path,
            port=port,
            tensor=tensor,
            platform_args=platform_args,
            quantization=quantization,
            pool=pool,
            facts=facts,
            host=host,
        )

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
    ) -> Tuning:
        args = [*task_args(facts, extra_args), *pool_args(pool), *extra_args]
        return tuning_of(args, platform_args=platform_args, quantization=quantization, env=env)


class SGLangAgent:
    """Calls to an SGLang engine."""

    def connect(
        self, session: aiohttp.ClientSession, url: str, *, api_key: str | None, admin_key: str | None
    ) -> EngineConnection:
        client = SGLangClient(session, url, api_key=api_key, admin_key=admin_key)
        return EngineConnection(client, SGLangAdapters(client))


SGLANG: Final = EngineKind("SGLang", pod=SGLangPod(), agent=SGLangAgent())
