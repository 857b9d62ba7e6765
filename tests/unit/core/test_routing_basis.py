"""Why a replica was chosen without predicted seconds."""

from typing import Any, get_args

import pytest

from shoal.core.routing.basis import Basis, UnscoredChoice, basis_of, describe_basis

REASONS: list[tuple[dict[str, Any], Basis]] = [
    ({}, "no-reports"),
    ({"prompt": False}, "no-prompt"),
    ({"scores": False}, "prefix-heads"),
    ({"scores": False, "prompt": False, "computes": False}, "computes-nothing"),
    ({"sent_again": True, "prompt": False}, "sent-again"),
    ({"sent_again": True, "prompt": False, "scores": False}, "sent-again"),
    ({"among": 1, "sent_again": True, "prompt": False}, "only-one"),
    ({"step": "adapter-load", "scores": False}, "adapter-load"),
    ({"step": "adapter-full", "among": 1}, "adapter-full"),
]


@pytest.mark.parametrize(("known", "basis"), REASONS)
def test_the_first_reason_that_holds_is_given(known: dict[str, Any], basis: Basis) -> None:
    plain = UnscoredChoice(8, "ready", scores=True, sent_again=False, computes=True, prompt=True)
    assert basis_of(plain._replace(**known)) == basis


def test_every_reason_has_words_of_its_own() -> None:
    assert len({describe_basis(each) for each in (None, *get_args(Basis))}) == len(get_args(Basis)) + 1
    assert {each for _, each in REASONS} == set(get_args(Basis))
