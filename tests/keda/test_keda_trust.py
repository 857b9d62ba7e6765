"""The certificate by which KEDA knows the operator is another one, of another CA: KEDA asks on, and hears of wakes."""

import pytest

from shoal_dev.demo.clusters import NAMESPACE
from tests.support.keda import DRIVEN, KEDAFleet, leader
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.keda, pytest.mark.timeout(600)]


def digest(fleet: KEDAFleet, name: str) -> str:
    [scaled] = fleet.scaled_objects(name)
    return scaled["spec"]["triggers"][0]["metadata"]["caSHA256"]


def test_a_new_certificate_and_ca_reach_keda_and_it_is_told_of_wakes_by_them(fleet: KEDAFleet) -> None:
    fleet.make_model("renewed", scaling=DRIVEN)
    fleet.active("renewed", "DrivenByKEDA", within=180)
    fleet.expect("renewed", "Ready", "ScaledToZero", within=180)
    before = digest(fleet, "renewed")

    # As docs/keda.md says: the operator issues another one.
    fleet.kubectl("delete", "secret", "shoal-scaler-tls", "-n", NAMESPACE)
    until(lambda: digest(fleet, "renewed") != before, 240, lambda: fleet.told("renewed"))

    # Connections of the old certificate end with the operators; the Model stays at zero, so that nothing else makes
    # KEDA open its stream anew.
    fleet.kubectl("rollout", "restart", "deployment/shoal-operator", "-n", NAMESPACE)
    rollout = ("rollout", "status", "deployment/shoal-operator", "-n", NAMESPACE, "--timeout=180s")
    fleet.kubectl(*rollout, timeout=190)
    streams = lambda: fleet.metric(leader(fleet), 'shoal_keda_streams{method="StreamIsActive"}')  # noqa: E731
    until(lambda: streams() >= 1, 120, lambda: fleet.told("renewed"))
    assert fleet.replicas("renewed") == 0
    assert fleet.ask("renewed")
    fleet.active("renewed", "DrivenByKEDA", within=60)
    fleet.delete_model("renewed")
