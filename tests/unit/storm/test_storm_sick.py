"""The storm's judge of GPUs that sickened: a bounded share is out of use, and a replica goes once another serves."""

import dataclasses
import importlib
import random
from pathlib import Path
from typing import Any

import pytest

from tests.storm import sick
from tests.storm.faults import Storm
from tests.storm.journals import DriverUpgrade, Journals, Kill, OutOfUse, Sickness
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


UNIT = ("dra-1", DEVICE)
"""What `STAYS` says was out of use."""
STAYS: dict[str, Any] = {"unit": sick.unit_name(*UNIT), "gone": None, "replaced": None, "others": 0, "until": 340.0}
"""Changes of `SICK`: for four minutes nothing was done about the replica."""


def seen(at: float, *units: tuple[str, str], gpu_class: str = sick.CLASS) -> OutOfUse:
    return OutOfUse(at, gpu_class, 8, units)


def test_a_replica_that_stays_on_a_gpu_out_of_use_is_found() -> None:
    (found,) = violations(**STAYS, out=(seen(90.0), seen(115.0, UNIT)))
    assert found == (
        f"health: {sick.MODEL}-a was still there after {DEVICE} was out of use for 225 s (device_tainted), "
        "and no other replica served in its place"
    )
    (found,) = violations(**STAYS | dict[str, Any](replaced=120.0), out=(seen(115.0, UNIT),))
    assert found.endswith("another replica served in its place")


@pytest.mark.parametrize(
    ("changes", "out"),
    [
        # The load ended, or the GPU healed, before another replica had the time to get ready.
        ({"until": 200.0}, (seen(115.0, UNIT),)),
        # It was in use again by then, as one that was slow and is so no more.
        ({}, (seen(115.0, UNIT), seen(150.0))),
        ({}, (seen(90.0), seen(115.0, UNIT), seen(120.0, ("dra-2", "other"), UNIT), seen(150.0, ("dra-2", "other")))),
    ],
)
def test_a_gpu_that_was_not_out_of_use_for_long_needs_no_replacement(
    changes: dict[str, Any], out: tuple[OutOfUse, ...]
) -> None:
    assert violations(**STAYS | changes, out=out) == []


def test_what_another_class_says_does_not_put_a_gpu_back_into_use() -> None:
    assert violations(**STAYS, out=(seen(115.0, UNIT), seen(150.0, gpu_class="other")))


UPGRADE = DriverUpgrade("dra-1", sick.MODEL, 100.0, 190.0, (f"{sick.MODEL}-a", f"{sick.MODEL}-b"), gone=(), sick=(),
                        counted=True, before=4, floor=4)  # fmt: skip


def after_upgrade(*kills: Kill, **changes: object) -> list[str]:
    upgrade = dataclasses.replace(UPGRADE, **changes)  # pyright: ignore[reportArgumentType]
    return judge(Journals({}, kills=list(kills), upgrades=[upgrade])).violations


def test_a_driver_that_is_replaced_while_its_replicas_stay_is_good() -> None:
    assert after_upgrade() == []


def test_a_replica_that_goes_because_slices_vanish_is_found() -> None:
    gone = f"{sick.MODEL}-a"
    assert after_upgrade(gone=(gone,)) == [f"health: {gone} went while the driver of dra-1 was replaced"]
    # One more replica than the Model has at least may go for want of load, but not two.
    assert after_upgrade(gone=(gone,), before=5) == []
    assert after_upgrade(gone=UPGRADE.pods, before=5)
    # A node that lost its power takes its replicas with it.
    assert after_upgrade(Kill("engine", gone, 90.0, 240.0, "node_killed"), gone=(gone,)) == []
    assert after_upgrade(Kill("engine", gone, 30.0, 90.0, "node_killed"), gone=(gone,))
    assert after_upgrade(Kill("engine", f"{sick.MODEL}-b", 90.0, 240.0, "node_killed"), gone=(gone,))


def test_gpus_that_are_called_sick_or_not_counted_again_after_their_driver_was_replaced_are_found() -> None:
    (found,) = after_upgrade(sick=(f"{DEVICE}: DeviceTainted",))
    assert found == f"health: the driver of dra-1 was replaced, and its GPUs were called sick: {DEVICE}: DeviceTainted"
    (found,) = after_upgrade(counted=False)
    assert found == "health: the GPUs of dra-1 were not all counted again after its driver was replaced"


def test_the_journal_keeps_what_became_of_an_upgrade(tmp_path: Path) -> None:
    journal = tmp_path / "faults.jsonl"
    ground: Any = None
    Storm(ground, random.Random(1), journal).say(  # noqa: S311
        "driver_upgraded", upgrades=[UPGRADE]
    )
    assert sick.read_upgrades(journal) == [UPGRADE]


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
