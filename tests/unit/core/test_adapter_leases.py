"""How long a lease holds (docs/streams.md, "Adapters on a replica"), by the second, and what that leaves to others."""

from shoal.api.adapters import LEASE_SECONDS, AdapterWanted
from shoal.api.loraadapter import engine_name
from shoal.core.drain import CLAIM_SECONDS
from shoal.core.lora.lifecycle.leases import EngineLeases
from shoal.core.lora.lifecycle.planstep import plan_step
from shoal.core.lora.lifecycle.registry import AdapterWaiter, Registry, RegistryEntry

A, B = ("gw-0", "boot-1"), ("gw-1", "boot-1")
DRAIN_SECONDS = 900.0


def left(leases: EngineLeases, now: float) -> set[str]:
    leases.lapse(now)
    return set(leases)


def test_a_lease_that_is_not_used_ends_ten_seconds_after_its_grant() -> None:
    leases = EngineLeases()
    leases.grant("poet", A, 100.0)
    assert LEASE_SECONDS == 10.0
    assert left(leases, 109.9) == {"poet"}
    assert left(leases, 110.0) == set()


def test_it_is_kept_while_acknowledgements_show_the_adapter_running_and_ten_seconds_after_the_last_one() -> None:
    leases = EngineLeases()
    leases.grant("poet", A, 100.0)
    for at in range(105, 150, 5):
        leases.acked(A, {"poet"}, float(at))
        assert left(leases, at + 4.9) == {"poet"}
    leases.acked(A, set(), 150.0)
    assert left(leases, 154.9) == {"poet"}, "ten seconds after 145, when it was last said to run"
    assert left(leases, 155.0) == set()


def test_a_gateway_that_falls_silent_while_it_runs_keeps_it_as_long_as_silence_may_be_a_delay() -> None:
    leases = EngineLeases()
    leases.acked(A, {"poet"}, 100.0)  # granted by this agent's predecessor
    assert left(leases, 100.0 + CLAIM_SECONDS - 0.1) == {"poet"}
    assert left(leases, 100.0 + CLAIM_SECONDS) == set()


def test_each_gateway_has_its_own_and_the_last_one_that_ends_frees_the_slot() -> None:
    leases = EngineLeases()
    leases.grant("poet", A, 100.0)
    leases.grant("poet", B, 106.0)
    leases.acked(B, {"legal"}, 107.0)
    assert len(leases) == 2
    assert left(leases, 112.0) == {"poet", "legal"}
    assert left(leases, 116.0) == {"legal"}


def test_with_every_slot_leased_another_adapter_waits_until_a_lease_ends() -> None:
    names = [engine_name(f"chat/{name}", f"sha256:{digit * 64}") for name, digit in (("a", "1"), ("b", "2"))]
    registry = Registry(places=8, slots=1, started=0.0)
    registry.observed("engine", 0.0, up=True)
    registry.listing({}, 0, 0.0)
    registry.reportable = True
    registry.entries = {name: RegistryEntry("loaded", 0.0) for name in names}

    def asks(name: str, key: tuple[str, str], now: float) -> AdapterWaiter:
        revision = f"sha256:{name.rpartition('@')[2][0] * 64}"
        ask = AdapterWaiter(AdapterWanted(name=name, revision=revision, uri="s3://a/b"), key, now)
        registry.waiters.append(ask)
        return ask

    def granted(now: float) -> list[AdapterWaiter]:
        return plan_step(registry, (), now, drain_seconds=DRAIN_SECONDS).grants

    first = asks(names[0], A, 100.0)
    assert granted(100.0) == [first]
    second = asks(names[1], B, 101.0)
    assert granted(101.0) == []
    registry.acked(A, frozenset({names[0]}), 109.0)
    assert granted(110.0) == [], "it runs"
    registry.acked(A, frozenset(), 112.0)
    assert granted(118.5) == []
    assert granted(119.0) == [second]
    third = asks(names[0], A, 120.0)
    assert granted(120.0) == []
    registry.acked(B, frozenset(), 121.0, {names[1]: second.grant})
    assert granted(121.0) == [third], "it was given back"


def test_a_lease_that_is_given_back_frees_its_slot_at_once_and_one_that_was_granted_anew_stays() -> None:
    leases = EngineLeases()
    first = leases.grant("poet", A, 100.0)
    leases.grant("poet", B, 100.0)
    leases.given_back(A, {"poet": first, "never granted": 7})
    assert left(leases, 101.0) == {"poet"}  # the other gateway has one too
    again = leases.grant("poet", A, 102.0)
    leases.given_back(B, {"poet": 2})
    leases.given_back(A, {"poet": first})  # said before the second grant, heard after it
    assert left(leases, 103.0) == {"poet"}
    leases.acked(A, {"poet"}, 104.0)
    leases.given_back(A, {"poet": again})
    assert left(leases, 105.0) == {"poet"}, "it runs"
    leases.acked(A, set(), 106.0)
    leases.given_back(A, {"poet": again})
    assert not left(leases, 106.0)
