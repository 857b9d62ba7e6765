"""vLLM's scheduler: running requests first, then waiting ones in their order, within a budget of tokens per step.

It reserves nothing for tokens to come. When the blocks run out, the request that began last loses its own and waits
again, at the front. A request whose adapter finds no slot is passed by all others, however long it has waited.
StepCounters move in every step.
"""

from dataclasses import dataclass
from typing import cast

from shoal_dev.sim.kv import KVCache
from shoal_dev.sim.scheduler import Finish, QueueFullError, Scheduler, Sequence
from shoal_dev.sim.slots import Slots
from shoal_dev.sim.timing import Timing
from shoal_dev.sim.vllm.kv import BlockCache, Holding


class VLLMSlots(Slots):
    """Slots that the base model does not need."""

    def fit(self, batch: "frozenset[str | None] | set[str | None]") -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return len(batch - {None}) <= self.total

    def prepare(self, batch: "frozenset[str | None] | set[str | None]") -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().prepare(batch - {None})


@dataclass(slots=True)
class StepCounters:
    """What vLLM counts in its steps, in tokens where nothing else is said."""

    prompt: int = 0
    computed: int = 0
    cached: int = 0
    queried: int = 0
    generated: int = 0
    preemptions: int = 0
    """Times that a request lost its blocks."""
    steps: int = 0
    """Steps that computed something."""
    work: int = 0
    """Tokens that went through the model, also those of a part of a prompt."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the engine told of itself at its last step."""

    running: int = 0
    waiting: int = 0
    deferred: int = 0
    """Waiting for a slot of an adapter; the other waiting ones wait for room."""
    usage: float = 0.0
    """Share of the blocks that requests hold, 0 to 1."""


class VLLMScheduler(Scheduler):
    """The batch, the queue and the blocks of one engine."""

    def __init__(
        self, *, pool: BlockCache, timing: Timing, budget: int, max_running: int, max_queued: int | None, share: bool
    ) -> None:
        # The base class only reads its cache's figures.
        super().__init__(
            kv=cast(KVCache, pool), timing=timing, chunk=budget, max_running=max_running, share_prefixes=share
        )
        self.pool = pool
        self.counters = StepCounters()
        self.gauges = Gauges()
        self.adapters_seen: dict[tuple[str, ...], float] = {}
        """Ids of the adapters of each batch there ever was, and when it was last."""
        self._held: dict[Sequence, Holding] = {}
        self._most = max_queued

    def submit(self, sequence: Sequence, now: float) -> None:
        """Queues a sequence. Raises QueueFullError where as many run and wait as --max-num-queued-reqs."""
        if self._most is not None and self.running + self.waiting >= self._most:
            raise QueueFullError
        super().submit(sequence, now)

    def begin(self, now: float) -> float | None:
        duration = super().begin(now)
        if duration is None:
            self._publish(now)
        return duration

    def complete(self, now: float) -> None:
        computed = sum(chunk for _, chunk in self._chunks)
        self.counters.steps += 1
        self.counters.work += computed + len(self._decodes)
        self.counters.computed += computed
        super().complete(now)
        self._publish(now)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _publish(self, now: float) -> None:
        self.gauges = Gauges(
            running=self.running,
            waiting=self.waiting,
            deferred=self._deferred(),
            usage=self.pool.used / self.pool.capacity,
        )
        if self.slots is not None:
            batch = tuple(sorted({s.adapter for s in self._running if s.adapter is not None}))
            self.adapters_seen[batch] = now

    def _deferred(self) -> int:
        if self.slots is None:
            return 0
        running = {s.adapter for s in self._running}
        return sum(1 for s in self._waiting if s.adapter not in running and not self.slots.fit(running | {s.adapter}))

    def _admit(self, sequence: Sequence, now: float) -> bool:
        tokens = sequence.tokens()
        hits = self.pool.match(tokens, sequence.space) if self._share else []
        holding = self.pool.admit(hits, len(tokens))
        if holding is None:
            return False
        self._held[sequence] = holding
        cached = len(hits) * self.pool.size
        sequence.computed, sequence.target = cached, len(tokens)
        self.counters.queried += len(tokens)
        if sequence.admitted is None:
            sequence.admitted, sequence.cached = now, cached
            self.totals.prefill_cached_tokens += cached
        return True

    def _make_room_for_decodes(self) -> None:
        at = 0
        while at < len(self._decodes):
            sequence = self._decodes[at]
            held = self._held[sequence]
            self.pool.cache(held, sequence.tokens()[:-1], sequence.space)
            if self.pool.grow(held, len(sequence.prompt) + len(sequence.output)):
                at += 1
                continue
            last = self._running[-1]
            if last is sequence and len(self._running) == 1:
                self._end(sequence, Finish("length"), sequence.arrived)
                self._decodes.remove(sequence)
                return
            if last in self._decodes:
                self._decodes.remove(last)
            self._preempt(last)

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        self._running.remove(sequence)
        self.pool.release(self._held.pop(sequence))
        sequence.computed = sequence.target = 0
        sequence.retractions += 1
        self._waiting.appendleft(sequence)

    def _share_prompt(self, sequence: Sequence) -> None:
        if sequence.first_token is None:
            self.counters.prompt += len(sequence.prompt)
            self.counters.cached += sequence.cached or 0
        self.pool.cache(self._held[sequence], sequence.tokens(), sequence.space)

    def _emit(self, sequence: Sequence, now: float) -> None:
        before = len(sequence.output)
        super()._emit(sequence, now)
        self.counters.generated += len(sequence.output) - before

    def _release(self, sequence: Sequence, *, keep: bool) -> None:
        holding = self._held.pop(sequence)
        if keep:
            # The last token was generated, but no step has computed its KV yet.
            self.pool.cache(holding, sequence.tokens()[:-1], sequence.space)
        self.pool.release(holding)
