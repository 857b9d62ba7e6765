"""Sources that hang keep nobody else waiting: neither for a turn, nor for a slot, nor for word of the adapters."""

from collections.abc import Iterable

from shoal.api import reasons
from shoal.api.adapters import AdapterWanted, DesiredAdapter
from shoal.api.loraadapter import engine_name
from shoal.core.lora.lifecycle.planstep import LATE_SECONDS, Load, PlanStep, plan_step
from shoal.core.lora.lifecycle.registry import AdapterWaiter, Registry, RegistryEntry
from shoal.core.lora.lifecycle.staging import KEEP_SECONDS, MOST_STAGING, SLOW_SECONDS, STAGING

GATEWAY = ("gw-0", "boot-1")


def name_of(name: str) -> str:
    return engine_name(f"chat/{name}", f"sha256:{'1' * 64}")


class Replica:
    """An agent's registry beside an engine that loads at once; files come when the test says so."""

    def __init__(self, *, places: int = 64, slots: int = 7, loaded: Iterable[str] = ()) -> None:
        self.registry = Registry(places=places, slots=slots, started=0.0)
        self.registry.observed("engine", 0.0, up=True)
        self.registry.listing(dict.fromkeys(map(name_of, loaded), True), 0, 0.0)
        self.now = 100.0
        self.fetching: list[str] = []
        self.last = PlanStep()

    def ask(self, name: str) -> AdapterWaiter:
        wanted = AdapterWanted(name=name_of(name), revision=f"sha256:{'1' * 64}", uri=f"s3://a/{name}")
        ask = AdapterWaiter(wanted, GATEWAY, self.now)
        self.registry.waiters.append(ask)
        return ask

    def floor(self, *names: str) -> None:
        self.registry.set_desired(
            DesiredAdapter(name=name_of(n), revision=f"sha256:{'1' * 64}", uri=f"s3://a/{n}") for n in names
        )

    def step(self, seconds: float = 0.0) -> PlanStep:
        """One turn, so much later; what it asks of the engine is done."""
        self.now += seconds
        self.last = plan_step(self.registry, (), self.now, drain_seconds=900.0)
        self.fetching += [wanted.name for wanted in self.last.stage]
        self.fetching = [name for name in self.fetching if name not in self.last.discard]
        call = self.last.call
        self.registry.busy = False
        if isinstance(call, Load):
            self.registry.loaded(call.name, 0.01, self.now)
        return self.last

    def comes(self, name: str) -> None:
        """Its files are here."""
        self.fetching.remove(name_of(name))
        self.registry.staged(name_of(name), 1.0)

    def entry(self, name: str) -> RegistryEntry | None:
        return self.registry.entries.get(name_of(name))


def test_as_many_sources_hang_as_are_read_at_a_time_and_others_are_read_all_the_same() -> None:
    it = Replica()
    it.step()
    for number in range(STAGING):
        it.ask(f"hung{number}")
    it.ask("fine")
    it.step()
    assert len(it.fetching) == STAGING
    assert it.entry("fine") is None, "its turn has not come yet"
    it.step(SLOW_SECONDS)
    assert name_of("fine") in it.fetching
    assert len(it.fetching) == STAGING + 1, "those that hang go on"


def test_there_is_an_end_to_how_many_are_read_at_a_time() -> None:
    it = Replica(slots=100)
    it.step()
    for number in range(2 * MOST_STAGING):
        it.ask(f"hung{number}")
    for _ in range(20):
        it.step(SLOW_SECONDS)
    assert len(it.fetching) == MOST_STAGING


def test_who_waits_for_a_source_that_hangs_takes_no_slot_from_an_adapter_that_is_there() -> None:
    it = Replica(slots=1, loaded=["fine"])
    it.step()
    hung = it.ask("hung")
    it.step()
    fine = it.ask("fine")
    assert it.step().grants == [], "the slot is the first one's, whose files are on their way"
    assert it.step(SLOW_SECONDS).grants == [fine]
    assert hung in it.registry.waiters, "it waits on, for its files"

    it.comes("hung")
    it.step()  # it is loaded
    assert it.step().grants == [], "now it waits for the slot"
    assert it.step(10.0).grants == [hung], "the lease of the other one is over"
    assert hung.missed


def test_files_that_take_longer_than_a_caller_waits_are_here_when_it_comes_again() -> None:
    it = Replica()
    it.step()
    first = it.ask("large")
    it.step()
    it.step(30.0)
    it.registry.waiters.remove(first)  # it has waited for long enough
    assert it.step(0.25).discard == []
    it.comes("large")
    again = it.ask("large")
    it.step(1.0)
    assert it.step().grants == [again]
    assert it.fetching == []


def test_what_nobody_asks_for_again_is_let_go() -> None:
    it = Replica()
    it.step()
    first = it.ask("large")
    it.step()
    it.registry.waiters.remove(first)
    assert it.step(KEEP_SECONDS - 1).discard == []
    assert it.step(1.0).discard == [name_of("large")]


def test_what_is_only_kept_makes_room_for_who_waits() -> None:
    it = Replica(places=2)
    it.step()
    for name in ("a", "b", "c"):
        ask = it.ask(name)
        it.step()
        it.registry.waiters.remove(ask)
    it.ask("d")
    assert it.step(0.25).discard == [name_of("a")]
    assert name_of("d") in it.fetching


def test_a_new_replica_speaks_of_its_adapters_without_one_whose_source_hangs() -> None:
    it = Replica()
    it.floor("hung", "fine")
    it.step()
    it.comes("fine")
    it.step()
    asked = it.ask("fine")
    assert [denial.reason for _, denial in it.step(1.0).denials] == [reasons.ENGINE_NOT_READY]
    assert asked not in it.registry.waiters
    assert not it.registry.reportable, "what belongs here may still come"
    it.step(LATE_SECONDS)
    assert it.registry.reportable
    again = it.ask("fine")
    assert it.step().grants == [again]
