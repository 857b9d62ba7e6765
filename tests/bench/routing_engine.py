"""Replicas with prefix caches and adapters in virtual time, for replays of routing rules.

The engine is that of `scaling_engine.py`. In addition it keeps the blocks of prompts and answers by least recent use,
as far as its KV cache has space, and prefills only what it does not find. As in SGLang and vLLM, a block that several
requests use takes its space once, and one that is in use is not forgotten. An adapter that is not resident is loaded
first, one after the other; the adapter that was used longest ago makes place.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.bench.scaling_engine import Engine, Params, Request

Block = tuple[int, int]
"""A name that is unique for the block and all that is before it, and its tokens."""
LOAD_SECONDS = 0.08
"""Of an adapter of rank 32 from the node's disk."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as a gateway sees it. Lengths in tokens, times in seconds."""

    number: int
    at: float
    blocks: tuple[Block, ...]
    answer: Block
    head: int | None = None
    """Of the system prompt and the first user message (`core/routing/affinity.py`)."""
    repeated: int = 0
    """The prompt up to the last answer that is in it; 0 in a first turn, and where turns are not known."""
    adapter: int | None = None
    gateway: int = 0
    system: int | None = None
    system_tokens: int = 0
    ends: tuple[int, ...] = ()
    """Blocks with which messages end, where blocks are not messages themselves: of the earlier turn, and the last whole
    one."""

    @property
    def prompt(self) -> int:
        return sum(tokens for _, tokens in self.blocks)


@dataclass(slots=True)
class Running(Request):
    asked: Asked | None = None
    cached: int = 0
    locked: list[Block] = field(default_factory=list[Block])
    """Blocks in the cache that it uses."""
    size: int = 0
    """Tokens that were reserved for it."""


@dataclass(slots=True)
class Replica(Engine):
    number: int = 0
    gpu_class: str = "l40s"
    places: int = 0
    """Adapters that are resident at most."""
    blocks: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])
    held: int = 0
    users: dict[int, int] = field(default_factory=dict[int, int])
    """Running requests by block that they use."""
    locked: int = 0
    """Tokens of those blocks."""
    shared: int = 0
    """Tokens that requests use beyond the first one."""
    adapters: OrderedDict[int, float] = field(default_factory=OrderedDict[int, float])
    """When the load is over, by adapter."""
    loads: int = 0
    leaving: bool = False
    load_free: float = 0.0
    loading: list[tuple[float, Running]] = field(default_factory=list[tuple[float, Running]])
    began: list[Running] = field(default_factory=list[Running])
    ended: list[Running] = field(default_factory=list[Running])
    log: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    """Events of the prefix cache: when, which block, and its tokens; 0: it is removed."""

    def found(self, blocks: tuple[Block, ...]) -> int:
        """Tokens of a prompt that are in the cache."""
        tokens = 0
        for name, size in blocks:
            if name not in self.blocks:
                break
            tokens += size
        return tokens

    @property
    def kv_used(self) -> int:
        """As engines count it: blocks that several requests use count once."""
        return self.context + sum(r.prior for r in self.prefilling) - self.shared

    def keep(self, blocks: tuple[Block, ...]) -> None:
        for name, size in reversed(blocks):  # the beginning is the youngest
            if name not in self.blocks:
                self.blocks[name] = size
                self.held += size
                self.log.append((self.clock, name, size))
            self.blocks.move_to_end(name)

    def shrink(self) -> None:
        """Forgets blocks that nobody uses, as far as there is no space."""
        most = int(0.95 * self.params.kv_tokens) - (self.kv_used - self.locked)
        for _ in range(len(self.blocks)):
            if self.held <= most:
                return
            name, size = self.blocks.popitem(last=False)
            if name in self.users:
                self.blocks[name] = size
                continue
            self.held -= size
            self.log.append((self.clock, name, 0))

    def lock(self, one: Running, blocks: Sequence[Block]) -> None:
        for name, size in blocks:
            count = self.users[name] = self.users.get(name, 0) + 1
            if count == 1:
                self.locked += size
            else:
                self.shared += size
            one.locked.append((name, size))

    def unlock(self, one: Running) -> None:
        for name, size in one.locked:
            count = self.users[name] - 1
            if count:
                self.users[name] = count
                self.shared -= size
            else:
                del self.users[name]
                self.locked -= size

    def send(self, asked: Asked, now: float) -> Running:
        prompt = max(1, asked.prompt)
        one = Running(now, prompt, max(1, asked.answer[1]), asked=asked)
        if asked.adapter is None:
            self.add(one)
            return one
        over = self.adapters.get(asked.adapter)
        if over is None:
            self.load_free = over = max(now, self.load_free) + LOAD_SECONDS
            self.loads += 1
            self.adapters[asked.adapter] = over
            while len(self.adapters) > self.places:
                self.adapters.popitem(last=False)
        self.adapters.move_to_end(asked.adapter)
        if over <= now:
            self.add(one)
        else:
            self.loading.append((over, one))
        return one

    def advance(self, until: float) -> None:
        while self.loading and self.loading[0][0] <= until:
            over, one = self.loading.pop(0)
            Engine.advance(self, over)
            self.add(one)
        Engine.advance(self, until)

    @property
    def all_in_flight(self) -> int:
        return self.in_flight + len(self.loading)

    @property
    def uncached_waiting(self) -> int:
        """As SGLang reports it: the waiting prompts without what is in the cache, and the rest of the one that is being
        read in chunks."""
        return sum(
            max(1, r.prompt - self.found(r.asked.blocks)) for r in self.waiting if isinstance(r, Running) and r.asked
        ) + sum(r.prompt - r.prior for r in self.prefilling)

    @property
    def work(self) -> int:
        """Tokens that are not prefilled yet, which nobody outside of the engine knows exactly."""
        return self.uncached_waiting

    def _admit(self) -> None:
        p = self.params
        budget = p.chunk - self.decoding - sum(r.prompt - r.prior for r in self.prefilling)
        while self.waiting and budget > 0 and self.running < p.max_running:
            one = self.waiting[0]
            size, there = one.prompt + one.answer, list[Block]()
            if isinstance(one, Running) and one.asked is not None:
                for block in one.asked.blocks:
                    if block[0] not in self.blocks:
                        break
                    there.append(block)
                    if block[0] in self.users:
                        size -= block[1]
            if self.reserved + size > p.kv_tokens and self.running:
                return
            self.waiting.popleft()
            if isinstance(one, Running) and one.asked is not None:
                one.cached = one.prior = min(one.prompt - 1, sum(tokens for _, tokens in there))
                one.size = size
                self.lock(one, there)
                self.shrink()
            self.prefilling.append(one)
            self.reserved += size
            budget -= one.prompt - one.prior

    def _mixed_step(self) -> None:
        before = list(self.prefilling)
        Engine._mixed_step(self)
        for one in before:
            if not math.isnan(one.first) and isinstance(one, Running) and one.asked is not None:
                self.keep(one.asked.blocks)
                self.lock(one, one.asked.blocks[len(one.locked) :])
                self.shrink()
                self.began.append(one)

    def _finished(self) -> None:
        while self._finish and self._finish[0][0] <= self.steps:
            _, _, one = heapq.heappop(self._finish)
            one.done = self.clock
            self.decoding -= 1
            self.context -= one.prompt + one.answer
            if isinstance(one, Running) and one.asked is not None:
                self.reserved -= one.size
                self.unlock(one)
                self.keep((*one.asked.blocks, one.asked.answer))
                self.shrink()
                self.ended.append(one)


def engine(number: int, params: Params, gpu_class: str, clock: float, places: int) -> Replica:
    return Replica(params, clock=clock, number=number, gpu_class=gpu_class, places=places)
