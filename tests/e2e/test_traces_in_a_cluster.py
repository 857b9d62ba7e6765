"""Traces by the chart's values alone, in a cluster with a collector: gateway, hold, engine, operator and ledger."""

import base64
import json
import os
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from shoal.api.keys import hash_api_key
from shoal_dev.demo import steps
from shoal_dev.lab.state import LabForward
from tests.e2e.conftest import Fleet
from tests.support import otlpsink
from tests.support.lab import make_lab
from tests.support.traces import Received, decode
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(480)]

SPACE: Final = "telemetry"
SINK: Final = LabForward(namespace=SPACE, service="collector", port=otlpsink.PORT)
VALUES: Final[dict[str, Any]] = {
    "tracing": {"endpoint": f"http://collector.{SPACE}.svc:{otlpsink.PORT}", "engines": True},
}
MODEL: Final = "traced"
KEY: Final = "sk-canary-that-no-span-may-have"
PROMPT: Final = "canary words that no span may have"
TRACE: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT: Final = "00f067aa0ba902b7"


def collector() -> list[dict[str, Any]]:
    """Namespace, program, pod and Service."""
    labels = {"app": "collector"}
    metadata = {"name": "collector", "namespace": SPACE}
    container = {
        "name": "collector",
        "image": steps.LAB_IMAGE,
        "command": ["python", "/collector/otlpsink.py"],
        "volumeMounts": [{"name": "program", "mountPath": "/collector"}],
        "readinessProbe": {"tcpSocket": {"port": otlpsink.PORT}, "periodSeconds": 1},
    }
    volume = {"name": "program", "configMap": {"name": "collector"}}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata,
         "data": {"otlpsink.py": Path(otlpsink.__file__).read_text()}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata | {"labels": labels},
         "spec": {"containers": [container], "volumes": [volume]}},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata,
         "spec": {"selector": labels, "ports": [{"port": otlpsink.PORT}]}},
    ]  # fmt: skip


@pytest.fixture(scope="module")
def fleet() -> Generator[Fleet]:
    if os.geteuid() != 0:
        pytest.skip("the lab needs root")
    lab = make_lab(forwards=(SINK,))
    try:
        fleet = Fleet(lab)
        fleet.apply(*collector())
        fleet.kubectl("wait", "--for=condition=Ready", "pod/collector", "-n", SPACE, "--timeout=60s", timeout=70)
        steps.install(fleet, "simulator", steps.LAB_IMAGE, VALUES)
        fleet.kubectl("apply", "-f", str(steps.EXAMPLES / "gpuclasses.yaml"))
        tenant = {
            "keys": [{"name": "k", "sha256": hash_api_key(KEY)}],
            "models": [{"namespace": steps.DEMO_NAMESPACE, "name": MODEL}],
        }
        fleet.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": steps.DEMO_NAMESPACE}},
            {"apiVersion": "shoal.dev/v1alpha1", "kind": "Tenant", "metadata": {"name": "traces"}, "spec": tenant},
        )
        yield fleet
    finally:
        lab.down()


def batches(fleet: Fleet) -> list[bytes]:
    url = f"http://127.0.0.1:{fleet.lab.forward_port(SINK.namespace, SINK.service, SINK.port)}/taken"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return [base64.b64decode(each) for each in json.load(answer)]


def spans(fleet: Fleet) -> list[Received]:
    return [span for batch in batches(fleet) for span in decode(batch)]


def ask(fleet: Fleet) -> None:
    """One stream, by a client that traces."""
    url = f"http://127.0.0.1:{fleet.lab.forward_port()}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=120) as client:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=4,
            stream=True,
            extra_headers={"traceparent": f"00-{TRACE}-{CLIENT}-01"},
        )
        assert [chunk for chunk in stream if chunk.choices and chunk.choices[0].finish_reason]


def test_a_wake_from_zero_is_one_trace_from_the_client_to_the_engine(fleet: Fleet) -> None:
    fleet.make_model(MODEL, scaling={"minReplicas": 0, "idleSeconds": 5, "stabilizationSeconds": 3})
    fleet.expect(MODEL, "Ready", "ScaledToZero", within=180)
    ask(fleet)

    of_trace = lambda: [span for span in spans(fleet) if span.trace == TRACE]  # noqa: E731
    # A gateway sends in batches, and a span when it ends: the request's own comes last.
    kinds = {("shoal-gateway", "SERVER"), ("shoal-gateway", "CLIENT"), ("sglang", "INTERNAL")}
    until(lambda: kinds <= {(s.service, s.kind) for s in of_trace()}, 60, lambda: spans(fleet))
    found = of_trace()
    [server] = [span for span in found if span.kind == "SERVER"]
    assert (server.service, server.name, server.parent) == ("shoal-gateway", "POST /v1/chat/completions", CLIENT)
    assert server.attributes["shoal.model"] == f"{steps.DEMO_NAMESPACE}/{MODEL}"
    assert server.attributes["shoal.outcome"] == "answered"
    assert str(server.resource["k8s.pod.name"]).startswith("shoal-gateway-")
    hold, call = sorted((s for s in found if s.parent == server.id), key=lambda s: s.began)[-2:]
    assert (hold.name, hold.attributes["shoal.hold.ended"]) == ("hold", "released")
    assert (call.kind, call.attributes["gen_ai.provider.name"]) == ("CLIENT", "sglang")
    assert call.attributes["gen_ai.usage.output_tokens"] == 4
    assert call.attributes["shoal.gpu_class"]
    assert {span.name for span in found if span.parent == call.id} >= {"stream"}
    [engine] = [span for span in found if span.service == "sglang"]
    assert (engine.parent, engine.attributes["gen_ai.usage.completion_tokens"]) == (call.id, 4)


def test_decisions_and_records_are_traces_of_their_own(fleet: Fleet) -> None:
    def woken() -> list[Received]:
        return [s for s in spans(fleet) if s.name == "scale" and s.attributes["shoal.replicas.before"] == 0]

    until(lambda: bool(woken()), 60, lambda: spans(fleet))
    decided = woken()[-1]
    assert decided.service == "shoal-operator"
    assert decided.attributes["shoal.model"] == f"{steps.DEMO_NAMESPACE}/{MODEL}"
    assert decided.attributes["shoal.replicas.wanted"] == 1
    names = lambda: {(s.service, s.name) for s in spans(fleet)}  # noqa: E731
    until(lambda: {("shoal-operator", "reconcile model"), ("shoal-ledger", "POST /v1/records")} <= names(), 60, names)


def test_no_span_has_a_prompt_or_a_key_and_probes_are_none(fleet: Fleet) -> None:
    everything = b"".join(batches(fleet))
    assert everything
    for secret in (PROMPT, KEY):
        assert secret.encode() not in everything
    # Engines are looked at each second, by agent and kubelet: they trace what a gateway sends and nothing else.
    assert {s.trace for s in spans(fleet) if s.service == "sglang"} <= {
        s.trace for s in spans(fleet) if s.service == "shoal-gateway"
    }


def test_a_collector_that_goes_away_costs_no_request(fleet: Fleet) -> None:
    fleet.kubectl("delete", "pod", "collector", "-n", SPACE, "--grace-period=0", "--force")
    for _ in range(3):
        ask(fleet)
