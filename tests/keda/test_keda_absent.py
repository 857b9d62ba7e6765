"""A Model whose driver is KEDA in a cluster that has none, until somebody installs it."""

from collections.abc import Generator

import openai
import pytest

from shoal.lab.addons import keda
from tests.support.keda import DRIVEN, NODES, KEDAFleet, prepare
from tests.support.lab import make_lab

pytestmark = [pytest.mark.lab, pytest.mark.keda, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def bare() -> Generator[KEDAFleet]:
    """Shoal without KEDA; its nodes know KEDA's images."""
    lab = make_lab(NODES, extra_images=keda.images(keda.find_or_build(print)), hpa_sync_seconds=1.0)
    try:
        fleet = KEDAFleet(lab)
        prepare(fleet, {"operator": {"scaling": {"keda": {"pollingSeconds": 1}}}, "ledger": {"enabled": False}})
        yield fleet
    finally:
        lab.down()


def test_a_model_says_that_keda_is_missing_and_serves_once_it_is_installed(bare: KEDAFleet) -> None:
    bare.make_model("early", scaling=DRIVEN)
    message = bare.active("early", "KEDANotInstalled", within=120)
    assert "install KEDA (2.18 or later), or set spec.scaling.driver to BuiltIn" in message
    assert bare.replicas("early") == 0
    with pytest.raises(openai.APIStatusError) as refused:
        bare.ask("early")
    assert refused.value.status_code == 503

    keda.install(bare.lab, keda.find_or_build(print), print)

    bare.active("early", "DrivenByKEDA", within=180)
    assert bare.ask("early")


def test_a_model_without_keda_goes_back_to_shoals_own_driver_at_once(bare: KEDAFleet) -> None:
    bare.make_model("pushed", scaling=DRIVEN | {"driver": "BuiltIn", "minReplicas": 1})
    bare.kubectl("wait", "--for=condition=Ready", "model/pushed", "-n", "demo", "--timeout=120s", timeout=130)
    assert bare.ask("pushed")
    bare.delete_model("pushed")
