"""One replica's adapters under everything that may happen: callers, gateways, an engine, and their failures.

Real are the registry and its decisions. The rest is as simple as it can be: an engine that carries a call out when the
test says so, gateways that send only under a lease to what they last heard is loaded, an agent that does what it is
told. Times are virtual.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.api import reasons
from shoal.api.adapters import AdapterWanted, DesiredAdapter
from shoal.core import drain
from shoal.core.drain import GatewayProgress
from shoal.core.lora.lifecycle.planstep import List, Load, PlanStep, Unload, plan_step
from shoal.core.lora.lifecycle.registry import AdapterWaiter, Registry, RegistryEntry

PLACES: Final = 3
SLOTS: Final = 2
DRAIN_SECONDS: Final = 900.0


def wanted(number: int, *, pinned: bool = False) -> DesiredAdapter:
    """The adapter with this number."""
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return DesiredAdapter(
        name=f"chat.a{number}@{digest[:12]}", revision=f"sha256:{digest}", uri=f"file:///{number}", pinned=pinned
    )


@dataclass
class Gate:
    """A gateway."""

    key: tuple[str, str]
    record: GatewayProgress
    leases: dict[str, float] = field(default_factory=dict[str, float])
    """Until when, by adapter."""
    running: dict[str, int] = field(default_factory=dict[str, int])
    grants: dict[str, int] = field(default_factory=dict[str, int])
    """Number of the last grant, by adapter."""
    given_back: dict[str, int] = field(default_factory=dict[str, int])
    """Leases that it ended, and of which the agent has not heard that."""


class AdapterWorld(RuleBasedStateMachine):
    """Rules are what may happen; invariants what must hold whatever does. `seen` counts what a whole search did."""

    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.registry = Registry(PLACES, SLOTS, self.now)
        self.engine: set[str] = set()
        """What it has, whoever says what."""
        self.files: set[str] = set()
        self.call: Load | Unload | List | None = None
        self.boots = 0
        self.seq = 0
        self.told: object = None
        self.gates: list[Gate] = []
        self.undisturbed = True
        """No acknowledgement was late, and no agent new."""

    @initialize(gateways=st.integers(1, 2))
    def begin(self, gateways: int) -> None:
        for number in range(gateways):
            name = f"gw-{number}"
            self.gates.append(Gate((name, "b"), GatewayProgress(name, self.now)))
        self.restart_engine()
        self.goes_well()

    # --- the agent ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Decides until nothing changes."""
        for _ in range(20):
            before = (self.seq, self.call, len(self.registry.waiters))
            self.do(plan_step(self.registry, [g.record for g in self.gates], self.now, drain_seconds=DRAIN_SECONDS))
            if before == (self.seq, self.call, len(self.registry.waiters)):
                return

    def do(self, decided: PlanStep) -> None:
        states = self.registry.states()
        if states != self.told:
            self.seq, self.told = self.seq + 1, states
        self.registry.published(self.seq, self.now)
        for ask in decided.grants:
            assert ask.wanted.name in self.engine, "a lease for what the engine does not have"
            if ask.key is not None:
                gate = next(g for g in self.gates if g.key == ask.key)
                gate.leases[ask.wanted.name] = self.now + 10.0
                gate.grants[ask.wanted.name] = ask.grant
                self.seen["lease"] += 1
        for name in decided.discard:
            self.files.discard(name)
        if decided.call is not None:
            assert self.call is None, "two calls at a time"
            self.call = decided.call
            if isinstance(self.call, Load):
                assert self.call.name in self.files, "a load of what is not staged"
            if isinstance(self.call, Unload):
                self.unload_begins(self.call.name)

    def unload_begins(self, name: str) -> None:
        self.seen["unload"] += 1
        self.files.discard(name)
        assert self.now >= self.registry.started + drain.RESTART_SECONDS, "an unload right after the agent's start"
        for gate in self.gates:
            assert not gate.running.get(name), "an unload under a request"

    # --- what may happen ----------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.3, 5.0, 10.0, 20.0]), late=st.booleans())
    def time_passes(self, seconds: float, late: bool) -> None:
        """Gateways say every few seconds what they run, unless that is late; silent they may be for 12 s."""
        self.now += seconds
        for gate in self.gates:
            if not late or self.now - gate.record.last_message >= drain.CLAIM_SECONDS:
                self.acknowledge(gate)
            elif gate.running:
                self.undisturbed = False
        self.step()

    @rule(gate=st.integers(0, 1), number=st.integers(0, 3))
    def asks(self, gate: int, number: int) -> None:
        one = self.gates[gate % len(self.gates)]
        if len(self.registry.waiters) < 6:
            self.registry.waiters.append(
                AdapterWaiter(AdapterWanted.model_validate(wanted(number).model_dump()), one.key, self.now)
            )
            self.step()

    @rule(gate=st.integers(0, 1), data=st.data())
    def sends(self, gate: int, data: st.DataObject) -> None:
        """To what it holds a lease of, and what it last heard is loaded."""
        one = self.gates[gate % len(self.gates)]
        states = self.registry.states() or {}
        may = [n for n, end in one.leases.items() if end > self.now and n in states and states[n].state == "loaded"]
        if may:
            name = data.draw(st.sampled_from(sorted(may)))
            assert name in self.engine, "a request to what the engine does not have"
            one.running[name] = one.running.get(name, 0) + 1
            self.seen["request"] += 1

    @rule(gate=st.integers(0, 1))
    def requests_end(self, gate: int) -> None:
        one = self.gates[gate % len(self.gates)]
        one.running.clear()
        self.acknowledge(one)
        self.step()

    @rule(gate=st.integers(0, 1), late=st.booleans())
    def gives_back(self, gate: int, late: bool) -> None:
        """The leases that it does not use. `late`: it may have some of them anew before the agent hears of it."""
        one = self.gates[gate % len(self.gates)]
        for name in [name for name in one.leases if not one.running.get(name)]:
            del one.leases[name]
            one.given_back[name] = one.grants[name]
            self.seen["given back"] += 1
        if not late:
            self.acknowledge(one)
            self.step()

    @rule(gate=st.integers(0, 1), data=st.data())
    def has_one_anew(self, gate: int, data: st.DataObject) -> None:
        """It gives a lease back and gets it again; the agent hears only then that it gave it back."""
        one = self.gates[gate % len(self.gates)]
        if idle := sorted(name for name in one.leases if not one.running.get(name)):
            name = data.draw(st.sampled_from(idle))
            self.gives_back(gate, late=True)
            self.asks(gate, int(name.partition("@")[0].removeprefix("chat.a")))
            self.goes_well()
            self.acknowledge(one)
            self.step()

    @rule(numbers=st.lists(st.integers(0, 3), unique=True, max_size=3), pinned=st.integers(0, 2))
    def floor(self, numbers: list[int], pinned: int) -> None:
        self.registry.set_desired([wanted(n, pinned=place < pinned) for place, n in enumerate(numbers)])
        self.step()

    @precondition(lambda self: any(e.state == "staging" for e in self.registry.entries.values()))
    @rule(fails=st.sampled_from([None, None, None, reasons.SOURCE_UNREACHABLE, reasons.RANK_TOO_HIGH]))
    def staging_ends(self, fails: str | None) -> None:
        name = next(n for n, e in self.registry.entries.items() if e.state == "staging")
        if fails is None:
            self.files.add(name)
            self.registry.staged(name, 0.1)
        else:
            self.registry.failed(name, fails, "no", self.now)
        self.step()

    @precondition(lambda self: self.call is not None)
    @rule(how=st.sampled_from(["done", "done", "done", "refused", "hangs", "hangs and is done", "broken"]))
    def call_ends(self, how: str) -> None:
        call, registry = self.call, self.registry
        self.call = None
        registry.busy = False
        done = how in ("done", "hangs and is done") or (isinstance(call, List) and how != "broken")
        match call:
            case List() if done:
                self.list()
            case Load(name) if done or how in ("refused", "hangs"):
                if done:
                    self.engine.add(name)
                self.load_ended(name, how)
            case Unload(name) if done or how in ("refused", "hangs"):
                if done:
                    self.engine.discard(name)
                self.unload_ended(name, how)
            case Load(name):
                registry.set_state(name, "staged")
                registry.call_broke(self.now)
            case Unload(name):
                registry.set_state(name, "unload_pending")
                registry.call_broke(self.now)
            case _:
                registry.call_broke(self.now)
        self.step()

    @rule()
    def goes_well(self) -> None:
        """Whatever is under way ends as it should."""
        for _ in range(30):
            staging = next((n for n, e in self.registry.entries.items() if e.state == "staging"), None)
            if staging is None and self.call is None:
                return
            if staging is not None:
                self.files.add(staging)
                self.registry.staged(staging, 0.1)
                self.step()
            if self.call is not None:
                self.call_ends("done")

    @rule(gate=st.integers(0, 1), number=st.integers(0, 3), data=st.data())
    def uses(self, gate: int, number: int, data: st.DataObject) -> None:
        """As most do: ask, wait, send."""
        self.asks(gate, number)
        self.goes_well()
        self.sends(gate, data)

    @rule(gate=st.integers(0, 1), number=st.integers(0, 3), data=st.data())
    def uses_and_is_not_heard(self, gate: int, number: int, data: st.DataObject) -> None:
        """Its lease is over before it says again what it runs."""
        for one in self.gates:
            self.acknowledge(one)
        self.uses(gate, number, data)
        self.time_passes(10.0, late=True)

    def list(self) -> None:
        for name in self.registry.listing({name: name in self.files for name in self.engine}, 0, self.now):
            self.files.discard(name)

    def load_ended(self, name: str, how: str) -> None:
        if how == "done":
            self.registry.loaded(name, 0.01, self.now)
        elif how == "refused":
            self.files.discard(name)
            self.registry.failed(name, reasons.LOAD_FAILED, "no", self.now)
        else:
            self.registry.set_state(name, "load_unknown")
            self.registry.failed(name, reasons.LOAD_HANGS, "hangs", self.now, keep=True)

    def unload_ended(self, name: str, how: str) -> None:
        if how == "done":
            self.registry.unloaded(name)
        else:
            self.registry.set_state(name, "unload_pending")
            self.registry.failed(name, reasons.LOAD_HANGS, "hangs", self.now, keep=True)

    @rule(what=st.sampled_from(["", "", "", "engine", "agent"]))
    def restarts(self, what: str) -> None:
        if what == "engine":
            self.restart_engine()
        elif what == "agent":
            self.restart_agent()

    def restart_engine(self) -> None:
        self.boots += 1
        self.engine.clear()
        self.call = None
        self.registry.busy = False
        for gate in self.gates:
            gate.leases.clear()
            gate.running.clear()
        gone = [n for n, e in self.registry.entries.items() if e.state in ("unloading", "unload_pending")]
        self.files -= set(gone)
        self.registry.observed(f"boot-{self.boots}", self.now, up=True)
        self.told = None
        self.step()

    def restart_agent(self) -> None:
        """A call that is under way is carried out all the same."""
        if isinstance(self.call, Load):
            self.engine.add(self.call.name)
        self.call = None
        self.registry = Registry(PLACES, SLOTS, self.now)
        self.registry.observed(f"boot-{self.boots}", self.now, up=True)
        self.seq, self.told, self.undisturbed = 0, None, False
        for gate in self.gates:
            gate.record = GatewayProgress(gate.key[0], self.now)
            gate.leases.clear()
        self.step()

    def acknowledge(self, gate: Gate) -> None:
        running = frozenset(name for name, count in gate.running.items() if count)
        count = sum(gate.running.values())
        gate.record = drain.acked(gate.record, gate.key[0], self.seq, count, self.now, running)
        self.registry.acked(gate.key, running, self.now, gate.given_back)
        gate.given_back = {}
        for name in running:
            gate.leases[name] = self.now + 10.0

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def the_engine_has_room(self) -> None:
        assert len(self.engine) <= PLACES, "more adapters in the engine than its host cache has places"

    @invariant()
    def what_is_told_is_so(self) -> None:
        for name, state in (self.registry.states() or {}).items():
            assert state.state != "loaded" or name in self.engine, "called loaded, and is not"

    @invariant()
    def no_more_adapters_run_than_there_are_slots(self) -> None:
        running = {name for gate in self.gates for name, count in gate.running.items() if count}
        assert not self.undisturbed or len(running) <= SLOTS, "more distinct adapters run than there are slots"

    def teardown(self) -> None:
        """When everything is well again, everybody gets an answer."""
        if not self.gates:
            return
        for gate in self.gates:
            gate.running.clear()
        for _ in range(400):
            if not self.registry.waiters and self.call is None:
                break
            self.now += 1.0
            for name, entry in tuple(self.registry.entries.items()):
                if entry.state == "staging":
                    self.files.add(name)
                    self.registry.staged(name, 0.1)
            for gate in self.gates:
                self.acknowledge(gate)
            if self.call is not None:
                self.call_ends("done")
            self.step()
        pinned = sum(adapter.pinned for adapter in self.registry.desired.values())
        assert not self.registry.waiters or pinned >= PLACES, f"nobody answers: {_shown(self.registry.entries)}"


def _shown(entries: dict[str, RegistryEntry]) -> dict[str, str]:
    return {name: entry.state for name, entry in entries.items()}
