"""A Model whose driver is KEDA in a cluster that has none, until somebody installs it."""

from collections.abc import Generator
from pathlib import Path

import openai
import pytest

from shoal_dev.lab.addons import keda
from tests.support.keda import DRIVEN, NODES, KEDAFleet, prepare, stays, uninstall
from tests.support.lab import make_lab
from tests.support.waiting import until

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


def test_keda_is_uninstalled_under_load_and_the_replicas_stay(bare: KEDAFleet, tmp_path: Path) -> None:
    bare.make_model("removed", scaling=DRIVEN | {"minReplicas": 2, "maxReplicas": 2})
    bare.active("removed", "DrivenByKEDA", within=180)
    until(lambda: bare.model("removed")["status"]["replicas"]["ready"] == 2, 180, lambda: bare.told("removed"))
    with bare.asked("removed", 4) as load, bare.history(tmp_path) as history:
        uninstall(bare)
        bare.active("removed", "KEDANotInstalled", within=120)
        stays(lambda: bare.replicas("removed"), 2, 15)
        keda.install(bare.lab, keda.find_or_build(print), print)
        bare.active("removed", "DrivenByKEDA", within=180)
        assert history.of(bare.deployment("removed")) == [2]
    assert load.answers
    assert not load.problems
    bare.delete_model("removed")


def test_a_model_without_keda_goes_back_to_shoals_own_driver_at_once(bare: KEDAFleet) -> None:
    bare.make_model("pushed", scaling=DRIVEN | {"driver": "BuiltIn", "minReplicas": 1})
    bare.kubectl("wait", "--for=condition=Ready", "model/pushed", "-n", "demo", "--timeout=120s", timeout=130)
    assert bare.ask("pushed")
    bare.delete_model("pushed")
