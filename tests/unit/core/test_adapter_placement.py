"""Which replica holds which adapter: what a user sees of it."""

from dataclasses import replace

from shoal.api import reasons
from shoal.core.lora.placement import Limits, may_switch
from shoal.core.lora.placement.fill import BOUND
from shoal.core.lora.placement.place import MOVES_PER_MINUTE
from shoal.core.lora.placement.traffic import HALF_LIFE, KEPT_SECONDS, PoolTraffic
from shoal.core.lora.placement.types import Traffic
from shoal.core.lora.placement.wanted import FEWER_SECONDS, LEAST_LOAD, wanted
from tests.support.adapterpools import Pool, adapter, replica

# --- residency ------------------------------------------------------------------------------------------------------


def test_a_pinned_adapter_is_on_as_many_replicas_as_it_asks_for_or_on_all() -> None:
    pool = Pool.of(3, [adapter("two", "Pinned", 2), adapter("all", "Pinned", 9)])

    plan = pool.step()

    assert len(pool.homes()["two"]) == 2
    assert pool.homes()["all"] == {"r0", "r1", "r2"}
    assert all(e.pinned for floor in plan.desired.values() for e in floor)
    assert all(v.reason is None for v in plan.adapters.values())


def test_a_warm_adapter_is_held_and_may_be_evicted() -> None:
    pool = Pool.of(2, [adapter("warm", "Warm")])

    plan = pool.step()

    (entry,) = [e for floor in plan.desired.values() for e in floor]
    assert (entry.adapter, entry.pinned, entry.why) == ("warm", False, "warm")


def test_an_adapter_on_demand_that_nobody_asks_for_is_on_no_floor() -> None:
    pool = Pool.of(2, [adapter("quiet")])

    plan = pool.step()

    assert plan.adapters == {}
    assert plan.desired == {"r0": (), "r1": ()}
    assert plan.replan_after is None


def test_one_that_was_asked_for_keeps_a_place_for_half_an_hour() -> None:
    pool = Pool.of(2, [adapter("support")])
    pool.step()
    pool.ask("support")
    pool.step(1)
    assert len(pool.homes()["support"]) == 1

    plan = pool.step(KEPT_SECONDS - 1)
    assert len(pool.homes()["support"]) == 1
    assert plan.replan_after is not None
    pool.step(plan.replan_after)
    assert pool.homes() == {}


def test_what_is_loaded_already_stays_where_it_is() -> None:
    pool = Pool.of(8, [adapter("support")])
    pool.step()
    pool.replicas["r5"] = replica("r5", "acme.support@000000000001")
    pool.ask("support")

    pool.step(1)

    assert pool.homes() == {"support": {"r5"}}
    assert pool.loads == []


def test_a_new_leader_drops_nothing_that_is_loaded() -> None:
    pool = Pool.of(2, [adapter(f"a{i}") for i in range(20)])
    for number in (0, 1):
        names = [f"acme.a{i}@000000000001" for i in range(number * 10, number * 10 + 10)]
        pool.replicas[f"r{number}"] = replica(f"r{number}", *names)

    plan = pool.step()

    assert {uid: len(floor) for uid, floor in plan.desired.items()} == {"r0": 10, "r1": 10}
    assert pool.loads == []


# --- room -----------------------------------------------------------------------------------------------------------


def test_more_pinned_than_slots_says_so_with_numbers_and_disturbs_nobody() -> None:
    pool = Pool.of(2, [adapter(f"p{i}", "Pinned", 2) for i in range(7)])
    first = pool.step()
    pool.adapters["late"] = adapter("late", "Pinned", 2)

    plan = pool.step(1)

    verdict = plan.adapters["late"]
    assert verdict.reason == reasons.NO_ROOM
    assert verdict.message == (
        "pinned on 0 of 2 replicas: each of the others has 7 pinned already, which is all that its 8 slots allow; "
        "raise the pool's slotsPerReplica, or pin fewer"
    )
    assert verdict.homes == ()
    assert plan.desired == first.desired


def test_more_warm_than_places_says_so_with_numbers() -> None:
    pool = Pool.of(1, [adapter(f"w{i:02}", "Warm") for i in range(16)])

    plan = pool.step()

    refused = [v for v in plan.adapters.values() if v.reason]
    assert len(refused) == 1
    assert refused[0].message == (
        "kept warm on 0 of 1 replica: each of the others has 15 of its 16 places in host memory taken by such "
        "adapters; raise the pool's cachedPerReplica, or keep fewer"
    )
    assert len(plan.desired["r0"]) == 15


def test_pinned_adapters_take_the_places_of_those_on_demand() -> None:
    pool = Pool.of(1, [adapter(f"a{i}") for i in range(14)])
    pool.step()
    pool.ask(*pool.adapters)
    pool.step(HALF_LIFE)
    pool.settle(20)
    assert len(pool.homes()) == 14
    for number in range(7):
        pool.adapters[f"p{number}"] = adapter(f"p{number}", "Pinned")

    plan = pool.step(1)

    assert [e.pinned for e in plan.desired["r0"]] == [True] * 7 + [False] * 7


def test_a_replica_of_before_a_resize_gets_what_it_takes() -> None:
    pool = Pool.of(2, [adapter(f"p{i}", "Pinned", 2) for i in range(7)])
    pool.replicas["r1"] = replace(pool.replicas["r1"], limits=Limits(slots=3, cached=4))

    plan = pool.step()

    assert {uid: len(floor) for uid, floor in plan.desired.items()} == {"r0": 7, "r1": 2}
    short = [v for v in plan.adapters.values() if v.reason == reasons.NO_ROOM]
    assert len(short) == 5
    assert short[0].message.startswith(
        "pinned on 1 of 2 replicas: each of the others has 2 pinned already, which is all"
    )


# --- traffic --------------------------------------------------------------------------------------------------------


def test_copies_follow_the_load_at_once_and_go_after_a_while() -> None:
    pool = Pool.of(4, [adapter("hot"), adapter("other")])
    pool.step()
    pool.ask("hot", in_flight=int(4 * LEAST_LOAD))
    pool.settle(6)
    assert len(pool.homes()["hot"]) == 4

    pool.ask("hot", in_flight=1)
    pool.step(FEWER_SECONDS / 2)
    assert len(pool.homes()["hot"]) == 4
    pool.settle(60)
    assert len(pool.homes()["hot"]) == 1


def test_a_few_requests_need_one_copy() -> None:
    pool = Pool.of(4, [adapter("support")])
    pool.step()
    pool.ask("support", in_flight=3)

    pool.settle(20)

    assert len(pool.homes()["support"]) == 1


def test_requests_that_wait_count_as_load() -> None:
    pool = Pool.of(2, [adapter("support")])
    pool.step()
    pool.ask("support", held=int(2 * LEAST_LOAD))

    pool.settle(10)

    assert len(pool.homes()["support"]) == 2


def test_copies_stay_while_a_gateway_is_not_heard() -> None:
    pool = Pool.of(4, [adapter("hot")])
    pool.step()
    pool.ask("hot", in_flight=int(4 * LEAST_LOAD))
    pool.settle(6)
    before = pool.homes()
    pool.heard = False

    plan = pool.settle(300)

    assert pool.homes() == before
    assert plan.stale == ("gateway-0",)


def test_loads_for_the_sake_of_traffic_are_limited_per_minute() -> None:
    pool = Pool.of(2, [adapter(f"a{i}") for i in range(24)])
    pool.step()
    pool.ask(*pool.adapters)
    pool.step(1)
    assert len(pool.loads) == 4

    plan = pool.look()
    assert plan.replan_after is not None
    for _ in range(6):
        pool.step(10)
    assert len(pool.loads) == 4 + 2 * MOVES_PER_MINUTE


def test_a_popular_adapter_takes_the_place_of_one_that_is_hardly_used() -> None:
    pool = Pool.of(1, [adapter(f"a{i:02}") for i in range(15)])
    pool.step()
    pool.ask(*(f"a{i:02}" for i in range(14)))
    pool.step(HALF_LIFE)
    pool.settle(20)
    for number in range(1, 14):
        for _ in range(5):
            pool.ask(f"a{number:02}")
    for _ in range(3):
        pool.ask("a14")

    pool.step(10)

    assert "a14" in pool.homes()
    assert "a00" not in pool.homes()


# --- replicas that come and go --------------------------------------------------------------------------------------


def test_a_replica_that_drains_gets_nothing_new_and_keeps_what_it_has() -> None:
    pool = Pool.of(2, [adapter("old", "Warm", 2)])
    pool.step()
    pool.replicas["r0"] = replace(pool.replicas["r0"], draining=True)
    pool.adapters["new"] = adapter("new", "Warm", 2)

    plan = pool.step(1)

    assert [e.adapter for e in plan.desired["r0"]] == ["old"]
    assert {e.adapter for e in plan.desired["r1"]} == {"old", "new"}
    assert plan.adapters["new"].reason is None


def test_adapters_of_a_replica_that_is_gone_go_elsewhere() -> None:
    pool = Pool.of(3, [adapter(f"w{i}", "Warm") for i in range(9)])
    pool.step()
    before = pool.homes()
    del pool.replicas["r1"]

    pool.step(1)

    after = pool.homes()
    assert all(len(homes) == 1 for homes in after.values())
    assert all(after[uid] == homes for uid, homes in before.items() if homes != {"r1"})


def test_an_engine_that_restarts_keeps_its_floor() -> None:
    pool = Pool.of(2, [adapter("warm", "Warm")])
    pool.step()
    (home,) = pool.homes()["warm"]
    pool.replicas[home] = replace(pool.replicas[home], ready=False, resident=None)

    plan = pool.look(30)

    assert pool.homes()["warm"] == {home}
    assert plan.moves == ()


def test_a_replica_that_stays_away_is_replaced_by_another() -> None:
    pool = Pool.of(2, [adapter("warm", "Warm")])
    pool.step()
    (home,) = pool.homes()["warm"]
    pool.replicas[home] = replace(pool.replicas[home], ready=False, resident=None)

    plan = pool.look(1)
    while len(pool.homes()["warm"]) < 2 and plan.replan_after is not None and pool.now < 120:
        plan = pool.look(plan.replan_after)

    assert pool.homes()["warm"] == {"r0", "r1"}
    assert pool.now < 70


def test_a_new_replica_gets_its_share_before_the_others_let_go() -> None:
    pool = Pool.of(2, [adapter(f"a{i}") for i in range(20)])
    pool.step()
    pool.ask(*pool.adapters)
    pool.settle(30)
    pool.replicas["r9"] = replica("r9", ready=False, resident=None)

    for _ in range(4):
        pool.look(10)
    assert pool.plan is not None
    coming = {e.adapter for e in pool.plan.desired["r9"]}
    assert coming
    assert all(pool.homes()[uid] > {"r9"} for uid in coming)  # the former home still has it

    pool.replicas["r9"] = replica("r9")
    pool.settle(40)
    assert pool.plan is not None
    assert len(pool.plan.desired["r9"]) >= 4
    assert all(len(homes) == 1 for homes in pool.homes().values())


def test_no_replica_gets_more_than_its_share() -> None:
    pool = Pool.of(8, [adapter(f"a{i}") for i in range(64)])
    pool.step()
    pool.ask(*pool.adapters)

    plan = pool.settle(80)

    assert len(pool.homes()) == 64
    assert max(len(floor) for floor in plan.desired.values()) <= BOUND * 8 + 1


def test_an_adapter_of_a_high_rank_counts_for_more_than_one_of_a_low_rank() -> None:
    thin = [f"thin{i}" for i in range(12)]
    pool = Pool.of(2, [adapter("wide", rank=1024), *(adapter(name, rank=8) for name in thin)])
    pool.step()
    pool.ask("wide", in_flight=4)
    pool.ask(*thin, in_flight=1)

    pool.settle(80)

    # A third of the requests, and half of the work: decoding waits for the highest rank of its batch.
    homes = pool.homes()
    (with_wide,) = homes["wide"]
    beside = sum(with_wide in homes[name] for name in thin)
    assert beside <= 3
    told = PoolTraffic({name: Traffic(0.0, load=4.0, lasting=4.0, now=4) for name in ("wide", "thin0")}, {}, ())
    cost = {w.adapter.uid: w.cost for w in wanted(pool.snapshot, told, {}, {}, 2, 0.0).wants}
    assert cost["wide"] > 2 * cost["thin0"]


def test_without_replicas_there_is_nothing_to_say() -> None:
    pool = Pool.of(0, [adapter("p", "Pinned"), adapter("a")])

    plan = pool.look()

    assert plan.desired == {}
    assert plan.adapters == {}


# --- revisions ------------------------------------------------------------------------------------------------------


def test_a_newer_revision_is_loaded_beside_the_one_that_answers_until_gateways_switched() -> None:
    pool = Pool.of(3, [adapter("support", "Warm", 2)])
    pool.step()
    old, new = "acme.support@000000000001", "acme.support@000000000002"
    pool.adapters["support"] = adapter("support", "Warm", 2, next=2)

    plan = pool.look(1)
    homes = pool.homes()["support"]
    assert all([e.name for e in plan.desired[uid]] == [old, new] for uid in homes)
    switch = may_switch(pool.adapters["support"], plan, pool.snapshot)
    assert (switch.now, set(switch.missing)) == (False, set(homes))

    plan = pool.step()
    assert may_switch(pool.adapters["support"], plan, pool.snapshot).now

    pool.adapters["support"] = adapter("support", "Warm", 2, current=2)
    plan = pool.step(1)
    assert pool.homes()["support"] == homes
    assert all([e.name for e in plan.desired[uid]] == [new] for uid in homes)


def test_a_new_adapter_is_loaded_once_before_it_is_said_to_be_available() -> None:
    pool = Pool.of(3, [adapter("new", current=None, next=1)])

    plan = pool.look()

    (entry,) = [e for floor in plan.desired.values() for e in floor]
    assert (entry.name, entry.why) == ("acme.new@000000000001", "next")
    assert not may_switch(pool.adapters["new"], plan, pool.snapshot).now
    assert may_switch(pool.adapters["new"], pool.step(), pool.snapshot).now


def test_a_revision_that_requests_brought_somewhere_is_replaced_there_too() -> None:
    old, new = "acme.support@000000000001", "acme.support@000000000002"
    pool = Pool.of(4, [adapter("support")])
    pool.step()
    for uid in ("r0", "r2"):
        pool.replicas[uid] = replica(uid, old)
    pool.adapters["support"] = adapter("support", next=2)

    plan = pool.step(1)
    assert {uid: [e.name for e in floor] for uid, floor in plan.desired.items() if floor} == {
        "r0": [old, new],
        "r2": [old, new],
    }
    assert may_switch(pool.adapters["support"], plan, pool.snapshot).now

    pool.adapters["support"] = adapter("support", current=2)
    plan = pool.step(1)
    assert {e.name for floor in plan.desired.values() for e in floor} == {new}  # the old one left every floor: it goes
    pool.step(KEPT_SECONDS)
    assert pool.homes() == {}  # nobody asked for it


def test_without_a_ready_replica_gateways_may_switch_at_once() -> None:
    pool = Pool.of(1, [adapter("support", next=2)])
    pool.replicas["r0"] = replace(pool.replicas["r0"], ready=False, resident=None)

    assert may_switch(pool.adapters["support"], pool.look(), pool.snapshot).now


def test_pinned_in_every_slot_leaves_the_newer_revision_unpinned_while_both_are_there() -> None:
    pool = Pool.of(1, [adapter(f"p{i}", "Pinned") for i in range(7)])
    pool.step()
    pool.adapters["p0"] = adapter("p0", "Pinned", next=2)

    plan = pool.step(1)

    assert sum(e.pinned for e in plan.desired["r0"]) == 7
    (newer,) = [e for e in plan.desired["r0"] if e.name.endswith("2")]
    assert not newer.pinned
