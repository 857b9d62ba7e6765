"""While one replica replaces another there is one more than is wanted: that asks for nothing."""

from dataclasses import replace

import pytest

from tests.support.scaling import KV_TOKENS, Term, load, replica, snapshot, variant


@pytest.mark.parametrize("heard", [0, 1], ids=["neither is heard", "the old one is heard"])
def test_a_replica_that_is_not_heard_yet_raises_no_number_while_it_replaces_another(heard: int) -> None:
    old = replica(0, load(kv_tokens_used=KV_TOKENS // 10)) if heard else replica(0, dark=True)
    both = snapshot(old, replica(1, dark=True), wanted=1)
    term = Term()
    assert [term.at(now, both).wanted for now in (0.0, 30.0, 600.0)] == [1, 1, 1]


def test_those_that_are_wanted_and_not_heard_count_as_loaded_to_their_target() -> None:
    busy = replica(0, load(kv_tokens_used=KV_TOKENS))
    three = (busy, replica(1, dark=True), replica(2, dark=True))
    found = Term().at(0.0, snapshot(*three))
    assert found.wanted == 4, "what is over the target of one that is heard finds no room at the others"
    quiet = replace(busy, load=load())
    assert Term().at(0.0, snapshot(quiet, *three[1:])).wanted == 3


@pytest.mark.parametrize("first", ["small", "large"], ids=["to a larger one", "to a smaller one"])
def test_a_move_between_classes_of_different_size_raises_no_number_while_nobody_is_heard(first: str) -> None:
    # The larger one's cache, loaded to its target, does not fit beside the smaller one's: that is no reason for two.
    classes = (
        variant("small", replicas=1, kv_tokens=KV_TOKENS // 10),
        variant("large", replicas=1, kv_tokens=3 * KV_TOKENS),
    )
    other = "large" if first == "small" else "small"
    both = (replica(0, dark=True, gpu_class=first), replica(1, dark=True, gpu_class=other))
    found = Term().at(0.0, snapshot(*both, wanted=1, variants=classes))
    assert found.wanted == 1
