"""What Shoal needs of an engine, whatever its kind: the pod that runs it, and what the agent beside it asks.

An adapter of one kind is a folder beside this file, and an `EngineKind` in `kinds.py`. Everything that differs between
engines is a member of the classes here; code outside `engine/` asks the kind and never its name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

import aiohttp

from shoal.api.artifact import ArtifactFacts
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.core.sizing import Tuning

# --- errors -----------------------------------------------------------------------------------------------------------


class EngineError(Exception):
    """The engine did not answer as it should. The message has no key in it."""


class EngineUnreachable(EngineError):
    """Nothing listens, or the connection broke: the engine is starting, restarting or gone."""


class EngineTimeout(EngineError):
    """Something listens and did not answer in time."""


class EngineRefused(EngineError):
    """An answer with an error status."""

    def __init__(self, path: str, status: int) -> None:
        super().__init__(f"{path} answered {status}")
        self.status = status


class EngineGarbled(EngineError):
    """An answer that is not what this engine's version gives."""


class AdapterRejected(EngineError):
    """The engine will not load or unload the adapter: rank, modules, files. `message` is its own text."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message


class AlreadyLoaded(AdapterRejected):
    """An adapter of this name is loaded, from whatever folder: the engine replaces none in place."""


class NotLoaded(AdapterRejected):
    """No adapter of this name is loaded."""


class IncompleteUnload(AdapterRejected):
    """An earlier unload of this name failed, or a load on a part of the ranks: unload it (again) first."""


class TooManyPinned(AdapterRejected):
    """The last GPU slot may not be pinned."""


class LoRADisabled(AdapterRejected):
    """The engine runs without adapters."""


# --- what an engine says ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loads:
    """Load of one engine, summed over its data-parallel ranks. None: the engine did not say."""

    running: int | None
    """Requests in the running batch."""
    waiting: int | None
    """Requests in the queue."""
    waiting_tokens: int | None
    """Prompt tokens of those that no cache covers."""
    kv_tokens_used: int | None
    """Tokens in the KV cache, evictable prefix cache not counted."""
    kv_tokens_total: int | None
    """Tokens that the KV cache holds."""
    max_running: int | None = None
    """Requests in the running batch at most."""
    computed_tokens: int | None = None
    """Tokens computed by prefill and decode since the engine's start, as they are computed."""
    published: float | None = None
    """When the last of the ranks said this, by the engine's clock in Unix seconds. An idle rank says it every second, a
    busy one after each prefill and every 15 decode steps, one that hangs not at all."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Out of /metrics. Tokens are monotonic since the engine's start and counted when requests end; None: not counted
    yet, or not reported."""

    prompt_tokens: int | None
    generation_tokens: int | None
    active: int | None = None
    """Requests for answers that the HTTP server has not answered to the end."""
    requests: int | None = None
    """Requests for answers that it has received since its start."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in the engine's registry: in host memory, and in a GPU slot or not."""

    name: str
    path: str


# --- the agent's side -------------------------------------------------------------------------------------------------


class EngineClient(Protocol):
    """What the agent asks the engine of its pod. Every call has a deadline and raises EngineError, nothing else."""

    async def ready(self) -> bool:
        """Whether the engine serves. False: it answers that it does not (starting or stopping)."""
        ...

    async def loads(self) -> Loads:
        """Load now."""
        ...

    async def counters(self) -> Counters:
        """Counters since the engine's start."""
        ...

    async def abort(self, rid: str) -> None:
        """Has the engine end the requests whose id begins with `rid`; one that it does not have is passed over. Raises
        ValueError for an empty id."""
        ...


class EngineAdapters(Protocol):
    """Loading and unloading of adapters. Every call has a deadline and raises EngineError, nothing else."""

    async def load(self, name: str, path: str, *, seconds: float) -> object:
        """Loads the adapter of the folder `path`, as the engine sees it.

        Raises AlreadyLoaded, IncompleteUnload, TooManyPinned, LoRADisabled, AdapterRejected for what is wrong with the
        files, EngineTimeout after `seconds`, EngineUnreachable.
        """
        ...

    async def unload(self, name: str, *, seconds: float) -> object:
        """Unloads an adapter. Raises NotLoaded, and else as `load`."""
        ...

    async def loaded(self) -> tuple[LoadedAdapter, ...]:
        """The adapters that can be asked for."""
        ...


@dataclass(frozen=True, slots=True)
class EngineConnection:
    """Both sides of the calls to one engine."""

    client: EngineClient
    adapters: EngineAdapters


# --- the kind ---------------------------------------------------------------------------------------------------------


class PodSide(Protocol):
    """What the operator needs to run an engine of the kind."""

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions whose arguments are known, the default one last."""
        ...

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
        """Arguments of the engine for this Model, without the command that starts it.

        `version` is the engine version that the Model gets, `platform_args` are those of its row in the engine table,
        `quantization` is that of the variant, `pool` the one whose adapters the engine gets, `facts` those of the
        weights; the Model's own extraArgs come last, so they win over those.
        """
        ...

    def extra_args_problems(self, version: str, extra_args: Sequence[str]) -> list[str]:
        """What is wrong with these extraArgs, one sentence each for the person who wrote them; empty when all is
        well."""
        ...

    def given(self, args: Sequence[str]) -> Mapping[str, str]:
        """Canonical name -> value of these arguments, the later one where a name is there twice; a flag has an empty
        value."""
        ...

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
        """What the arguments of an engine change in the memory arithmetic. Parameters as of `args`; `env` is the
        environment that the Model gives its engine."""
        ...


class AgentSide(Protocol):
    """What the agent needs beside an engine of the kind."""

    def connect(
        self, session: aiohttp.ClientSession, url: str, *, api_key: str | None, admin_key: str | None
    ) -> EngineConnection:
        """The calls to the engine at `url`."""
        ...


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine kind: everything that Shoal knows of it."""

    type: str
    """Value of `Model.spec.engine.type`."""
    pod: PodSide
    agent: AgentSide
