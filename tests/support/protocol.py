"""The protocol of streams and acknowledgements (streams.md) as a small world, searched in every order of events.

One replica, its agent, some gateways. Real is what decides: `core/drain.py`. The rest is what the rules say of
gateways, connections and kubelets, with everything that may go wrong between them: connections that break for one side
or both, messages and acknowledgements that are late or never arrive, restarts of all three, hooks whose engine stays.

Assumed, and nothing more: a connection delivers in order; a gateway that has heard nothing for the silence limit takes
its stream for dead; a request reaches its engine within a tick of being chosen, a tick being `IDLE_SECONDS`.

Time runs in ticks, and a state holds ages instead of times, so that it comes back and the search ends.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.core import drain
from shoal.core.drain import EngineObservation, EngineProgress, GatewayProgress, Stop

SILENCE = 2
"""Ticks: the silence limit of a stream, 12 s."""
RESTART = 3
"""Ticks: 15 s."""
_OLD = 3
"""Ages of claims: older ones are all the same (the claim and the idle second are over)."""


_UNSEEN, _BUSY = EngineProgress(), EngineProgress(boot="e", requests=0)
_IDLE = {float(age): EngineProgress(boot="e", idle_since=-float(age), requests=0) for age in (0, 1)}


class Gate(NamedTuple):
    """A gateway: what it believes, and what is true."""

    open: bool = False
    """It has a connection, as it believes."""
    accepted: bool = False
    """The agent has that connection, as the agent believes."""
    pending: bool = False
    """The agent wrote what has not arrived yet."""
    boot: int | None = None
    """Of the agent whose state it knows; None: it knows none."""
    seq: int = 0
    heard: int = 0
    """Age of the last thing that arrived."""
    chosen: bool = False
    """It chose this replica and has not counted the request yet (only where the rule against that is broken)."""
    wire: int | None = None
    """Age of a request that has not reached the engine."""
    running: bool = False
    """A request of it runs in the engine."""
    ack: tuple[int, int, int] | None = None
    """On its way: the agent's boot, seq, in flight."""

    @property
    def in_flight(self) -> int:
        return int(self.wire is not None) + int(self.running)

    @property
    def may_choose(self) -> bool:
        """Rule 1: a live stream, and a state that does not turn it away. Draining states have odd numbers."""
        return self.open and self.boot is not None and self.heard < SILENCE and self.seq % 2 == 0


class World(NamedTuple):
    """All of it. Ages in ticks."""

    gates: tuple[Gate, ...]
    records: tuple[GatewayProgress | None, ...]
    """What the agent knows of each gateway; times are negative ages."""
    boot: int = 0
    seq: int = 0
    restarted: int | None = None
    began: int | None = None
    """Age of the drain; None: none is under way."""
    engine: EngineProgress = _UNSEEN
    """Only since when it is idle, as a negative age: the search decides right after a look."""
    arrived: bool = False
    """A request has reached the engine since the last look."""
    picks: int = 2
    faults: int = 2
    hooks: int = 2


@dataclass(frozen=True, slots=True)
class Rules:
    """Of gateways."""

    counts_when_it_chooses: bool = True
    """A request is in flight from the moment of the choice: no await between the last look and the send."""


Story = list[str]


def search(world: World, rules: Rules | None = None) -> tuple[Story | None, int, int]:
    """Every order of events. Returns the shortest story that ends with an engine stopped under a request, or None; how
    many states there are; how many drains were let through."""
    rules = rules or Rules()
    before: dict[World, tuple[World, str] | None] = {world: None}
    queue, let_through = deque([world]), 0
    while queue:
        now = queue.popleft()
        if now.began is not None:
            looked = _look(now)
            if isinstance(_decide(looked), Stop):
                let_through += 1
                if any(g.in_flight or g.chosen for g in now.gates):
                    return [*_story(before, now), "the engine is stopped"], len(before), let_through
            _add(before, queue, now, "the agent looks at the engine", looked)
        for what, after in _events(now, rules):
            _add(before, queue, now, what, after)
    return None, len(before), let_through


def _add(
    before: dict[World, tuple[World, str] | None], queue: deque[World], now: World, what: str, after: World
) -> None:
    after = _same(after)
    if after not in before:
        before[after] = (now, what)
        queue.append(after)


def _story(before: dict[World, tuple[World, str] | None], world: World) -> Story:
    steps: Story = []
    while (step := before[world]) is not None:
        world, what = step
        steps.append(what)
    return steps[::-1]


# --- the agent ------------------------------------------------------------------------------------------------------


def _look(world: World) -> World:
    idle = not any(g.running for g in world.gates)
    seen = drain.observe(
        world.engine,
        EngineObservation(
            0.0, "e", True, running=int(not idle), waiting=0, active=int(not idle), requests=int(world.arrived)
        ),
    )
    return world._replace(engine=replace(seen, requests=0), arrived=False)


def _same(world: World) -> World:
    """Of worlds that differ in nothing that could matter later, one."""
    # Compared before they are replaced, which is what this search spends its time on.
    draining, since = world.began is not None, world.engine.idle_since
    if not draining:
        engine = _UNSEEN
    elif since is None:
        engine = _BUSY
    else:
        engine = _IDLE[min(-since, drain.IDLE_SECONDS)]
    return world._replace(
        gates=tuple(_same_gate(g, world.boot) for g in world.gates),
        records=tuple(None if r is None else _same_record(r, draining=draining) for r in world.records),
        engine=engine,
        arrived=world.arrived and draining,
        began=None if world.began is None else min(world.began, _OLD),
        restarted=None if world.restarted is None else min(world.restarted, RESTART + 1),
    )


def _same_gate(gate: Gate, boot: int) -> Gate:
    if gate.heard > SILENCE:
        gate = gate._replace(heard=SILENCE)
    if gate.ack is not None and gate.ack[0] != boot:
        gate = gate._replace(ack=None)
    return gate


def _same_record(record: GatewayProgress, *, draining: bool) -> GatewayProgress:
    old = -float(_OLD)
    if record.closed is not None:
        last = max(record.last_message, record.closed, old)
        return (
            record if last == record.last_message == record.closed else replace(record, last_message=last, closed=last)
        )
    # A barrier that is told later is newer than all that was heard on a stream that is still open.
    last = max(record.last_message, old) if draining else old
    return record if last == record.last_message else replace(record, last_message=last)


def _decide(world: World) -> object:
    assert world.began is not None
    return drain.decide(
        drain.DrainState(
            began=-float(world.began),
            barrier=world.seq,
            drain_seconds=1e9,
            gateways=tuple(r for r in world.records if r is not None),
            engine=world.engine,
            restarted=None if world.restarted is None else -float(world.restarted),
        ),
        0.0,
    )


def _told(world: World) -> World:
    """A message to all who listen."""
    gates = tuple(g._replace(pending=True) if g.accepted else g for g in world.gates)
    return world._replace(seq=world.seq + 1, gates=gates)


# --- everything that can happen -------------------------------------------------------------------------------------


def _events(world: World, rules: Rules) -> Iterator[tuple[str, World]]:
    if all(g.wire is None or g.wire < 1 for g in world.gates):
        yield "a tick", _tick(world)
    for number, gate in enumerate(world.gates):
        for what, after in _gate_events(world, number, gate, rules):
            yield f"{what} (gateway {number})", after
    if world.began is None and world.hooks:
        begun = _told(world._replace(hooks=world.hooks - 1, began=0, engine=_UNSEEN, arrived=False))
        yield "the hook is called", begun
    if world.faults:
        fault = world._replace(faults=world.faults - 1)
        if world.began is None:
            # During a drain the broken hook stops the engine at once, whatever the protocol says.
            gates = tuple(g._replace(accepted=False, pending=False) for g in world.gates)
            yield (
                "the agent restarts",
                fault._replace(
                    boot=world.boot + 1,
                    seq=0,
                    restarted=0,
                    gates=gates,
                    records=tuple(None for _ in world.records),
                ),
            )
        else:
            gates = tuple(g._replace(running=False) for g in world.gates)
            yield "the engine restarts and ends the drain", _told(fault._replace(gates=gates))._replace(began=None)
            yield "the engine was not stopped after all", _told(fault)._replace(began=None)


def _gate_events(world: World, number: int, gate: Gate, rules: Rules) -> Iterator[tuple[str, World]]:
    def put(new: Gate, record: GatewayProgress | None = world.records[number], **more: object) -> World:
        gates = (*world.gates[:number], new, *world.gates[number + 1 :])
        records = (*world.records[:number], record, *world.records[number + 1 :])
        return world._replace(gates=gates, records=records, **more)

    record = world.records[number]
    if gate.may_choose and not gate.in_flight and not gate.chosen and world.picks:
        if rules.counts_when_it_chooses:
            yield "chooses and sends", put(gate._replace(wire=0), picks=world.picks - 1)
        else:
            yield "chooses", put(gate._replace(chosen=True), picks=world.picks - 1)
    if gate.chosen:
        yield "sends", put(gate._replace(chosen=False, wire=0))
    if gate.wire is not None:
        yield "the request reaches the engine", put(gate._replace(wire=None, running=True), arrived=True)
    if gate.running:
        yield "the request ends", put(gate._replace(running=False))
    if gate.open and gate.accepted:
        if gate.pending:
            yield "hears the state", put(gate._replace(pending=False, boot=world.boot, seq=world.seq, heard=0))
        elif gate.heard:
            yield "hears a heartbeat", put(gate._replace(heard=0))
    if gate.open and gate.boot == world.boot:  # the agent answers 409 to others
        ack = (gate.boot, gate.seq, gate.in_flight)
        # One that is never delivered is one that is lost. One that says nothing new would only lengthen a claim.
        if ack != gate.ack and (record is None or (record.seq, record.running) != ack[1:]):
            yield f"acknowledges {ack}", put(gate._replace(ack=ack))
    if gate.ack is not None:
        boot, seq, running = gate.ack
        new = record if boot != world.boot else drain.acked(record, "", seq, running, 0.0)
        yield "its acknowledgement arrives", put(gate._replace(ack=None), new)
    if not gate.open:
        fresh = gate._replace(open=True, accepted=True, pending=True, boot=None, heard=0)
        yield "connects", put(fresh, drain.opened(record, "", 0.0))
    if not world.faults:
        return
    fewer = world.faults - 1
    if gate.accepted:
        assert record is not None
        gone = gate._replace(accepted=False, pending=False)
        yield "the agent loses the connection", put(gone, drain.closed(record, 0.0), faults=fewer)
    if gate.open:
        yield "loses the connection", put(gate._replace(open=False, boot=None, pending=False), faults=fewer)
    # Its requests end with it: cut, and nobody waits for them. It is another gateway then.
    yield "restarts", put(Gate(), None, faults=fewer)


def _tick(world: World) -> World:
    return world._replace(
        gates=tuple(g._replace(heard=g.heard + 1, wire=None if g.wire is None else g.wire + 1) for g in world.gates),
        records=tuple(_older(r) for r in world.records),
        restarted=None if world.restarted is None else world.restarted + 1,
        began=None if world.began is None else world.began + 1,
        engine=replace(world.engine, idle_since=_past(world.engine.idle_since)),
    )


def _older(record: GatewayProgress | None) -> GatewayProgress | None:
    if record is None:
        return None
    return replace(record, last_message=record.last_message - 1.0, closed=_past(record.closed))


def _past(time: float | None) -> float | None:
    return None if time is None else time - 1.0
