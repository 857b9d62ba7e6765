"""The storm's judge of GPUs that sickened: a bounded share is out of use, and a replica goes once another serves."""

import dataclasses
import importlib

import pytest

from tests.storm import sick
from tests.storm.journals import Journals, Kill, OutOfUse, Sickness
from tests.storm.mutants import hurry
from tests.storm.verdict import judge

DEVICE = "gpu.nvidia.com/dra-1/gpu-1"
SICK = Sickness("device_tainted", f"dra-1/{DEVICE}", sick.MODEL, f"{sick.MODEL}-a", 100.0, 130.0, 115.0, 120.0, 125.0,
                others=4, before=4, floor=4)  # fmt: skip


def violations(*, kills: tuple[Kill, ...] = (), out: tuple[OutOfUse, ...] = (), **changes: object) -> list[str]:
    sicknesses = [dataclasses.replace(SICK, **changes)]  # pyright: ignore[reportArgumentType]
    return judge(Journals({}, kills=list(kills), out_of_use=list(out), sicknesses=sicknesses)).violations


def test_a_replica_that_goes_once_another_serves_is_good() -> None:
    assert violations() == []
    assert violations(others=3, before=3) == [], "the Model had not all of its replicas"


def test_a_replica_that_goes_first_is_found() -> None:
    (found,) = violations(others=3)
    assert "went for device_tainted while 3 other replicas" in found
    # Not where an engine of the same Model was killed at that time.
    assert violations(others=3, kills=(Kill("engine", f"{sick.MODEL}-b", 90.0, 95.0, "pod_killed"),)) == []
    assert violations(others=3, kills=(Kill("engine", "storm-steady-b", 90.0, 95.0, "pod_killed"),))


def test_a_gpu_that_stays_in_use_is_found() -> None:
    (found,) = violations(taken=None)
    assert found == f"health: dra-1/{DEVICE} was not taken out of use within 30 s (device_tainted)"


@pytest.mark.parametrize(
    ("units", "good"),
    [
        (((("dra-1", DEVICE)), ("dra-2", DEVICE)), True),
        ((("l40s-1", ""),), True),
        ((("l40s-1", ""), ("l40s-1", DEVICE)), True),
        ((("l40s-1", ""), ("l40s-2", "")), False),
        (((("dra-1", DEVICE)), ("dra-2", DEVICE), ("dra-3", DEVICE)), False),
    ],
)
def test_more_than_the_share_out_of_use_is_found(units: tuple[tuple[str, str], ...], good: bool) -> None:
    # A node that was away before does not make the share smaller.
    seen = (OutOfUse(1.0, "c", 8, ()), OutOfUse(2.0, "c", 6, units))
    assert (violations(out=seen) == []) is good


def test_the_journal_keeps_what_shoal_took_out_of_use() -> None:
    entry = '{"by":"Shoal","device":"d","node":"n","state":"Quarantined"}'
    probation, person = entry.replace("Quarantined", "Probation"), entry.replace("Shoal", "Person")
    assert sick.observed("c 8 \n", 1.0) == {"at": 1.0, "gpu_class": "c", "capacity": 8, "units": []}
    found = sick.observed(f"c 8 [{entry},{probation},{person}]\n", 1.0)
    assert found is not None
    assert found["units"] == [("n", "d")]
    assert sick.observed("c  \n", 1.0) is None


def test_what_a_storm_shortens_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    decide, *others = (
        importlib.import_module(f"shoal.{name}")
        for name in ("core.health.decide", "core.health.slow", "controllers.healthprobes")
    )
    for module in (decide, *others):
        for name, value in list(vars(module).items()):
            if name.isupper():
                monkeypatch.setattr(module, name, value)  # put back afterwards
    hurry()
    assert decide.HOLD_SECONDS < 60
