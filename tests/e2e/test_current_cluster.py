"""`shoal demo --cluster current`: kubectl's own cluster, and the gateway through kubectl port-forward."""

import os

import click
import openai
import pytest

from shoal_dev.demo import steps
from shoal_dev.demo.clusters import NAMESPACE, CurrentCluster
from tests.e2e.conftest import Fleet

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


@pytest.fixture
def current(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> CurrentCluster:
    """The lab as a user's own cluster: nothing is known of it but kubectl, helm and a kubeconfig."""
    monkeypatch.setenv("PATH", fleet.lab.environment()["PATH"])
    monkeypatch.setenv("KUBECONFIG", str(fleet.lab.kubeconfig))
    return CurrentCluster()


def test_the_gateway_is_reached_by_port_forward_and_its_records_by_exec(current: CurrentCluster) -> None:
    with current.gateway() as url, openai.OpenAI(base_url=f"{url}/v1", api_key=steps.DEMO_KEY, timeout=30) as client:
        streamed = client.chat.completions.with_raw_response.create(
            model="tiny-chat", messages=[{"role": "user", "content": "Who are you?"}], max_tokens=8, stream=True
        )
        assert [chunk for chunk in streamed.parse() if chunk.choices]
        answers = [client.completions.create(model="tiny-chat", prompt=f"{n}", max_tokens=2) for n in range(5)]
        assert all(answer.choices[0].text for answer in answers)
        request = streamed.headers["x-request-id"]
    assert steps.usage_record(current, request)["subject"] == "acme"
    with pytest.raises(openai.APIConnectionError):  # nothing is left listening
        openai.OpenAI(base_url=f"{url}/v1", api_key=steps.DEMO_KEY, max_retries=0, timeout=5).models.list()


def test_a_service_that_is_not_there_is_told_in_kubectls_words(
    current: CurrentCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal_dev.demo.clusters.GATEWAY_SERVICE", "no-such-service")
    with pytest.raises(click.ClickException, match='services "no-such-service" not found') as caught, current.gateway():
        pass
    assert caught.value.message.startswith("kubectl port-forward failed: ")


def test_a_kubeconfig_that_leads_nowhere(current: CurrentCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    assert NAMESPACE in {item["metadata"]["name"] for item in current.get("namespaces")}
    monkeypatch.setenv("KUBECONFIG", os.devnull)
    with pytest.raises(click.ClickException, match="kubectl does not reach a cluster"):
        CurrentCluster()
