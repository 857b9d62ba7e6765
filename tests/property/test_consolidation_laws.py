"""What holds whenever a node is emptied: nothing runs there, its replicas fit on nodes that exist, and it ends."""

import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.consolidation import (
    ConsolidationMemory,
    ConsolidationSnapshot,
    ModelThere,
    NodeThere,
    ReplicaThere,
    decide,
)
from shoal.core.scaling import Load

T = TypeVar("T")
START = datetime(2026, 11, 27, tzinfo=UTC)
AFTER = 30.0
COUNT = st.one_of(st.none(), st.integers(0, 2))
LOAD = st.one_of(st.none(), st.builds(Load, running=COUNT, waiting=COUNT, prompt_tokens_total=st.integers(0, 1)))
QUIET = Load(running=0, waiting=0, prompt_tokens_total=0)


def mostly(usual: T, others: st.SearchStrategy[T]) -> st.SearchStrategy[T]:
    return st.one_of(st.just(usual), st.just(usual), st.just(usual), others)


MODEL = st.builds(
    ModelThere,
    key=st.just("ns/m"),
    held=mostly(0, COUNT),
    cold_start_seconds=mostly(5.0, st.one_of(st.none(), st.floats(0, 500))),
)


@st.composite
def classes(draw: st.DrawFn, least_quiet: bool = False) -> tuple[NodeThere, ...]:
    """Nodes whose replicas fit there."""
    found: list[NodeThere] = []
    for i in range(draw(st.integers(1, 6))):
        gpus, held, replicas = draw(st.sampled_from([2, 4, 8])), 0, list[ReplicaThere]()
        for j in range(draw(st.integers(0, 4))):
            size = draw(st.sampled_from([1, 1, 2, 4]))
            if held + size > gpus:
                break
            held += size
            load = QUIET if least_quiet else draw(mostly(QUIET, LOAD))
            model = ModelThere("ns/m", 0, 5.0) if least_quiet else draw(MODEL)
            replicas.append(ReplicaThere(f"r{i}-{j}", f"ns/r{i}-{j}", model, size, True, load))
        takes = least_quiet or draw(mostly(True, st.booleans()))
        others = 0 if least_quiet or held == gpus else draw(mostly(0, st.integers(0, gpus - held)))
        found.append(NodeThere(f"n{i}", gpus, tuple(replicas), others, takes))
    return tuple(found)


def is_quiet(replica: ReplicaThere) -> bool:
    load = replica.load
    return load is not None and load.running == 0 and load.waiting == 0 and replica.model.held == 0


@settings(max_examples=300)
@given(classes(), st.lists(st.tuples(st.floats(1, 40), st.randoms(use_true_random=False)), min_size=1, max_size=8))
def test_no_replica_is_moved_that_had_a_request_or_an_unknown_signal(
    nodes: tuple[NodeThere, ...], looks: Sequence[tuple[float, random.Random]]
) -> None:
    memory: ConsolidationMemory | None = None
    now, last_busy = START, dict[str, datetime]()
    for seconds, rng in looks:
        now += timedelta(seconds=seconds)
        for each in (r for n in nodes for r in n.replicas):
            if not is_quiet(each):
                last_busy[each.uid] = now
        before = memory
        plan, memory = decide(ConsolidationSnapshot(AFTER, nodes), memory, now)
        if plan.emptied is not None:
            source = next(n for n in nodes if n.name == plan.emptied.node)
            assert before is not None, "a term begins by looking"
            assert source.replicas
            for each in source.replicas:
                assert is_quiet(each)
                assert (now - last_busy.get(each.uid, START)).total_seconds() >= AFTER
            free = [n.free for n in nodes if n.name != source.name and n.takes_pods and n.held]
            assert sum(each.gpus for each in source.replicas) <= sum(free)
            assert all(max(free) >= each.gpus for each in source.replicas)
            assert not source.others
            return
        # Something begins or ends on one of the nodes.
        nodes = tuple(
            replace(n, replicas=tuple(replace(r, load=rng.choice([r.load, QUIET, None])) for r in n.replicas))
            if rng.random() < 0.3
            else n
            for n in nodes
        )


@settings(max_examples=200)
@given(classes(least_quiet=True), st.randoms(use_true_random=False))
def test_each_node_that_is_emptied_is_one_less_in_use_wherever_the_scheduler_binds(
    nodes: tuple[NodeThere, ...], rng: random.Random
) -> None:
    """So it ends, and nothing moves to and fro. Replicas of one size are bound anywhere, others large ones first."""
    memory: ConsolidationMemory | None = None
    now, nodes = START, tuple(n for n in nodes if n.held)
    for _ in range(30):
        now += timedelta(seconds=400)
        plan, memory = decide(ConsolidationSnapshot(AFTER, nodes), memory, now)
        if plan.emptied is None:
            continue
        source = next(n for n in nodes if n.name == plan.emptied.node)
        left = [n for n in nodes if n.name != source.name]
        moving = list(source.replicas)
        rng.shuffle(moving)
        if len({each.gpus for each in moving}) > 1:
            moving.sort(key=lambda r: -r.gpus)
        for n, each in enumerate(moving):
            places = [i for i, there in enumerate(left) if there.free >= each.gpus]
            assert places, "what was decided to fit fits"
            i = rng.choice(places) if len({r.gpus for r in moving}) == 1 else min(places, key=lambda i: left[i].free)
            new = replace(each, uid=f"{each.uid}+{n}", pod=f"{each.pod}+{n}")
            left[i] = replace(left[i], replicas=(*left[i].replicas, new))
        emptied = plan.emptied
        plan, memory = decide(
            ConsolidationSnapshot(AFTER, (*left, replace(source, replicas=(), takes_pods=False)), emptied=emptied),
            memory,
            now + timedelta(seconds=5),
        )
        assert plan.emptied is not None
        _, memory = decide(
            ConsolidationSnapshot(AFTER, tuple(left), emptied=plan.emptied), memory, now + timedelta(seconds=6)
        )
        assert len(left) == len(nodes) - 1
        assert all(n.held for n in left)
        nodes = tuple(left)
    last, _ = decide(ConsolidationSnapshot(AFTER, nodes), memory, now + timedelta(seconds=4000))
    assert last.emptied is None
