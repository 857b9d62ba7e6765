"""Why a replica was chosen without predicted seconds (score.py)."""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

AdapterStep = Literal["ready", "adapter-load", "adapter-full"]
"""How far the choice for an adapter (adapterchoice.py) had to go: to replicas that have it and room, to those that have
to load it, or to those that have it and no room."""

Basis = Literal[
    "adapter-load",
    "adapter-full",
    "only-one",
    "sent-again",
    "computes-nothing",
    "prefix-heads",
    "no-prompt",
    "no-reports",
]
"""The reason."""

_DESCRIBED: Final[Mapping[Basis, str]] = {
    "adapter-load": "no replica had the adapter, a slot for it and capacity, so it goes to where the adapter is being "
    "loaded, or else to the adapter's home",
    "adapter-full": "no replica had room for the adapter, so it goes to the one of those with the adapter that has the "
    "fewest requests",
    "only-one": "no other replica could take it",
    "sent-again": "a replica was lost with it before, so it goes to the one with the fewest requests, whatever "
    "is cached there",
    "computes-nothing": "it computes no tokens, so it goes to the replica with the fewest requests",
    "prefix-heads": "gateway.routing is PrefixHeads, so the beginning of its prompt decides, or else the number of "
    "requests",
    "no-prompt": "the Model had one replica when it came, so its prompt was not looked at, and it goes to the one with "
    "the fewest requests",
    "no-reports": "no agent reports a replica's load, so the beginning of its prompt decides, or else the number of "
    "requests",
}


class UnscoredChoice(NamedTuple):
    """What is known of a choice that no score has decided."""

    among: int
    """Replicas that could take the request."""
    step: AdapterStep
    """`ready` without an adapter."""
    scores: bool
    """Replicas have scores (`gateway.routing: Seconds`)."""
    sent_again: bool
    """A replica was lost with the request, which gives up its prompt's affinity."""
    computes: bool
    """The engine computes tokens for it."""
    prompt: bool
    """The request's prompt was looked at."""


def basis_of(choice: UnscoredChoice) -> Basis:
    """The first reason that holds."""
    if choice.step != "ready":
        return choice.step
    if choice.among < 2:
        return "only-one"
    if choice.sent_again:
        return "sent-again"
    if not choice.computes:
        return "computes-nothing"
    if not choice.scores:
        return "prefix-heads"
    return "no-reports" if choice.prompt else "no-prompt"


def describe_basis(basis: Basis | None) -> str:
    """For people; None: it is not known."""
    text = "not chosen by predicted seconds"
    return text if basis is None else f"{text}: {_DESCRIBED[basis]}"
