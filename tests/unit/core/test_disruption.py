"""How many replicas the drain of a node must leave: worked examples, and two laws."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.disruption import min_available


def test_a_replica_that_serves_alone_may_be_evicted() -> None:
    assert min_available(None, ready=1, desired=1) == 0


def test_two_evictions_on_a_machine_that_goes_while_the_model_scales_up() -> None:
    standing = min_available(None, ready=2, desired=2)
    assert standing == 1, "one of both may go"
    # The first is evicted; two replacements are wanted, and three replicas more for the load. None is ready yet.
    standing = min_available(standing, ready=1, desired=6)
    assert standing == 1, "the second stays until another one is ready"
    standing = min_available(standing, ready=2, desired=6)
    assert standing == 1, "it may go: the four that have never been ready do not count"
    standing = min_available(standing, ready=1, desired=6)
    assert standing == 1
    assert min_available(standing, ready=6, desired=6) == 5


def test_scaling_down_lowers_it() -> None:
    assert min_available(9, ready=10, desired=4) == 3
    assert min_available(9, ready=10, desired=0) == 0


counts = st.integers(0, 1000)


@given(st.none() | counts, counts, counts)
def test_an_eviction_is_possible_once_all_that_are_wanted_are_ready(
    former: int | None, ready: int, desired: int
) -> None:
    found = min_available(former, ready, desired)
    assert found >= 0
    assert ready < desired or ready == 0 or found < ready


@given(counts, counts)
def test_evictions_alone_never_lower_it(ready: int, desired: int) -> None:
    before = min_available(None, ready, desired)
    for left in range(min(ready, desired), 0, -1):
        assert min_available(before, left, desired) == before
