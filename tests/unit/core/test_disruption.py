"""How many replicas the drain of a node must leave: worked examples, and two laws."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.disruption import min_available, waits_for_another
from shoal.core.facts import Pod


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


def pod(name: str, *, ready: bool, gpu_class: str = "l4", **more: Any) -> Pod:
    base: dict[str, Any] = {"node": "n", "finished": False, "deleting": False, "requests": {}, "model_uid": "u"}
    return Pod("ns", name, name, ready=ready, gpu_class=gpu_class, **(base | more))


SERVES = pod("a", ready=True)
STARTS = pod("b", ready=False)


def test_the_only_replica_waits_for_the_one_that_replaces_it() -> None:
    assert waits_for_another([SERVES, STARTS], {"l4": 2})
    assert waits_for_another([SERVES], {"l4": 2}), "its pod is made now"
    assert waits_for_another([SERVES, pod("b", ready=False, node=None)], {"l4": 2}), "an autoscaler adds its node"
    elsewhere = [SERVES, pod("b", ready=False, gpu_class="h100")]
    assert waits_for_another(elsewhere, {"l4": 1, "h100": 1})


def test_an_eviction_waits_for_nothing_that_may_not_come() -> None:
    assert not waits_for_another([SERVES], {"l4": 1}), "there are no GPUs for another one"
    assert not waits_for_another([SERVES, STARTS], {"l4": 1}), "a rollout's pod is not wanted in addition"
    assert not waits_for_another([SERVES, STARTS], {"l4": 2}, backoffs={"l4"})
    assert not waits_for_another([SERVES], {"l4": 2}, refused={"l4"})
    held_back = pod("b", ready=False, node=None, gates=("kueue.x-k8s.io/admission",))
    assert not waits_for_another([SERVES, held_back], {"l4": 2}, refused={"l4"})
    assert not waits_for_another([SERVES, STARTS], {"l4": 2}, interruptible={"l4"}), "the machine goes, ready or not"
    assert not waits_for_another([SERVES, pod("c", ready=True), STARTS], {"l4": 3}), "another one serves"
    assert not waits_for_another([STARTS], {"l4": 2}), "nothing serves"
    assert not waits_for_another([replace(SERVES, deleting=True), STARTS], {"l4": 1})


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
