"""External targets of routes: closed unless a value opens them, and then for operator, gateways and network alike."""

import json
from typing import Any

import yaml

from tests.charts.test_chart_media import gateway, reaches, values
from tests.support.charts import rendered

HOSTS: list[dict[str, Any]] = [
    {"host": "api.example.com"},
    {"host": "vllm.other.internal", "port": 8443, "networks": ["10.20.0.0/16"], "plainHttp": True},
]
OPEN: dict[str, Any] = {"external": {"allowedHosts": HOSTS}}


def pod(given: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = gateway(rendered(given), "StatefulSet")["spec"]["template"]["spec"]
    return found


def operator_hosts(given: dict[str, Any]) -> list[dict[str, Any]]:
    (found,) = [o for o in rendered(given) if o["kind"] == "ConfigMap" and o["metadata"]["name"] == "shoal-operator"]
    hosts: list[dict[str, Any]] = yaml.safe_load(found["data"]["config.yaml"])["external"]["allowedHosts"]
    return hosts


def test_by_default_nothing_goes_out() -> None:
    env = {each["name"] for each in pod(values())["containers"][0]["env"]}
    assert not any("EXTERNAL" in name for name in env)
    assert "external-keys" not in {each["name"] for each in pod(values())["volumes"]}
    assert operator_hosts(values()) == []
    assert not reaches(values(), "8.8.8.8", 443)


def test_operator_and_gateways_have_the_same_list_and_only_gateways_the_keys() -> None:
    spec = pod(values(**OPEN))
    env = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}
    assert json.loads(env["SHOAL_GATEWAY_EXTERNAL_HOSTS"]) == HOSTS == operator_hosts(values(**OPEN))
    (volume,) = [each for each in spec["volumes"] if each["name"] == "external-keys"]
    assert volume["secret"] == {"secretName": "shoal-external-keys", "optional": True}


def test_the_network_opens_their_ports_and_nothing_inside() -> None:
    assert reaches(values(**OPEN), "8.8.8.8", 443)
    assert reaches(values(**OPEN), "8.8.8.8", 8443)
    assert not reaches(values(**OPEN), "8.8.8.8", 80)
    assert not reaches(values(**OPEN), "169.254.169.254", 443)
