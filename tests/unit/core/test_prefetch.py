"""Which node caches fetch a Model's weights in advance."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from shoal.core.prefetch import MOST_AT_ONCE, MOST_JOBS, PrefetchDemand, decide

GI = 2**30
NODES = {"h100": [f"n{i}" for i in range(6)], "l4": ["l0", "l1"]}


def asks(uid: str = "a", nodes: int = 2, classes: tuple[str, ...] = ("h100",), **more: Any) -> PrefetchDemand:
    return PrefetchDemand(uid, nodes, classes, more.pop("size", 100 * GI), more.pop("manifest", f"m-{uid}"), **more)


def test_as_many_nodes_of_each_class_as_asked_for_and_the_same_ones_again() -> None:
    first = decide([asks(classes=("h100", "l4"))], NODES, 500 * GI)["a"]
    assert [(c.gpu_class, len(c.nodes), c.ready, c.short) for c in first.classes] == [
        ("h100", 2, 0, ""),
        ("l4", 2, 0, ""),
    ]
    assert len(first.start) == 4
    done = {node: "done" for _, node in first.start}
    again = decide([asks(classes=("h100", "l4"), jobs=done)], NODES, 500 * GI)["a"]
    assert [c.nodes for c in again.classes] == [c.nodes for c in first.classes]
    assert ([c.ready for c in again.classes], again.start) == ([2, 2], ())


def test_a_node_with_a_replica_counts_and_needs_no_job() -> None:
    found = decide([asks(nodes=1, replicas_on={"n5"})], NODES, 500 * GI)["a"]
    assert (found.classes[0].nodes, found.classes[0].ready, found.start) == (("n5",), 1, ())


def test_a_node_that_goes_is_replaced() -> None:
    before = decide([asks()], NODES, 500 * GI)["a"].classes[0].nodes
    left = {"h100": [n for n in NODES["h100"] if n != before[0]]}
    after = decide([asks(jobs={before[1]: "done"})], left, 500 * GI)["a"]
    assert before[1] in after.classes[0].nodes
    assert [node for _, node in after.start] == [n for n in after.classes[0].nodes if n != before[1]]


def test_prefetched_weights_stay_below_a_share_of_each_cache_and_priority_comes_first() -> None:
    """75 % of 200 Gi is room for one of two Models of 100 Gi on each node."""
    old = asks("old", nodes=6, created=datetime(2026, 1, 1, tzinfo=UTC))
    new = asks("new", nodes=6, created=datetime(2026, 2, 1, tzinfo=UTC))
    found = decide([new, old], NODES, 200 * GI)
    assert [len(found[uid].classes[0].nodes) for uid in ("old", "new")] == [6, 0]
    assert found["new"].classes[0].short.startswith("6 of 6 nodes have no room")
    found = decide([replace(new, priority=1), old], NODES, 200 * GI)
    assert [len(found[uid].classes[0].nodes) for uid in ("old", "new")] == [0, 6]


def test_models_of_the_same_weights_share_them() -> None:
    found = decide([asks("a", nodes=6, manifest="m"), asks("b", nodes=6, manifest="m")], NODES, 200 * GI)
    assert [len(found[uid].classes[0].nodes) for uid in ("a", "b")] == [6, 6]


def test_few_fetches_run_at_once() -> None:
    many = {"h100": [f"n{i}" for i in range(32)]}
    assert len(decide([asks(nodes=32)], many, 500 * GI)["a"].start) == MOST_AT_ONCE
    fleet = decide([asks(f"m{i}", nodes=32, size=1) for i in range(40)], many, 500 * GI)
    assert sum(len(each.start) for each in fleet.values()) == MOST_JOBS


def test_what_failed_is_said_and_not_repeated_while_its_job_is_there() -> None:
    first = decide([asks(nodes=1)], NODES, 500 * GI)["a"]
    [node] = first.classes[0].nodes
    found = decide([asks(nodes=1, jobs={node: "failed"})], NODES, 500 * GI)["a"]
    assert (found.classes[0].failed, found.classes[0].ready, found.start) == ((node,), 0, ())


def test_nothing_is_fetched_before_the_size_is_known() -> None:
    assert decide([asks(size=None)], NODES, 500 * GI)["a"].start == ()


def test_fewer_nodes_than_asked_for_are_explained() -> None:
    assert decide([asks(nodes=9)], NODES, 500 * GI)["a"].classes[0].short == "the class has 6 of 9 nodes"
    assert decide([asks(classes=("none",))], NODES, 1)["a"].classes[0].short == "no node of the class takes pods"
