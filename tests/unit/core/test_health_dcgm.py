"""What DCGM's metrics say of GPUs: which numbers mean a sick one, which GPU it is, and what silence means."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from shoal.core.health import HealthMemory, HealthSignal, HealthSnapshot, Quarantine, Unit, dcgm, decide
from shoal.core.health.dcgm import (
    CLOCK_EVENTS,
    DOUBLE_BIT,
    LAST_XID,
    MOST_SICK,
    REMAP_FAILED,
    XID_COUNT,
    DCGMSample,
    measured,
    of_devices,
    of_nodes,
    reading,
)
from shoal.core.health.decide import CONFIRM_SECONDS, HOLD_SECONDS
from shoal.core.health.types import DCGM

START = datetime(2026, 11, 26, tzinfo=UTC)
HOSTS = {"a": "a", "a.example": "a", "b": "b"}


def sample(
    metric: str, value: float, gpu: int = 0, host: str = "a", more: Mapping[str, str] | None = None, **labels: str
) -> DCGMSample:
    named = {"gpu": str(gpu), "UUID": f"GPU-{host}-{gpu}", "Hostname": host, "modelName": "NVIDIA H100 80GB HBM3"}
    return DCGMSample(metric, named | labels | dict(more or {}), value)


def of(*samples: DCGMSample, pods: Mapping[str, str] | None = None) -> list[HealthSignal]:
    return list(of_nodes(reading(samples), HOSTS, (pods or {}).get))


@pytest.mark.parametrize(
    ("metric", "value", "labels", "reason"),
    [
        (LAST_XID, 79, {}, "GPUFellOffBus"),
        (LAST_XID, 48, {}, "GPUUncorrectableECC"),
        (LAST_XID, 64, {}, "GPUUncorrectableECC"),
        (LAST_XID, 95, {}, "GPUUncorrectableECC"),
        (LAST_XID, 74, {}, "NVLinkFault"),
        (LAST_XID, 119, {}, "DriverFault"),
        (LAST_XID, 120, {}, "DriverFault"),
        (XID_COUNT, 2, {"xid": "79", "window_size_in_ms": "300000"}, "GPUFellOffBus"),
        (DOUBLE_BIT, 3, {}, "GPUUncorrectableECC"),
        (REMAP_FAILED, 1, {}, "GPUUncorrectableECC"),
        # of applications, contained in one, repaired, or news only
        *((LAST_XID, xid, {}, None) for xid in (0, 13, 31, 43, 45, 63, 92, 94, 145, 154, 99_999)),
        (XID_COUNT, 5, {"xid": "31"}, None),
        (XID_COUNT, 0, {"xid": "79"}, None),
        (XID_COUNT, 5, {"xid": "0x4f"}, None),
        (XID_COUNT, 5, {}, None),
        (DOUBLE_BIT, 0, {}, None),
        # DCGM's blank values: not supported, no permission
        (DOUBLE_BIT, 9.223372036854776e18, {}, None),
        (REMAP_FAILED, 2147483632, {}, None),
        (LAST_XID, float("nan"), {}, None),
        (LAST_XID, float("inf"), {}, None),
        (LAST_XID, -1, {}, None),
        (CLOCK_EVENTS[0], 0xE8, {}, None),
        ("DCGM_FI_DEV_GPU_TEMP", 95, {}, None),
    ],
)
def test_which_numbers_mean_a_sick_gpu(metric: str, value: float, labels: dict[str, str], reason: str | None) -> None:
    found = of(sample(metric, value, more=labels))
    assert [(each.unit, each.reason) for each in found] == ([(Unit("a"), reason)] if reason else [])
    assert all(each.monitor == DCGM and "GPU 0 GPU-a-0" in each.message for each in found)


def test_the_first_xid_counts_though_the_one_of_the_engine_that_ends_is_the_last() -> None:
    [found] = of(sample(LAST_XID, 45), sample(XID_COUNT, 1, xid="48"), sample(XID_COUNT, 8, xid="45"))
    assert (found.reason, found.message) == (
        "GPUUncorrectableECC",
        "DCGM: GPU 0 GPU-a-0: Xid 48 (a double-bit error of memory, which cannot be corrected)",
    )


def test_labels_name_the_node_in_the_ways_of_prometheus_and_exporter() -> None:
    pods = {"chat/llama-1": "a", "chat/llama-2": "b", "chat/else": "z"}
    unnamed = {"Hostname": "dcgm-exporter-x7k2p"}
    assert [s.unit.node for s in of(sample(LAST_XID, 79, host="a.example"))] == ["a"]
    assert [s.unit.node for s in of(sample(LAST_XID, 79, more=unnamed, node="b"))] == ["b"]
    theirs = {**unnamed, "exported_namespace": "chat", "exported_pod": "llama-2", "namespace": "gpu", "pod": "dcgm-1"}
    assert [s.unit.node for s in of(sample(LAST_XID, 79, more=theirs), pods=pods)] == ["b"]
    assert not of(sample(LAST_XID, 79, more=unnamed)), "nobody says which node it is"
    assert not of(sample(LAST_XID, 79, host="other")), "no node of the class"
    assert not of(sample(LAST_XID, 79, more=unnamed | {"namespace": "chat", "pod": "else"}), pods=pods)


def test_labels_that_contradict_each_other_take_nothing_out_of_use() -> None:
    pods = {"chat/llama-2": "b"}
    assert not of(sample(LAST_XID, 79, node="b")), "Hostname says a"
    assert not of(sample(LAST_XID, 79, namespace="chat", pod="llama-2"), pods=pods)
    claimed = sample(LAST_XID, 79, UUID="GPU-x"), sample(LAST_XID, 0, host="b", UUID="GPU-x")
    assert not of(*claimed), "one GPU cannot be on two nodes"
    assert not of(DCGMSample(LAST_XID, {}, 79))
    assert not of(DCGMSample(LAST_XID, {"gpu": "0", "instance": "10.0.0.1:9400"}, 79))


def test_a_device_is_found_by_its_uuid_and_a_partition_by_that_of_its_gpu() -> None:
    gpu, parts = Unit("a", "gpu.test/a/gpu-0"), (Unit("a", "gpu.test/a/mig-0"), Unit("a", "gpu.test/a/mig-1"))
    devices = {"GPU-a-0": (gpu,), "GPU-a-1": parts}
    sick = reading([sample(LAST_XID, 79), sample(DOUBLE_BIT, 1, gpu=1), sample(LAST_XID, 79, gpu=2)])
    assert [s.unit for s in of_devices(sick, HOSTS, devices)] == [gpu, *parts]
    unnamed = reading([sample(LAST_XID, 79, Hostname="dcgm-exporter-x7k2p")])
    assert [s.unit for s in of_devices(unnamed, HOSTS, devices)] == [gpu], "the UUID says all"
    elsewhere = reading([sample(LAST_XID, 79, Hostname="b")])
    assert not list(of_devices(elsewhere, HOSTS, devices)), "the driver says that it is on a"


def test_hostile_series_are_bounded_and_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcgm, "MOST_GPUS", 3000)
    many = [sample(LAST_XID, 79, gpu=i, host=f"evil-{i % 7}") for i in range(4000)]
    read = reading([*many, sample(LAST_XID, 79, UUID="GPU-\x1b[31m" + "x" * 100_000)])
    assert len(read.sick) == MOST_SICK
    assert len(read.by_uuid) == 3000
    [found] = of(sample(LAST_XID, 79, UUID="GPU-\x1b[31m" + "x" * 100_000))
    assert len(found.message) < 600
    assert "\x1b" not in found.message


def test_clocks_that_are_held_down_are_told_and_no_signal() -> None:
    read = reading([sample(CLOCK_EVENTS[1], 0x44), sample(CLOCK_EVENTS[0], 0x4, gpu=1)])
    assert read.held_down("GPU-a-0") == "too hot (hardware)"
    assert read.held_down("GPU-a-1") == "", "the power cap is normal under load"
    assert read.held_down("GPU-other") == ""
    assert not read.sick


def test_a_node_is_measured_when_all_its_gpus_are() -> None:
    read = reading([sample(LAST_XID, 0, gpu=i) for i in range(7)])
    assert measured(read, ["a"], 7)
    assert not measured(read, ["a"], 8), "one is missing: it may be the one that fell off the bus"
    assert not measured(read, ["b"], 0)


# --- what silence means -----------------------------------------------------------------------------------------------


class Clock:
    """A class of four nodes over time."""

    def __init__(self) -> None:
        self.at = START
        self.memory: HealthMemory | None = None
        self.quarantined: tuple[Quarantine, ...] = ()
        self.recheck: float | None = None

    def last(self, seconds: float, *there: HealthSignal, silent: bool = False) -> tuple[Quarantine, ...]:
        nodes = dict.fromkeys("abcd", 8)
        for _ in range(int(seconds // 5)):
            self.at += timedelta(seconds=5)
            seen = HealthSnapshot(
                capacity=nodes,
                usable=nodes,
                nodes=frozenset(nodes),
                devices=None,
                quarantined=self.quarantined,
                signals=there,
                silent=frozenset({Unit("a"), Unit("gone")}) if silent else frozenset(),
            )
            plan, self.memory = decide(seen, self.memory, self.at)
            self.quarantined, self.recheck = plan.quarantined, plan.recheck_seconds
        return self.quarantined


[SICK] = of(sample(LAST_XID, 79))


def test_a_prometheus_that_is_away_neither_confirms_nor_ends_anything() -> None:
    clock = Clock()
    clock.last(10, SICK)
    assert not clock.last(3600, silent=True), "ten seconds of evidence do not grow in silence"
    assert clock.recheck is None, "nothing changes until somebody says something"
    [found] = clock.last(20, SICK)
    assert (found.unit, found.monitor) == (Unit("a"), DCGM)
    [found] = clock.last(7200, silent=True)
    assert (found.state, found.until) == ("Quarantined", None), "silence is no recovery"
    clock.memory = None
    [found] = clock.last(7200, silent=True)
    assert (found.state, found.until) == ("Quarantined", None), "not for another operator either"
    [found] = clock.last(400)
    assert found.until is not None, "now the exporter says that it is well"
    [found] = clock.last(HOLD_SECONDS)
    assert found.state == "Probation"


def test_what_others_say_fades_as_before_while_the_monitor_is_silent() -> None:
    clock = Clock()
    condition = replace(SICK, monitor=None, message="condition XIDErrors is True")
    clock.last(CONFIRM_SECONDS + 10, condition)
    [found] = clock.last(400, silent=True)
    assert found.until is not None


def test_a_unit_that_left_the_cluster_is_not_waited_for() -> None:
    clock = Clock()
    clock.quarantined = (Quarantine(Unit("gone"), "GPUFellOffBus", "", START, monitor=DCGM),)
    clock.last(HOLD_SECONDS + 60, silent=True)
    assert not clock.quarantined
