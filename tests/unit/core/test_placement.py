"""One plan over the whole fleet: what each Model gets, and what it is told."""

from dataclasses import replace

from shoal.core.placement import Demand, Held, Moves, Placement, Rejected, ReplicaState, VariantPlan, plan, steering
from tests.support.fleets import candidate, demand, standing, supply

L4, H100 = candidate("l4-24gb", cost="0.43"), candidate("h100-80gb", cost="2.49")


def by_class(placement: Placement) -> dict[str, int]:
    return {v.gpu_class: v.replicas for v in placement.variants if v.replicas}


def one(model: Demand, *supplies, moves: Moves | None = None) -> Placement:
    return plan([model], supplies, moves=moves)[model.uid]


# --- which class ------------------------------------------------------------------------------------------------------


def test_the_cheapest_sufficient_class_with_room_is_taken_and_unpriced_ones_come_last() -> None:
    gift = candidate("gift")
    room = [supply("gift", 8), supply("h100-80gb", 8), supply("l4-24gb", 1)]
    assert by_class(one(demand("chat/a", gift, H100, L4), *room)) == {"l4-24gb": 1}
    assert by_class(one(demand("chat/a", gift, H100), *room)) == {"h100-80gb": 1}
    assert by_class(one(demand("chat/a", gift), *room)) == {"gift": 1}


def test_a_class_that_no_node_has_is_not_said_to_be_superfluous_or_full() -> None:
    gone, ghost = candidate("gone", 1, "0.10"), candidate("ghost", 1)
    found = one(demand("chat/a", gone, ghost, L4), supply("gone"), supply("l4-24gb", 1))
    said = [(e.gpu_class, e.reason, e.why) for e in found.excluded]
    assert said == [(name, "NoCapacity", "no node has the class's labels") for name in ("gone", "ghost")]


def test_cost_is_that_of_a_replica_not_of_a_gpu() -> None:
    four_l4 = candidate("l4-24gb", 8, "3.44")
    found = one(demand("chat/a", four_l4, H100), supply("l4-24gb", 8), supply("h100-80gb", 8))
    assert found.variants == (VariantPlan("h100-80gb", 1, 1, "2.49"),)
    assert found.hourly_cost == "2.49"
    assert [(e.gpu_class, e.reason, e.why, e.hourly_cost) for e in found.excluded] == [
        ("l4-24gb", "NotNeeded", "not needed: what is used is not dearer", "3.44")
    ]


def test_replicas_spill_over_to_the_next_class_at_max_replicas_and_where_room_ends() -> None:
    model = demand("chat/a", replace(L4, max_replicas=2), H100, wanted=4)
    found = one(model, supply("l4-24gb", 4), supply("h100-80gb", 1))
    assert by_class(found) == {"l4-24gb": 2, "h100-80gb": 1}
    assert (found.reason, found.missing, found.hourly_cost) == ("NoCapacity", 1, "3.35")
    assert found.message == (
        "no room for 1 of 4 replicas of 1 GPU: l4-24gb: maxReplicas 2 reached; "
        "h100-80gb: 1 of 1 GPUs free, 1 promised to replicas that are starting; placed: 2 on l4-24gb, 1 on h100-80gb"
    )


def test_a_replica_never_spans_nodes() -> None:
    found = one(demand("chat/a", candidate("l4-24gb", 4, "1.72")), supply("l4-24gb", 2, 2, of=4))
    assert found.message == "no room for a replica of 4 GPUs: l4-24gb: 4 of 8 GPUs free, at most 2 on one node"
    found = one(demand("chat/a", candidate("l4-24gb", 8, "3.44")), supply("l4-24gb", 2, 2, of=4))
    assert found.message == "no room for a replica of 8 GPUs: l4-24gb: no node has 8 GPUs, the largest has 4"


def test_a_class_without_nodes_says_so() -> None:
    found = one(demand("chat/a", L4), supply("l4-24gb"))
    assert found.message == "no room for a replica of 1 GPU: l4-24gb: no node has the class's labels"
    assert found.reason == "NoCapacity"


def test_without_any_class_the_message_says_what_to_do() -> None:
    found = one(demand("chat/a"))
    assert (found.reason, found.missing) == ("NoClass", 1)
    assert found.message == "there is no GPUClass: create one for your GPU nodes"


def test_a_model_that_fits_nowhere_shows_the_sums() -> None:
    rejected = (Rejected("l4-24gb", "NoFit", "weights 130 GiB, 22 GiB per GPU"), Rejected("t4", "NoFit", "no FP8"))
    found = one(demand("chat/a", rejected=rejected), supply("l4-24gb", 2))
    assert (found.reason, found.placed) == ("NoFit", False)
    assert found.message == "fits on no GPU class: l4-24gb: weights 130 GiB, 22 GiB per GPU; t4: no FP8"
    assert [(e.gpu_class, e.why) for e in found.excluded] == [(r.gpu_class, r.why) for r in rejected]


def test_an_unknown_architecture_says_it_once() -> None:
    why = "the KV cache of Foo is not known: set spec.sizing.kvBytesPerToken"
    rejected = (Rejected("a", "SizeUnknown", why), Rejected("b", "SizeUnknown", why))
    found = one(demand("chat/a", rejected=rejected))
    assert (found.reason, found.message) == ("SizeUnknown", f"fits on no GPU class: {why}")


def test_the_interruptible_share_is_rounded_down() -> None:
    spot = replace(L4, interruptible=True)
    room = [supply("l4-24gb", 8), supply("h100-80gb", 8)]
    found = one(demand("chat/a", spot, H100, wanted=3, interruptible_percent=50), *room)
    assert by_class(found) == {"l4-24gb": 1, "h100-80gb": 2}
    assert by_class(one(demand("chat/a", spot, H100, wanted=3), *room)) == {"l4-24gb": 3}
    found = one(demand("chat/a", spot, wanted=1, interruptible_percent=50), *room)
    assert found.missing == 1
    assert found.message.endswith(
        "l4-24gb: interruptible, and interruptiblePercent 50 allows 0 of 1 replicas on such classes"
    )


def test_small_replicas_leave_large_blocks_free() -> None:
    small = [demand(f"chat/s{i}", L4, age=i) for i in range(3)]
    large = demand("chat/z", candidate("l4-24gb", 8, "3.44"), age=9)
    found = plan([*small, large], [supply("l4-24gb", 8, 3, 8, of=8)])
    assert all(p.placed for p in found.values())


# --- what runs --------------------------------------------------------------------------------------------------------


def test_what_runs_stays_when_a_cheaper_class_gets_room_and_moving_is_off() -> None:
    model = demand("chat/a", H100, L4, standing={"h100-80gb": standing(1, 1, name="h100-80gb")})
    room = [supply("h100-80gb", 7, of=8), supply("l4-24gb", 8)]
    found = one(model, *room, moves=Moves(in_flight=0))
    assert (by_class(found), found.reason, found.message) == ({"h100-80gb": 1}, "Placed", "1 on h100-80gb, 1 GPU each")


def test_a_move_surges_first_and_drains_when_the_cheap_replica_is_ready() -> None:
    dear = standing(1, 1, name="h100-80gb")
    room = [supply("h100-80gb", 7, of=8), supply("l4-24gb", 8)]
    first = one(demand("chat/a", H100, L4, standing={"h100-80gb": dear}), *room)
    assert (by_class(first), first.reason, first.placed) == ({"l4-24gb": 1, "h100-80gb": 1}, "Moving", True)
    assert first.message == (
        "1 on h100-80gb, 1 GPU each; moving to l4-24gb, which is cheaper: "
        "a replica on h100-80gb goes when its replacement is ready"
    )
    asked = ReplicaState(1, 1, {}, 1)
    loading = ReplicaState(1, 1, {"l4-24gb-0": Held(1, 0)}, 1)
    for cheap in (asked, loading):
        again = one(demand("chat/a", H100, L4, standing={"h100-80gb": dear, "l4-24gb": cheap}), *room)
        assert (by_class(again), again.reason) == ({"l4-24gb": 1, "h100-80gb": 1}, "Moving")
    ready = standing(1, 1, name="l4-24gb")
    done = one(demand("chat/a", H100, L4, standing={"h100-80gb": dear, "l4-24gb": ready}), *room)
    assert (by_class(done), done.reason) == ({"l4-24gb": 1}, "Placed")
    assert done.variants[-1].leaving == (("h100-80gb-0", 1),)


def test_a_move_that_saves_little_or_takes_room_from_one_that_waits_is_not_made() -> None:
    dear = {"h100-80gb": standing(1, 1, name="h100-80gb")}
    model = demand("chat/a", H100, candidate("h200", cost="2.40"), standing=dear)
    assert by_class(one(model, supply("h100-80gb", 7, of=8), supply("h200", 8))) == {"h100-80gb": 1}
    waits = demand("chat/big", candidate("l4-24gb", 8, "3.44"), age=5)
    room = [supply("h100-80gb", 7, of=8), supply("l4-24gb", 7, of=8)]
    found = plan([demand("chat/a", H100, L4, standing=dear), waits], room)
    assert by_class(found["chat/a"]) == {"h100-80gb": 1}
    assert found["chat/big"].reason == "NoCapacity"


def test_moves_are_bounded_for_the_fleet_and_one_at_a_time_for_a_model() -> None:
    room = [supply("h100-80gb", 0, of=8), supply("l4-24gb", 8)]
    models = [
        demand(f"chat/m{i}", H100, L4, wanted=2, age=i, standing={"h100-80gb": standing(1, 2, name="h100-80gb")})
        for i in range(4)
    ]
    found = plan(models, room, moves=Moves(in_flight=2))
    assert [by_class(p) for p in found.values()] == [{"l4-24gb": 1, "h100-80gb": 2}] * 2 + [{"h100-80gb": 2}] * 2


def test_a_replica_that_may_not_be_evicted_is_not_moved_for_its_price() -> None:
    annotation = "karpenter.sh/do-not-disrupt"
    here = replace(standing(1, 1, name="h100-80gb"), keeps=annotation)
    room = [supply("h100-80gb", 7, of=8), supply("l4-24gb", 8)]
    found = one(demand("chat/a", H100, L4, standing={"h100-80gb": here}), *room, moves=Moves())
    assert (by_class(found), found.reason) == ({"h100-80gb": 1}, "Placed")
    assert [(e.gpu_class, e.why) for e in found.excluded] == [
        ("l4-24gb", f"no room when the replicas were placed; {annotation} forbids to move them")
    ]
    begun = {"h100-80gb": here, "l4-24gb": ReplicaState(1, 1, {}, 1)}
    found = one(demand("chat/a", H100, L4, standing=begun), *room, moves=Moves())
    assert by_class(found) == {"h100-80gb": 1}, "nor is a move continued that no node has bound yet"
    # Elsewhere a replica of the Model may be evicted.
    a100 = candidate("a100", cost="1.50")
    both = {"h100-80gb": here, "a100": standing(1, 1, name="a100")}
    room += [supply("a100", 7, of=8)]
    found = one(demand("chat/a", H100, a100, L4, wanted=2, standing=both), *room, moves=Moves())
    assert by_class(found) == {"h100-80gb": 1, "a100": 1, "l4-24gb": 1}


def test_fewer_replicas_leave_the_dearest_class_first() -> None:
    both = {"h100-80gb": standing(1, 1, name="h100-80gb"), "l4-24gb": standing(1, 1, 1, name="l4-24gb")}
    room = [supply("h100-80gb", 7, of=8), supply("l4-24gb", 7, 7, of=8)]
    assert by_class(one(demand("chat/a", H100, L4, wanted=2, standing=both), *room)) == {"l4-24gb": 2}
    assert by_class(one(demand("chat/a", H100, L4, wanted=1, standing=both), *room)) == {"l4-24gb": 1}


def test_a_replica_on_a_cordoned_node_is_replaced_before_it_goes() -> None:
    stands = {"l4-24gb": ReplicaState(1, 1, {"cordoned": Held(1, 1)}, 1)}
    found = one(demand("chat/a", L4, standing=stands), supply("l4-24gb", 8))
    assert by_class(found) == {"l4-24gb": 2}
    assert found.message == (
        "1 on l4-24gb, 1 GPU each; 1 on a node that takes no pods stays, until others are ready in their place"
    )
    both = {"l4-24gb": ReplicaState(2, 1, {"cordoned": Held(1, 1), "l4-24gb-0": Held(1, 1)}, 2)}
    found = one(demand("chat/a", L4, standing=both), supply("l4-24gb", 7, of=8))
    assert (by_class(found), found.variants[0].leaving) == ({"l4-24gb": 1}, (("cordoned", 1),))


def test_a_deployment_that_asks_for_replacements_does_not_shrink_meanwhile() -> None:
    # 4 pods, of which 2 are to be replaced: saying 4 again would bring no new pod about.
    stands = {"l4-24gb": ReplicaState(4, 1, {"cordoned": Held(2, 2), "l4-24gb-0": Held(2, 2)}, 4)}
    found = one(demand("chat/a", L4, wanted=3, standing=stands), supply("l4-24gb", 1, of=4))
    assert by_class(found) == {"l4-24gb": 5}


def test_a_replica_on_a_lost_node_is_replaced_on_another_class_when_its_own_is_full() -> None:
    lost = {"l4-24gb": ReplicaState(1, 1, {"lost": Held(1, 0)}, 1)}
    found = one(demand("chat/a", L4, H100, standing=lost), supply("l4-24gb", 0, of=8), supply("h100-80gb", 8))
    assert (by_class(found), found.placed) == ({"h100-80gb": 1}, True)


def test_without_room_elsewhere_a_replica_on_a_node_that_takes_no_pods_is_left_alone() -> None:
    for ready in (0, 1):
        stands = {"l4-24gb": ReplicaState(1, 1, {"cordoned": Held(1, ready)}, 1)}
        found = one(demand("chat/a", L4, standing=stands), supply("l4-24gb", 0, of=8))
        assert (by_class(found), found.missing, found.reason) == ({"l4-24gb": 1}, 1, "NoCapacity")
        assert found.message.endswith("0 of 8 GPUs free; 1 on a node that takes no pods stays meanwhile")


def test_where_gpus_became_unhealthy_the_least_important_replica_is_replaced() -> None:
    def stands(node: int, n: int = 1) -> dict[str, ReplicaState]:
        return {"l4-24gb": ReplicaState(n, 1, {f"l4-24gb-{node}": Held(n, n)}, n)}

    low, high = (
        demand("chat/low", L4, standing=stands(0, 2), wanted=2),
        demand("chat/high", L4, priority=9, standing=stands(0, 2), wanted=2),
    )
    found = plan([low, high], [supply("l4-24gb", -1, 2, of=3)])
    assert (by_class(found["chat/high"]), by_class(found["chat/low"])) == ({"l4-24gb": 2}, {"l4-24gb": 3})


def test_a_class_that_is_not_listed_any_more_serves_until_its_replacement_is_ready() -> None:
    old = standing(1, 1, name="h100-80gb")
    room = [supply("h100-80gb", 7, of=8), supply("l4-24gb", 8)]
    first = one(demand("chat/a", L4, standing={"h100-80gb": old}), *room)
    assert [(v.gpu_class, v.replicas, v.retired) for v in first.variants] == [
        ("l4-24gb", 1, False),
        ("h100-80gb", 1, True),
    ]
    assert first.variants[1].why == "the Model may not use this class any more"
    ready = {"h100-80gb": old, "l4-24gb": standing(1, 1, name="l4-24gb")}
    assert by_class(one(demand("chat/a", L4, standing=ready), *room)) == {"l4-24gb": 1}
    # With nowhere else to go it serves on.
    found = one(demand("chat/a", standing={"h100-80gb": old}, rejected=(Rejected("h100-80gb", "NoFit", "sum"),)), *room)
    assert (by_class(found), found.reason, found.variants[0].why) == ({"h100-80gb": 1}, "NoFit", "sum")
    assert found.excluded == ()


def test_a_replica_beyond_what_the_spec_allows_serves_until_there_is_room_elsewhere() -> None:
    stands = {"l4-24gb": standing(1, 2, name="l4-24gb")}
    model = demand("chat/a", replace(L4, max_replicas=1), H100, wanted=2, standing=stands)
    found = one(model, supply("l4-24gb", 6, of=8), supply("h100-80gb", 0, of=8))
    assert (by_class(found), found.missing) == ({"l4-24gb": 2}, 1)
    assert found.message.endswith("placed: 1 on l4-24gb; 1 more than the spec allows there stays meanwhile")
    found = one(model, supply("l4-24gb", 6, of=8), supply("h100-80gb", 8))
    assert by_class(found) == {"l4-24gb": 2, "h100-80gb": 1}


def test_a_paused_model_keeps_what_it_has_and_is_never_evicted() -> None:
    full = {"l4-24gb": standing(8, 1, name="l4-24gb")}
    eight = candidate("l4-24gb", 8, "3.44")
    paused = demand("chat/low", eight, standing=full, wanted=3, frozen=True)
    found = plan([paused, demand("chat/high", eight, priority=9)], [supply("l4-24gb", 0, of=8)])
    assert by_class(found["chat/low"]) == {"l4-24gb": 1}
    assert (found["chat/low"].reason, found["chat/low"].message) == ("Pending", "keeps what it has: 1 on l4-24gb")
    assert found["chat/high"].missing == 1


# --- when GPUs are short ----------------------------------------------------------------------------------------------

EIGHT = candidate("h100-80gb", 8, "19.92")


def test_the_higher_priority_gets_the_gpus_and_both_say_so() -> None:
    low = demand("chat/low", EIGHT, standing={"h100-80gb": standing(8, 1, name="h100-80gb")}, drain_seconds=300)
    high = demand("chat/high", EIGHT, priority=100, age=9)
    room = supply("h100-80gb", 0, of=8)
    found = plan([low, high], [room])
    winner, loser = found["chat/high"], found["chat/low"]
    assert winner.variants == (VariantPlan("h100-80gb", 1, 8, "19.92", waiting=1),)
    assert (winner.reason, winner.missing, winner.placed) == ("DrainingOthers", 0, False)
    assert winner.message == "waits for 8 GPUs on h100-80gb that chat/low (priority 0) gives up, within 300 s"
    assert loser.variants == (
        VariantPlan("h100-80gb", 0, 8, "0", leaving=(("h100-80gb-0", 1),), forced=(("h100-80gb-0", 1),)),
    )
    assert (loser.reason, loser.missing) == ("Outranked", 1)
    assert loser.message.startswith("waits for chat/high (priority 100), which has GPUs of h100-80gb; no room for a")
    # While the loser's pod drains nothing changes.
    going = replace(low, replica_states={"h100-80gb": standing(8, 0, name="h100-80gb", terminating=1)})
    asked = replace(high, replica_states={"h100-80gb": ReplicaState(1, 8, {}, 1)})
    again = plan([going, asked], [supply("h100-80gb", 0, of=8, releasing=[8])])
    assert (again["chat/high"].message, again["chat/low"].reason) == (winner.message, "Outranked")
    assert by_class(again["chat/high"]) == {"h100-80gb": 1}
    assert by_class(again["chat/low"]) == {}


def test_equal_priority_keeps_what_it_has_however_young() -> None:
    young = demand("chat/young", EIGHT, age=9, standing={"h100-80gb": standing(8, 1, name="h100-80gb")})
    found = plan([young, demand("chat/old", EIGHT)], [supply("h100-80gb", 0, of=8)])
    assert by_class(found["chat/young"]) == {"h100-80gb": 1}
    assert (found["chat/old"].reason, found["chat/old"].missing) == ("NoCapacity", 1)


def test_replicas_above_a_minimum_go_before_any_minimum_and_the_youngest_of_the_lowest_first() -> None:
    def stands(*per_node: int) -> dict[str, ReplicaState]:
        return {"h100-80gb": standing(1, *per_node, name="h100-80gb")}

    spare = replace(demand("chat/spare", H100, wanted=2, standing=stands(1, 1)), minimum=1)
    lowest = demand("chat/lowest", H100, age=9, standing=stands(1))
    high = demand("chat/high", H100, priority=9)
    found = plan([spare, lowest, high], [supply("h100-80gb", 0, 0, of=2)])
    assert by_class(found["chat/lowest"]) == {"h100-80gb": 1}
    assert by_class(found["chat/spare"]) == {"h100-80gb": 1}

    old, young = (demand(f"chat/{n}", H100, age=a, standing=stands(1)) for n, a in (("old", 1), ("young", 2)))
    found = plan([old, young, high], [supply("h100-80gb", 0, of=2)])
    assert (by_class(found["chat/old"]), by_class(found["chat/young"])) == ({"h100-80gb": 1}, {})


def test_nothing_is_evicted_when_that_does_not_help() -> None:
    # The low one's 4 GPUs and 3 free ones are no block of 8; the other GPUs of the node are not Shoal's.
    low = demand(
        "chat/low", candidate("h100-80gb", 4, "9.96"), standing={"h100-80gb": standing(4, 1, name="h100-80gb")}
    )
    found = plan([low, demand("chat/high", EIGHT, priority=9)], [supply("h100-80gb", 3, of=8)])
    assert by_class(found["chat/low"]) == {"h100-80gb": 1}
    assert found["chat/high"].reason == "NoCapacity"


def test_no_more_replicas_are_evicted_than_it_takes() -> None:
    def stands(gpus: int, node: int) -> dict[str, ReplicaState]:
        return {"h100-80gb": ReplicaState(1, gpus, {f"h100-80gb-{node}": Held(1, 1)}, 1)}

    four, two = candidate("h100-80gb", 4, "9.96"), candidate("h100-80gb", 2, "4.98")
    models = [
        demand("chat/a", two, age=1, standing=stands(2, 0)),
        demand("chat/b", four, age=2, standing=stands(4, 0)),
        demand("chat/c", two, age=3, standing=stands(2, 0)),
    ]
    found = plan([*models, demand("chat/high", four, priority=9)], [supply("h100-80gb", 0, of=8)])
    assert [m for m in ("chat/a", "chat/b", "chat/c") if not by_class(found[m])] == ["chat/b"]


def test_one_large_replica_that_goes_makes_room_for_several_small_ones() -> None:
    low = demand("chat/low", EIGHT, standing={"h100-80gb": standing(8, 1, name="h100-80gb")})
    high = demand("chat/high", candidate("h100-80gb", 4, "9.96"), priority=9, wanted=3)
    found = plan([low, high], [supply("h100-80gb", 0, of=8)])
    assert (found["chat/high"].waiting, found["chat/high"].missing) == (2, 1)


def test_while_a_large_replica_waits_for_its_block_no_small_one_is_asked_for_that_could_be_bound_into_it() -> None:
    low = demand("chat/low", H100, standing={"h100-80gb": standing(1, 1, name="h100-80gb")})
    high = demand("chat/high", candidate("h100-80gb", 4, "9.96"), priority=9)
    found = plan([low, high], [supply("h100-80gb", 3, 2, of=4)])
    assert (found["chat/high"].waiting, by_class(found["chat/low"])) == (1, {})
    assert found["chat/low"].message == (
        "waits for chat/high (priority 9), which has GPUs of h100-80gb; no room for a replica of 1 GPU: "
        "h100-80gb: 5 of 8 GPUs free, 3 promised to replicas that are starting, "
        "kept while a replica of 4 GPUs waits for its block"
    )
    # The winner is bound: the loser starts on the other node.
    has = {"h100-80gb": standing(4, 1, name="h100-80gb")}
    found = plan(
        [replace(low, replica_states={}), replace(high, replica_states=has)], [supply("h100-80gb", 0, 2, of=4)]
    )
    assert by_class(found["chat/low"]) == {"h100-80gb": 1}


def test_a_loser_that_fits_elsewhere_starts_there_before_it_goes() -> None:
    on_l4 = standing(1, 1, name="l4-24gb")
    low, high = demand("chat/low", L4, H100, standing={"l4-24gb": on_l4}), demand("chat/high", L4, priority=9)
    room = [supply("l4-24gb", 0, of=1), supply("h100-80gb", 8)]
    found = plan([low, high], room)
    assert by_class(found["chat/low"]) == {"l4-24gb": 1, "h100-80gb": 1}
    assert (found["chat/low"].reason, found["chat/low"].message) == (
        "Moving",
        "1 on h100-80gb, 1 GPU each; chat/high (priority 9) needs its GPUs on l4-24gb: the replica there goes when its "
        "replacement is ready",
    )
    assert found["chat/high"].message == (
        "waits for 1 GPU on l4-24gb that chat/low (priority 0) gives up when others serve in their place"
    )
    starting = ReplicaState(1, 1, {"h100-80gb-0": Held(1, 0)}, 1)
    room = [supply("l4-24gb", 0, of=1), supply("h100-80gb", 7, of=8)]
    low = replace(low, replica_states={"l4-24gb": on_l4, "h100-80gb": starting})
    assert by_class(plan([low, high], room)["chat/low"]) == {"l4-24gb": 1, "h100-80gb": 1}
    low = replace(low, replica_states={"l4-24gb": on_l4, "h100-80gb": standing(1, 1, name="h100-80gb")})
    found = plan([low, high], room)
    assert by_class(found["chat/low"]) == {"h100-80gb": 1}
    assert found["chat/low"].message == "1 on h100-80gb, 1 GPU each"


def test_a_loser_without_ready_replicas_does_not_make_the_winner_wait_for_its_next_place() -> None:
    silent = ReplicaState(1, 1, {"l4-24gb-0": Held(1, 0)}, 1)
    low, high = demand("chat/low", L4, H100, standing={"l4-24gb": silent}), demand("chat/high", L4, priority=9)
    found = plan([low, high], [supply("l4-24gb", 0, of=1), supply("h100-80gb", 8)])
    assert by_class(found["chat/low"]) == {"h100-80gb": 1}
    assert found["chat/high"].message == "waits for 1 GPU on l4-24gb that chat/low (priority 0) gives up, within 900 s"


def test_gpus_that_drain_are_waited_for_only_when_none_are_free() -> None:
    model = demand("chat/a", L4, H100)
    draining = supply("l4-24gb", 0, of=1, releasing=[1])
    assert one(model, draining, supply("h100-80gb", 8)).variants == (VariantPlan("h100-80gb", 1, 1, "2.49"),)
    found = one(model, draining, supply("h100-80gb", 0, of=8))
    assert found.variants == (VariantPlan("l4-24gb", 1, 1, "0.43", waiting=1),)
    assert found.message == "waits for 1 GPU on l4-24gb that pods that are being deleted still hold"


def test_a_pod_that_a_rollout_replaces_in_place_does_not_send_the_model_elsewhere() -> None:
    rolling = ReplicaState(1, 1, {"l4-24gb-0": Held(0, 0, 1)}, 1, settled=False)
    model = demand("chat/a", L4, H100, standing={"l4-24gb": rolling})
    found = one(model, supply("l4-24gb", 0, of=1, releasing=[1]), supply("h100-80gb", 8))
    assert by_class(found) == {"l4-24gb": 1}
    assert found.message == "waits for 1 GPU on l4-24gb that its own replica that goes gives up, within 900 s"


def test_the_surge_of_a_rollout_holds_its_gpus_and_adds_no_replica() -> None:
    surging = ReplicaState(1, 1, {"l4-24gb-0": Held(1, 1)}, 2, settled=False)
    model = demand("chat/a", L4, standing={"l4-24gb": surging})
    found = plan([model, demand("chat/b", L4, age=1)], [supply("l4-24gb", 1, of=2)])
    assert by_class(found["chat/a"]) == {"l4-24gb": 1}
    assert found["chat/b"].missing == 1


def test_the_room_of_a_class_is_told_in_numbers() -> None:
    room = replace(supply("l4-24gb", 1, of=4), matching=3, capacity=12)
    found = one(demand("chat/a", L4, wanted=2), room)
    assert found.message == (
        "no room for 1 of 2 replicas of 1 GPU: l4-24gb: 1 of 12 GPUs free, 1 promised to replicas that are starting, "
        "8 on nodes that take no pods or not healthy; placed: 1 on l4-24gb"
    )
    found = one(demand("chat/a", L4), replace(supply("l4-24gb"), matching=2, capacity=8))
    assert found.message.endswith("l4-24gb: none of its 2 node(s) takes pods")
    found = one(demand("chat/a", L4), replace(supply("l4-24gb"), matching=2, capacity=0))
    assert found.message.endswith("l4-24gb: its 2 node(s) have none of the resource")


# --- what pods tell the scheduler -------------------------------------------------------------------------------------


def test_small_replicas_are_drawn_together_and_whole_blocks_are_not() -> None:
    small = steering(gpu_class="l4-24gb", model_uid="u1", gpus=1)
    assert small.near is not None
    assert small.near.labels == {"app.kubernetes.io/component": "engine", "shoal.dev/gpu-class": "l4-24gb"}
    assert steering(gpu_class="h100-80gb", model_uid="u1", gpus=8).near is None
    assert small.apart.labels["shoal.dev/model-uid"] == "u1"
