"""Leases and retirements (streams.md, "Slots") as a small world, searched in every order of events.

One adapter on one replica, its agent, some gateways. Real is what decides: `lifecycle/unload.py`. The rest is what
the rules say of gateways and connections, with everything that may go wrong between them: connections that break for
one side or both, messages, acknowledgements and leases that are late or never arrive, restarts of agents and gateways.
A retirement may begin at any time: whether it is a good one is not asked here.

Assumed, and nothing more: a connection delivers in order; a gateway that has heard nothing for the silence limit takes
its stream for dead; a request reaches its engine within a tick of being chosen.

Time runs in ticks, and a state holds ages instead of times, so that it comes back and the search ends. Messages with
an odd number call the adapter retiring.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.core import drain
from shoal.core.drain import GatewayProgress
from shoal.core.lora.lifecycle import unload
from shoal.core.lora.lifecycle.unload import Retirement

SILENCE = 2
"""Ticks: the silence limit of a stream, 12 s."""
RESTART = 3
"""Ticks: 15 s."""
_OLD = 3
"""Ages: older ones are all the same."""
NAME = "a"
_RUNS = frozenset({NAME})


class Gate(NamedTuple):
    """A gateway: what it believes, and what is true."""

    open: bool = False
    """It has a stream, as it believes."""
    accepted: bool = False
    """The agent has that stream, as the agent believes."""
    pending: bool = False
    """The agent wrote what has not arrived yet."""
    boot: int | None = None
    """Of the agent whose state it knows."""
    seq: int = 0
    heard: int = 0
    """Age of the last thing that arrived."""
    answer: tuple[int, int] | None = None
    """A lease on its way: the agent's boot, and the seq by which the adapter is loaded."""
    lease: tuple[int, int] | None = None
    wire: int | None = None
    """Age of a request that has not reached the engine."""
    running: bool = False
    ack: tuple[int, int, bool] | None = None
    """On its way: the agent's boot, seq, whether the adapter runs."""

    @property
    def in_flight(self) -> bool:
        return self.wire is not None or self.running


class World(NamedTuple):
    """All of it. Ages in ticks."""

    gates: tuple[Gate, ...]
    records: tuple[GatewayProgress | None, ...]
    """What the agent knows of each gateway; times are negative ages."""
    boot: int = 0
    seq: int = 0
    retired: int | None = None
    """Age of the retirement that is under way."""
    restarted: int | None = None
    picks: int = 2
    asks: int = 2
    faults: int = 1
    retirements: int = 2


@dataclass(frozen=True, slots=True)
class Rules:
    """Of gateways and agents."""

    lease_follows_stream: bool = True
    """A gateway uses a lease when its stream has come to what the lease says, and calls the adapter loaded."""
    waits_after_restart: bool = True


Story = list[str]


def search(world: World, rules: Rules | None = None) -> tuple[Story | None, int, int]:
    """Every order of events. Returns the shortest story that ends with an adapter unloaded under a request, or None;
    how many states there are; how many unloads were let through."""
    rules = rules or Rules()
    before: dict[World, tuple[World, str] | None] = {world: None}
    queue, let_through = deque([world]), 0
    while queue:
        now = queue.popleft()
        if now.retired is not None and _may_unload(now, rules):
            let_through += 1
            if any(gate.in_flight for gate in now.gates):
                return [*_story(before, now), "the adapter is unloaded"], len(before), let_through
        for what, after in _events(now, rules):
            same = _same(after)
            if same not in before:
                before[same] = (now, what)
                queue.append(same)
    return None, len(before), let_through


def _story(before: dict[World, tuple[World, str] | None], world: World) -> Story:
    steps: Story = []
    while (step := before[world]) is not None:
        world, what = step
        steps.append(what)
    return steps[::-1]


def _may_unload(world: World, rules: Rules) -> bool:
    assert world.retired is not None
    # It decides right after a look: one of before, at an idle engine, says no more.
    idle_at = None if any(gate.running for gate in world.gates) else 0.0
    if rules.waits_after_restart and world.restarted is not None:
        started = -float(world.restarted)
        if not unload.knows_all(started, 0.0, joined=True, idle_at=idle_at):
            return False
    known = [record for record in world.records if record is not None]
    retirement = Retirement(NAME, world.seq, -float(world.retired))
    return not unload.holders(retirement, known, 0.0, drain_seconds=1e9, idle_at=idle_at)


def _same(world: World) -> World:
    """Of worlds that differ in nothing that could matter later, one."""
    return world._replace(
        gates=tuple(
            gate._replace(
                heard=min(gate.heard, SILENCE), ack=gate.ack if gate.ack and gate.ack[0] == world.boot else None
            )
            for gate in world.gates
        ),
        records=tuple(
            None if r is None else replace(r, last_message=max(r.last_message, -_OLD), closed=_floor(r.closed))
            for r in world.records
        ),
        retired=None if world.retired is None else min(world.retired, _OLD),
        restarted=None if world.restarted is None else min(world.restarted, RESTART),
    )


def _floor(time: float | None) -> float | None:
    return None if time is None else max(time, -_OLD)


# --- everything that can happen -------------------------------------------------------------------------------------


def _told(world: World) -> World:
    gates = tuple(gate._replace(pending=True) if gate.accepted else gate for gate in world.gates)
    return world._replace(seq=world.seq + 1, gates=gates)


def _events(world: World, rules: Rules) -> Iterator[tuple[str, World]]:
    if all(gate.wire is None or gate.wire < 1 for gate in world.gates):
        yield "a tick", _tick(world)
    for number, gate in enumerate(world.gates):
        for what, after in _gate_events(world, number, gate, rules):
            yield f"{what} (gateway {number})", after
    if world.retired is None and world.retirements:
        yield "the adapter is retired", _told(world._replace(retirements=world.retirements - 1, retired=0))
    if world.faults:
        # What was being retired is loaded, as far as the next agent knows; its numbers begin again.
        gates = tuple(gate._replace(accepted=False, pending=False) for gate in world.gates)
        none = tuple(None for _ in world.records)
        yield (
            "the agent restarts",
            world._replace(
                faults=world.faults - 1, boot=world.boot + 1, seq=0, retired=None, restarted=0, gates=gates,
                records=none,
            ),
        )  # fmt: skip


def _may_choose(gate: Gate, rules: Rules) -> bool:
    if not gate.open or gate.boot is None or gate.heard >= SILENCE or gate.lease is None:
        return False
    if not rules.lease_follows_stream:
        return True
    boot, seq = gate.lease
    return boot == gate.boot and gate.seq >= seq and gate.seq % 2 == 0


def _gate_events(world: World, number: int, gate: Gate, rules: Rules) -> Iterator[tuple[str, World]]:
    def put(
        new: Gate, record: GatewayProgress | None = world.records[number], base: World = world, **more: object
    ) -> World:
        gates = (*base.gates[:number], new, *base.gates[number + 1 :])
        records = (*base.records[:number], record, *base.records[number + 1 :])
        return base._replace(gates=gates, records=records, **more)

    record = world.records[number]
    if gate.open and gate.accepted and gate.boot == world.boot and world.asks and gate.answer is None:
        after = world
        if world.retired is not None:
            after = _told(world._replace(retired=None))  # an ensure takes a retirement back
        asked = after.gates[number]._replace(answer=(after.boot, after.seq))
        yield "asks for a lease", put(asked, base=after, asks=world.asks - 1)
    if gate.answer is not None:
        yield "gets its lease", put(gate._replace(answer=None, lease=gate.answer))
    if _may_choose(gate, rules) and not gate.in_flight and world.picks:
        yield "chooses and sends", put(gate._replace(wire=0), picks=world.picks - 1)
    if gate.wire is not None:
        yield "the request reaches the engine", put(gate._replace(wire=None, running=True))
    if gate.running:
        yield "the request ends", put(gate._replace(running=False))
    if gate.open and gate.accepted:
        if gate.pending:
            yield "hears the state", put(gate._replace(pending=False, boot=world.boot, seq=world.seq, heard=0))
        elif gate.heard:
            yield "hears a heartbeat", put(gate._replace(heard=0))
    if gate.open and gate.boot == world.boot:
        ack = (gate.boot, gate.seq, gate.in_flight)
        said = None if record is None else (record.seq, bool(record.adapters))
        if ack != gate.ack and said != ack[1:]:
            yield f"acknowledges {ack}", put(gate._replace(ack=ack))
    if gate.ack is not None:
        boot, seq, runs = gate.ack
        new = record
        if boot == world.boot:
            new = drain.acked(record, str(number), seq, int(runs), 0.0, _RUNS if runs else frozenset())
        yield "its acknowledgement arrives", put(gate._replace(ack=None), new)
    if not gate.open:
        fresh = gate._replace(open=True, accepted=True, pending=True, boot=None, heard=0, lease=None, answer=None)
        yield "connects", put(fresh, drain.opened(record, str(number), 0.0))
    if not world.faults:
        return
    fewer = world.faults - 1
    if gate.accepted:
        assert record is not None
        gone = gate._replace(accepted=False, pending=False)
        yield "the agent loses the connection", put(gone, drain.closed(record, 0.0), faults=fewer)
    if gate.open:
        yield "loses the connection", put(gate._replace(open=False, boot=None, pending=False), faults=fewer)
    # Its requests end with it. It is another gateway then.
    yield "restarts", put(Gate(), None, faults=fewer)


def _tick(world: World) -> World:
    return world._replace(
        gates=tuple(
            gate._replace(heard=gate.heard + 1, wire=None if gate.wire is None else gate.wire + 1)
            for gate in world.gates
        ),
        records=tuple(
            None
            if r is None
            else replace(r, last_message=r.last_message - 1.0, closed=None if r.closed is None else r.closed - 1.0)
            for r in world.records
        ),
        retired=None if world.retired is None else world.retired + 1,
        restarted=None if world.restarted is None else world.restarted + 1,
    )
