"""An adapter whose load ends the engine is not loaded again and again: one end may have another reason, a second in a
row makes the adapter wait."""

from collections.abc import Iterable
from typing import Final

from shoal.api import reasons
from shoal.api.adapters import AdapterWanted
from shoal.core.lora.lifecycle.endings import BACKOFF_SECONDS, LIVES, REMEMBER_SECONDS, SURVIVED_SECONDS
from shoal.core.lora.lifecycle.planstep import Denial, List, Load, plan_step
from shoal.core.lora.lifecycle.registry import AdapterWaiter, Registry, RegistryEntry
from tests.support.adapter_world import wanted

A, B = wanted(0), wanted(1)
NOON: Final = 1_767_268_800.0
"""2026-01-01T12:00:00Z."""


class Replica:
    """An agent's registry beside an engine; the files of adapters come at once."""

    def __init__(self, *desired: int) -> None:
        self.now = 0.0
        self.boots = 0
        self.registry = Registry(places=4, slots=2, started=0.0, since_1970=NOON)
        self.desire(*desired)
        self.restart()

    def desire(self, *numbers: int) -> None:
        self.registry.set_desired(wanted(number) for number in numbers)

    def restart(self) -> None:
        """The engine's next start is seen; a call that was under way has ended."""
        self.boots += 1
        self.registry.observed(f"boot-{self.boots}", self.now, up=True)
        self.registry.busy = False

    def next_load(self, seconds: float = 0.0) -> str | None:
        """The adapter that the engine is asked to load next, after so much time."""
        self.now += seconds
        for _ in range(10):
            decided = plan_step(self.registry, (), self.now, drain_seconds=900.0)
            for adapter in decided.stage:
                self.registry.staged(adapter.name, 0.1)
            match decided.call:
                case Load(name):
                    return name
                case List():
                    self.registry.listing(dict.fromkeys(self.in_engine(), True), 0, self.now)
                case _:
                    pass
            self.registry.busy = False
        return None

    def in_engine(self) -> Iterable[str]:
        return [name for name, entry in self.registry.entries.items() if entry.state == "loaded"]

    def breaks_off(self, name: str) -> None:
        """The call of a load found that the connection is closed."""
        self.registry.set_state(name, "staged")
        self.registry.load_broke_off(name, self.now)
        self.registry.call_broke(self.now)
        self.registry.busy = False

    def loaded(self, name: str) -> None:
        self.registry.loaded(name, 0.1, self.now)
        self.registry.busy = False

    def asked(self, adapter: AdapterWanted) -> Denial:
        """The answer to a gateway that wants the adapter."""
        waiter = AdapterWaiter(adapter, ("gw-0", "boot"), self.now)
        self.registry.waiters.append(waiter)
        (denied,) = plan_step(self.registry, (), self.now, drain_seconds=900.0).denials
        assert denied[0] is waiter
        return denied[1]


def ended_twice() -> Replica:
    replica = Replica(0)
    for _ in range(2):
        assert replica.next_load() == A.name
        replica.restart()
    return replica


def test_after_one_end_of_the_engine_the_adapter_is_loaded_again_at_once_and_nothing_is_said() -> None:
    replica = Replica(0)
    assert replica.next_load() == A.name
    replica.restart()
    assert replica.next_load() == A.name
    assert replica.registry.failures == {}


def test_after_the_second_end_in_a_row_it_waits_ten_minutes_and_its_status_says_why_and_until_when() -> None:
    replica = ended_twice()
    assert replica.next_load() is None
    states = replica.registry.states()
    assert states is not None
    assert states[A.name].reason == reasons.LOAD_ENDED_ENGINE
    assert states[A.name].message == (
        "the engine ended while it loaded this adapter, 2 times in a row; next try at 2026-01-01T12:10:00Z"
    )
    assert replica.asked(A) == Denial(503, reasons.LOAD_ENDED_ENGINE, states[A.name].message or "", 2)
    assert replica.next_load(BACKOFF_SECONDS - 1.0) is None
    assert replica.next_load(1.0) == A.name
    replica.restart()
    assert replica.next_load() is None, "the third end in a row"
    assert "3 times in a row" in replica.registry.failures[A.name].message


def test_others_are_loaded_meanwhile() -> None:
    replica = ended_twice()
    replica.desire(0, 1)
    assert replica.next_load() == B.name


def test_its_files_make_room_while_it_waits() -> None:
    replica = ended_twice()
    replica.next_load()
    assert A.name not in replica.registry.entries


def test_a_call_that_broke_off_before_the_restart_is_seen_counts_once() -> None:
    replica = Replica(0)
    assert replica.next_load() == A.name
    replica.breaks_off(A.name)
    replica.now += 1.0
    replica.restart()
    assert replica.next_load() == A.name, "one end"
    replica.breaks_off(A.name)
    replica.now += 1.0
    replica.restart()
    assert replica.next_load() is None, "two ends"


def test_a_call_that_an_engine_about_to_end_answered_with_an_error_counts_too() -> None:
    """vLLM's server answers 500 for a dead engine, and ends seconds later."""
    replica = Replica(0)
    for _ in range(2):
        assert replica.next_load(2.0) == A.name
        replica.registry.failed(A.name, reasons.LOAD_FAILED, "/v1/load_lora_adapter answered 500", replica.now)
        replica.registry.load_broke_off(A.name, replica.now)
        replica.now += 5.0
        replica.restart()
    assert replica.next_load(60.0) is None
    assert replica.registry.failures[A.name].reason == reasons.LOAD_ENDED_ENGINE


def test_an_engine_that_serves_on_after_a_broken_call_did_not_end_by_it() -> None:
    replica = Replica(0)
    for _ in range(3):
        assert replica.next_load(2.0) == A.name
        replica.breaks_off(A.name)
        replica.now += SURVIVED_SECONDS
        replica.registry.observed(f"boot-{replica.boots}", replica.now, up=True)
        replica.restart()
    assert replica.registry.failures == {}


def test_of_two_loads_under_way_both_are_blamed_for_one_end_and_neither_waits() -> None:
    replica = Replica(0, 1)
    replica.registry.entries = {
        A.name: RegistryEntry("load_unknown", 0.0),
        B.name: RegistryEntry("loading", 0.0),
    }
    replica.restart()
    found = [replica.next_load()]
    replica.loaded(A.name)
    found.append(replica.next_load())
    assert found == [A.name, B.name]
    assert replica.registry.failures == {}


def test_a_load_that_succeeds_forgets_the_end_before() -> None:
    replica = Replica(0)
    for _ in range(3):
        assert replica.next_load() == A.name
        replica.restart()
        assert replica.next_load() == A.name
        replica.loaded(A.name)
        replica.restart()
    assert replica.registry.failures == {}


def test_it_waits_also_if_it_is_no_longer_wanted_and_wanted_again() -> None:
    """A Warm adapter comes and goes with the demand."""
    replica = ended_twice()
    replica.desire()
    assert replica.next_load(1.0) is None
    replica.desire(0)
    assert replica.next_load(1.0) is None


def test_what_is_asked_for_rarely_ends_the_engine_twice_before_it_waits_and_once_after_each_wait() -> None:
    replica = ended_twice()
    replica.desire()
    assert replica.next_load(2 * BACKOFF_SECONDS) is None
    replica.desire(0)
    assert replica.next_load() == A.name
    replica.restart()
    assert replica.next_load() is None


def test_ends_of_another_day_are_forgotten() -> None:
    replica = ended_twice()
    replica.desire()
    replica.next_load(REMEMBER_SECONDS)
    replica.desire(0)
    assert replica.next_load() == A.name
    replica.restart()
    assert replica.next_load() == A.name


def test_a_replica_that_holds_back_a_requested_adapter_reports_it_as_failed_while_its_files_are_kept() -> None:
    replica = Replica()
    for _ in range(2):
        replica.next_load(2.0)
        replica.registry.waiters.append(AdapterWaiter(A, ("gw-0", "boot"), replica.now))
        assert replica.next_load(1.0) == A.name
        replica.breaks_off(A.name)
        replica.restart()
    assert replica.next_load(2.0) is None
    assert A.name in replica.registry.entries, "a request may want it soon"
    states = replica.registry.states()
    assert states is not None
    assert (states[A.name].state, states[A.name].reason) == ("failed", reasons.LOAD_ENDED_ENGINE)


def test_an_engine_that_ends_by_itself_soon_after_each_start_blames_no_adapter() -> None:
    """It ends while it loads the adapter that is loaded first."""
    replica = Replica()
    replica.restart()
    replica.desire(0)
    for _ in range(3):
        assert replica.next_load(2.0) == A.name
        replica.restart()
        assert replica.registry.failures == {}


def test_an_adapter_that_was_blamed_is_loaded_again_when_the_engine_ends_without_a_load() -> None:
    replica = ended_twice()
    assert replica.next_load(5.0) is None
    replica.restart()
    assert replica.registry.failures == {}
    assert replica.next_load() == A.name
    replica.restart()
    assert replica.next_load() == A.name


def test_an_end_by_itself_hides_an_adapter_that_ends_the_engine_for_a_few_starts_only() -> None:
    replica = Replica()
    replica.restart()
    replica.desire(0)
    for _ in range(LIVES):
        assert replica.next_load(2.0) == A.name
        replica.restart()
    assert replica.next_load(2.0) is None
    assert f"{LIVES} times in a row" in replica.registry.failures[A.name].message


def test_an_engine_that_ends_hours_later_or_never_served_says_nothing_of_the_load_that_ended_it() -> None:
    replica = ended_twice()
    replica.desire()
    replica.next_load(BACKOFF_SECONDS)
    replica.registry.observed(f"boot-{replica.boots}", replica.now, up=True)
    replica.registry.observed("boot-starts", replica.now, up=False)
    replica.restart()
    replica.desire(0)
    assert replica.next_load() == A.name
    replica.restart()
    assert replica.next_load() is None, "the third end in a row"


def test_an_end_by_itself_of_another_day_hides_no_adapter_that_ends_the_engine() -> None:
    """An engine that ended once as it was new, and served for weeks, was ended four times by an adapter, not twice."""
    replica = Replica()
    replica.restart()
    replica.now += REMEMBER_SECONDS
    replica.desire(0)
    for _ in range(2):
        assert replica.next_load(2.0) == A.name
        replica.restart()
    assert replica.next_load(2.0) is None
    assert "2 times in a row" in replica.registry.failures[A.name].message
