"""The protocol of acknowledgements, in every order of events: no engine is stopped under a request.

And its mutations: with any of the protections off, the search finds the story of a loss. What a reader of a stream
knows whatever is lost (unknown, never zero) is proved in test_demand_stream_property.py. A longer search is
`python -m tests.bench.bench_protocol`.
"""

from collections.abc import Callable

import pytest

from shoal.core import drain
from tests.support import protocol
from tests.support.protocol import Gate, Rules, World, search


@pytest.fixture(autouse=True)
def in_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "CLAIM_SECONDS", float(protocol.SILENCE))
    monkeypatch.setattr(drain, "RESTART_SECONDS", float(protocol.RESTART))
    monkeypatch.setattr(drain, "IDLE_SECONDS", 1.0)


def world(gateways: int = 1, *, picks: int = 1, faults: int = 1, hooks: int = 1) -> World:
    return World((Gate(),) * gateways, (None,) * gateways, picks=picks, faults=faults, hooks=hooks)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(world(), id="a fault"),
        pytest.param(world(picks=2, faults=0), id="two requests"),
        pytest.param(world(faults=1, hooks=2, picks=0), id="two drains"),
    ],
)
def test_no_engine_is_stopped_under_a_request(start: World) -> None:
    story, states, let_through = search(start)
    assert story is None, "\n".join(story or ())
    assert let_through, f"in {states} states no drain was ever let through"


def no_claims(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drain, "CLAIM_SECONDS", 0.0)


def no_seq(patch: pytest.MonkeyPatch) -> None:
    def through(gateway: drain.GatewayProgress, barrier: int) -> bool:
        return gateway.running == 0

    patch.setattr(drain, "through", through)


def no_wait_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    """As if an idle engine were enough: whoever listened to the former agent still sends."""
    patch.setattr(drain, "RESTART_SECONDS", 0.0)


def one_look(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drain, "IDLE_SECONDS", 0.0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mutate", [no_claims, no_seq, no_wait_after_a_restart, one_look])
def test_each_protection_is_needed(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    story, _, _ = search(world())
    assert story is not None
    assert story[-1] == "the engine is stopped"


@pytest.mark.timeout(120)
def test_a_request_that_counts_only_when_it_is_sent_is_lost() -> None:
    """The rule that there is no await between the last look at the state and the send."""
    story, _, _ = search(world(), Rules(counts_when_it_chooses=False))
    assert story is not None
    assert any(step.startswith("chooses (") for step in story)
