"""Continuous batching with chunked prefill, KV admission, and retraction when the cache overflows.

In one step, every decoding sequence gets a token, then running prefills continue, then waiting sequences are admitted
first come first served, all within the chunked-prefill budget. There is no clock and no I/O: `begin` returns how long
the step lasts, `complete` applies it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from shoal_dev.sim.kv import KVCache, RadixNode, Space
from shoal_dev.sim.slots import Slots
from shoal_dev.sim.timing import EngineStep, Timing

FinishType = Literal["stop", "length", "abort"]

_CLIP_NEW_TOKENS: Final = 4096
"""SGLang reserves room for at most this many output tokens of one sequence."""
_RATIO_FIRST: Final = 0.7
_RATIO_LAST: Final = 0.098
_RATIO_STEPS: Final = 600
"""Decode steps in which the share of the possible output tokens that SGLang reserves falls from first to last,
while nothing overflows."""


class QueueFullError(Exception):
    """As many requests as --max-queued-requests are waiting."""


class TokenSource(Protocol):
    """Where a sequence's tokens come from."""

    def token(self, index: int) -> tuple[int, str, bool]:
        """The index-th token: its id, its text, and whether it ends the answer."""
        ...


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sequence ended."""

    type: FinishType
    matched: str | int | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence: a prompt and what was generated for it."""

    rid: str
    prompt: tuple[int, ...]
    answer: TokenSource
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    on_update: Callable[[], None] = lambda: None
    adapter: str | None = None
    """Id of the adapter's load; None: the base model answers."""
    prefixes: str | None = None
    """Whose cached prefixes it finds, where that is not the adapter's load."""
    salt: tuple[str, str] = ("", "")
    """`extra_key` and `cache_salt`: the sequence finds only cached prefixes of requests with the same values."""
    arrived: float = 0.0

    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached: int | None = None
    """Prompt tokens found in the cache; None until admitted."""
    output: list[int] = field(default_factory=list[int])
    text: str = ""
    finish: Finish | None = None
    hold_after: int | None = None
    """Set by a fault: the sequence generates no more than this many tokens."""
    retractions: int = 0
    aborting: bool = False
    """The sequence is aborted after the step that completes its prompt."""

    node: RadixNode | None = None
    owned: int = 0
    computed: int = 0
    """Tokens of the prompt (and of the output, after a retraction) whose KV is computed."""
    target: int = 0
    """Tokens to compute before the next token can be generated."""

    @property
    def decoding(self) -> bool:
        return self.computed >= self.target

    @property
    def held(self) -> bool:
        return self.hold_after is not None and len(self.output) >= self.hold_after

    @property
    def space(self) -> Space:
        return Space(self.prefixes or self.adapter, self.salt)

    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)


@dataclass(slots=True)
class SchedulerTotals:
    """Counters since the start."""

    prefill_uncached_tokens: int = 0
    prefill_cached_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    retracted_input: int = 0
    retracted_output: int = 0
    aborted: int = 0
    decode_moments: list[float] = field(default_factory=lambda: [0.0] * 6)
    """Sums over decode steps of 1, B, t (microseconds), B^2, B*t, tokens generated."""


class Scheduler:
    """The batch, the queue and the cache of one engine."""

    def __init__(
        self,
        *,
        kv: KVCache,
        timing: Timing,
        chunk: int,
        max_running: int,
        max_queued: int | None = None,
        share_prefixes: bool = True,
    ) -> None:
        self.kv = kv
        self.totals = SchedulerTotals()
        self.max_running = max_running
        self.paused = False
        self.slots: Slots | None = None
        """Slots of adapters; None if the engine runs without LoRA."""
        self.cache_hit_rate = 0.0
        self._timing = timing
        self._chunk = chunk
        self._max_queued = max_queued
        self._share = share_prefixes
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._ratio = _RATIO_FIRST
        self._decodes: list[Sequence] = []
        self._chunks: list[tuple[Sequence, int]] = []
        self._duration = 0.0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def retracted_waiting(self) -> int:
        return sum(1 for s in self._waiting if s.retractions)

    @property
    def waiting_tokens(self) -> int:
        return sum(len(s.prompt) + len(s.output) for s in self._waiting)

    @property
    def context_tokens(self) -> int:
        return sum(s.computed + max(len(s.output) - 1, 0) for s in self._running if s.decoding)

    @property
    def active_tokens(self) -> int:
        """Tokens that running sequences hold, shared ones counted once per sequence."""
        return sum(len(s.prompt) + len(s.output) for s in self._running)

    @property
    def adapters_running(self) -> int:
        """Distinct adapters in the running batch."""
        return len({s.adapter for s in self._running} - {None})

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    def sequences(self) -> Iterator[Sequence]:
        yield from self._running
        yield from self._waiting

    def submit(self, sequence: Sequence, now: float) -> None:
        """Queues a sequence. Raises QueueFullError."""
        if self._max_queued is not None and len(self._waiting) >= self._max_queued:
            raise QueueFullError
        sequence.arrived = now
        self._waiting.append(sequence)

    def abort(self, sequence: Sequence, now: float) -> None:
        """Ends a sequence now. A sequence that has already ended stays as it is."""
        if sequence.finish is not None:
            return
        self.totals.aborted += 1
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        self._end(sequence, Finish("abort"), now)

    def abort_by_id(self, sequence: Sequence, now: float) -> None:
        """Ends a sequence as SGLang's /abort_request does. If this step completes the prompt, the sequence ends after
        the step, with a token. If the sequence waits or has only a part of its prompt, nothing is counted for it and
        no prompt tokens are reported."""
        if sequence.finish is not None or sequence.aborting:
            return
        waits = sequence in self._waiting
        if not waits and not sequence.decoding:
            planned = sum(chunk for each, chunk in self._chunks if each is sequence)
            if sequence.computed + planned >= sequence.target:
                sequence.aborting = True
                return
        if waits or not sequence.decoding:
            sequence.admitted = None
        self.abort(sequence, now)

    def begin(self, now: float) -> float | None:
        """Chooses the next step. Returns its duration in seconds, or None when there is nothing to compute."""
        self._decodes, self._chunks = [], []
        if self.paused:
            return None
        self._decodes = [s for s in self._running if s.decoding and not s.held]
        self._make_room_for_decodes()
        budget = self._chunk - len(self._decodes)
        for sequence in self._running:
            if not sequence.decoding and budget > 0:
                budget -= self._plan_chunk(sequence, budget)
        while self._waiting and budget > 0 and len(self._running) < self.max_running:
            sequence = self._next()
            if sequence is None or not self._admit(sequence, now):
                break
            self._waiting.remove(sequence)
            self._running.append(sequence)
            budget -= self._plan_chunk(sequence, budget)
        if not self._decodes and not self._chunks:
            return None
        self._duration = self._timing.seconds(
            EngineStep(
                tokens=len(self._decodes) + sum(c for _, c in self._chunks),
                decode_context=sum(len(s.prompt) + len(s.output) for s in self._decodes),
                prefill_work=sum(c * (s.computed + c / 2) for s, c in self._chunks),
                sequences=len(self._decodes) + len(self._chunks),
            )
        )
        if self.slots is not None:
            self._duration += self.slots.prepare({s.adapter for s in self._running})
        return self._duration

    def complete(self, now: float) -> None:
        """Applies the step that `begin` chose."""
        totals = self.totals
        generated = [s for s in self._decodes if s.finish is None]
        if self._chunks:
            totals.prefill_steps += 1
            totals.prefill_seconds += self._duration
            totals.prefill_uncached_tokens += sum(c for _, c in self._chunks)
        elif generated:
            b, t = float(len(generated)), self._duration * 1e6
            for i, value in enumerate((1.0, b, t, b * b, b * t, b)):
                totals.decode_moments[i] += value
        if generated:
            totals.decode_steps += 1
            totals.decode_tokens += len(generated)
            self._ratio = max(_RATIO_LAST, self._ratio - (_RATIO_FIRST - _RATIO_LAST) / _RATIO_STEPS)
        for sequence in generated:
            self._emit(sequence, now)
        for sequence, chunk in self._chunks:
            if sequence.finish is not None:
                continue
            sequence.computed += chunk
            if sequence.decoding:
                self._share_prompt(sequence)
                if not sequence.held:
                    self._emit(sequence, now)
                if sequence.aborting:
                    self.abort(sequence, now)
        self._decodes, self._chunks = [], []

    # --- inside -------------------------------------------------------------------------------------------------

    def _next(self) -> Sequence | None:
        """The first waiting sequence that may join the batch. A sequence whose adapter finds no slot is skipped."""
        if self.slots is None:
            return self._waiting[0]
        running = {s.adapter for s in self._running}
        for sequence in self._waiting:
            if sequence.adapter in running or self.slots.fit(running | {sequence.adapter}):
                return sequence
        return None

    def _plan_chunk(self, sequence: Sequence, budget: int) -> int:
        chunk = min(budget, sequence.target - sequence.computed)
        self._chunks.append((sequence, chunk))
        return chunk

    def _admit(self, sequence: Sequence, now: float) -> bool:
        tokens = sequence.tokens()
        # At least one token has to be computed, or there would be nothing to generate from.
        node, cached = self.kv.match(tokens[:-1], sequence.space) if self._share else (None, 0)
        if node is not None:
            self.kv.lock(node)
        need = len(tokens) - cached
        reserved = sum(self._reserve(s) for s in self._running) + self._reserve(sequence)
        room = self.kv.free + self.kv.evictable
        fits = need + reserved <= room or (not self._running and need <= room)
        if not fits or not self.kv.take(need):
            if node is not None:
                self.kv.unlock(node)
            return False
        sequence.node, sequence.owned = node, need
        sequence.computed, sequence.target = cached, len(tokens)
        if sequence.admitted is None:
            sequence.admitted, sequence.cached = now, cached
            self.totals.prefill_cached_tokens += cached
            self.cache_hit_rate = cached / len(tokens)
        return True

    def _reserve(self, sequence: Sequence) -> float:
        return self._ratio * max(min(sequence.max_new_tokens, _CLIP_NEW_TOKENS) - len(sequence.output), 0)

    def _make_room_for_decodes(self) -> None:
        while self._decodes and not self.kv.take(len(self._decodes)):
            newest = self._decodes.pop()
            if not self._decodes and len(self._running) == 1:
                # The only sequence left is still too long for the cache: SGLang ends it for lack of memory.
                self._end(newest, Finish("length"), newest.arrived)
                return
            self._retract(newest)
        for sequence in self._decodes:
            sequence.owned += 1

    def _retract(self, sequence: Sequence) -> None:
        self.totals.retracted_input += len(sequence.prompt)
        self.totals.retracted_output += len(sequence.output)
        self._ratio = _RATIO_FIRST
        self._running.remove(sequence)
        self._release(sequence, keep=False)
        sequence.computed = sequence.target = 0
        sequence.retractions += 1
        self._waiting.appendleft(sequence)

    def _share_prompt(self, sequence: Sequence) -> None:
        """Caches the whole prompt after the prefill, so that other sequences find it too."""
        if not self._share:
            return
        old = sequence.node
        sequence.node = self.kv.insert(sequence.tokens(), sequence.owned, sequence.space)
        sequence.owned = 0
        self.kv.lock(sequence.node)
        if old is not None:
            self.kv.unlock(old)

    def _emit(self, sequence: Sequence, now: float) -> None:
        if sequence.max_new_tokens == 0:
            self._end(sequence, Finish("length"), now)
            return
        token, text, last = sequence.answer.token(len(sequence.output))
        sequence.output.append(token)
        if sequence.first_token is None:
            sequence.first_token = now
        if (last and not sequence.ignore_eos) or token in sequence.stop_token_ids:
            self._end(sequence, Finish("stop", token), now)
            return
        sequence.text += text
        for stop in sequence.stop:
            at = sequence.text.find(stop, max(0, len(sequence.text) - len(text) - len(stop)))
            if at >= 0:
                sequence.text = sequence.text[:at]
                self._end(sequence, Finish("stop", stop), now)
                return
        if len(sequence.output) >= sequence.max_new_tokens:
            self._end(sequence, Finish("length"), now)
            return
        sequence.on_update()

    def _end(self, sequence: Sequence, finish: Finish, now: float) -> None:
        sequence.finish, sequence.finished = finish, now
        if sequence in self._running:
            self._running.remove(sequence)
            self._release(sequence, keep=sequence.decoding)
        sequence.on_update()

    def _release(self, sequence: Sequence, *, keep: bool) -> None:
        """Frees what a sequence holds; with `keep` its tokens stay cached for the next turn of its conversation."""
        if keep and self._share and sequence.owned:
            # The last token was generated, but no step has computed its KV yet.
            computed = sequence.tokens()[: sequence.target + sequence.owned]
            self.kv.insert(computed, sequence.owned, sequence.space)
        else:
            self.kv.give_back(sequence.owned)
        if sequence.node is not None:
            self.kv.unlock(sequence.node)
        sequence.node, sequence.owned = None, 0
