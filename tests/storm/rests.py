"""Nodes that Shoal empties in a storm, so that the autoscaler removes them: two Models with one replica each, which
find themselves on a node each. One is asked all the time and must stay; the other rests between its bursts, and moves.

| somebody saw | verdict |
|---|---|
| a node chosen to be emptied while a replica there had a request, or soon after | broken |
| Models that were set apart, and no node that was emptied and went | broken |

Where a request comes while its replica moves, the node is given back, or the replica drains: none is lost.
"""

from collections.abc import Iterable
from typing import Final

from tests.storm.journals import Journals, Sequence

WORKS: Final = "storm-works"
RESTS: Final = "storm-rests"
AFTER_SECONDS: Final = 10
"""`nodes.autoscaled.consolidate.afterSeconds` of the class, the least that it may be."""
_SLACK_SECONDS: Final = 2.5
"""A status has whole seconds, and the engines' loads are heard of a moment later."""


def violations(journals: Journals) -> list[str]:
    """Nothing where no node was to be emptied."""
    emptying = [event for event in journals.nodes if event.event == "emptying"]
    busy = [
        f"{event.node} was chosen to be emptied while {each.engine} had a request, or less than {AFTER_SECONDS} s after"
        for event in emptying
        if (each := _worked(journals.sequences, event.pods, event.at)) is not None
    ]
    apart = sum((each.event, each.why, each.good) == ("fault", "node_thinned", True) for each in journals.nodes)
    idle = [f"{apart} times two Models were apart, and no node was emptied and went"]
    return [f"consolidation: {text}" for text in (*busy, *(idle if apart and not _went(journals) else ()))]


def line(journals: Journals) -> str:
    """What was emptied, in one line."""
    chosen, kept = (sum(each.event == what for each in journals.nodes) for what in ("emptying", "kept"))
    return f"nodes chosen to be emptied {chosen}, given back {kept}, emptied and gone {_went(journals)}"


def _went(journals: Journals) -> int:
    """Nodes that went empty after they had been chosen."""
    chosen = {event.node for event in journals.nodes if event.event == "emptying"}
    return sum((each.event, each.why) == ("gone", "empty") and each.node in chosen for each in journals.nodes)


def _worked(sequences: Iterable[Sequence], pods: tuple[str, ...], at: float) -> Sequence | None:
    """A request that a replica had at that time or shortly before. One that has no end was cut off with its engine."""
    since, until = at - AFTER_SECONDS + _SLACK_SECONDS, at - _SLACK_SECONDS
    return next(
        (
            each
            for each in sequences
            if each.engine in pods
            and not each.canary
            and each.asked < until
            and each.finished is not None
            and each.finished > since
        ),
        None,
    )
