"""Whatever is lost, cut or restarted: what a listener knows of a gateway is what the gateway has, or unknown."""

from collections import deque
from typing import Any, cast

import aiohttp
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shoal.api.demand import ModelDemand
from shoal.gateway.demand import DemandBook
from shoal.signals.demand import DemandStream
from shoal.signals.hub import Hub, Reader
from shoal.signals.stream import Me, Peer, StreamBroken

MODELS = st.sampled_from(["a", "b", "c"])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Pair(RuleBasedStateMachine):
    """A gateway's book and hub, a listener, and a network between them that does what networks do."""

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.told: list[str | None] = []
        self.stream = DemandStream(
            Peer("g", "g", "h", "k"),
            cast(aiohttp.ClientSession, None),
            lambda _uid, models: self.told.extend([None] if models is None else models),
            Me(),
        )
        self.wire: deque[bytes] = deque()
        self.reader: Reader | None = None
        self.most: dict[str, int] = {}
        self.start()

    def start(self) -> None:
        self.book = DemandBook(self.clock)
        self.hub = Hub("models", self.book.full)
        self.had: dict[str, list[ModelDemand]] = {}
        self.begun: dict[str, list[float]] = {}
        self.remember()

    def remember(self) -> None:
        for uid in ("a", "b", "c"):
            self.had.setdefault(uid, []).append(self.book.demand(uid).model_copy(update={"oldest_seconds": 0.0}))

    # --- the gateway --------------------------------------------------------------------------------------------------

    @rule(model=MODELS)
    def arrives_and_runs(self, model: str) -> None:
        self.book.arrived(model)
        self.book.sent(model)
        self.remember()

    @rule(model=MODELS)
    def ends(self, model: str) -> None:
        if self.book.demand(model).in_flight:
            self.book.ended(model)
            self.remember()

    @rule(model=MODELS)
    def waits(self, model: str) -> None:
        self.book.arrived(model)
        self.book.held(model, 10, self.clock.now)
        self.begun.setdefault(model, []).append(self.clock.now)
        self.remember()

    @rule(model=MODELS, first=st.booleans())
    def waits_no_longer(self, model: str, first: bool) -> None:
        if self.begun.get(model):
            self.book.unheld(model, 10, self.begun[model].pop(0 if first else -1))
            self.remember()

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0]), urgent=st.booleans())
    def tells(self, seconds: float, urgent: bool) -> None:
        self.clock.now += seconds
        content = self.book.take_urgent() if urgent else self.book.take()
        if content is not None:
            self.hub.tell(content)
            self.pump()

    @rule()
    def beats(self) -> None:
        if self.reader is not None:
            self.pump()
            self.wire.append(self.hub.heartbeat())

    @rule(told=st.booleans())
    def restarts(self, told: bool) -> None:
        """Another process has the address; what was on the wire may still arrive."""
        if not told:
            self.wire.clear()
        self.reader = None
        self.start()

    # --- the network --------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        reader = self.reader
        while reader is not None and not reader._queue.empty():
            message = reader._queue.get_nowait()
            if reader._ended:
                self.reader = None
                return
            self.wire.append(message)

    @rule()
    def connects(self) -> None:
        self.wire.clear()
        self.stream.lose()
        manager: Any = self.hub.reader()
        self.reader = manager.__enter__()
        self.pump()

    @rule()
    def cut(self) -> None:
        self.wire.clear()
        self.reader = None
        self.stream.lose()

    @rule(number=st.integers(1, 5))
    def brings(self, number: int) -> None:
        for _ in range(min(number, len(self.wire))):
            try:
                self.stream.take(self.wire.popleft()[5:])
            except StreamBroken:
                self.cut()

    @rule()
    def loses_a_message(self) -> None:
        if self.wire:
            self.wire.popleft()

    @rule()
    def brings_it_twice(self) -> None:
        if self.wire:
            self.wire.appendleft(self.wire[0])

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def knows_what_is_or_knows_that_it_does_not(self) -> None:
        if self.stream.boot is None:
            assert self.stream.models == {}
            return
        if self.stream.boot != self.hub.boot:
            return  # the former process's words, until the connection is found to be cut
        for uid, had in self.had.items():
            assert self.stream.demand(uid).model_copy(update={"oldest_seconds": 0.0}) in had
        if not self.wire and self.stream.seq == self.hub.seq and not self.book._changed:
            for uid in self.had:
                heard = self.stream.demand(uid, self.clock.now).model_copy(update={"oldest_seconds": 0.0})
                assert heard == self.had[uid][-1]


TestPair = Pair.TestCase
