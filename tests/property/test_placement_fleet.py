"""Whatever the fleet and the Models are: no GPU is promised twice, what serves is replaced before it goes, and a fleet
that nobody touches comes to rest. Each step plans from what really stands, with a scheduler that binds as it likes."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from shoal.core.placement import Candidate, Demand, Moves, Placement, plan
from tests.support.fleets import Fleet, FleetNode, candidate, demand

_CLASSES = ("a", "b", "c")
_STEPS = 60
"""A fleet of this size comes to rest in fewer."""


@st.composite
def _candidates(draw: st.DrawFn) -> tuple[Candidate, ...]:
    names = draw(st.lists(st.sampled_from(_CLASSES), unique=True, min_size=1))
    return tuple(
        candidate(
            name,
            draw(st.sampled_from([1, 1, 2, 4])),
            draw(st.sampled_from(["1", "2", "3.5", "8", None])),
            max_replicas=draw(st.sampled_from([None, None, 1, 2])),
            interruptible=name == "c",
        )
        for name in names
    )


@st.composite
def fleets(draw: st.DrawFn, *, priorities: bool = True, stranding: bool = False) -> Fleet:
    nodes = [
        FleetNode(f"{name}-{i}", name, draw(st.sampled_from([1, 2, 4, 8])))
        for name in _CLASSES
        for i in range(draw(st.integers(0, 3)))
    ]
    models = [
        demand(
            f"ns/m{i}",
            *draw(_candidates()),
            wanted=draw(st.integers(0, 3)),
            priority=draw(st.sampled_from([0, 0, 10, 20])) if priorities else 0,
            age=i,
            interruptible_percent=draw(st.sampled_from([100, 100, 50])),
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    return Fleet(nodes, models, seed=draw(st.integers(0, 999)))


def _check_promises(fleet: Fleet, placements: Mapping[str, Placement]) -> None:
    """Invariant 11, from the snapshot that the plan was made of."""
    for supply in fleet.supplies():
        nodes = {n.name for n in supply.nodes}
        has = sum(n.allocatable - n.releasing for n in supply.nodes)
        # What serves on nodes that take no pods holds GPUs there, not here.
        has += sum(p.gpus for p in fleet.pods if p.gpu_class == supply.name and p.node and p.node not in nodes)
        asked = sum(
            (v.replicas - v.waiting) * v.gpus
            for placement in placements.values()
            for v in placement.variants
            if v.gpu_class == supply.name
        )
        assert asked <= has, supply.name


def _run(fleet: Fleet, steps: int = _STEPS, *, serving: bool = True) -> None:
    """Steps until nothing has changed for a while. Fails when that takes too long."""
    quiet = 0
    for _ in range(steps):
        snapshot = fleet.demands()
        before = {m: fleet.ready(m) for m in fleet.models}
        wanted_replicas, pods = fleet.wanted_replicas(), [replace_pod(p) for p in fleet.pods]
        planned = plan(snapshot, fleet.supplies(), moves=fleet.moves)
        _check_promises(fleet, planned)
        for model in snapshot:
            placement = planned[model.uid]
            counted = sum(v.replicas for v in placement.variants if not v.retired)
            assert counted + placement.missing >= model.wanted
        placements = fleet.step()
        assert placements == planned, "the order in which the Models are given must not matter"
        for model, ready in before.items():
            if serving:
                assert fleet.ready(model) >= min(ready, fleet.models[model].wanted), model
        same = fleet.wanted_replicas() == wanted_replicas and [replace_pod(p) for p in fleet.pods] == pods
        quiet = quiet + 1 if same else 0
        if quiet >= 4 and all(p.ready for p in fleet.pods):
            return
    raise AssertionError(f"does not come to rest: {[(m, p.message) for m, p in fleet.placements.items()]}")


def replace_pod(pod: object) -> object:
    return replace(pod)  # type: ignore[type-var]


def _check_rest(fleet: Fleet) -> None:
    """At rest: nobody lacks what is free, or what a lower priority has."""
    at = fleet.supplies()
    for model in fleet.models.values():
        placement = fleet.placements[model.uid]
        assert not placement.waiting
        # What serves on a node that takes no pods until there is room elsewhere counts against no limit.
        counts = {v.gpu_class: v.replicas - _stranded(fleet, model.uid, v.gpu_class) for v in placement.variants}
        spot = sum(counts.get(c.gpu_class, 0) for c in model.candidates if c.interruptible)
        # One that serves beyond what the spec allows now stays until there is room elsewhere, and is told as missing.
        assert spot <= model.wanted * model.interruptible_percent // 100 + placement.missing
        event(placement.reason)
        for c in model.candidates:
            most = model.wanted if c.max_replicas is None else c.max_replicas
            assert counts.get(c.gpu_class, 0) <= most + placement.missing
            if not placement.missing or not _may_have_more(model, c, counts, spot):
                continue
            for node in next((s.nodes for s in at if s.name == c.gpu_class), ()):
                lower = sum(
                    p.gpus
                    for p in fleet.pods
                    if p.node == node.name and fleet.models[p.model].priority < model.priority
                )
                assert node.free + lower < c.gpus, f"{model.key} lacks what {node.name} has"


def _stranded(fleet: Fleet, model: str, gpu_class: str) -> int:
    return sum(
        p.model == model and p.gpu_class == gpu_class and p.node is not None and not fleet.nodes[p.node].takes_pods
        for p in fleet.pods
    )


def _may_have_more(model: Demand, c: Candidate, counts: Mapping[str, int], spot: int) -> bool:
    if c.max_replicas is not None and counts.get(c.gpu_class, 0) >= c.max_replicas:
        return False
    return not c.interruptible or spot < model.wanted * model.interruptible_percent // 100


def test_the_check_of_promises_can_fail() -> None:
    """Each Model planned as if it were alone: what one is promised is not taken from what the next one sees."""
    fleet = Fleet([FleetNode("a-0", "a", 2)], [demand(f"ns/{name}", candidate("a", 2)) for name in "xy"])
    _check_promises(fleet, plan(fleet.demands(), fleet.supplies()))
    alone = {m.uid: plan([m], fleet.supplies())[m.uid] for m in fleet.demands()}
    with pytest.raises(AssertionError, match="a"):
        _check_promises(fleet, alone)


@given(fleets())
@settings(max_examples=60, deadline=None)
def test_a_fleet_comes_to_rest_and_priorities_hold(fleet: Fleet) -> None:
    _run(fleet, serving=False)
    _check_rest(fleet)


@given(fleets(), st.data())
@settings(max_examples=40, deadline=None)
def test_priorities_hold_whatever_comes_later(fleet: Fleet, data: st.DataObject) -> None:
    late = dict(sorted(fleet.models.items(), key=lambda m: (m[1].priority, m[0])))
    for _ in range(data.draw(st.integers(0, len(late) - 1), label="late ones")):  # the highest priorities come last
        late.popitem()
    late, fleet.models = fleet.models, late
    _run(fleet, serving=False)
    fleet.models = late
    for _ in range(data.draw(st.integers(1, 2), label="changes")):
        _run(fleet, serving=False)
        _check_rest(fleet)
        _change(fleet, data)


@given(fleets(priorities=False), st.data())
@settings(max_examples=60, deadline=None)
def test_what_serves_is_replaced_before_it_goes(fleet: Fleet, data: st.DataObject) -> None:
    _run(fleet)
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        _change(fleet, data)
        _run(fleet)
        _check_rest(fleet)


@given(fleets())
@settings(max_examples=60, deadline=None)
def test_a_loser_serves_until_it_serves_elsewhere(fleet: Fleet) -> None:
    """Where those of the lowest priority have a last class with room for all, none stops serving for others."""
    last = candidate("z", 1, "90")
    fleet.models = {
        uid: replace(m, candidates=(*m.candidates, *([] if m.priority else [last])), interruptible_percent=100)
        for uid, m in fleet.models.items()
        if m.priority in (0, 20)
    }
    fleet.nodes |= {f"z-{i}": FleetNode(f"z-{i}", "z", 8) for i in range(4)}
    fleet.moves, fleet.start_chance = Moves(in_flight=0), 0.2
    late = {uid: m for uid, m in fleet.models.items() if not m.priority}
    late, fleet.models = fleet.models, late
    _run(fleet, 4 * _STEPS)
    fleet.models = late
    _run(fleet, 4 * _STEPS)
    _check_rest(fleet)


@given(fleets(priorities=False))
@settings(max_examples=60, deadline=None)
def test_a_rollout_that_lacks_room_moves_a_replica_only_when_its_successor_serves(fleet: Fleet) -> None:
    _run(fleet)
    standing = fleet.wanted_replicas()
    for uid, model in fleet.models.items():
        fleet.models[uid] = replace(model, lacks_surge=frozenset(name for of, name in standing if of == uid))
    for _ in range(2 * _STEPS):
        before = {uid: fleet.ready(uid) for uid in fleet.models}
        for uid, placement in fleet.step().items():
            model = fleet.models[uid]
            assert fleet.ready(uid) >= min(before[uid], model.wanted), uid
            # Another one is replaced in place, and what is gone from a class is made there with the new template.
            relocated = frozenset(v.gpu_class for v in placement.variants if v.relocated)
            event(f"relocated: {len(relocated)}")
            fleet.models[uid] = replace(model, lacks_surge=model.lacks_surge & relocated)
        if not any(model.lacks_surge for model in fleet.models.values()):
            break
    else:
        raise AssertionError("a rollout waits without end")
    _run(fleet)
    _check_rest(fleet)


def _change(fleet: Fleet, data: st.DataObject) -> None:
    """Something that takes no replica away by itself."""
    what = data.draw(st.sampled_from(["cordon", "add node", "scale", "unlist", "price", "leave"]), label="what")
    uid = data.draw(st.sampled_from(sorted(fleet.models)), label="model")
    model = fleet.models[uid]
    if what == "cordon" and fleet.nodes:
        name = data.draw(st.sampled_from(sorted(fleet.nodes)), label="node")
        fleet.nodes[name].takes_pods = not fleet.nodes[name].takes_pods
    elif what == "add node":
        name = data.draw(st.sampled_from(_CLASSES), label="class")
        fleet.nodes[f"{name}-9"] = FleetNode(f"{name}-9", name, 8)
    elif what == "scale":
        fleet.models[uid] = replace(model, wanted=data.draw(st.integers(0, 3), label="wanted"))
    elif what == "unlist":
        fleet.models[uid] = replace(model, candidates=model.candidates[1:])
    elif what == "price":
        turned = tuple(
            replace(c, hourly_cost=d.hourly_cost)
            for c, d in zip(model.candidates, reversed(model.candidates), strict=True)
        )
        fleet.models[uid] = replace(model, candidates=turned)
    elif what == "leave" and len(fleet.models) > 1:
        del fleet.models[uid]
        fleet.replicas = {k: n for k, n in fleet.replicas.items() if k[0] != uid}
        fleet.pods = [p for p in fleet.pods if p.model != uid]


@given(fleets(priorities=False))
@settings(max_examples=25, deadline=None)
def test_moves_keep_to_their_pace(fleet: Fleet) -> None:
    fleet.moves = Moves(in_flight=1)
    for name in _CLASSES:  # room for everything on every class, after the fact
        fleet.models = {u: replace(m, interruptible_percent=100) for u, m in fleet.models.items()}
        _run(fleet)
        fleet.nodes |= {f"{name}-{i}": FleetNode(f"{name}-{i}", name, 8) for i in (7, 8)}
        for _ in range(_STEPS):
            moving = [u for u, p in fleet.step().items() if p.reason == "Moving"]
            assert len(moving) <= 1
