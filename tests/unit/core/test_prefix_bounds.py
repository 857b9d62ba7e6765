"""What knowledge of prompts may take of memory, and what wrong knowledge may cost."""

import tracemalloc

from shoal.core.routing.prefixes import MOST_MARKS, MOST_OF_ALL, PrefixIndex
from shoal.core.routing.replica import Replica
from shoal.core.routing.reuse import MOST_HEADS, Prompt, ReuseMemory
from shoal.core.routing.score import Pick, ReplicaScores
from tests.support.gateway import replica
from tests.unit.core.test_routing_score import IDLE, NOW, PODS, busy, known

LONG = 20_000
"""Tokens of a prompt."""


def point(number: int, tokens: int = 1) -> int:
    return tokens * 4 << 32 | number


def fill(index: PrefixIndex, uid: str, count: int, first: int) -> None:
    """A replica gets so many prompts of one token."""
    for number in range(first, first + count):
        index.sent(uid, [point(number)])


# --- memory


def test_all_replicas_together_have_a_bound_and_the_largest_gives_way() -> None:
    index = PrefixIndex()
    fill(index, "small", 100, 0)
    full = MOST_OF_ALL // MOST_MARKS
    for number in range(full):
        fill(index, f"pod-{number}", MOST_MARKS, (number + 1) * MOST_MARKS)
    assert len(index) == MOST_OF_ALL
    fill(index, "new", 50, (full + 1) * MOST_MARKS)
    assert len(index) == MOST_OF_ALL
    assert [index.tokens(uid) for uid in ("small", "new")] == [100, 50], "small ones lose nothing to large ones"
    left = [index.tokens(f"pod-{number}") for number in range(full)]
    assert sum(left) == MOST_OF_ALL - 150
    # One that has its share of the index pays for its own growth.
    fill(index, "pod-0", 50, (full + 2) * MOST_MARKS)
    assert len(index) == MOST_OF_ALL
    assert index.tokens("pod-0") == left[0]
    index.keep(())
    assert len(index) == 0


def test_the_memory_of_heads_has_a_bound_in_bytes() -> None:
    memory = ReuseMemory()
    trust = memory.trust("model")
    tracemalloc.start()
    try:
        for head in range(MOST_HEADS + 1000):
            memory.sent(Prompt(LONG, head=head, system=head, system_tokens=LONG), "pod-1", trust)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A head with one replica takes as much as one with MOST_PLACES: the smallest dict has room for them.
    assert len(memory) == MOST_HEADS + MOST_HEADS // 4
    assert taken < 16 * 2**20


# --- knowledge that is wrong: of a gateway that is stale, or that lies


def answered(scores: ReplicaScores, number: int, pods: list[Replica] = PODS) -> Pick:
    """A prompt that nobody sent before, of which a gateway says that pod-2 has it. The engine finds nothing."""
    points = [point(number, LONG)]
    scores.told("pod-2", points)
    pick = scores.pick(pods, {}, Prompt(LONG, points=points), NOW, rotation=number)
    assert pick is not None
    scores.answered(pick, first=None, prompt=LONG, cached=0, answer=10)
    return pick


def test_a_gateway_that_claims_every_prompt_for_a_replica_misleads_few_requests() -> None:
    scores = known(10_000.0, reports={1: busy(waiting=1, waiting_tokens=10_000)})
    misled = [number for number in range(200) if answered(scores, number).replica.uid == "pod-2"]
    assert misled, "the first ones believe it"
    assert len(misled) <= 20
    assert misled == list(range(len(misled))), "and no later one does"


def test_wrong_tellings_cost_no_more_than_what_tellings_are_worth_and_only_to_their_model() -> None:
    scores = known(10_000.0)
    for number in range(100):
        answered(scores, number)  # all replicas are idle: to follow it costs nothing
    trust = scores.reuse.trust(PODS[0].model_uid).of
    assert trust["held"] < 0.01
    fresh = ReuseMemory().trust("model").of
    assert {kind: trust[kind] for kind in trust if kind != "held"} == {
        kind: fresh[kind] for kind in fresh if kind != "held"
    }, "what this gateway has seen itself is believed as before"
    assert scores.reuse.trust("another model").of == fresh
    # With a little more ahead there, no claim is worth it any more.
    scores.reported("pod-2", busy(waiting=1, waiting_tokens=500), 0, NOW)
    assert answered(scores, 1000).replica.uid != "pod-2"


def test_claims_for_replicas_that_nobody_knows_are_dropped() -> None:
    scores = known(10_000.0)
    scores.told("pod-99", [point(1, LONG)])
    assert len(scores.prefixes) == 0
    scores.reported("pod-99", IDLE, 0, NOW)
    scores.told("pod-99", [point(1, LONG)])
    assert len(scores.prefixes) == 1
    scores.keep({replica(1).uid})
    assert len(scores.prefixes) == 0
