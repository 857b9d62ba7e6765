"""Which replica serves a request for an adapter."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from shoal.core.routing.adapterchoice import LEASE_WORTH, AdapterCandidate, AdapterChoice, choose_for_adapter
from shoal.core.routing.choice import NoReplica
from shoal.core.routing.replica import Replica
from shoal.core.routing.reuse import NOTHING, Prompt
from shoal.core.routing.score import Costs, Pick
from tests.support.gateway import replica


def home(number: int, **changes: Any) -> AdapterCandidate:
    fields: dict[str, Any] = {
        "loaded": True,
        "leased": False,
        "slot": True,
        "has_capacity": True,
        "in_flight": 0,
        **changes,
    }
    return AdapterCandidate(replica(number), **fields)


def first(replicas: Sequence[Replica]) -> Replica:
    return replicas[0]


def chosen(have: list[AdapterCandidate], others: list[AdapterCandidate], turn: int = 0) -> str:
    choice = choose_for_adapter(have, lambda: others, first, turn)
    assert isinstance(choice, AdapterChoice)
    return choice.replica.uid


def absent(number: int, **changes) -> AdapterCandidate:
    return home(number, loaded=False, **changes)


def test_a_replica_that_has_it_goes_before_an_idle_one_that_does_not():
    assert chosen([home(1, in_flight=50)], [absent(2)]) == "pod-1"


def test_a_full_replica_that_has_it_loses_to_one_with_room_that_must_load_it():
    assert chosen([home(1, has_capacity=False)], [absent(2)]) == "pod-2"


def test_where_nobody_has_room_it_stays_where_it_is():
    assert chosen([home(1, has_capacity=False)], [absent(2, has_capacity=False)]) == "pod-1"


def test_others_are_not_even_looked_at_while_one_that_has_it_will_do():
    def others():
        raise AssertionError("asked")

    assert choose_for_adapter([home(1)], others, first) == AdapterChoice(replica(1), leased=False)


def test_a_replica_whose_slots_are_taken_loses_to_one_with_a_slot_even_if_that_must_load_it():
    assert chosen([home(1, slot=False)], [absent(2)]) == "pod-2"
    assert chosen([home(1, slot=False)], [absent(2, slot=False)]) == "pod-1"


@pytest.mark.parametrize(("lead", "uid"), [(LEASE_WORTH - 1, "pod-1"), (LEASE_WORTH + 1, "pod-2")])
def test_a_lease_in_hand_is_worth_some_requests(lead: int, uid: str):
    have = [home(1, leased=True, in_flight=10 + lead), home(2, in_flight=10)]
    assert chosen(have, []) == uid


def test_equals_take_turns():
    have = [home(1), home(2), home(3)]
    assert [chosen(have, [], turn) for turn in range(4)] == ["pod-1", "pod-2", "pod-3", "pod-1"]


def test_it_goes_where_it_comes_already_and_last_where_loading_failed():
    assert chosen([], [absent(1), absent(2, state="loading")]) == "pod-2"
    assert chosen([], [absent(1, state="failed"), absent(2)]) == "pod-2"
    assert chosen([], [absent(1, state="failed")]) == "pod-1"


def test_nobody_serves_adapters():
    assert choose_for_adapter([], list, first) == NoReplica("no-adapters")


def test_every_combination_follows_the_order_of_the_rule():
    """Mutations of the order are found here: each pair of classes is put against each other."""
    classes = [
        home(1, has_capacity=True, slot=True),
        absent(2, has_capacity=True, slot=True),
        home(3, has_capacity=False, slot=True),
        absent(4, has_capacity=False, slot=True),
        home(5, has_capacity=True, slot=False),
        absent(6, has_capacity=True, slot=False),
    ]
    for better in range(len(classes)):
        for worse in range(better + 1, len(classes)):
            pair = [dataclasses.replace(classes[better], in_flight=99), classes[worse]]
            have, rest = [h for h in pair if h.loaded], [h for h in pair if not h.loaded]
            assert chosen(have, rest) == classes[better].replica.uid


NO_COSTS = Costs(1.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)


def by_score(seconds: Mapping[str, float]) -> Any:
    """A choice by known seconds, and the wait for the adapter."""

    def cheapest(replicas: Sequence[Replica], waits: Mapping[str, float] | None) -> Pick:
        costs = {r.uid: seconds[r.uid] + (waits or {}).get(r.uid, 0.0) for r in replicas}
        best = min(replicas, key=lambda r: costs[r.uid])
        return Pick(best, Prompt(100), NOTHING, 0.0, 0.0, costs[best.uid], NO_COSTS)

    return cheapest


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [(0.5, 0.1, "pod-1"), (4.0, 0.1, "pod-2"), (4.0, 3.0, "pod-1")],
    ids=["the load costs more than the queue", "the queue costs more than the load", "both have a queue"],
)
def test_a_hot_adapter_is_loaded_elsewhere_only_if_a_request_costs_less_there_with_the_load(
    here: float, there: float, expected: str
):
    cheapest = by_score({"pod-1": here, "pod-2": there})
    choice = choose_for_adapter([home(1, leased=True)], lambda: [absent(2)], first, 0, 7, cheapest, load_seconds=1.0)
    assert isinstance(choice, AdapterChoice)
    assert (choice.replica.uid, choice.leased) == (expected, expected == "pod-1")


@pytest.mark.parametrize("unfit", [{"slot": False}, {"has_capacity": False}, {"state": "failed"}])
def test_a_hot_adapter_is_not_loaded_where_it_does_not_fit(unfit: dict[str, Any]):
    cheapest = by_score({"pod-1": 60.0, "pod-2": 0.1})
    choice = choose_for_adapter([home(1)], lambda: [absent(2, **unfit)], first, 0, 7, cheapest)
    assert isinstance(choice, AdapterChoice)
    assert choice.replica.uid == "pod-1"
