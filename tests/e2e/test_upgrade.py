"""helm upgrade, uninstall and install again on a serving fleet. Last in this folder, since it takes Shoal away."""

import threading

import openai
import pytest

from shoal_dev.demo import steps
from shoal_dev.demo.clusters import NAMESPACE
from tests.e2e.conftest import Fleet
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]


def ask(fleet: Fleet) -> str:
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{fleet.lab.forward_port()}/v1", api_key=steps.DEMO_KEY, max_retries=0, timeout=30
    )
    with client:
        return client.completions.create(model="tiny-chat", prompt="x", max_tokens=4).choices[0].text


def engine_pods(fleet: Fleet) -> set[str]:
    """Without those that are going: what earlier tests deleted may still be finishing."""
    pods = fleet.get("pods", "-n", "demo", "-l", "shoal.dev/model,app.kubernetes.io/component=engine")
    return {p["metadata"]["uid"] for p in pods if "deletionTimestamp" not in p["metadata"]}


def test_upgrade_under_requests_then_uninstall_then_install_again(fleet: Fleet) -> None:
    fleet.until_alone()
    engines = engine_pods(fleet)
    stop, wrong, answered = threading.Event(), list[str](), list[str]()

    def client() -> None:
        while not stop.is_set():
            try:
                answered.append(ask(fleet))
            except openai.APIError as e:  # connections that broke are among them
                wrong.append(f"{e} ({e.__cause__!r})")

    thread = threading.Thread(target=client)
    thread.start()
    try:
        values = {"operator": {"logLevel": "debug"}, "gateway": {"logLevel": "debug", "replicas": 2}}
        steps.install(fleet, "simulator", steps.LAB_IMAGE, values)
        fleet.kubectl("rollout", "status", "statefulset/shoal-gateway", "-n", NAMESPACE, "--timeout=240s", timeout=250)
    finally:
        stop.set()
        thread.join(60)
    assert answered
    assert wrong == []
    assert engine_pods(fleet) == engines, "an upgrade of Shoal that changes no engine must not restart engines"

    fleet.helm("uninstall", "shoal", "--namespace", NAMESPACE, "--wait")
    assert "tiny-chat" in fleet.kubectl("get", "models", "-n", "demo")
    assert engine_pods(fleet) == engines

    steps.install(fleet, "simulator", steps.LAB_IMAGE)

    def answers() -> bool:
        try:
            return bool(ask(fleet))
        except openai.APIError:
            return False

    until(answers, 60)
