"""Who has to go is found without looking at every node for every replica, and is who it always was."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.placement import Candidate, ClassSupply, Demand, Held, NodeSupply, ReplicaState, plan
from shoal.core.placement.modelplan import ModelPlan
from shoal.core.placement.preemption import Eviction, Preemptor
from tests.support.limited import TooManySteps, counted


def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: each search looks at all nodes anew."""
    real = Preemptor.find

    def find(self: Preemptor, case: ModelPlan) -> Eviction | None:
        self._searches.clear()
        return real(self, case)

    monkeypatch.setattr(Preemptor, "find", find)


def outranked(nodes: int, wanted: int) -> tuple[list[Demand], list[ClassSupply]]:
    """A full class, and one Model that outranks everybody on it."""
    names = [f"n{i:04}" for i in range(nodes)]
    low = [
        Demand(
            f"x/{name}", name, 8, (Candidate("a", 1),), replica_states={"a": ReplicaState(8, 1, {name: Held(8, 8)}, 8)}
        )
        for name in names
    ]
    first = Demand("x/first", "first", wanted, (Candidate("a", 1),), priority=1000)
    return [*low, first], [ClassSupply("a", tuple(NodeSupply(name, 0, 8) for name in names))]


MOST_LINES = 400_000


def test_a_model_that_outranks_everybody_is_planned_in_few_steps() -> None:
    demands, supplies = outranked(200, 400)
    counted(lambda: plan(demands, supplies), most_lines=MOST_LINES)


def test_with_a_search_over_all_nodes_for_each_replica_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    forgetful(monkeypatch)
    demands, supplies = outranked(200, 400)
    with pytest.raises(TooManySteps):
        counted(lambda: plan(demands, supplies), most_lines=MOST_LINES)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Demand], list[ClassSupply]]:
    count, sizes = draw(st.integers(1, 6)), st.sampled_from([1, 1, 2, 4])
    nodes = {f"{c}{i}": 8 for c in "ab" for i in range(count)}
    free, demands = dict(nodes), list[Demand]()
    for m in range(draw(st.integers(1, 8))):
        standing: dict[str, ReplicaState] = {}
        candidates: list[Candidate] = []
        for c in "ab":
            gpus = draw(sizes)
            on: dict[str, Held] = {}
            for _ in range(draw(st.integers(0, 6))):
                node = f"{c}{draw(st.integers(0, count - 1))}"
                if free[node] >= gpus:
                    free[node] -= gpus
                    pods = on[node].pods + 1 if node in on else 1
                    on[node] = Held(pods, draw(st.integers(0, pods)))
            bound = sum(held.pods for held in on.values())
            candidates.append(Candidate(c, gpus))
            if bound:
                standing[c] = ReplicaState(bound, gpus, on, bound)
        wanted = draw(st.integers(0, 8))
        priority, minimum = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        demands.append(Demand(f"x/{m}", f"u{m}", wanted, candidates, minimum, priority, replica_states=standing))
    supplies = [ClassSupply(c, tuple(NodeSupply(n, free[n], 8) for n in nodes if n[0] == c)) for c in "ab"]
    return demands, supplies


@settings(max_examples=300, deadline=None)
@given(fleets())
def test_the_same_replicas_go_as_when_every_node_is_looked_at(fleet: Any) -> None:
    demands, supplies = fleet
    known = plan(demands, supplies)
    with pytest.MonkeyPatch.context() as patch:
        forgetful(patch)
        assert plan(demands, supplies) == known
