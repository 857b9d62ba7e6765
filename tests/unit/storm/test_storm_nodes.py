"""Nodes that come and go in a storm: when the provider adds one, and what the judge says of what came and went."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.api import names
from tests.storm import nodes
from tests.storm.journals import Journals, NodeEvent, UsageRow
from tests.storm.provider import Cluster, Machine, NodeProvider, State, missing
from tests.storm.verdict import judge

POD = f"{nodes.MODEL}-a"


def pod(name: str, node: str | None = None, **changes: Any) -> dict[str, Any]:
    waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    spec: dict[str, Any] = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]}
    return {
        "metadata": {"name": name, "labels": {names.LABEL_GPU_CLASS: nodes.CLASS}} | changes,
        "spec": spec | ({"nodeName": node} if node else {}),
        "status": {"phase": "Pending", "conditions": [] if node else [waits]},
    }


def on(name: str, state: State = "there") -> Machine:
    return Machine(name, state, due=0.0, started=True)


@pytest.mark.parametrize(
    ("waiting", "machines", "count"),
    [
        (0, [], 0),
        (1, [], 1),
        (3, [], 2),
        (1, [on("spot-1")], 0),  # it has room
        (2, [on("spot-1", "coming")], 0),
        (3, [on("spot-1", "coming")], 1),
        (1, [on("spot-1", "leaving")], 1),
        (9, [on("spot-1"), on("spot-2", "leaving")], nodes.MOST - 2),
    ],
)
def test_a_node_comes_for_what_waits_beside_what_is_free(waiting: int, machines: list[Machine], count: int) -> None:
    assert missing(Cluster.of([], [pod(str(i)) for i in range(waiting)]), machines) == count


def test_only_pods_of_the_class_that_the_scheduler_gave_up_on_ask_for_nodes() -> None:
    others = [
        pod("going", deletionTimestamp="now"),
        pod("other", labels={}),
        pod("bound", node="spot-1"),
        pod("every-node", node="spot-2", ownerReferences=[{"kind": "DaemonSet"}]),
        pod("new") | {"status": {"phase": "Pending"}},
        pod("ended") | {"status": {"phase": "Failed"}},
    ]
    found = Cluster.of([], [*others, pod("waits")])
    assert [each["metadata"]["name"] for each in found.waiting] == ["waits"]
    assert list(found.bound) == ["spot-1"]
    assert missing(found, [on("spot-1")]) == 0, "one of its two GPUs is free"


def test_a_machine_that_leaves_is_nobody_elses(tmp_path: Path) -> None:
    provider = NodeProvider(None, tmp_path, random.Random(1))  # noqa: S311 # pyright: ignore[reportArgumentType]
    provider._machines["spot-1"] = on("spot-1")
    assert provider.nodes() == ["spot-1"]
    assert provider.notice("spot-1")
    assert not provider.notice("spot-1")
    assert provider.nodes() == []


def event(at: float, name: nodes.Event, node: str = "", *pods: str, why: str = "", good: bool = True) -> NodeEvent:
    return NodeEvent(at, name, node, pods, why, good)


GOOD = (
    event(0, "begins"),
    event(10, "asked", "spot-1", POD),
    event(18, "came", "spot-1"),
    event(20, "placed", "spot-1", POD),
    event(30, "fault", why="spot_node_taken", good=False),
    event(31, "fault", why="spot_node_taken"),
    event(31, "noticed", "spot-1", POD),
    event(40, "gone", "spot-1", why="notice"),
    event(41, "stock", good=False),
    event(45, "refused", "", POD),
    event(60, "quoted", "", nodes.MODEL),
    event(70, "stock"),
    event(90, "asked", "spot-2", POD),
    event(101, "came", "spot-2"),
    event(150, "gone", "spot-2", why="empty"),
)
ROW = UsageRow("g", "r1", "c1", "final", "t", "answered", 200, 1, f"storm/{POD}", model=f"storm/{nodes.MODEL}")


def journals(*events: NodeEvent, rows: tuple[UsageRow, ...] = (ROW,)) -> Journals:
    return Journals({}, rows=list(rows), nodes=list(events))


def violations(*events: NodeEvent, rows: tuple[UsageRow, ...] = (ROW,)) -> list[str]:
    return [text for text in judge(journals(*events, rows=rows)).violations if text.startswith("nodes: ")]


def without(*left_out: nodes.Event) -> tuple[NodeEvent, ...]:
    return tuple(each for each in GOOD if each.event not in left_out)


def test_nodes_that_come_and_go_are_good() -> None:
    assert violations(*GOOD) == []
    assert violations() == [], "a storm without such nodes"
    assert nodes.line(journals(*GOOD)) == (
        "nodes that came 2 (asked for 8 to 11 s before), went empty 1, were taken away 1 (1 replicas left in time, 0 "
        "were cut off); without stock 1 times, said of 1 pending replicas, in a Model's status 1 times; answers from "
        "such nodes 1"
    )


def test_what_was_cut_off_is_counted() -> None:
    events = [replace(each, pods=(POD,)) if each.why == "notice" else each for each in GOOD]
    assert "(0 replicas left in time, 1 were cut off)" in nodes.line(journals(*events))


def test_a_storm_in_which_nothing_came_or_went_is_found() -> None:
    assert violations(event(0, "begins")) == ["nodes: no node came; 0 replicas asked for one"]
    assert violations(*without("came")) == ["nodes: no node came; 1 replicas asked for one"]
    assert violations(*(each for each in GOOD if each.why != "empty")) == [
        "nodes: 2 came, and none went because it was empty"
    ]


@pytest.mark.parametrize("rows", [(), (replace(ROW, replica="storm/storm-steady-b"),), (replace(ROW, kind="open"),)])
def test_nodes_on_which_nobody_is_served_are_found(rows: tuple[UsageRow, ...]) -> None:
    assert violations(*GOOD, rows=rows) == ["nodes: no request was answered by a replica on a node that came"]


def test_a_fault_that_never_found_a_node_is_found() -> None:
    idle = (each for each in GOOD if not (each.event == "fault" and each.good))
    assert violations(*idle) == ["nodes: spot_node_taken never found a node to take away"]


def test_a_time_without_stock_that_no_status_tells_of_is_found() -> None:
    (found,) = violations(*without("quoted"))
    assert found.endswith("1 replicas waited, and no Model's status quoted the autoscaler")
    (found,) = violations(*without("refused", "quoted"))
    assert found == "nodes: for 29 s no node could be had, and no replica waited for one"
