"""helm upgrade, uninstall and install again on a serving fleet. Last in this folder, since it takes Shoal away."""

import threading

import openai
import pytest

from shoal.cli.demo import steps
from shoal.cli.demo.clusters import NAMESPACE
from tests.e2e.conftest import Fleet
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]


def ask(fleet: Fleet) -> str:
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{fleet.lab.forward_port()}/v1", api_key=steps.DEMO_KEY, max_retries=0, timeout=30
    )
    with client:
        return client.completions.create(model="tiny-chat", prompt="x", max_tokens=4).choices[0].text


def test_upgrade_under_requests_then_uninstall_then_install_again(fleet: Fleet) -> None:
    engines = {p["metadata"]["uid"] for p in fleet.get("pods", "-n", "demo", "-l", "shoal.dev/model")}
    stop, wrong, answered = threading.Event(), list[str](), list[str]()

    def client() -> None:
        while not stop.is_set():
            try:
                answered.append(ask(fleet))
            except openai.APIStatusError as e:
                wrong.append(str(e))
            except openai.APIConnectionError:
                pass  # the test's way in: a forwarder on the host, which picks a gateway before it may be gone

    thread = threading.Thread(target=client)
    thread.start()
    try:
        values = {"operator": {"logLevel": "debug"}, "gateway": {"logLevel": "debug", "replicas": 2}}
        steps.install(fleet, "simulator", steps.LAB_IMAGE, values)
        fleet.kubectl("rollout", "status", "statefulset/shoal-gateway", "-n", NAMESPACE, "--timeout=90s", timeout=100)
    finally:
        stop.set()
        thread.join(60)
    assert answered
    assert wrong == []
    now = {p["metadata"]["uid"] for p in fleet.get("pods", "-n", "demo", "-l", "shoal.dev/model")}
    assert now == engines, "an upgrade of Shoal that changes no engine must not restart engines"

    fleet.helm("uninstall", "shoal", "--namespace", NAMESPACE, "--wait")
    assert "tiny-chat" in fleet.kubectl("get", "models", "-n", "demo")
    assert {p["metadata"]["uid"] for p in fleet.get("pods", "-n", "demo", "-l", "shoal.dev/model")} == engines

    steps.install(fleet, "simulator", steps.LAB_IMAGE)
    until(lambda: bool(ask(fleet)), 30)
