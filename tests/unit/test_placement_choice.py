"""Which classes serve which part of the demand."""

from itertools import product
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.placement.choice import Bucket, Choice, Offered, choose
from tests.support.demand import problem

_PRICES = (0.5, 1.2, 2.5)
_CLASSES = [Offered(name, price) for name, price in zip("abc", _PRICES, strict=True)]


def test_each_part_goes_where_it_costs_least_and_whole_replicas_are_paid() -> None:
    short = Bucket("short", {"a": 4.0, "c": 1.5})
    long = Bucket("long", {"c": 2.5})
    found = choose([short, long], _CLASSES)
    assert found.slices["long"] == {"c": 8}
    assert (found.replicas, found.hourly_cost) == ({"a": 3, "c": 3}, 9.0)  # 3 c have half a replica to spare
    assert found.unserved == ()


def test_small_demand_is_put_together_on_one_replica() -> None:
    found = choose([Bucket(f"b{i}", {"a": 0.3, "b": 0.13, "c": 0.1}) for i in range(7)], _CLASSES)
    assert (found.replicas, found.hourly_cost) == ({"b": 1}, 1.2)


def test_limits_are_kept_and_what_finds_no_room_is_named() -> None:
    classes = [Offered("a", 0.5, limit=2), Offered("c", 2.5, limit=1)]
    either = Bucket("x", {"a": 4.0, "c": 1.0})
    found = choose([either, Bucket("y", {"a": 1.0})], classes)
    assert (found.replicas, found.unserved) == ({"a": 1, "c": 1}, ())
    found = choose([either, Bucket("y", {"a": 3.0})], classes)
    assert (found.replicas, found.unserved) == ({"a": 2, "c": 1}, ("y",))
    assert choose([Bucket("z", {})], classes) == Choice({}, {"z": {}}, 0.0, ("z",))


def test_a_bucket_has_at_least_one_slice() -> None:
    with pytest.raises(ValueError, match="at least one slice, not 0"):
        choose([], _CLASSES, slices=0)


_LOADS = st.lists(st.none() | st.integers(1, 40).map(lambda n: n / 8), min_size=3, max_size=3)


@given(st.lists(_LOADS.filter(any), min_size=1, max_size=5))
@settings(deadline=None, max_examples=40)
def test_the_choice_bears_the_load_and_putting_together_never_costs_more(
    loads: list[list[float | None]],
) -> None:
    buckets = [
        Bucket(f"b{i}", {name: load for name, load in zip("abc", row, strict=True) if load is not None})
        for i, row in enumerate(loads)
    ]
    found = choose(buckets, _CLASSES, slices=2)
    prices = {c.name: c.hourly_cost for c in _CLASSES}
    carried = dict.fromkeys("abc", 0.0)
    for bucket in buckets:
        assert sum(found.slices[bucket.name].values()) == 2
        for name, n in found.slices[bucket.name].items():
            carried[name] += bucket.load[name] * n / 2
    assert all(carried[name] <= found.replicas.get(name, 0) + 1e-6 for name in "abc")
    assert found.hourly_cost == pytest.approx(sum(prices[name] * n for name, n in found.replicas.items()))
    alone = dict.fromkeys("abc", 0.0)
    for bucket in buckets:
        cheapest = min(bucket.load, key=lambda name: bucket.load[name] * prices[name])
        alone[cheapest] += bucket.load[cheapest]
    assert found.hourly_cost <= sum(prices[name] * ceil(load - 1e-9) for name, load in alone.items()) + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_small_problems_are_solved_nearly_as_well_as_by_looking_at_everything(seed: int) -> None:
    loads = [[((i * 7 + j * 5 + seed * 3) % 11 + 2) / 6 / (j + 1) for j in range(3)] for i in range(6)]
    buckets = [Bucket(f"b{i}", dict(zip("abc", row, strict=True))) for i, row in enumerate(loads)]
    best = min(
        sum(
            price * ceil(sum(row[j] for row, chosen in zip(loads, picks, strict=True) if chosen == j) - 1e-9)
            for j, price in enumerate(_PRICES)
        )
        for picks in product(range(3), repeat=len(buckets))
    )
    assert choose(buckets, _CLASSES, slices=1).hourly_cost <= 1.1 * best


@pytest.mark.parametrize(("seed", "bound"), [(0, 46.9), (5, 50.29), (7, 51.76), (8, 41.19)])
def test_a_few_replicas_of_many_classes_are_chosen_within_one_percent(seed: int, bound: float) -> None:
    """`bound`: below which HiGHS proved that no choice is, in US dollars per hour (tests/bench/packing_choice.py)."""
    buckets, classes = problem(seed, 20)
    assert choose(buckets, classes).hourly_cost <= 1.01 * bound
