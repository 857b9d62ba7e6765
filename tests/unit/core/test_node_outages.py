"""A class of which no further node comes: found out by one Model, known to all, and the last choice for a while."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from shoal.api.gpuclass import GPUClass
from shoal.core.facts import NodeRefusal, Pod
from shoal.core.gpus import Usage
from shoal.core.placement import ClassSupply, Demand, Held, Moves, Placement, ReplicaState, plan
from shoal.core.placement.backoff import REFUSED_SECONDS, RETRY_SECONDS, ClassBackoff, observe
from shoal.core.placement.outages import NodeOutage, decide, own, stored
from shoal.core.rollout import no_node_came
from shoal.core.status import gpuclassstatus
from tests.support.fleets import candidate, demand, standing, supply

NOW = datetime(2026, 11, 25, tzinfo=UTC)
L4, H100 = candidate("l4-24gb", cost="0.43"), candidate("h100-80gb", cost="2.49")
NO_STOCK = "karpenter: creating instance, insufficient capacity"
WHY = f"for 41 s no autoscaler added a node for a replica there: {NO_STOCK}"


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


# --- what one replica shows -------------------------------------------------------------------------------------------


def pending(*, refused: NodeRefusal | None = None, **more: Any) -> Pod:
    lacks = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    pod = Pod(
        "chat", "a-0", "u", None, False, False, False, {}, "m", gpu_class="l4-24gb", unschedulable=lacks, created=NOW,
        node_refusal=refused, autoscaler_event=refused.message if refused else None,
    )  # fmt: skip
    return replace(pod, **more)


def refusal(*, everyone: bool = True, repeated: bool = True) -> NodeRefusal:
    return NodeRefusal("StockOut", NO_STOCK, everyone, repeated)


def shown(pod: Pod, seconds: float, made: datetime | None = None) -> dict[str, ClassBackoff]:
    return observe(
        {}, [pod], now=at(seconds), timeout=lambda _: 1.0, provision=lambda _: 600.0, newest_node=lambda _: made
    )


def test_a_node_that_is_refused_twice_is_not_waited_for() -> None:
    assert shown(pending(refused=refusal(repeated=False)), 41) == {}
    found = shown(pending(refused=refusal()), 41)
    assert found == {"l4-24gb": ClassBackoff(WHY, at(41 + REFUSED_SECONDS), "StockOut")}
    assert own(found) == {}, "the class is at fault, for whatever Model"


def test_what_only_one_replica_is_refused_is_a_backoff_of_its_model() -> None:
    alone = shown(pending(refused=refusal(everyone=False)), 41)
    assert own(alone) == alone == {"l4-24gb": ClassBackoff(WHY, at(41 + RETRY_SECONDS))}
    # GPUs are free on a node that has no CPU left: for a replica that needs less, that node is good.
    lacks = pending(refused=refusal(), unschedulable="0/1 nodes are available: 1 Insufficient cpu.")
    assert list(own(shown(lacks, 41))) == ["l4-24gb"]


def test_a_node_that_does_not_come_in_twice_its_time_is_an_outage_unless_only_this_replica_gets_none() -> None:
    def reasons(pod: Pod, made: datetime | None = None) -> list[str]:
        return [each.no_nodes for each in shown(pod, 1200, made).values()]

    assert reasons(pending()) == ["NoNodeCame"]
    assert reasons(pending(autoscaler_event="karpenter: nodeclaim/x; late", node_late=True)) == ["NoNodeCame"]
    assert reasons(pending(autoscaler_event="karpenter: words that nobody knows")) == [""]
    assert reasons(pending(), at(300)) == [""], "a node came meanwhile, for another replica"
    assert reasons(pending(), at(-300)) == ["NoNodeCame"]


def test_a_rollout_does_not_wait_for_a_node_that_is_refused() -> None:
    assert not no_node_came([pending(refused=refusal(repeated=False))], 600.0, at(41))
    assert no_node_came([pending(refused=refusal())], 600.0, at(41))


# --- the outage of the class ------------------------------------------------------------------------------------------


def gpu_class(generation: int = 1, status: Mapping[str, Any] | None = None) -> GPUClass:
    autoscaled = {"max": 3, "gpusPerNode": 4, "provisionSeconds": 600}
    spec = {"nodeSelector": {"gpu": "l4"}, "memoryPerGPU": "24Gi", "nodes": {"autoscaled": autoscaled}}
    metadata = {"name": "l4-24gb", "generation": generation}
    return GPUClass.model_validate({"metadata": metadata, "spec": spec, "status": status})


def decided(
    known: Mapping[str, NodeOutage],
    seconds: float,
    *found: Mapping[str, ClassBackoff],
    of: GPUClass | None = None,
    made: datetime | None = None,
) -> dict[str, NodeOutage]:
    classes = {"l4-24gb": of or gpu_class()}
    return decide(known, found, classes, now=at(seconds), newest_node=lambda _: made)


REFUSED = shown(pending(refused=refusal()), 41)
OUT = decided({}, 41, REFUSED)


def test_an_outage_lasts_for_its_time_and_as_long_again_while_a_replica_is_refused() -> None:
    assert list(OUT.values()) == [NodeOutage("StockOut", WHY, at(41), at(41 + REFUSED_SECONDS), 1)]
    assert decided(OUT, 940) == OUT
    assert decided(OUT, 941) == {}
    again = decided(OUT, 941, shown(pending(refused=refusal()), 941))
    assert again == {"l4-24gb": replace(OUT["l4-24gb"], until=at(941 + REFUSED_SECONDS))}, "no second message"


def test_a_node_that_was_not_on_its_way_and_another_spec_end_it() -> None:
    assert decided(OUT, 700, made=at(-1000)) == OUT
    assert decided(OUT, 700, made=at(600)) == OUT, "it had been ordered before"
    assert decided(OUT, 700, made=at(642)) == {}
    assert decided(OUT, 50, of=gpu_class(generation=2)) == {}
    assert decide(OUT, [], {}, now=at(50), newest_node=lambda _: None) == {}, "the class is gone"


def test_an_outage_of_a_leader_whose_clock_was_ahead_does_not_last_longer_than_others() -> None:
    ahead = {name: replace(each, since=at(90_000), until=at(90_900)) for name, each in OUT.items()}
    known = decided(ahead, 60)
    assert [(each.since, each.until) for each in known.values()] == [(at(60), at(60 + RETRY_SECONDS))]
    assert decided(known, 61) == known
    assert decided(known, 60 + RETRY_SECONDS) == {}


def test_an_operator_whose_clock_is_behind_does_not_find_the_same_outage_anew_at_each_look() -> None:
    made = at(41 + 900)  # by the clock of the API server
    first = decided(OUT, 60, REFUSED, made=made)
    assert decided(first, 65, REFUSED, made=made) == first == OUT


def test_the_status_of_the_class_says_it_and_the_next_leader_reads_it_there() -> None:
    usage = Usage(0, 0, 0, 0, 0, ())
    one = gpu_class()
    status = gpuclassstatus.status(one, usage, (), overlapping={}, overhead=None, now=at(41), outage=OUT["l4-24gb"])
    said = next(c for c in status.conditions if c.type == "NodesAvailable")
    assert (said.status, said.reason) == ("False", "StockOut")
    assert said.message == f"{WHY}; until 2026-11-25T00:15:41Z Models take GPUs of other classes first"
    written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert stored(gpu_class(status=written)) == OUT["l4-24gb"]
    assert stored(gpu_class(2, written)) is None, "of another spec"
    none = gpuclassstatus.status(one, usage, (), overlapping={}, overhead=None, now=at(41))
    assert [c.type for c in none.conditions] == ["Ready"]


# --- what the plan makes of it ----------------------------------------------------------------------------------------


def coming(name: str, nodes: int, *free: int, outage: str = "", of: int | None = None) -> ClassSupply:
    return replace(supply(name, *free, of=of), coming=nodes, coming_gpus=1, outage=outage)


def by_class(placement: Placement) -> dict[str, int]:
    return {v.gpu_class: v.replicas for v in placement.variants if v.replicas}


def one(model: Demand, *supplies: ClassSupply, moves: Moves | None = None) -> Placement:
    return plan([model], supplies, moves=moves)[model.uid]


def waits(announced: int = 0) -> ReplicaState:
    return ReplicaState(1, 1, {}, pods=1, announced=announced)


OUT_OF_STOCK = coming("l4-24gb", 3, outage=WHY)


def test_a_model_that_has_not_tried_the_class_goes_to_the_next_one_at_once() -> None:
    found = one(demand("chat/b", L4, H100), OUT_OF_STOCK, coming("h100-80gb", 3))
    assert by_class(found) == {"h100-80gb": 1}
    assert found.message == (
        f"1 on h100-80gb, 1 GPU each; 1 on h100-80gb waits for a node that an autoscaler adds; not on l4-24gb: {WHY}"
    )
    assert [(e.gpu_class, e.reason) for e in found.excluded] == [("l4-24gb", "InBackoff")]


def test_gpus_of_nodes_that_exist_are_used_as_ever() -> None:
    assert by_class(one(demand("chat/b", L4, H100), coming("l4-24gb", 3, 1, outage=WHY), supply("h100-80gb", 4))) == {
        "l4-24gb": 1
    }


def test_a_replica_goes_on_waiting_for_the_node_that_was_announced_to_it() -> None:
    for announced, where in ((1, "l4-24gb"), (0, "h100-80gb")):
        model = demand("chat/b", L4, H100, standing={"l4-24gb": waits(announced)})
        assert by_class(one(model, OUT_OF_STOCK, coming("h100-80gb", 3))) == {where: 1}


def test_without_another_class_a_replica_waits_all_the_same_and_the_status_says_why() -> None:
    for model in (demand("chat/b", L4), demand("chat/b", L4, standing={"l4-24gb": waits()})):
        found = one(model, OUT_OF_STOCK)
        assert by_class(found) == {"l4-24gb": 1}
        assert found.message == (
            "1 on l4-24gb, 1 GPU each; 1 on l4-24gb waits for a node that an autoscaler adds; none is expected on "
            f"l4-24gb: {WHY}"
        )


def test_a_higher_priority_does_not_wait_for_a_node_that_does_not_come() -> None:
    serves = {"h100-80gb": standing(1, 1, name="h100-80gb")}
    low = demand("chat/low", H100, standing=serves)
    high = demand("chat/high", L4, H100, priority=10)
    for room, where in ((coming("l4-24gb", 3), "l4-24gb"), (OUT_OF_STOCK, "h100-80gb")):
        assert by_class(plan([low, high], [room, supply("h100-80gb", 0, of=1)])["chat/high"]) == {where: 1}


def test_nothing_moves_to_nodes_that_do_not_come_and_a_move_under_way_goes_on_where_one_was_announced() -> None:
    there = {"h100-80gb": ReplicaState(1, 1, {"h100-80gb-0": Held(1, 1)}, pods=1)}
    room = supply("h100-80gb", 0, of=1)
    rests = demand("chat/a", L4, H100, standing=there)
    assert by_class(one(rests, OUT_OF_STOCK, room, moves=Moves())) == {"h100-80gb": 1}
    for announced, found in ((0, {"h100-80gb": 1}), (1, {"h100-80gb": 1, "l4-24gb": 1})):
        moving = demand("chat/a", L4, H100, standing=there | {"l4-24gb": waits(announced)})
        assert by_class(one(moving, OUT_OF_STOCK, room, moves=Moves())) == found


def test_a_model_that_finds_no_room_is_told_that_no_node_is_expected() -> None:
    found = one(demand("chat/a", L4, wanted=4), OUT_OF_STOCK)
    assert (by_class(found), found.missing) == ({"l4-24gb": 3}, 1)
    assert f"no node is expected: {WHY}" in found.message


def test_a_replica_waits_through_an_outage_before_it_gets_a_node_of_a_class_where_its_engine_crashes() -> None:
    """The wait costs nothing. On a new node the engine would most likely crash again."""
    crashed = {"h100-80gb": "the engine of a replica there ended 3 times with exit code 1"}
    model = demand("chat/a", L4, H100, priority=10, backoffs=crashed)
    assert by_class(one(model, OUT_OF_STOCK, coming("h100-80gb", 3))) == {"l4-24gb": 1}
    assert by_class(one(model, coming("h100-80gb", 3))) == {"h100-80gb": 1}, "it is the last choice, and the only one"
    both_out = one(model, OUT_OF_STOCK, coming("h100-80gb", 3, outage=WHY))
    assert by_class(both_out) == {"l4-24gb": 1}
    # Nobody loses a GPU for an engine that crashes while a node may come.
    low = demand("chat/low", H100, standing={"h100-80gb": standing(1, 1, name="h100-80gb")})
    alone = replace(model, candidates=(H100,))
    found = plan([low, alone], [coming("h100-80gb", 1, 0, of=1)])
    assert (by_class(found["chat/low"]), by_class(found["chat/a"])) == ({"h100-80gb": 1}, {"h100-80gb": 1})
    # GPUs of a lower priority on a class where it runs come before a new node where it crashes.
    low = demand("chat/low", L4, standing={"l4-24gb": standing(1, 1, name="l4-24gb")})
    found = plan([low, model], [supply("l4-24gb", 0, of=1), coming("h100-80gb", 3)])
    assert by_class(found["chat/a"]) == {"l4-24gb": 1}
