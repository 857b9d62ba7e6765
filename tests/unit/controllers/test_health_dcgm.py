"""DCGM's metrics, from Prometheus' answer to what a class says of its GPUs."""

from dataclasses import dataclass
from typing import Any

import pytest

from shoal.api.config import DCGM, OperatorConfig
from shoal.api.config import Prometheus as PrometheusSettings
from shoal.api.gpuclass import GPUClass
from shoal.core.health.dcgm import CLOCK_EVENTS, LAST_XID, DCGMReading, DCGMSample, reading
from shoal.core.status import healthstatus
from shoal.signals import dcgm
from shoal.signals.dcgm import DCGMMetrics
from shoal.signals.promql import PromQLClient
from tests.support.devices import class_of_devices
from tests.support.operators import CONFIG
from tests.unit.controllers.test_health_probes import Fleet
from tests.unit.signals.test_prometheus_answers import Answering, answering, samples


@dataclass
class Metrics:
    reading: DCGMReading | None = None
    problem: str | None = None


def measured(*sick: int, host: str = "n", of: int = 8) -> DCGMReading:
    return reading(
        DCGMSample(LAST_XID, {"gpu": str(i), "UUID": f"GPU-n-gpu-{i}", "Hostname": host}, 79 if i in sick else 0)
        for i in range(of)
    )


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    found = Fleet(0, monkeypatch)
    found.health.metrics = Metrics(measured())
    return found


async def last(fleet: Fleet, seconds: int) -> None:
    """Steps for so long; the status is written each time."""
    for _ in range(seconds // 5):
        await fleet.step(5)
        fleet.write_plan()


def quarantined(fleet: Fleet) -> list[Any]:
    return fleet.status["quarantined"]


async def test_one_device_is_taken_out_of_use_by_its_uuid_and_stays_so_in_silence(fleet: Fleet) -> None:
    await last(fleet, 60)
    assert not quarantined(fleet)
    fleet.health.metrics = metrics = Metrics(measured(3))
    await last(fleet, 30)
    [found] = quarantined(fleet)
    assert (found["device"], found["reason"], found["monitor"]) == ("gpu.test/n/gpu-3", "GPUFellOffBus", "DCGM")
    assert found["message"] == "DCGM: GPU 3 GPU-n-gpu-3: Xid 79 (the GPU has fallen off the bus)"
    metrics.reading, metrics.problem = None, "no answer within 5 s"
    await last(fleet, 3600)
    assert "until" not in quarantined(fleet)[0]
    metrics.reading, metrics.problem = measured(of=3), None
    await last(fleet, 600)
    assert "until" not in quarantined(fleet)[0], "others are measured, and this one is not"
    metrics.reading = measured()
    await last(fleet, 600)
    assert "until" in quarantined(fleet)[0]


async def test_metrics_that_are_read_no_more_hold_no_quarantine(fleet: Fleet) -> None:
    fleet.health.metrics = Metrics(measured(3))
    await last(fleet, 30)
    assert quarantined(fleet)
    fleet.health.metrics = None
    await last(fleet, 600)
    assert "until" in quarantined(fleet)[0]


async def test_what_is_not_measured_is_told_as_unknown(fleet: Fleet) -> None:
    raw = GPUClass.model_validate(class_of_devices("devices"))

    def said(metrics: Metrics) -> tuple[str, str, str] | None:
        fleet.health.metrics = metrics
        found = fleet.health.decide(fleet.world.classes.get("devices").object or raw)  # pyright: ignore[reportOptionalMemberAccess]
        told = healthstatus.condition(found.plan, found.problems, found.unmeasured)
        return None if told is None else (told.status, told.reason, told.message)

    assert said(Metrics(measured())) is None
    assert said(Metrics()) is None, "nobody has asked yet"
    assert said(Metrics(problem="no answer within 5 s")) == (
        "Unknown", "GPUMetricsMissing", "DCGM's metrics in Prometheus are not known: no answer within 5 s",
    )  # fmt: skip
    assert said(Metrics(measured(host="other"))) == (
        "Unknown", "GPUMetricsMissing", "Prometheus has no fresh metrics of DCGM of the GPUs on n",
    )  # fmt: skip


async def test_a_slow_replica_is_told_with_what_holds_its_clocks_down(fleet: Fleet) -> None:
    labels = {"gpu": "2", "UUID": "GPU-n-gpu-2", "Hostname": "n"}
    fleet.health.metrics = Metrics(reading([DCGMSample(CLOCK_EVENTS[0], labels, 0x40)]))
    fleet.decide()
    [unit] = fleet.health._known["devices"].of_gpus["GPU-n-gpu-2"]  # pyright: ignore[reportPrivateUsage]
    assert fleet.health.held_down("devices", unit) == "too hot (hardware)"


# --- Prometheus' answers ----------------------------------------------------------------------------------------------


def sick(xid: str) -> dict[str, Any]:
    labels = {"__name__": LAST_XID, "gpu": "0", "UUID": "GPU-1", "Hostname": "n"}
    return samples({"metric": labels, "value": [1, xid]})


async def test_readings_are_kept_for_a_while_and_changes_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server, told = Answering(sick("0")), []
    async with answering(server) as url:
        settings = PrometheusSettings(url=url, match='cluster="east"')
        metrics = DCGMMetrics(settings, DCGM(match='job="dcgm"'), lambda: told.append(1))
        async with PromQLClient(settings) as client:
            await metrics.step(client)
            await metrics.step(client)
            assert len(told) == 1
            assert metrics.problem is None
            server.body = sick("79")
            await metrics.step(client)
            assert len(told) == 2
            assert metrics.reading is not None
            assert metrics.reading.sick
            server.body, server.status = "away", 503
            await metrics.step(client)
            await metrics.step(client)
            assert len(told) == 3
            assert metrics.reading is not None, "one answer that fails is no silence yet"
            assert metrics.problem == "HTTP 503: away"
            monkeypatch.setattr(dcgm, "KEPT_SECONDS", -1.0)
            assert metrics.reading is None
            server.body, server.status = samples(), 200
            await metrics.step(client)
            assert "has no sample of DCGM_FI_DEV_XID_ERRORS" in (metrics.problem or "")


def test_matchers_without_a_prometheus_are_refused() -> None:
    raw = CONFIG.model_dump(by_alias=True) | {"health": {"dcgm": {"match": 'job="dcgm"'}}}
    with pytest.raises(ValueError, match=r"health.dcgm.match needs signals.prometheus.url"):
        OperatorConfig.model_validate(raw)


async def test_a_device_that_is_out_of_use_still_counts_among_those_of_which_a_quarter_may_be(fleet: Fleet) -> None:
    await last(fleet, 60)
    fleet.health.metrics = Metrics(measured(3))
    await last(fleet, 30)
    fleet.health.metrics = Metrics(measured(3, 5, 6))
    await last(fleet, 30)
    assert [each["device"][-1] for each in quarantined(fleet)] == ["3", "5"], "two of eight"
    [withheld] = fleet.decide().withheld
    assert "2 of 8 GPUs are out of use already" in withheld.why
