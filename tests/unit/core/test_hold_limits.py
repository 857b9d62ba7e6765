"""Who may wait for a replica, for how long, and what a Model's object says of it."""

from typing import Any

import pytest

from shoal.api.model import Model
from shoal.core.hold.limits import Held, Limits, expected_wait, longest_wait, may_come, over, retry_after
from shoal.core.routing.resolve import DeadEnd, ServedModel, served_model


@pytest.mark.parametrize(
    ("timeout", "cold_start", "ceiling", "longest"),
    [
        (600, None, 600, 600),  # never measured
        (600, 40, 600, 110),  # two cold starts and 30 s
        (600, 1000, 600, 600),
        (20, 40, 600, 20),
        (3600, None, 600, 600),  # the gateway's own ceiling
        (3600, 0, 600, 30),
    ],
)
def test_nobody_waits_for_longer_than_two_cold_starts_and_a_bit(
    timeout: float, cold_start: float | None, ceiling: float, longest: float
):
    assert longest_wait(Limits(timeout_seconds=timeout), cold_start, ceiling) == longest


@pytest.mark.parametrize(
    ("cold_start", "waking", "seconds"),
    [(None, 0, 30), (40, 0, 40), (40, 10.5, 30), (40, 39.5, 1), (40, 100, 1), (900, 0, 60), (900, 895, 5)],
)
def test_another_try_makes_sense_when_the_cold_start_is_over(cold_start: float | None, waking: float, seconds: int):
    assert retry_after(cold_start, waking) == seconds


@pytest.mark.parametrize(
    ("cold_start", "ages", "seconds"),
    [
        (None, [], None),  # never measured
        (120.0, [], 120.0),  # nothing has started
        (120.0, [100.0], 20.0),
        (120.0, [10.0, 100.0], 20.0),  # the oldest comes first
        (120.0, [-5.0], 120.0),  # the clocks differ
        (120.0, [120.0], None),  # it takes longer than measured, nobody knows how long
        (120.0, [10.0, None], None),
        (0.0, [], None),
    ],
)
def test_the_wait_for_a_first_replica_is_the_rest_of_the_cold_start(
    cold_start: float | None, ages: list[float | None], seconds: float | None
):
    assert expected_wait(cold_start, ages) == seconds


def test_bounds_are_reached_and_not_passed():
    limits = Limits(max_requests=4, max_bytes=1000, max_tenant_percent=50)
    assert over(limits, 100, Held(), Held()) is None
    assert over(limits, 100, Held(3, 300), Held(1, 100)) is None
    assert over(limits, 100, Held(4, 400), Held()) == "requests"
    assert over(limits, 101, Held(3, 900), Held()) == "bytes"
    assert over(limits, 100, Held(3, 900), Held()) is None
    assert over(limits, 100, Held(2, 200), Held(2, 200)) == "tenant"
    assert over(limits, 401, Held(1, 100), Held(1, 100)) == "tenant"
    assert over(limits, 400, Held(1, 100), Held(1, 100)) is None


def served(status: dict[str, Any] | None = None, **spec: Any) -> ServedModel:
    obj: dict[str, Any] = {
        "metadata": {"name": "llama", "namespace": "chat", "uid": "u"},
        "spec": {"source": {"uri": "file:///m"}, **spec},
    }
    return served_model(Model.model_validate({**obj, **({"status": status} if status else {})}))


def condition(type: str, status: str, reason: str) -> dict[str, str]:
    return {
        "type": type,
        "status": status,
        "reason": reason,
        "message": "node-7 has no room",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def test_takes_the_limits_from_the_object():
    model = served(
        hold={"maxRequests": 7, "maxBytes": "2Mi", "maxTenantPercent": 10, "timeoutSeconds": 9},
        scaling={"kvUtilizationPercent": 60},
    )
    assert model.limits == Limits(max_requests=7, max_bytes=2 * 1024 * 1024, max_tenant_percent=10, timeout_seconds=9)
    assert model.kv_percent == 60
    assert served().limits == Limits()
    assert (served().cold_start_seconds, served().dead_end) == (None, None)


@pytest.mark.parametrize(
    ("variants", "seconds"),
    [
        ([], 99),
        ([{"class": "a", "desired": 1, "coldStartSeconds": 30}, {"class": "b", "coldStartSeconds": 300}], 30),
        ([{"class": "a", "desired": 0, "coldStartSeconds": 30}], 99),
        # Nothing has started there yet: what another class needs says nothing of it.
        ([{"class": "a", "desired": 1}], None),
        ([{"class": "a", "desired": 1}, {"class": "b", "desired": 1, "coldStartSeconds": 30}], None),
        ([{"class": "a", "desired": 1, "coldStartSeconds": 40, "nodeWaitSeconds": 260}], 300),
    ],
)
def test_the_cold_start_is_that_of_the_class_that_wakes(variants: list[dict[str, Any]], seconds: float | None):
    assert served({"variants": variants, "coldStartSeconds": 99}).cold_start_seconds == seconds


@pytest.mark.parametrize(
    ("told", "end"),
    [
        (condition("Placed", "False", "NoFit"), DeadEnd("NoFit", unless_pods=True, for_a_person=True)),
        (condition("Placed", "False", "NoCapacity"), DeadEnd("NoCapacity", unless_pods=True)),
        (condition("Placed", "False", "Outranked"), DeadEnd("Outranked", unless_pods=True)),
        (condition("Placed", "False", "DrainingOthers"), None),  # GPUs are on their way
        (condition("Placed", "Unknown", "Pending"), None),
        (condition("Accepted", "False", "ArgumentsRefused"), DeadEnd("ArgumentsRefused", False, for_a_person=True)),
        (condition("Stalled", "True", "SourceNotFound"), DeadEnd("SourceNotFound", False, for_a_person=True)),
        (condition("Stalled", "True", "SourceUnreachable"), DeadEnd("SourceUnreachable", unless_pods=False)),
        (condition("Stalled", "True", "EngineFailed"), DeadEnd("EngineFailed", unless_pods=False)),
        (condition("ScalingActive", "False", "KEDANotInstalled"), DeadEnd("KEDANotInstalled", unless_pods=True)),
        (condition("ScalingActive", "False", "KEDANotPolling"), None),  # it may come back while requests wait
        (condition("Ready", "True", "ScaledToZero"), None),
        (condition("Ready", "False", "Loading"), None),
    ],
)
def test_the_conditions_tell_whether_waiting_is_of_use(told: dict[str, str], end: DeadEnd | None):
    assert served({"conditions": [condition("Accepted", "True", "Valid"), told]}).dead_end == end


@pytest.mark.parametrize(
    ("cold_start", "ages", "found"),
    [
        (20.0, [], True),
        (20.0, [None], True),
        (20.0, [70.0], True),
        (20.0, [5.0, 71.0], False),
        (None, [1_800.0], True),
        (None, [1_801.0], False),
    ],
)
def test_a_pod_that_takes_much_longer_than_measured_does_not_come(
    cold_start: float | None, ages: list[float | None], found: bool
) -> None:
    assert may_come(cold_start, ages) is found
