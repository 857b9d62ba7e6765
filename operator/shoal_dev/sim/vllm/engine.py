"""The simulated vLLM: model, scheduler, loop, adapters, and how it ends."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Final, cast

import structlog

from shoal_dev.sim import timing
from shoal_dev.sim.adapterfiles import BaseDimensions
from shoal_dev.sim.args import engine_params
from shoal_dev.sim.engine import RequestBatch, SimEngine
from shoal_dev.sim.journal import Journal
from shoal_dev.sim.loop import Clock
from shoal_dev.sim.lora import SimAdapter
from shoal_dev.sim.vllm import memory
from shoal_dev.sim.vllm import protocol as p
from shoal_dev.sim.vllm.args import VLLMArgs
from shoal_dev.sim.vllm.kv import BlockCache
from shoal_dev.sim.vllm.lora import AdapterLostError, VLLMAdapter, VLLMRegistry
from shoal_dev.sim.vllm.metrics import Told, VLLMMetrics
from shoal_dev.sim.vllm.scheduler import VLLMScheduler

_log = structlog.get_logger()
DEAD: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."
STOPPING: Final = "cannot schedule new futures after shutdown"


class VLLMEngine(SimEngine):
    """One engine."""

    scheduler: VLLMScheduler  # pyright: ignore[reportIncompatibleVariableOverride]
    metrics: VLLMMetrics  # pyright: ignore[reportIncompatibleVariableOverride]
    _deaths: ClassVar[frozenset[str]] = frozenset({"crash"})

    def __init__(self, args: VLLMArgs, *, clock: Clock | None = None, journal: Journal | None = None) -> None:
        self.vllm = args
        super().__init__(args.engine, clock=clock, journal=journal)
        self.died = asyncio.Event()
        """The core is dead: every request fails, and the process ends."""
        self.cut = False
        """Told to stop, and out of time: what still runs fails."""
        self._ended = asyncio.Event()
        self.load = 0
        """Requests that are being answered, which only /load tells."""

    # --- what it is made of -------------------------------------------------------------------------------------------

    def _make_scheduler(self) -> VLLMScheduler:
        self.blocks = memory.of(self.vllm, self.context_length)
        share = self.args.radix_cache
        return VLLMScheduler(
            pool=BlockCache(self.blocks.blocks, self.vllm.block_size, share=share),
            timing=timing.Timing.of(engine_params()[self.args.gpu]),
            budget=self.args.chunked_prefill_size,
            max_running=self.max_running,
            max_queued=self.vllm.max_queued,
            share=share,
        )

    def _make_adapters(self) -> None:
        """SGLang's registry stays empty; `adapters` is vLLM's."""
        args = self.vllm.adapters
        names = frozenset(self.vllm.names)
        self.adapters = (
            None
            if args is None
            else VLLMRegistry(args, BaseDimensions.of(self.model.config), names, self.loop, self.faults)
        )
        self.scheduler.slots = None if self.adapters is None else self.adapters.slots

    def _make_metrics(self) -> VLLMMetrics:
        return VLLMMetrics(Told(self.vllm, self.scheduler, self.adapters, self.clock, self.context_length))

    # --- its life -----------------------------------------------------------------------------------------------------

    async def turn(self) -> None:
        """Runs the loop until the engine dies of what a step needs."""
        try:
            await self.loop.run()
        except AdapterLostError as error:
            _log.error("a step failed", reason=str(error))
            self.die()

    def die(self) -> None:
        """The core ends: everybody's request fails at once."""
        self.died.set()
        for batch in self._batches:
            batch.outcome = batch.outcome or "died"
            batch.changed.set()

    async def finished(self) -> None:
        """Returns when nothing is being answered any more, or the engine is dead."""
        while self._batches and not self.died.is_set():
            self._ended.clear()
            await self._ended.wait()

    def _record(self, *args: Any, **fields: Any) -> None:
        super()._record(*args, **fields)
        self._ended.set()

    def stop_all(self) -> None:
        """The time of a stopping engine is over: what still runs fails."""
        self.cut = True
        for batch in self._batches:
            batch.outcome = batch.outcome or "cut"
            batch.changed.set()

    def strike(self, batch: RequestBatch) -> None:
        super().strike(batch)
        if batch.fault is not None and batch.fault.kind == "core_death":
            self.die()

    def warmed_up(self) -> None:
        """Nothing of vLLM's own warm-up is counted."""
        self.status = "Up"

    def check(self) -> None:
        """Raises RefusedError where the engine takes no request, or will not end those that it has."""
        if self.died.is_set():
            raise p.RefusedError(500, DEAD)

    def named(self, model: str | None) -> VLLMAdapter | None:
        """The adapter of that name; None: the base model. Raises RefusedError for a name that nobody has."""
        if not model or model in self.vllm.names:
            return None
        found = None if self.adapters is None else self.adapters.named(model)
        if found is None:
            aliases = ", ".join(self.vllm.names)
            message = f"The model `{model}` does not exist. Valid aliases: {aliases}."
            raise p.RefusedError(404, message, param="model")
        return found

    # --- inside -------------------------------------------------------------------------------------------------------

    def _limits(self, prompts: Sequence[tuple[int, ...]], asked: int | None) -> list[int]:
        """Beyond the context an answer is cut."""
        rooms = [self.context_length - len(prompt) for prompt in prompts]
        return [room if asked is None else min(asked, room) for room in rooms]

    def _rids(self, rid: str | list[str] | None, count: int) -> list[str]:
        """The same id may run twice: inside it gets a suffix of its own."""
        return super()._rids(None, count) if not isinstance(rid, str) else [rid] * count

    def _prefixes(self, adapter: SimAdapter | None) -> str | None:
        return cast(VLLMAdapter, adapter).prefixes if adapter is not None else None

    def _count_request(self, prompts: Sequence[tuple[int, ...]], n: int, *, stream: bool) -> None:
        """Each choice's own prompt is counted, and nothing else."""

    @asynccontextmanager
    async def _adapters(
        self, asked: str | list[str | None] | None, prompts: int
    ) -> AsyncGenerator[Sequence[SimAdapter | None]]:
        """`asked` is the id of a load that `named` found: a request that was taken keeps its weights, whatever becomes
        of the name."""
        found = None if not isinstance(asked, str) or self.adapters is None else self.adapters.slots.load_of(asked)
        yield [found] * prompts
