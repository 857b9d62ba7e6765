"""What holds of every plan of adapters. Each law comes with its mutation: the protection off, and it breaks."""

import importlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shoal.core.lora.placement import Limits, Plan, PoolMemory, PoolSnapshot, Replica, place
from shoal.core.lora.placement.board import PoolBoard, ReplicaSlots
from shoal.core.lora.placement.fill import Draft
from shoal.core.lora.placement.place import MOVES_PER_MINUTE
from shoal.core.lora.placement.traffic import KEPT_SECONDS
from shoal.core.lora.placement.types import Residency
from tests.support.adapterpools import Pool, adapter, demand, replica

Law = Callable[[st.DataObject], None]
Placing = Callable[[PoolSnapshot, PoolMemory | None, float], tuple[Plan, PoolMemory]]

balancing, boards = (importlib.import_module(f"shoal.core.lora.placement.{name}") for name in ("balance", "board"))


def holds(law: Law, examples: int = 60) -> None:
    """Tries the law."""

    @settings(max_examples=examples, deadline=None)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        law(data)

    run()


def breaks(law: Law) -> None:
    """Finds a case in which it does not hold: the same one each time."""

    @settings(max_examples=500, deadline=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        law(data)

    with pytest.raises(AssertionError):
        run()


# --- stories ----------------------------------------------------------------------------------------------------------

LIMITS = Limits(slots=3, cached=5)
NAMES = [f"a{i}" for i in range(14)]
RESIDENCIES: list[Residency] = ["OnDemand", "OnDemand", "Warm", "Pinned"]


def _changed(data: st.DataObject, pool: Pool) -> None:
    """One thing that happens to a pool."""
    draw = data.draw
    name = draw(st.sampled_from(NAMES))
    at = draw(st.sampled_from([f"r{i}" for i in range(5)]))
    there, known = pool.replicas.get(at), pool.adapters.get(name)
    match draw(
        st.sampled_from(["ask", "ask", "busy", "adapter", "adapter", "next", "switch", "gone", "replica", "life"])
    ):
        case "ask":
            pool.ask(*draw(st.lists(st.sampled_from(NAMES), max_size=14)))
        case "busy":
            pool.ask(name, in_flight=draw(st.integers(0, 40)))
        case "adapter":
            residency = draw(st.sampled_from(RESIDENCIES))
            copies = 1 if residency == "OnDemand" else draw(st.integers(1, 6))
            pool.adapters[name] = adapter(name, residency, copies, rank=draw(st.sampled_from([8, 64])))
        case "next" if known is not None:
            pool.adapters[name] = replace(known, next=adapter(name, current=2).current)
        case "switch" if known is not None and known.next is not None:
            pool.adapters[name] = replace(known, current=known.next, next=None)
        case "gone":
            pool.adapters.pop(name, None)
        case "replica" if there is None:
            pool.replicas[at] = replica(at)
        case "replica":
            del pool.replicas[at]
        case "life" if there is not None:
            pool.replicas[at] = draw(
                st.sampled_from(
                    [
                        replace(there, draining=True),
                        replace(there, ready=False, resident=None),
                        replace(there, ready=True, resident=frozenset()),
                    ]
                )
            )
        case _:
            pass


def story(data: st.DataObject, each: Callable[[Pool, Plan | None], None], placing: Placing = place) -> None:
    """Some minutes of a pool; `each` hears of every plan, with the one before."""
    pool = Pool.of(data.draw(st.integers(0, 4)), limits=LIMITS, place=placing)
    for name in data.draw(st.lists(st.sampled_from(NAMES), max_size=14)):
        pool.adapters[name] = adapter(name)
    before: Plan | None = None
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 3))):
            _changed(data, pool)
        pool.heard = data.draw(st.sampled_from([True, True, True, False]))
        plan = pool.step(data.draw(st.sampled_from([0.1, 5.0, 70.0, 400.0, KEPT_SECONDS])))
        each(pool, before)
        before = plan


# --- limits -----------------------------------------------------------------------------------------------------------


def _within_limits(data: st.DataObject) -> None:
    def each(pool: Pool, _before: Plan | None) -> None:
        assert pool.plan is not None
        known = {r.name for a in pool.adapters.values() for r in a.revisions}
        assert pool.plan.desired.keys() == pool.replicas.keys()
        for floor in pool.plan.desired.values():
            names = [e.name for e in floor]
            assert len(names) == len(set(names))
            assert set(names) <= known
            assert len(names) < LIMITS.cached, "a place for what is loaded on demand"
            assert sum(e.pinned for e in floor) < LIMITS.slots

    story(data, each)


def test_a_floor_never_has_more_than_host_memory_and_slots_take() -> None:
    holds(_within_limits, 200)


def test_without_counting_the_places_a_floor_has_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplicaSlots, "fits", lambda *_: True)
    breaks(_within_limits)


def test_without_counting_the_pinned_ones_a_floor_pins_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "pinned", property(lambda limits: limits.slots))
    breaks(_within_limits)


# --- promises ---------------------------------------------------------------------------------------------------------


def _promises(data: st.DataObject) -> None:
    def each(pool: Pool, _before: Plan | None) -> None:
        assert pool.plan is not None
        holding = {r.uid for r in pool.replicas.values() if not r.draining}
        free = any(len(pool.plan.desired[uid]) < LIMITS.cached for uid in holding)
        for uid, known in pool.adapters.items():
            verdict = pool.plan.adapters.get(uid)
            homes = holding & set(verdict.homes) if verdict else set[str]()
            assert homes or free or not holding, f"{uid} can be nowhere"
            if known.residency != "OnDemand" and holding and verdict is not None and verdict.reason is None:
                assert homes, f"{uid} has no copy, and nothing is said"

    story(data, each)


def test_each_adapter_has_a_home_or_can_be_loaded_on_demand_and_who_has_less_than_asked_hears_it() -> None:
    holds(_promises, 200)


def test_without_a_place_left_free_an_adapter_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplicaSlots, "free", property(lambda place: place.limits.cached - place.used))
    breaks(_promises)


def _drained(data: st.DataObject, placing: Placing = place) -> None:
    loads = 0

    def each(pool: Pool, _before: Plan | None) -> None:
        nonlocal loads
        assert not any(pool.replicas[uid].draining for uid, _ in pool.loads[loads:] if uid in pool.replicas)
        loads = len(pool.loads)

    story(data, each, placing)


def test_a_replica_that_drains_gets_no_adapter() -> None:
    holds(_drained, 100)


def test_without_looking_whether_it_drains_it_gets_some() -> None:
    def blind(seen: PoolSnapshot, memory: PoolMemory | None, now: float) -> tuple[Plan, PoolMemory]:
        return place(replace(seen, replicas=tuple(replace(r, draining=False) for r in seen.replicas)), memory, now)

    breaks(lambda data: _drained(data, blind))


# --- what is not known ------------------------------------------------------------------------------------------------


def _kept(data: st.DataObject, placing: Placing = place) -> None:
    pool = Pool.of(data.draw(st.integers(1, 4)), limits=LIMITS, place=placing)
    for name in data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True)):
        pool.adapters[name] = adapter(name)
        pool.said[name] = demand()
    for _ in range(data.draw(st.integers(1, 4))):
        for name in pool.adapters:
            pool.ask(name, in_flight=data.draw(st.sampled_from([0, 1, 9, 30])))
        pool.step(data.draw(st.sampled_from([1.0, 30.0, 400.0])))
    pool.heard = False
    before = pool.homes()
    for _ in range(4):
        pool.step(data.draw(st.sampled_from([1.0, 100.0, 2 * KEPT_SECONDS])))
        assert all(homes <= pool.homes().get(uid, frozenset()) for uid, homes in before.items()), "a copy went"


def test_no_copy_goes_while_it_is_not_known_who_asks_for_it() -> None:
    holds(_kept)


def test_taking_unknown_for_nothing_loses_copies() -> None:
    def stale_as_empty(seen: PoolSnapshot, memory: PoolMemory | None, now: float) -> tuple[Plan, PoolMemory]:
        sources = tuple(replace(v, demand={} if v.demand is None else v.demand) for v in seen.sources or ())
        return place(replace(seen, sources=sources), memory, now)

    breaks(lambda data: _kept(data, stale_as_empty))


# --- the same again ---------------------------------------------------------------------------------------------------


def _same(data: st.DataObject) -> None:
    def twice(seen: PoolSnapshot, memory: PoolMemory | None, now: float) -> tuple[Plan, PoolMemory]:
        first = place(seen, memory, now)
        shuffled = replace(
            seen,
            replicas=tuple(data.draw(st.permutations(seen.replicas))),
            adapters=dict(data.draw(st.permutations(list(seen.adapters.items())))),
        )
        again = place(shuffled, memory, now)
        assert first[0] == again[0]
        assert first[1] == again[1]
        return first

    story(data, lambda _pool, _before: None, twice)


def test_the_same_pool_gets_the_same_plan_in_whatever_order_it_is_told() -> None:
    holds(_same)


def test_without_an_order_of_their_own_replicas_get_what_the_order_of_the_telling_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unsorted(board: PoolBoard, replicas: Sequence[Replica], limits: Limits, away: Collection[str]) -> None:
        original(board, replicas, limits, away)
        board.candidates = [board.places[r.uid] for r in replicas if r.uid in board.places]

    original = PoolBoard.__init__
    monkeypatch.setattr(PoolBoard, "__init__", unsorted)
    monkeypatch.setattr(boards, "score", lambda _adapter, _replica: 0)
    breaks(_same)


# --- as little movement as possible -----------------------------------------------------------------------------------


def _asked(data: st.DataObject) -> Pool:
    """A pool with as much traffic for each of its adapters, settled."""
    replicas = data.draw(st.integers(3, 8))
    pool = Pool.of(replicas, limits=Limits(slots=8, cached=32))
    for number in range(data.draw(st.integers(4 * replicas, 12 * replicas))):
        name = f"{data.draw(st.integers(0, 9)) if number < 3 else 'x'}-{number}"
        pool.adapters[name] = adapter(name)
    pool.step()
    pool.ask(*pool.adapters)
    pool.settle(80)
    return pool


def _moves_little(data: st.DataObject) -> None:
    pool = _asked(data)
    before, count = pool.homes(), len(pool.adapters)
    assert len(before) == count
    pool.loads.clear()
    gone = data.draw(st.sampled_from(sorted(pool.replicas)))
    lost = {uid for uid, homes in before.items() if gone in homes}
    del pool.replicas[gone]
    pool.settle(60)
    assert {uid for uid, homes in pool.homes().items() if homes != before[uid]} <= lost
    assert len(pool.loads) <= len(lost)

    before = pool.homes()
    pool.loads.clear()
    pool.replicas["new"] = replica("new")
    pool.settle(60)
    moved = {uid for uid, homes in pool.homes().items() if homes != before[uid]}
    assert all(pool.homes()[uid] == {"new"} for uid in moved)
    assert {at for at, _ in pool.loads} <= {"new"}
    assert len(moved) <= math.ceil(count / len(pool.replicas)) + 1


def test_a_replica_that_goes_moves_its_adapters_only_and_one_that_comes_takes_no_more_than_its_share() -> None:
    holds(_moves_little, 15)


def test_without_homes_that_stay_others_move_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draft, "previous", lambda *_: [])
    monkeypatch.setattr(PoolBoard, "having", lambda *_: [])
    monkeypatch.setattr(PoolBoard, "ranked", lambda board, key: iter(_by_number(board, key)))
    breaks(_moves_little)


def _by_number(board: PoolBoard, key: str) -> list[ReplicaSlots]:
    """What hashing by the number of replicas makes of it."""
    at = boards.digest(key) % len(board.candidates)
    return board.candidates[at:] + board.candidates[:at]


# --- no flapping ------------------------------------------------------------------------------------------------------


def _rests(data: st.DataObject) -> None:
    pool = Pool.of(data.draw(st.integers(1, 6)), limits=Limits(slots=8, cached=16))
    for number in range(data.draw(st.integers(1, 30))):
        pool.adapters[f"a{number:02}"] = adapter(f"a{number:02}", rank=data.draw(st.sampled_from([8, 16, 64])))
    loads = {name: data.draw(st.sampled_from([0, 0, 1, 3, 10, 50])) for name in pool.adapters}
    pool.step()
    moves = 0
    for turn in range(140):
        for name, load in loads.items():
            pool.ask(name, in_flight=load)
        plan = pool.step(10.0)
        moves += len(plan.moves) if turn >= 120 else 0
    assert moves == 0


def test_a_constant_load_comes_to_rest() -> None:
    holds(_rests, 20)


def test_without_a_gain_to_show_adapters_move_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balancing, "_GAIN", 10.0)
    monkeypatch.setattr(balancing, "LIGHT", 2.0)
    breaks(_rests)


# --- loads per minute -------------------------------------------------------------------------------------------------


def _paced(data: st.DataObject) -> None:
    pool = Pool.of(data.draw(st.integers(1, 4)), limits=Limits(slots=8, cached=16))
    for number in range(40):
        pool.adapters[f"a{number:02}"] = adapter(f"a{number:02}")
    pool.step()
    most = 2.0 * len(pool.replicas)
    for _ in range(20):
        pool.ask(*data.draw(st.lists(st.sampled_from(sorted(pool.adapters)), max_size=40)))
        seconds = data.draw(st.sampled_from([0.1, 1.0, 10.0]))
        most += seconds * MOVES_PER_MINUTE / 60 * len(pool.replicas)
        pool.step(seconds)
        assert len(pool.loads) <= most


def test_traffic_causes_no_more_loads_than_the_pace_allows() -> None:
    holds(_paced, 30)


def test_without_the_budget_everything_is_loaded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    placing = importlib.import_module("shoal.core.lora.placement.place")
    monkeypatch.setattr(placing, "_budget", lambda *_: 1e9)
    breaks(_paced)
