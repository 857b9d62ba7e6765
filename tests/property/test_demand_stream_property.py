"""Whatever is lost, cut or restarted: what a listener knows of a gateway is what the gateway has, or unknown."""

from collections import deque
from contextlib import ExitStack
from typing import cast

import aiohttp
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shoal.api.demand import ModelDemand
from shoal.gateway.demand import DemandState
from shoal.net.hub import HubReader, StreamHub
from shoal.net.stream import ListenerIdentity, StreamBroken, StreamPeer
from shoal.signals.demand import DemandStream
from tests.support.clock import Clock

MODELS = st.sampled_from(["a", "b"])
FATES = st.sampled_from(["brought", "brought", "brought", "late", "lost", "twice"])


class Pair(RuleBasedStateMachine):
    """A gateway's book and hub, a listener, and a network between them that does what networks do."""

    @initialize()
    def begin(self) -> None:
        self.clock = Clock(0.0)
        self.told: list[str | None] = []
        self.stream = DemandStream(
            StreamPeer("g", "g", "h", "k"),
            cast(aiohttp.ClientSession, None),
            lambda _uid, models: self.told.extend([None] if models is None else models),
            ListenerIdentity(),
        )
        self.wire: deque[bytes] = deque()
        self.reader: HubReader | None = None
        self.connection = ExitStack()
        self.of_boot: dict[str, dict[str, list[ModelDemand]]] = {}
        """What each process had, ever."""
        self.start()
        self.connects("brought")

    def start(self) -> None:
        self.book = DemandState(self.clock)
        self.hub = StreamHub("models", self.book.full)
        self.had = self.of_boot[self.hub.boot] = {}
        self.begun: dict[str, list[float]] = {}
        self.remember()

    def remember(self) -> None:
        for uid in ("a", "b"):
            self.had.setdefault(uid, []).append(self.book.demand(uid).model_copy(update={"oldest_seconds": 0.0}))

    # --- the gateway --------------------------------------------------------------------------------------------------

    @rule(
        model=MODELS,
        what=st.sampled_from(["runs", "ends", "waits", "leaves", "leaves first"]),
        told=st.sampled_from(["not yet", "at once", "after a second"]),
        fate=FATES,
    )
    def works(self, model: str, what: str, told: str, fate: str) -> None:
        begun = self.begun.setdefault(model, [])
        if what == "runs":
            self.book.arrived(model)
            self.book.sent(model)
        elif what == "ends" and self.book.demand(model).in_flight:
            self.book.ended(model)
        elif what == "waits":
            self.book.arrived(model)
            self.book.held(model, 10, self.clock.now)
            begun.append(self.clock.now)
        elif what.startswith("leaves") and begun:
            self.book.released(model, 10, begun.pop(0 if what == "leaves first" else -1))
        self.remember()

        if told != "not yet":
            self.tells(told == "at once", fate)

    def tells(self, urgent: bool, fate: str) -> None:
        self.clock.now += 0.1 if urgent else 1.0
        content = self.book.take_urgent() if urgent else self.book.take()
        if content is not None:
            self.hub.publish(content)
            self.pump(fate)

    @rule(fate=FATES)
    def a_while_passes(self, fate: str) -> None:
        self.tells(False, fate)
        if self.reader is None:
            self.connects(fate)
        else:
            self.send(self.hub.heartbeat(), fate)

    @rule(spliced=st.booleans())
    def restarts(self, spliced: bool) -> None:
        """Another process has the address. A proxy may even go on with its words in the old connection."""
        self.start()
        self.reader = None
        if spliced:
            self.open()._queue.get_nowait()

    # --- the network --------------------------------------------------------------------------------------------------

    def open(self) -> HubReader:
        """A connection of the hub's; it ends when the next one opens."""
        self.connection.close()
        self.reader = self.connection.enter_context(self.hub.reader())
        return self.reader

    def pump(self, fate: str) -> None:
        reader = self.reader
        while reader is not None and not reader._queue.empty():
            message = reader._queue.get_nowait()
            if reader._ended:
                self.reader = None
                return
            self.send(message, fate)

    def send(self, message: bytes, fate: str) -> None:
        self.wire.extend({"lost": [], "twice": [message] * 2}.get(fate, [message]))
        if fate != "late":
            self.arrives()

    @rule(fate=FATES)
    def connects(self, fate: str) -> None:
        self.cut()
        self.open()
        self.pump(fate)

    def cut(self) -> None:
        self.wire.clear()
        self.reader = None
        self.stream.lose()

    @rule()
    def arrives(self) -> None:
        while self.wire:
            try:
                self.stream.take(self.wire.popleft()[5:])
            except StreamBroken:
                self.cut()

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def knows_what_is_or_knows_that_it_does_not(self) -> None:
        if self.stream.boot is None:
            assert self.stream.models == {}
            return
        # Of a former process only its own words, until the connection is found to be cut, or silent.
        for uid, had in self.of_boot[self.stream.boot].items():
            assert self.stream.demand(uid).model_copy(update={"oldest_seconds": 0.0}) in had
        current = self.stream.boot == self.hub.boot and self.stream.seq == self.hub.seq
        if current and not self.wire and not self.book._changed:
            for uid in self.had:
                heard = self.stream.demand(uid, self.clock.now).model_copy(update={"oldest_seconds": 0.0})
                assert heard == self.had[uid][-1]


Pair.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestPair = Pair.TestCase
