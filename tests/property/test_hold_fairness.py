"""Whoever waits gets its share, whatever the others do."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.hold.fair import FairQueue

TENANTS = st.sampled_from("abcde")
COSTS = st.integers(1, 5000)


@settings(deadline=None)
@given(st.lists(st.tuples(TENANTS, COSTS), max_size=200), st.randoms(use_true_random=False))
def test_nothing_is_lost_and_each_tenants_own_order_stays(pushes: list[tuple[str, int]], rng: random.Random):
    queue: FairQueue[int] = FairQueue()
    gone: set[int] = set()
    came: list[int] = []
    for number, (tenant, cost) in enumerate(pushes):
        queue.push(tenant, number, cost)
        if rng.random() < 0.2:
            victim = rng.randrange(number + 1)
            if victim not in came and victim not in gone:
                assert queue.remove(pushes[victim][0], victim)
                gone.add(victim)
            assert not queue.remove(pushes[victim][0], victim)
        if rng.random() < 0.3 and (first := queue.pop()) is not None:
            came.append(first)
    while (item := queue.pop()) is not None:
        came.append(item)
    assert len(queue) == 0
    assert sorted([*came, *gone]) == list(range(len(pushes)))
    for tenant in "abcde":
        own = [n for n in came if pushes[n][0] == tenant]
        assert own == sorted(own)


@settings(deadline=None)
@given(st.lists(st.tuples(TENANTS, COSTS, st.booleans()), max_size=60))
def test_what_does_not_fit_keeps_its_place_and_stops_nobody(pushes: list[tuple[str, int, bool]]):
    queue: FairQueue[int] = FairQueue()
    for number, (tenant, cost, _) in enumerate(pushes):
        queue.push(tenant, number, cost)
    came: list[int] = []
    while (item := queue.pop(lambda number: pushes[number][2])) is not None:
        came.append(item)
    own = {tenant: [n for n, push in enumerate(pushes) if push[0] == tenant and push[2]] for tenant in "abcde"}
    assert sorted(came) == sorted(n for each in own.values() for n in each)
    for tenant, numbers in own.items():
        assert [n for n in came if pushes[n][0] == tenant] == numbers
    rest: list[int] = []
    while (item := queue.pop()) is not None:
        rest.append(item)
    assert sorted([*came, *rest]) == list(range(len(pushes)))
    for tenant in "abcde":
        later = [n for n in rest if pushes[n][0] == tenant]
        assert later == sorted(later)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), COSTS), min_size=1, max_size=300),
    st.integers(0, 300),
    COSTS,
)
def test_a_tenant_that_comes_anew_waits_for_no_more_than_one_request_of_each_other(
    waiting: list[tuple[str, int]], served: int, cost: int
):
    queue: FairQueue[str | int] = FairQueue()
    for number, (tenant, size) in enumerate(waiting):
        queue.push(tenant, number, size)
    for _ in range(served):
        queue.pop()
    queue.push("new", "mine", cost)
    before: list[str | int] = []
    while (item := queue.pop()) not in (None, "mine"):
        assert item is not None
        before.append(item)
    others = [waiting[int(item)][0] for item in before]
    assert len(others) == len(set(others))


def test_ten_thousand_of_one_tenant_delay_anothers_single_one_by_nothing():
    queue: FairQueue[str | int] = FairQueue()
    for number in range(10_000):
        queue.push("many", number, 300)
    first_round = [queue.pop() for _ in range(8)]
    queue.push("single", "mine", 300)
    next_round = [queue.pop() for _ in range(8)]
    assert first_round == list(range(8))
    assert "mine" in next_round


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4), min_size=2),
    st.lists(st.integers(1, 500), min_size=4, max_size=4),
    st.integers(50, 400),
)
def test_tenants_that_always_wait_get_tokens_by_their_weights(weights: dict[str, int], sizes: list[int], rounds: int):
    queue: FairQueue[tuple[str, int]] = FairQueue()
    cost = dict(zip("abcd", sizes, strict=True))
    for tenant, weight in weights.items():
        for number in range(rounds):
            queue.push(tenant, (tenant, number), cost[tenant], weight)
    had = dict.fromkeys(weights, 0)
    for _ in range(rounds):
        item = queue.pop()
        assert item is not None
        had[item[0]] += cost[item[0]]
    # The bound of start-time fair queueing: at any time two flows that wait differ by less than a request of each.
    for one, other in [(a, b) for a in weights for b in weights if a < b]:
        apart = abs(had[one] / weights[one] - had[other] / weights[other])
        assert apart <= cost[one] / weights[one] + cost[other] / weights[other]


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 50))
def test_what_leaves_before_its_turn_costs_its_tenant_nothing(gone: int, others: int):
    queue: FairQueue[str] = FairQueue()
    for number in range(others):
        queue.push("other", f"o{number}", 100)
    for number in range(gone):
        queue.push("mine", f"m{number}", 10_000)
    for number in range(gone):
        queue.remove("mine", f"m{number}")
    queue.pop()
    queue.push("mine", "last", 100)
    assert queue.pop() == "last" or others == 1


def test_a_tenant_that_was_served_much_and_came_again_does_not_pay_for_an_empty_queue():
    queue: FairQueue[str] = FairQueue()
    queue.push("a", "a1", 1_000_000)
    assert queue.pop() == "a1"
    queue.push("a", "a2", 100)
    queue.push("b", "b1", 100)
    assert [queue.pop(), queue.pop()] == ["a2", "b1"]


def test_forgets_tenants_that_owe_nothing_any_more():
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        queue.push("always", f"a{number}", 10)
    for number in range(20_000):
        queue.push(f"once-{number}", f"o{number}", 10)
        queue.push("always", f"b{number}", 10)
        queue.pop()
        queue.pop()
    assert len(queue) == 3
    assert len(queue._flows) < 500  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("cost", "weight"), [(0, 1), (-1, 1), (1, 0), (1, -1)])
def test_a_cost_or_weight_of_nothing_is_refused(cost: float, weight: float):
    queue: FairQueue[str] = FairQueue()
    with pytest.raises(ValueError, match="must be above 0"):
        queue.push("a", "x", cost, weight)


def test_the_same_item_twice_is_refused():
    queue: FairQueue[str] = FairQueue()
    queue.push("a", "x", 1)
    with pytest.raises(ValueError, match="waits already"):
        queue.push("a", "x", 1)
