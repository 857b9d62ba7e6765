"""Which node of a class is emptied, so that an autoscaler removes it, and when it is given back."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from shoal.core.consolidation import (
    ConsolidationMemory,
    ConsolidationPlan,
    ConsolidationSnapshot,
    EmptiedNode,
    ModelThere,
    NodeThere,
    PendingPod,
    ReplicaThere,
    decide,
)
from shoal.core.scaling import Load
from shoal.core.status import consolidationstatus

START = datetime(2026, 11, 27, 12, tzinfo=UTC)
QUIET = Load(engine_boot="b", running=0, waiting=0, prompt_tokens_total=5, generation_tokens_total=7)
CHAT = ModelThere("ns/chat", held=0, cold_start_seconds=60.0)


def replica(name: str, *, gpus: int = 1, model: ModelThere = CHAT, **more: Any) -> ReplicaThere:
    given: dict[str, Any] = {"ready": True, "load": QUIET, **more}
    return ReplicaThere(name, f"ns/{name}", model, gpus, **given)


def node(name: str, *replicas: ReplicaThere, gpus: int = 4, **more: Any) -> NodeThere:
    return NodeThere(name, gpus, replicas, **more)


def two_nodes(there: ReplicaThere | None = None, **more: Any) -> ConsolidationSnapshot:
    """`n1` has one replica, `n2` three: that of `n1` fits there, and more than half of `n2` is in use."""
    nodes = (node("n1", there or replica("a")), node("n2", replica("b"), replica("c"), replica("d")))
    given: dict[str, Any] = {"after_seconds": 300.0, "nodes": nodes, **more}
    return ConsolidationSnapshot(**given)


class Term:
    """Decisions of one operator, one after the other."""

    def __init__(self) -> None:
        self.now, self.memory = START, None

    memory: ConsolidationMemory | None

    def look(self, seen: ConsolidationSnapshot, *, later: float = 0.0) -> ConsolidationPlan:
        self.now += timedelta(seconds=later)
        plan, self.memory = decide(seen, self.memory, self.now)
        return plan


def looked(seen: ConsolidationSnapshot, seconds: float = 300.0) -> ConsolidationPlan:
    """What is decided after the class was as it is for so long."""
    term = Term()
    term.look(seen)
    return term.look(seen, later=seconds)


def moving(seen: ConsolidationSnapshot | None = None) -> tuple[Term, ConsolidationSnapshot]:
    """`n1` is being emptied."""
    seen, term = seen or two_nodes(), Term()
    term.look(seen)
    plan = term.look(seen, later=300)
    assert plan.began
    return term, replace(seen, emptied=plan.emptied)


def without(seen: ConsolidationSnapshot, name: str) -> ConsolidationSnapshot:
    return replace(seen, nodes=tuple(each for each in seen.nodes if each.name != name))


def on(seen: ConsolidationSnapshot, name: str, *replicas: ReplicaThere, **more: Any) -> ConsolidationSnapshot:
    """The same with other replicas on a node."""
    nodes = (replace(n, replicas=replicas, **more) if n.name == name else n for n in seen.nodes)
    return replace(seen, nodes=tuple(nodes))


# --- which node -------------------------------------------------------------------------------------------------------


def test_the_emptiest_node_is_emptied_once_all_is_quiet_for_long_enough() -> None:
    term, seen = Term(), two_nodes(hourly_cost=(Decimal("0.43"), "USD"))
    assert term.look(seen).emptied is None
    early = term.look(seen, later=299)
    assert early.emptied is None
    assert early.stays == {"": "the use of the class has not been the same for 300 s yet"}
    plan = term.look(seen, later=1)
    assert plan.emptied == EmptiedNode(
        "n1", term.now, "3 of its 4 GPUs are free, and ns/a fit on other nodes, which saves 1.72 USD per hour"
    )
    assert plan.began


def test_nothing_happens_where_nobody_asked_for_it() -> None:
    plan = looked(two_nodes(after_seconds=None), 90_000)
    assert (plan.emptied, plan.recheck_seconds) == (None, None)


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (replace(QUIET, running=1), "ns/a has requests"),
        (replace(QUIET, waiting=2), "ns/a has requests"),
        (None, "the load of ns/a is not known"),
        (replace(QUIET, running=None), "the load of ns/a is not known"),
        (replace(QUIET, waiting=None), "the load of ns/a is not known"),
    ],
)
def test_a_replica_with_a_request_or_an_unknown_load_is_never_moved(load: Load | None, why: str) -> None:
    plan = looked(two_nodes(replica("a", load=load)), 90_000)
    assert plan.emptied is None
    assert plan.stays["n1"] == why


@pytest.mark.parametrize(
    ("held", "why"),
    [(2, "requests are held for ns/chat"), (None, "a gateway does not say what it holds for ns/chat")],
)
def test_a_model_for_which_requests_are_held_or_may_be_is_never_moved(held: int | None, why: str) -> None:
    plan = looked(two_nodes(replica("a", model=replace(CHAT, held=held))), 90_000)
    assert plan.emptied is None
    assert plan.stays["n1"] == why


@pytest.mark.parametrize("change", [{"prompt_tokens_total": 6}, {"generation_tokens_total": 8}, {"engine_boot": "c"}])
def test_a_request_between_two_looks_begins_the_wait_anew(change: dict[str, Any]) -> None:
    term, seen = Term(), two_nodes()
    term.look(seen)
    seen = two_nodes(replica("a", load=replace(QUIET, **change)))
    term.look(seen, later=200)
    plan = term.look(seen, later=299)
    assert plan.emptied is None
    assert "had a request within the last 300 s" in plan.stays["n1"]
    assert term.look(seen, later=1).began


def test_a_signal_that_was_lost_for_a_moment_begins_the_wait_anew() -> None:
    term, seen = Term(), two_nodes()
    term.look(seen)
    term.look(two_nodes(replica("a", load=None)), later=200)
    term.look(seen, later=1)
    assert term.look(seen, later=299).emptied is None
    assert term.look(seen, later=1).began


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"takes_pods": False}, "it takes no pods"),
        ({"keeps": "karpenter.sh/do-not-disrupt"}, "its annotation karpenter.sh/do-not-disrupt forbids it"),
        ({"others": 1}, "other pods hold 1 of its GPUs"),
    ],
)
def test_a_node_that_has_to_stay_is_not_emptied(change: dict[str, Any], why: str) -> None:
    plan = looked(on(two_nodes(), "n1", replica("a"), **change))
    assert plan.emptied is None
    assert plan.stays["n1"] == why


def test_a_pod_that_must_not_be_disrupted_is_not_moved() -> None:
    annotation = "cluster-autoscaler.kubernetes.io/safe-to-evict"
    plan = looked(two_nodes(replica("a", keeps=annotation)))
    assert plan.emptied is None
    assert plan.stays["n1"] == f"ns/a: its annotation {annotation} forbids it"


def test_a_node_is_emptied_only_where_half_of_it_is_free() -> None:
    full = node("n2", *(replica(f"b{i}") for i in range(4)), gpus=8)
    seen = two_nodes(nodes=(node("n1", replica("a", gpus=3)), full))
    plan = looked(seen)
    assert plan.emptied is None
    assert plan.stays["n1"] == "3 of its 4 GPUs are held, more than half"
    half = looked(replace(seen, nodes=(node("n1", replica("a", gpus=2)), full)))
    assert half.emptied is not None
    assert half.emptied.node == "n1"


def test_replicas_go_only_where_there_are_free_gpus_of_nodes_in_use() -> None:
    no_room = "its replicas do not fit into the free GPUs of the other nodes in use"
    full = node("n2", *(replica(f"b{i}") for i in range(4)))
    assert looked(two_nodes(nodes=(node("n1", replica("a")), full))).stays["n1"] == no_room
    # Alone, a class has no other node, however many an autoscaler would add.
    assert looked(two_nodes(nodes=(node("n1", replica("a")),))).stays["n1"] == no_room
    # GPUs of a node that takes no pods are not free, and a replica has all its GPUs on one node.
    cordoned = node("n2", replica("b"), takes_pods=False)
    assert looked(two_nodes(nodes=(node("n1", replica("a")), cordoned))).stays["n1"] == no_room
    three = [node(f"n{i}", *(replica(f"b{i}{j}") for j in range(3))) for i in (2, 3)]
    assert looked(two_nodes(nodes=(node("n1", replica("a", gpus=2)), *three))).stays["n1"] == no_room


def test_replicas_of_several_sizes_fit_whichever_nodes_the_scheduler_chooses() -> None:
    """With the small one on the emptiest node, the large one would find no place, and a node would be added for it."""
    source = node("n1", replica("a", gpus=2), replica("b", gpus=1), gpus=8)
    others = (
        node("n2", replica("c", gpus=6, load=None), gpus=8),
        node("n3", replica("d", gpus=7, load=None), gpus=8),
    )
    plan = looked(two_nodes(nodes=(source, *others)))
    assert plan.emptied is None
    assert "do not fit" in plan.stays["n1"]


def test_of_several_nodes_one_is_emptied_and_the_busy_one_is_passed_over() -> None:
    seen = two_nodes(
        nodes=(
            node("n1", replica("busy", load=replace(QUIET, running=3))),
            node("n2", replica("a")),
            node("n3", replica("b")),
        )
    )
    plan = looked(seen)
    assert plan.emptied is not None
    assert plan.emptied.node == "n2"
    assert plan.stays == {"n1": "ns/busy has requests"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"contested": True}, "a replica that may run on the class waits for GPUs"),
        ({"pending": (PendingPod("ns/new", 1.0),)}, "ns/new has no node yet"),
        ({"out_of_use": True}, "GPUs of the class are out of use"),
    ],
)
def test_a_class_where_something_is_under_way_is_left_alone(change: dict[str, Any], why: str) -> None:
    plan = looked(two_nodes(**change), 90_000)
    assert plan.emptied is None
    assert plan.stays == {"": why}


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replica("b", ready=False), "ns/b is not ready"),
        (replica("b", deleting=True), "ns/b is going"),
        (replica("b", model=replace(CHAT, fixed="is being rolled out")), "ns/chat is being rolled out"),
        (replica("b", model=replace(CHAT, fixed="is in backoff on the class")), "ns/chat is in backoff on the class"),
        (replica("b", model=replace(CHAT, unsettled="is being scaled")), "ns/chat is being scaled"),
    ],
)
def test_a_class_whose_other_replicas_change_is_left_alone(other: ReplicaThere, why: str) -> None:
    plan = looked(on(two_nodes(), "n2", other), 90_000)
    assert plan.emptied is None
    assert plan.stays == {"": why}


def test_while_a_node_is_empty_none_is_emptied() -> None:
    """Its autoscaler removes that one first; else the replacement could make it a node in use again."""
    seen = two_nodes()
    plan = looked(replace(seen, nodes=(*seen.nodes, node("n3"))), 90_000)
    assert plan.emptied is None
    assert plan.stays == {"": "n3 is empty already"}


def test_a_class_whose_use_changed_has_to_be_the_same_again_for_long_enough() -> None:
    term, seen = Term(), two_nodes()
    term.look(seen)
    seen = on(seen, "n2", replica("b"), replica("c"), replica("other"))
    term.look(seen, later=290)
    assert term.look(seen, later=299).emptied is None
    assert term.look(seen, later=1).began


# --- it pays ----------------------------------------------------------------------------------------------------------


def test_a_move_that_costs_more_than_it_saves_waits_until_the_use_has_lasted_longer() -> None:
    """4 GPUs for (H - 240) s against 1 GPU for 240 s: from 300 s on."""
    term, seen = Term(), two_nodes(replica("a", model=replace(CHAT, cold_start_seconds=240)), after_seconds=10.0)
    term.look(seen)
    plan = term.look(seen, later=300)
    assert plan.emptied is None
    assert plan.stays["n1"] == (
        "it does not pay until the use of the class has been the same for 300 s: a cold start of 240 s, and 240 "
        "GPU-seconds of replicas that run twice, for 4 GPUs"
    )
    assert term.look(seen, later=1).began


def test_use_is_not_expected_to_last_longer_than_an_hour() -> None:
    plan = looked(two_nodes(replica("a", model=replace(CHAT, cold_start_seconds=3000))), 90_000)
    assert plan.emptied is None, "4 x 600 s saved, against 3000 s"


def test_without_a_measured_cold_start_nothing_is_moved() -> None:
    plan = looked(two_nodes(replica("a", model=replace(CHAT, cold_start_seconds=None))), 90_000)
    assert plan.stays["n1"] == "no cold start of ns/chat was measured on the class"


def test_a_replica_that_scale_down_takes_soon_is_not_moved() -> None:
    going = replace(CHAT, idle_seconds=360.0)
    assert "scale-down takes its replicas by itself within" in looked(two_nodes(replica("a", model=going))).stays["n1"]
    assert looked(two_nodes(replica("a", model=replace(CHAT, idle_seconds=900.0)))).began
    # One that stays there keeps the node, so it pays.
    both = two_nodes(
        nodes=(node("n1", replica("a", model=going), replica("s")), node("n2", replica("b"), replica("c")))
    )
    assert looked(both).began


# --- while it is emptied ----------------------------------------------------------------------------------------------


def test_a_node_is_emptied_and_kept_free_until_the_autoscaler_removes_it() -> None:
    term, seen = moving()
    assert term.look(seen, later=1).emptied == seen.emptied
    new = replica("new", ready=False, load=None)
    seen = on(seen, "n2", replica("b"), replica("c"), replica("d"), new)
    assert term.look(seen, later=1).emptied == seen.emptied, "the replacement starts"
    seen = on(seen, "n1", replica("a", deleting=True, load=replace(QUIET, running=4)))
    assert term.look(seen, later=1).emptied == seen.emptied, "what runs there ends first"
    plan = term.look(on(seen, "n1"), later=1)
    assert plan.emptied is not None
    assert plan.emptied.empty_since == term.now
    seen = replace(on(seen, "n1"), emptied=plan.emptied)
    assert term.look(seen, later=600).emptied == plan.emptied
    plan = term.look(without(seen, "n1"), later=1)
    assert plan.emptied is None
    assert plan.ended is not None
    assert (plan.ended.result, plan.ended.why) == ("removed", "it was removed")


def given_back(plan: ConsolidationPlan) -> str:
    assert plan.emptied is None
    assert plan.ended is not None
    assert plan.ended.result == "given back"
    return plan.ended.why


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (replica("a", load=replace(QUIET, running=1)), "ns/a has requests"),
        (replica("a", load=replace(QUIET, waiting=1)), "ns/a has requests"),
        (replica("a", load=replace(QUIET, generation_tokens_total=9)), "ns/a had a request"),
        (replica("a", load=None), "the load of ns/a is not known"),
        (replica("a", model=replace(CHAT, held=1)), "requests are held for ns/chat"),
        (replica("a", model=replace(CHAT, held=None)), "a gateway does not say what it holds for ns/chat"),
        (replica("a", model=replace(CHAT, fixed="is being rolled out")), "ns/chat is being rolled out"),
        (replica("a", keeps="karpenter.sh/do-not-disrupt"),
         "ns/a: its annotation karpenter.sh/do-not-disrupt forbids it now"),
    ],
)  # fmt: skip
def test_a_node_is_given_back_when_its_replica_may_not_be_moved_any_more(there: ReplicaThere, why: str) -> None:
    term, seen = moving()
    assert given_back(term.look(on(seen, "n1", there), later=1)) == why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"contested": True}, "a replica that may run on the class waits for GPUs"),
        ({"after_seconds": None}, "the class does not ask for it any more"),
        ({"pending": (PendingPod("ns/new", 31.0),)}, "ns/new has had no node for 31 s"),
        ({"pending": (PendingPod("ns/new", 0.1, "0/2 nodes are available"),)},
         "ns/new finds no place: 0/2 nodes are available"),
    ],
)  # fmt: skip
def test_a_node_is_given_back_when_the_replacement_finds_no_place(change: dict[str, Any], why: str) -> None:
    """At once when the scheduler says it: an autoscaler would add a node for it."""
    term, seen = moving()
    assert given_back(term.look(replace(seen, **change), later=1)) == why


def test_a_replacement_has_a_moment_to_be_bound() -> None:
    term, seen = moving()
    assert term.look(replace(seen, pending=(PendingPod("ns/new", 2.0),)), later=1).emptied == seen.emptied


@pytest.mark.parametrize(("cold", "seconds"), [(60.0, 300.0), (200.0, 600.0)])
def test_a_replacement_that_does_not_start_is_not_waited_for_beyond_three_cold_starts(
    cold: float, seconds: float
) -> None:
    term, seen = Term(), two_nodes(replica("a", model=replace(CHAT, cold_start_seconds=cold)))
    term.look(seen)
    plan = term.look(seen, later=500)
    seen = replace(seen, emptied=plan.emptied)
    assert term.look(seen, later=seconds).emptied == seen.emptied
    assert given_back(term.look(seen, later=1)) == f"a replacement was not ready after {seconds + 1:.0f} s"


@pytest.mark.parametrize("empty", [False, True])
def test_a_node_that_gets_another_pod_is_given_back(empty: bool) -> None:
    term, seen = moving()
    if empty:
        plan = term.look(on(seen, "n1"), later=1)
        seen = replace(on(seen, "n1"), emptied=plan.emptied)
    there = () if empty else (replica("a"),)
    again = Term()
    again.now, again.memory = term.now, term.memory
    assert given_back(term.look(on(seen, "n1", *there, replica("late")), later=1)) == "ns/late has come there"
    assert given_back(again.look(on(seen, "n1", *there, others=2), later=1)) == "other pods hold 2 of its GPUs now"


def test_an_empty_node_is_given_back_at_once_when_its_gpus_are_needed() -> None:
    """Before an autoscaler adds another one."""
    term, seen = moving()
    plan = term.look(on(seen, "n1"), later=1)
    seen = replace(on(seen, "n1"), emptied=plan.emptied, contested=True)
    assert given_back(term.look(seen, later=1)) == "a replica that may run on the class waits for GPUs"


def test_an_empty_node_that_nobody_removes_is_given_back_and_not_emptied_again_for_a_day() -> None:
    term, seen = moving()
    plan = term.look(on(seen, "n1"), later=1)
    seen = replace(on(seen, "n1"), emptied=plan.emptied)
    assert term.look(seen, later=1799).emptied == plan.emptied
    assert "no autoscaler removed it in 30 minutes" in given_back(term.look(seen, later=1))
    again = two_nodes()
    term.look(again, later=1)
    plan = term.look(again, later=7200)
    assert plan.emptied is None
    assert plan.stays["n1"] == "it was emptied before, and not removed"
    assert term.look(again, later=86_400).began


def test_after_a_node_the_class_rests() -> None:
    term, seen = moving(two_nodes(after_seconds=10.0))
    term.look(on(seen, "n1", replica("a", load=None)), later=1)
    seen = replace(seen, emptied=None)
    term.look(seen, later=1)
    plan = term.look(seen, later=1798)
    assert plan.emptied is None
    assert "left alone until" in plan.stays[""]
    assert term.look(seen, later=1).began


def test_after_a_node_that_was_removed_the_class_rests_five_minutes() -> None:
    nodes = (node("n1", replica("a")), node("n2", replica("b")), node("n3", replica("c")))
    term, seen = moving(two_nodes(nodes=nodes, after_seconds=10.0))
    seen = without(on(seen, "n3", replica("c"), replica("new")), "n1")
    assert term.look(seen, later=1).ended is not None
    seen = replace(seen, emptied=None)
    assert term.look(seen, later=299).emptied is None
    plan = term.look(seen, later=1)
    assert plan.emptied is not None
    assert plan.emptied.node == "n2"


def test_an_operator_that_starts_goes_on_with_the_node_of_the_status() -> None:
    _, seen = moving()
    assert seen.emptied is not None
    new = Term()
    new.now = seen.emptied.since + timedelta(seconds=20)
    for _ in range(3):
        assert new.look(seen, later=1).emptied == seen.emptied
    busy = replica("a", load=replace(QUIET, prompt_tokens_total=99))
    assert given_back(new.look(on(seen, "n1", busy), later=1)) == "ns/a had a request"


def test_stays_name_each_node_that_was_looked_at() -> None:
    full = tuple(replica(f"b{i}") for i in range(4))
    stays: Mapping[str, str] = looked(two_nodes(nodes=(node("n1", *full), node("n2", replica("a"), others=1)))).stays
    assert stays.keys() == {"n1", "n2"}


# --- the condition ----------------------------------------------------------------------------------------------------


def test_the_condition_says_why_the_nodes_with_the_fewest_replicas_are_not_emptied() -> None:
    full = [replica(name) for name in ("b", "c", "d")]
    seen = two_nodes(nodes=(node("n1", replica("a", load=None)), *(node(f"n{at}", *full) for at in range(2, 6))))
    said = consolidationstatus.condition(looked(seen))
    assert (said.type, said.status, said.reason) == ("Consolidating", "False", "NothingEmptied")
    assert said.message == (
        "n1: the load of ns/a is not known; n2: 3 of its 4 GPUs are held, more than half; "
        "n3: 3 of its 4 GPUs are held, more than half; and 2 more"
    )


def test_the_condition_does_not_change_while_only_time_goes_by() -> None:
    """Each change is a write."""
    term, seen = Term(), two_nodes(replica("a", model=replace(CHAT, cold_start_seconds=240)), after_seconds=100.0)
    said = [consolidationstatus.condition(term.look(seen, later=10)).message for _ in range(29)]
    assert len(set(said)) == 2, "first the use of the class is too young, then it does not pay yet"


def test_the_condition_says_which_node_is_emptied_and_why_the_last_one_was_given_back() -> None:
    term, seen = Term(), two_nodes()
    term.look(seen)
    began = term.look(seen, later=301)
    said = consolidationstatus.condition(began)
    assert (said.status, said.reason) == ("True", "Consolidating")
    assert said.message.startswith("node n1: 3 of its 4 GPUs are free")
    assert began.emptied is not None
    ended = term.look(replace(seen, emptied=began.emptied, contested=True), later=1)
    said = consolidationstatus.condition(ended)
    assert (said.status, said.reason) == ("False", "NothingEmptied")
    assert said.message == "node n1 no more: a replica that may run on the class waits for GPUs"
