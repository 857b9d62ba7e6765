"""Nodes that are emptied in a storm: what the judge says of those that were chosen."""

import pytest

from tests.storm import nodes, rests
from tests.storm.journals import Journals, NodeEvent, Sequence
from tests.storm.verdict import judge

POD = f"{rests.RESTS}-a"


def event(at: float, name: nodes.Event, node: str = "", *pods: str, why: str = "", good: bool = True) -> NodeEvent:
    return NodeEvent(at, name, node, pods, why, good)


EMPTIED = (
    event(100, "fault", why="node_thinned"),
    event(150, "emptying", "spot-2", POD),
    event(170, "gone", "spot-2", why="empty"),
)


def request(asked: float, finished: float | None, engine: str = POD, rid: str = "r1") -> Sequence:
    return Sequence(rid, engine, "boot", asked, finished)


def violations(*events: NodeEvent, sequences: tuple[Sequence, ...] = ()) -> list[str]:
    found = judge(Journals({}, nodes=list(events), sequences=list(sequences))).violations
    return [text for text in found if text.startswith("consolidation: ")]


def test_a_node_whose_replicas_rested_is_good() -> None:
    assert violations(*EMPTIED) == []
    assert violations() == [], "a storm in which none was to be emptied"
    assert violations(event(100, "fault", why="node_thinned", good=False)) == [], "the Models were not apart"
    kept = (event(120, "emptying", "spot-2", POD), event(125, "kept", "spot-2"))
    told = Journals({}, nodes=[*kept, *EMPTIED, event(90, "gone", "spot-3", why="empty")])
    assert rests.line(told) == "nodes chosen to be emptied 2, given back 1, emptied and gone 1"


@pytest.mark.parametrize(
    ("sequence", "good"),
    [
        (request(140, 160), False),  # under a stream
        (request(140, 145), False),  # soon after
        (request(130, 139), True),
        (request(149, 160), True),  # it came when the node was chosen
        (request(140, 160, engine=f"{rests.WORKS}-b"), True),  # on another node
        (request(140, None), True),  # cut off with its engine
        (request(140, 160, rid="shoal-canary-1"), True),
    ],
)
def test_a_node_that_is_emptied_under_a_stream_is_found(sequence: Sequence, good: bool) -> None:
    found = violations(*EMPTIED, sequences=(sequence,))
    text = f"spot-2 was chosen to be emptied while {POD} had a request, or less than 10 s after"
    assert found == ([] if good else [f"consolidation: {text}"])


def test_a_node_that_is_not_emptied_or_stays_is_found() -> None:
    never = "consolidation: 1 times two Models were apart, and no node was emptied and went"
    assert violations(EMPTIED[0]) == [never]
    assert violations(*EMPTIED[:2]) == [never]
    assert violations(*EMPTIED[:2], event(170, "gone", "spot-2", why="power")) == [never]
    assert violations(*EMPTIED[:2], event(170, "gone", "spot-1", why="empty")) == [never]
