"""A replica's adapters in any order of events (invariants 3 and 10), and what breaks without each protection."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from shoal.core.drain import GatewayProgress
from shoal.core.lora.lifecycle import unload
from shoal.core.lora.lifecycle.registry import Registry
from tests.support.adapter_world import AdapterWorld

QUICK = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
FINDING = settings(QUICK, max_examples=400, stateful_step_count=100, phases=[Phase.generate])
"""Long runs: with these each fault is found in the first 60 examples, whatever constants hypothesis takes from modules
that other tests have imported (with 40 steps it took up to 650)."""


@pytest.mark.timeout(180)
def test_whatever_happens_no_adapter_is_unloaded_under_a_request_and_the_bounds_hold() -> None:
    AdapterWorld.seen.clear()
    run_state_machine_as_test(AdapterWorld, settings=QUICK)
    assert min(AdapterWorld.seen[what] for what in ("lease", "request", "unload", "given back")) > 50, AdapterWorld.seen


def no_claims(patch: pytest.MonkeyPatch) -> None:
    def holders(*_: object, **__: object) -> list[GatewayProgress]:
        return []

    patch.setattr(unload, "holders", holders)


def no_barrier(patch: pytest.MonkeyPatch) -> None:
    def through(gateway: GatewayProgress, retirement: unload.Retirement) -> bool:
        return retirement.name not in gateway.adapters

    patch.setattr(unload, "through", through)


def no_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Registry, "covered", property(lambda _: set[str]()))


def no_places(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Registry, "free", property(lambda _: 9))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("mutate", "found"),
    [
        (no_claims, "an unload under a request"),
        (no_barrier, "an unload under a request"),
        (no_slots, "more distinct adapters run than there are slots"),
        (no_places, "more adapters in the engine than its host cache has places"),
    ],
)
def test_each_protection_is_needed(
    mutate: Callable[[pytest.MonkeyPatch], None], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        run_state_machine_as_test(AdapterWorld, settings=FINDING)
