"""Leases and retirements in every order of events: no adapter is unloaded under a request (invariant 3).

And its mutations: with any of the protections off, the search finds the story of a request to an unloaded adapter.
"""

from collections.abc import Callable

import pytest

from shoal.core import drain
from shoal.core.drain import GatewayProgress
from shoal.core.lora.lifecycle import unload
from tests.support import adapter_protocol
from tests.support.adapter_protocol import Gate, Rules, World, search


@pytest.fixture(autouse=True)
def in_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "RESTART_SECONDS", float(adapter_protocol.RESTART))
    monkeypatch.setattr(drain, "CLAIM_SECONDS", float(adapter_protocol.SILENCE))
    monkeypatch.setattr(drain, "IDLE_SECONDS", 1.0)
    # No engine ends a request by itself here, so that only an idle one ends the claim of a stale gateway.
    monkeypatch.setattr(unload, "LINGER_SECONDS", 1e9)


def world(gateways: int = 1, *, picks: int = 1, asks: int = 1, faults: int = 1, retirements: int = 1) -> World:
    return World(
        (Gate(),) * gateways, (None,) * gateways, picks=picks, asks=asks, faults=faults, retirements=retirements
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(world(), id="a fault"),
        pytest.param(world(faults=0, asks=2, retirements=2, picks=2), id="a retirement taken back"),
    ],
)
def test_no_adapter_is_unloaded_under_a_request(start: World) -> None:
    story, states, let_through = search(start)
    assert story is None, "\n".join(story or ())
    assert let_through, f"in {states} states no unload was ever let through"


def no_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    def holders(*_: object, **__: object) -> list[GatewayProgress]:
        return []

    patch.setattr(unload, "holders", holders)


def no_seq(patch: pytest.MonkeyPatch) -> None:
    def through(gateway: GatewayProgress, retirement: unload.Retirement) -> bool:
        return retirement.name not in gateway.adapters

    patch.setattr(unload, "through", through)


def no_silence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drain, "CLAIM_SECONDS", 0.0)


def no_way(patch: pytest.MonkeyPatch) -> None:
    """As if a request that was chosen had arrived."""
    patch.setattr(drain, "IDLE_SECONDS", 0.0)


def no_idle_engine(patch: pytest.MonkeyPatch) -> None:
    """As if a stale gateway had nothing running."""
    patch.setattr(unload, "LINGER_SECONDS", 0.0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mutate", [no_acknowledgement, no_seq, no_silence, no_way, no_idle_engine])
def test_each_protection_is_needed(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    story, _, _ = search(world())
    assert story is not None
    assert story[-1] == "the adapter is unloaded"


@pytest.mark.timeout(120)
def test_an_agent_that_has_just_started_does_not_know_who_sends() -> None:
    story, _, _ = search(world(), Rules(waits_after_restart=False))
    assert story is not None
    assert "the agent restarts" in story


@pytest.mark.timeout(120)
def test_a_lease_that_comes_late_must_not_outdo_a_retirement_that_was_acknowledged() -> None:
    story, _, _ = search(world(faults=0, asks=1), Rules(lease_follows_stream=False))
    assert story is not None
    assert any(step.startswith("gets its lease") for step in story)
