"""The InferencePool of a Model, and the way from it to the gateways that are ready."""

from dataclasses import replace

from shoal.api import names
from shoal.api.config import MTLS, AgentImage, Engines, ExtProc, OperatorConfig, TransportConfig
from shoal.api.model import Model
from shoal.core import facts
from shoal.manifests import inferencepool
from shoal.manifests.model import network_policy

CONFIG = OperatorConfig(
    engines=Engines(default_version="1", versions={}, cpuPerGPU="1", memoryPerGPU="1Gi"),
    agent=AgentImage(image="shoal"),
    ext_proc=ExtProc(enabled=True, proxy_namespaces=("ingress",)),
    transport=TransportConfig(mtls=MTLS(enabled=True)),
)
PLAIN = CONFIG.model_copy(update={"transport": TransportConfig(mtls=MTLS(enabled=False))})
MODEL = Model.model_validate(
    {
        "metadata": {
            "name": "llama.3",
            "namespace": "chat",
            "uid": "uid-1",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"source": {"uri": "file:///models/tiny"}},
    }
)


def gateway(ip: str | None, **changes: bool) -> facts.Pod:
    pod = facts.Pod(
        "shoal-system",
        f"g-{ip}",
        f"uid-{ip}",
        "node",
        finished=False,
        deleting=False,
        ready=True,
        requests={},
        model_uid=None,
        ip=ip,
    )
    return replace(pod, **changes)


def test_a_request_on_which_no_gateway_decides_is_refused() -> None:
    pool = inferencepool.pool(MODEL, CONFIG)
    picker = pool["spec"]["endpointPickerRef"]
    service = inferencepool.service(MODEL)
    assert picker["failureMode"] == "FailClose"
    assert (picker["name"], picker["port"]["number"]) == (service["metadata"]["name"], names.EXT_PROC_PORT)
    assert pool["spec"]["selector"]["matchLabels"][names.LABEL_MODEL_UID] == "uid-1"
    assert pool["metadata"]["name"] == "llama.3"
    assert service["metadata"]["name"] == "picker-llama-3"
    assert "selector" not in service["spec"]
    assert service["spec"]["type"] == "ClusterIP"


def test_the_port_is_that_for_proxies_where_engines_are_behind_mutual_tls() -> None:
    assert inferencepool.pool(MODEL, CONFIG)["spec"]["targetPorts"] == [{"number": names.ENGINE_PROXY_PORT}]
    assert inferencepool.pool(MODEL, PLAIN)["spec"]["targetPorts"] == [{"number": names.ENGINE_PORT}]


def test_only_gateways_that_are_ready_are_asked() -> None:
    pods = [
        gateway("10.0.0.2"),
        gateway("10.0.0.1"),
        gateway("10.0.0.3", ready=False),
        gateway("10.0.0.4", deleting=True),
        gateway(None),
    ]
    found = inferencepool.endpoints(MODEL, pods)
    assert found["addressType"] == "IPv4"
    assert [each["addresses"] for each in found["endpoints"]] == [["10.0.0.1"], ["10.0.0.2"]]
    service = inferencepool.service(MODEL)["metadata"]["name"]
    assert found["metadata"]["labels"]["kubernetes.io/service-name"] == service
    assert inferencepool.endpoints(MODEL, [gateway("fd00::1")])["addressType"] == "IPv6"
    assert inferencepool.endpoints(MODEL, [])["endpoints"] == []


def test_only_the_proxies_namespaces_reach_the_engines_port_for_them() -> None:
    def sources(config: OperatorConfig, port: int) -> list[str]:
        rules = network_policy(MODEL, config, "shoal-system")["spec"]["ingress"]
        found = [each for rule in rules if {"port": port, "protocol": "TCP"} in rule["ports"] for each in rule["from"]]
        return [s["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for s in found]

    assert sources(CONFIG, names.ENGINE_PROXY_PORT) == ["ingress"]
    assert sources(CONFIG, names.ENGINE_TLS_PORT) == ["shoal-system"]
    assert sources(PLAIN, names.ENGINE_PORT) == ["shoal-system", "ingress"]
    off = CONFIG.model_copy(update={"ext_proc": ExtProc()})
    assert sources(off, names.ENGINE_PROXY_PORT) == []
