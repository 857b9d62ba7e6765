"""The simulated engine: model, scheduler, loop, faults, journal and the state that probes show."""

import asyncio
import json
import os
import signal
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import structlog

from shoal.core.architectures.names import EMBEDS
from shoal_dev.sim import memory, timing
from shoal_dev.sim.adapterfiles import BaseDimensions
from shoal_dev.sim.answers import SimulatedAnswer
from shoal_dev.sim.args import EngineArgs, engine_params
from shoal_dev.sim.faults import Fault, Faults
from shoal_dev.sim.journal import Journal, JournalEntry, JournalStart, prompt_hash
from shoal_dev.sim.kv import KVCache
from shoal_dev.sim.limits import BadRequestError, new_tokens
from shoal_dev.sim.loop import Clock, EngineLoop, RealClock
from shoal_dev.sim.lora import AdapterUnavailableError, SimAdapter, SimLoRA
from shoal_dev.sim.metrics import SimMetrics
from shoal_dev.sim.scheduler import QueueFullError, Scheduler
from shoal_dev.sim.scheduler import Sequence as Seq
from shoal_dev.sim.tokenizer import ModelFolder

if TYPE_CHECKING:
    from shoal_dev.sim.tracing import EngineTraces

_log = structlog.get_logger()

QUEUE_FULL: Final = "The request queue is full."
WARM_UP: Final = "The capital city of France is"
"""Prompt of the warm-up request that SGLang sends to itself before it serves."""
WARM_UP_TOKENS: Final = 8
GARBLED: Final = "garbled"
"""What a garbled answer has in the place of an adapter's signature."""


@dataclass(slots=True)
class Sampling:
    """The parameters of a request that the simulator acts on."""

    max_new_tokens: int | None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int | None = None
    greedy: bool = False
    """At temperature 0."""


@dataclass(slots=True, eq=False)
class RequestBatch:
    """The sequences of one request."""

    sequences: list[Seq]
    fault: Fault | None
    adapters: list[SimAdapter | None] = field(default_factory=list["SimAdapter | None"])
    """The adapter of each sequence; None: the base model."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: str | None = None
    """For the journal, where a fault or a full queue decides it; None: the sequences' own ends."""

    @property
    def finished(self) -> bool:
        return all(s.finish is not None for s in self.sequences)

    @property
    def struck(self) -> bool:
        """Whether the fault's token has been reached."""
        return self.fault is not None and any(s.held for s in self.sequences)

    async def change(self) -> None:
        """Returns when a sequence has made progress since the last call."""
        await self.changed.wait()
        self.changed.clear()


class SimEngine:
    """One engine. `loop.run` drives it; all methods are called in the event loop that runs it."""

    def __init__(self, args: EngineArgs, *, clock: Clock | None = None, journal: Journal | None = None) -> None:
        self.args = args
        self.clock: Clock = clock or RealClock()
        self.model = ModelFolder.load(args.model_path)
        self.context_length = args.context_length or self.model.context_length
        self.traces = _traces(args)
        self.max_running = args.max_running_requests or 1
        self.scheduler = self._make_scheduler()
        self.faults = Faults()
        self.loop = EngineLoop(self.scheduler, self.clock, speed=args.speed, slowdown=lambda: self.faults.slowdown)
        self.lora: SimLoRA | None = None
        self._make_adapters()
        self.metrics = self._make_metrics()
        self.journal = journal or Journal(None)
        self.status: Literal["Starting", "Up", "UnHealthy"] = "Starting"
        self.draining = False
        self.started = time.time()
        self._batches: set[RequestBatch] = set()

    _deaths: ClassVar[frozenset[str]] = frozenset({"crash", "core_death"})
    """Faults that kill the process at once: SGLang's scheduler takes it along."""

    # --- what it is made of, which differs between engines ------------------------------------------------------

    def _make_scheduler(self) -> Scheduler:
        args = self.args
        self.memory = memory.of(args)
        self.max_running = args.max_running_requests or self.memory.max_requests
        return Scheduler(
            kv=KVCache(self.memory.kv_tokens, share=args.radix_cache),
            timing=timing.Timing.of(engine_params()[args.gpu]),
            chunk=args.chunked_prefill_size,
            max_running=self.max_running,
            max_queued=args.max_queued_requests,
            share_prefixes=args.radix_cache,
        )

    def _make_adapters(self) -> None:
        if self.args.lora is not None:
            self.lora = SimLoRA(self.args.lora, BaseDimensions.of(self.model.config), self.loop, self.faults)
            self.scheduler.slots = self.lora.slots

    def _make_metrics(self) -> SimMetrics:
        args = self.args
        return SimMetrics(args.served_model_name, self.scheduler, self.loop.throughput, self.context_length)

    # --- requests -----------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any request has not been answered yet."""
        return bool(self._batches)

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json, with what the command line overrides."""
        overrides: dict[str, Any] = json.loads(
            self.args.given.get("json_model_override_args") or self.args.given.get("hf_overrides") or "{}"
        )
        return {**self.model.config, **overrides}

    @property
    def embeds(self) -> bool:
        """Whether it generates nothing: by an argument, or by the model's architecture."""
        return self.args.is_embedding or not EMBEDS.isdisjoint(self.model.architectures)

    def traced(self, headers: Mapping[str, str], batch: RequestBatch) -> AbstractContextManager[None]:
        """The span of a request; does nothing if this engine does not trace."""
        return nullcontext() if self.traces is None else self.traces.request(headers, batch.sequences)

    @asynccontextmanager
    async def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        *,
        n: int,
        sampling: Sampling,
        rid: str | list[str] | None,
        path: str,
        model: str,
        stream: bool,
        adapters: str | list[str | None] | None = None,
        salt: tuple[str, str] = ("", ""),
    ) -> AsyncGenerator[RequestBatch]:
        """Queues one request. Leaving the block before the request has ended aborts it. `salt` holds `extra_key` and
        `cache_salt`.

        Raises BadRequestError and scheduler.QueueFullError.
        """
        async with self._adapters(adapters, len(prompts)) as used:
            limits = self._limits(prompts, sampling.max_new_tokens)
            batch = RequestBatch([], self.faults.take())
            rids = self._rids(rid, len(prompts) * n)
            for i, (prompt, limit, adapter) in enumerate(zip(prompts, limits, used, strict=True)):
                sign = None if adapter is None else adapter.files.signature
                if sampling.greedy and self.faults.garbles:
                    sign = GARBLED
                for choice in range(n):
                    seed = self.args.seed if sampling.seed is None else sampling.seed
                    batch.adapters.append(adapter)
                    batch.sequences.append(
                        Seq(
                            rid=rids[i * n + choice],
                            prompt=prompt,
                            answer=SimulatedAnswer(
                                self.model.tokenizer, prompt, seed=seed, choice=choice, signature=sign
                            ),
                            max_new_tokens=limit,
                            stop=sampling.stop,
                            stop_token_ids=sampling.stop_token_ids,
                            ignore_eos=sampling.ignore_eos,
                            on_update=batch.changed.set,
                            hold_after=self._hold(batch.fault),
                            adapter=None if adapter is None else adapter.id,
                            prefixes=self._prefixes(adapter),
                            salt=salt,
                        )
                    )
            self._batches.add(batch)
            try:
                # Written before a fault may strike: the journal must name the request that kills the engine.
                for sequence, adapter in zip(batch.sequences, batch.adapters, strict=True):
                    name = None if adapter is None else adapter.name
                    self.journal.started(JournalStart(sequence.rid, model, stream, time.time(), name))
                self._strike_first(batch)
                for sequence in batch.sequences:
                    self.scheduler.submit(sequence, self.clock.now())
                self._count_request(prompts, n, stream=stream)
                self.loop.wake()
                yield batch
            except QueueFullError:
                batch.outcome = batch.outcome or "rejected"
                raise
            finally:
                self._batches.discard(batch)
                for sequence, adapter in zip(batch.sequences, batch.adapters, strict=True):
                    self.scheduler.abort(sequence, self.clock.now())
                    self._record(batch, sequence, adapter, path=path, model=model, stream=stream)
                # An engine's gauges are told by its steps.
                self.loop.wake()

    def warmed_up(self) -> None:
        """Marks the engine as serving, and counts the warm-up request as SGLang does."""
        self.metrics.count(len(self.model.tokenizer.encode(WARM_UP)), WARM_UP_TOKENS)
        self.metrics.started(self.args.load_seconds)
        self.status = "Up"

    async def health(self, *, generate: bool, timeout: float = 20.0) -> bool:
        """Whether a token can be generated. With `generate` the check takes at least a second, as in SGLang."""
        if self.status == "Starting" or self.draining:
            return False
        if not generate:
            return True
        await asyncio.sleep(1.0)
        alive = not self.scheduler.paused and await self.loop.alive(timeout)
        self.status = "Up" if alive else "UnHealthy"
        return alive

    def abort(self, rid: str | None, *, everything: bool = False) -> None:
        """Ends all sequences whose id begins with `rid`, if a sequence has exactly this id; or all of them."""
        sequences = list(self.scheduler.sequences())
        if not everything and (not rid or all(sequence.rid != rid for sequence in sequences)):
            return
        for sequence in sequences:
            if everything or sequence.rid.startswith(rid or ""):
                self.scheduler.abort_by_id(sequence, self.clock.now())

    def pause(self, mode: str) -> None:
        """Stops generating; mode `abort` also ends all sequences."""
        self.scheduler.paused = True
        if mode == "abort":
            self.abort(None, everything=True)

    def resume(self) -> None:
        self.scheduler.paused = False
        self.loop.wake()

    def crash(self) -> None:
        """Kills the process at once, as SGLang dies with its scheduler."""
        _log.error("the engine crashes")
        self.journal.close()
        os.kill(os.getpid(), signal.SIGKILL)

    def strike(self, batch: RequestBatch) -> None:
        """Records the batch's fault, and carries it out if it concerns the whole engine."""
        if batch.fault is None:
            return
        batch.outcome = batch.fault.kind
        if batch.fault.kind in self._deaths:
            self.crash()
        elif batch.fault.kind == "stall":
            self.loop.stall()

    # --- inside -------------------------------------------------------------------------------------------------

    def _limits(self, prompts: Sequence[tuple[int, ...]], asked: int | None) -> list[int]:
        """How many tokens each prompt's answer may have. Raises BadRequestError."""
        return [new_tokens(prompt, asked, self.context_length, self.scheduler.kv.capacity) for prompt in prompts]

    def _prefixes(self, adapter: SimAdapter | None) -> str | None:
        """What the adapter's cached prefixes are known by; None: by its load."""
        return None

    def _count_request(self, prompts: Sequence[tuple[int, ...]], n: int, *, stream: bool) -> None:
        """SGLang first caches each prompt of several choices with an internal request, which is counted but not
        returned."""
        if n > 1:
            for prompt in prompts:
                self.metrics.count(len(prompt), 0, stream=stream)

    @asynccontextmanager
    async def _adapters(
        self, asked: str | list[str | None] | None, prompts: int
    ) -> AsyncGenerator[Sequence[SimAdapter | None]]:
        """The adapter of each prompt, in use until the block is left. Raises BadRequestError."""
        names = [name or None for name in asked] if isinstance(asked, list) else [asked or None] * prompts
        if self.lora is None or not any(names):
            yield [None] * prompts
            return
        if len(names) != prompts:
            raise BadRequestError(f"{len(names)} adapters for {prompts} prompts")
        try:
            used = await self.lora.acquire(names)
        except AdapterUnavailableError as error:
            raise BadRequestError(str(error)) from None
        try:
            for adapter in used:
                if adapter is not None and adapter.files.kills is not None:
                    _log.error("an adapter does not fit", adapter=adapter.name, reason=adapter.files.kills)
                    self.crash()
            yield used
        finally:
            self.lora.release(used)

    def _strike_first(self, batch: RequestBatch) -> None:
        fault = batch.fault
        if fault is None:
            return
        batch.outcome = fault.kind
        if fault.after_tokens == 0 and fault.kind in ("crash", "core_death", "stall"):
            self.strike(batch)

    @staticmethod
    def _hold(fault: Fault | None) -> int | None:
        if fault is None or fault.kind == "slow" or (fault.kind == "stall" and fault.after_tokens == 0):
            return None
        return fault.after_tokens

    def _rids(self, rid: str | list[str] | None, count: int) -> list[str]:
        if isinstance(rid, str) and count == 1:
            given = [rid]
        elif isinstance(rid, list) and len(rid) == count:
            given = rid
        else:
            # SGLang, too, generates ids when one id is given for several sequences.
            return [uuid.uuid4().hex for _ in range(count)]
        running = {sequence.rid for batch in self._batches for sequence in batch.sequences}
        for one in given:
            if one in running:
                raise BadRequestError(f"Duplicate request ID detected: {one}")
        return given

    def _record(
        self, batch: RequestBatch, sequence: Seq, adapter: SimAdapter | None, *, path: str, model: str, stream: bool
    ) -> None:
        self.metrics.finished(sequence, stream=stream)
        now, wall = self.clock.now(), time.time()

        def at(moment: float | None) -> float | None:
            return None if moment is None else round(wall - (now - moment), 6)

        finish = sequence.finish
        self.journal.write(
            JournalEntry(
                rid=sequence.rid,
                path=path,
                model=model,
                stream=stream,
                prompt_sha256=prompt_hash(sequence.prompt),
                prompt_tokens=len(sequence.prompt),
                cached_tokens=sequence.cached,
                completion_tokens=len(sequence.output),
                arrived=round(wall - (now - (sequence.arrived or now)), 6),
                first_token=at(sequence.first_token),
                finished=at(sequence.finished) or wall,
                outcome=batch.outcome or (finish.type if finish else "abort"),
                adapter=None if adapter is None else adapter.name,
                signature=None if adapter is None else adapter.files.signature,
            )
        )


def _traces(args: EngineArgs) -> "EngineTraces | None":
    if args.traces_endpoint is None:
        return None
    from shoal_dev.sim.tracing import EngineTraces  # OpenTelemetry is loaded only if traces are enabled

    return EngineTraces(args.traces_endpoint, args.traces_service, args.served_model_name)
