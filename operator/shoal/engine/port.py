"""What Shoal needs of an engine, whatever its kind: the pod that runs it, and what the agent beside it asks.

An adapter of one kind is a folder beside this file, and an `EngineKind` in `kinds.py`. Everything that differs between
engines is a member of the classes here; code outside `engine/` asks the kind and never its name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, Protocol

import aiohttp

from shoal.api.artifact import ArtifactFacts
from shoal.api.config import Engines, EngineTable
from shoal.api.lorapool import LoRAPool
from shoal.api.meta import CELRule
from shoal.api.model import Engine, Model
from shoal.core.lora.format.rules import AdapterRules
from shoal.core.sizing import Tuning

STARTUP_SECONDS: Final = 3600
"""Longest start of an engine: weights of hundreds of GB with cold compile caches."""
LONGEST_STEP: Final = 1024
"""More tokens of one request than a step can give: a figure beyond it is none."""
CANARY_ID: Final = "shoal-canary-"
"""Ids of requests that Shoal itself sends to an engine begin so: who reads its log sees that no tenant asked."""

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
    computed: int | None = None
    """Work done by prefill and decode since the engine's start, as it is done; in tokens, or a unit of the engine's
    own."""
    published: float | None = None
    """When the last of the ranks said this, by the engine's clock in Unix seconds: an idle one says it every second,
    one that hangs not at all. None: the engine does not say it, and a rank that hangs shows its last figures."""
    active: int | None = None
    """Requests for answers that the HTTP server has not answered to the end, where it is known with the load."""
    tokens_per_step: float | None = None
    """Tokens that one step of an engine with speculation gave one request, on average since the engine's start: the
    guessed ones that were accepted, and one. None: it does not speculate, or has made no step yet."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts since the engine's start. None: not counted yet, or not reported."""

    prompt_tokens: int | None
    """Of prompts, cached ones included. When a prompt is counted differs: when its prefill or its request ends."""
    generation_tokens: int | None
    """As they are generated, or when their request ends."""
    active: int | None = None
    """Requests for answers that the HTTP server has not answered to the end."""
    requests: int | None = None
    """Requests for answers that it has received since its start."""
    graph_seconds: float | None = None
    """Seconds of this start in which the engine captured CUDA graphs; 0: it captured none."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in the engine's registry: in host memory, and in a GPU slot or not."""

    name: str
    path: str


# --- the agent's side -------------------------------------------------------------------------------------------------


class EngineClient(Protocol):
    """What the agent asks the engine of its pod. Every call has a deadline and raises EngineError, nothing else."""

    async def ready(self) -> bool:
        """Whether the engine serves. False: it answers that it does not, and goes on: it is starting, or stopping after
        what runs. Raises EngineUnreachable also where it answers that it is dead."""
        ...

    async def loads(self) -> Loads:
        """Load now."""
        ...

    async def counters(self) -> Counters:
        """Counters since the engine's start."""
        ...

    async def greedy(self, prompt: str, tokens: int, seconds: float) -> str:
        """What the base model writes after a prompt at temperature 0, at most so many tokens. The request's id begins
        with CANARY_ID."""
        ...

    async def abort(self, rid: str) -> None:
        """Has the engine end the requests whose id begins with `rid`; one that it does not have is passed over. An
        engine that ends a request when its connection closes needs nothing more. Raises ValueError for an empty id."""
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


NO_FIELDS: Final = Engine()
"""Nothing but defaults in `spec.engine`."""

# --- the kind ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineTracing:
    """What makes an engine send spans."""

    args: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """One engine to be started."""

    model: Model
    version: str
    """Engine version that the Model gets."""
    model_path: str
    """Folder of the weights."""
    port: int
    gpus: int
    """GPUs of the replica."""
    platform_args: Sequence[str] = ()
    """Arguments of the version's row in the engine table."""
    quantization: Literal["FP8"] | None = None
    """That of the variant."""
    pool: LoRAPool | None = None
    """Pool whose adapters the engine serves."""
    facts: ArtifactFacts | None = None
    """Facts of the weights, once they are known."""
    host: str = "0.0.0.0"  # noqa: S104 - the pod's own address

    @property
    def tensor(self) -> int:
        """GPUs of one stage."""
        return self.gpus // self.model.spec.engine.parallelism.pipeline

    @property
    def weights(self) -> Literal["FP8"] | None:
        """How the weights are quantized while they are loaded: the variant's word wins over the Model's."""
        return self.quantization or self.model.spec.engine.quantization.weights


class PodSide(Protocol):
    """What the operator needs to run an engine of the kind."""

    @property
    def command(self) -> tuple[str, ...]:
        """Starts the server in the engine's own image; the arguments follow."""
        ...

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions whose arguments are known, the default one last."""
        ...

    @property
    def ready_path(self) -> str:
        """Answers 200 to a GET without a key while the engine serves, without computing anything."""
        ...

    @property
    def serving_paths(self) -> tuple[str, ...]:
        """Paths that gateways POST requests to. The TLS sidecar opens these and no other."""
        ...

    @property
    def needs_mtls(self) -> str | None:
        """Why nobody but the pod's own containers may reach the engine's port, for a person; None: the engine checks a
        key on every path that matters."""
        ...

    @property
    def repeat_stop_seconds(self) -> float | None:
        """The time after which SIGTERM is sent again to an engine that has not ended, for one that may lose the signal
        and takes a repeated one for the same; None: it is sent once."""
        ...

    @property
    def keys_suffix(self) -> str:
        """End of the name of a Model's Secret with keys. Kinds differ in it: Secrets are immutable, and during a
        rollout from one engine to another a Model has pods of both."""
        ...

    def keys_file(self, api_key: str, admin_key: str) -> Mapping[str, str]:
        """The engine's config file (YAML), as a mapping: its keys, and nothing else."""
        ...

    def table(self, engines: Engines) -> EngineTable:
        """The kind's part of the engine table."""
        ...

    def environment(self, *, pool: bool) -> Mapping[str, str]:
        """Environment of the engine's container; the engine table and the Model override it. `pool`: the engine gets
        the adapters of a LoRAPool."""
        ...

    def tracing(self, endpoint: str) -> EngineTracing:
        """Arguments and environment with which the engine sends spans to the collector at `endpoint`, a URL without a
        slash at its end: only for requests that are sampled by their gateway."""
        ...

    def args(self, launch: EngineLaunch) -> tuple[str, ...]:
        """Arguments of the engine, without the command that starts it. The Model's own extraArgs come last, so they win
        over the platform's."""
        ...

    def extra_args_problems(self, version: str, extra_args: Sequence[str]) -> list[str]:
        """What is wrong with these extraArgs, one sentence each for the person who wrote them; empty when all is
        well. Refuses those of `unserved.py` with the reasons there."""
        ...

    def field_args(self, engine: Engine) -> tuple[str, ...]:
        """Arguments for speculation, quantization and parallelism, as far as they do not depend on the number of
        GPUs."""
        ...

    @property
    def rules(self) -> tuple[CELRule, ...]:
        """What it cannot do of `spec.engine` alone, whatever the version and the weights: the API server applies them
        to Models of this kind (`self` is `spec.engine`). `problems` and `extra_args_problems` refuse the same."""
        ...

    def problems(self, model: Model, version: str, facts: ArtifactFacts | None) -> list[str]:
        """What this version of the engine cannot do of what the Model's other fields ask for, and what `extraArgs` may
        not say because of them: one sentence each for the person who wrote them; empty when it can all. `facts` are
        those of the weights, once they are known."""
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
        engine: Engine = NO_FIELDS,
    ) -> Tuning:
        """What the arguments of an engine change in the memory arithmetic, and that arithmetic. Parameters as of
        `EngineLaunch`; `env` is the environment of the engine, `engine` are the Model's fields that become
        arguments."""
        ...

    def max_running(self, args: Sequence[str]) -> int | None:
        """Requests in the running batch at most, where the arguments `args` say it and the engine does not; None: the
        engine says it itself."""
        ...

    def pool_problem(self, pool: LoRAPool, given: Mapping[str, str], env: Mapping[str, str]) -> str | None:
        """The first thing that the engine refuses together with adapters, and what to do; None: there is none.

        `given` are the engine's arguments, the platform's and the Model's, by canonical name; `env` its environment.
        """
        ...

    @property
    def adapter_rules(self) -> AdapterRules:
        """Which adapters the engine serves, beyond rank, modules and shapes."""
        ...

    def adapters_in_memory(self, pool: LoRAPool) -> int:
        """Adapters that one process of the engine keeps in host memory at most."""
        ...


class AgentSide(Protocol):
    """What the agent needs beside an engine of the kind."""

    @property
    def files_before_unload(self) -> bool:
        """Whether an adapter's files are put away before it is unloaded: for an engine that would load it again for a
        late request. Else after it: for one that reads them again as long as the adapter is loaded."""
        ...

    def connect(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        api_key: str | None,
        admin_key: str | None,
        max_running: int | None = None,
    ) -> EngineConnection:
        """The calls to the engine at `url`. `max_running`: see `PodSide.max_running`."""
        ...


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine kind: everything that Shoal knows of it."""

    type: str
    """Value of `Model.spec.engine.type`."""
    pod: PodSide
    agent: AgentSide
