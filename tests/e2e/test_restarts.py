"""Serving goes on without the operator and without the API server, and all comes back by itself."""

import click
import openai
import pytest

from shoal_dev.demo import steps
from shoal_dev.demo.clusters import NAMESPACE
from tests.e2e.conftest import Fleet
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]


@pytest.fixture
def client(fleet: Fleet) -> openai.OpenAI:
    port = fleet.lab.forward_port()
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=steps.DEMO_KEY, max_retries=0, timeout=30)


def answered(client: openai.OpenAI) -> bool:
    try:
        return bool(client.completions.create(model="tiny-chat", prompt="x", max_tokens=2).choices)
    except openai.APIError:
        return False


def test_a_gateway_starts_and_serves_while_no_operator_is_there(fleet: Fleet, client: openai.OpenAI) -> None:
    operator = ("deployment/shoal-operator", "-n", NAMESPACE)
    fleet.kubectl("scale", *operator, "--replicas=0")
    try:
        operators = ("-n", NAMESPACE, "-l", "app.kubernetes.io/component=operator")
        fleet.kubectl("wait", "--for=delete", "pod", *operators, "--timeout=120s", timeout=130)
        for pod in ("shoal-gateway-0", "shoal-gateway-1"):
            fleet.kubectl("delete", "pod", pod, "-n", NAMESPACE, timeout=120)
        fleet.kubectl("rollout", "status", "statefulset/shoal-gateway", "-n", NAMESPACE, "--timeout=120s", timeout=130)
        until(lambda: answered(client), 30)
    finally:
        fleet.kubectl("scale", *operator, "--replicas=2")
    fleet.kubectl("rollout", "status", *operator, "--timeout=120s", timeout=130)


def test_the_api_server_goes_and_comes_under_operator_and_gateway(fleet: Fleet, client: openai.OpenAI) -> None:
    fleet.lab.kill("kube-apiserver")
    try:
        for _ in range(5):
            assert answered(client)
    finally:
        fleet.lab.start("kube-apiserver")
    until(lambda: "tiny-chat" in fleet.lab.kubectl("get", "models", "-n", "demo", check=False), 120)
    assert answered(client)

    def accepted() -> bool:
        try:
            fleet.make_model("after-restart")
        except click.ClickException:  # an API server serves reads before it admits writes
            return False
        return True

    # The operator watches again: a new Model is worked on, and the scheduler has found back, too.
    until(accepted, 90)
    fleet.kubectl("wait", "--for=condition=Ready", "model/after-restart", "-n", "demo", "--timeout=240s", timeout=250)
    fleet.delete_model("after-restart")
