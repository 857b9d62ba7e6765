"""Envoy's external processing in the chart: off by default; where it is on, only the proxies' namespaces reach it."""

from typing import Any

import pytest
import yaml

from shoal.api import names, permissions
from tests.support.charts import CHART, helm, rendered

ON = {"gateway": {"extProc": {"enabled": True, "proxyNamespaces": ["istio-ingress"]}}}


def find(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any] | None:
    return next((o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name)), None)


def gateway(objects: list[dict[str, Any]]) -> dict[str, Any]:
    found = find(objects, "StatefulSet", "shoal-gateway")
    assert found is not None
    return found["spec"]["template"]["spec"]["containers"][0]


def test_it_is_off_by_default() -> None:
    objects = rendered({})
    assert find(objects, "Service", names.EXT_PROC_SERVICE) is None
    assert not [e for e in gateway(objects)["env"] if "EXT_PROC" in e["name"]]


def test_where_it_is_on_only_the_proxies_reach_it_and_with_tls() -> None:
    objects = rendered(ON)
    service = find(objects, "Service", names.EXT_PROC_SERVICE)
    assert service is not None
    assert [p["port"] for p in service["spec"]["ports"]] == [names.EXT_PROC_PORT]
    env = {e["name"]: e.get("value") for e in gateway(objects)["env"]}
    assert (env["SHOAL_GATEWAY_EXT_PROC"], env["SHOAL_GATEWAY_EXT_PROC_TLS_DIR"]) == ("true", names.TLS_DIR)
    policy = find(objects, "NetworkPolicy", "shoal-gateway")
    assert policy is not None
    (rule,) = [r for r in policy["spec"]["ingress"] if r["ports"][0]["port"] == names.EXT_PROC_PORT]
    (source,) = rule["from"]
    assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "istio-ingress"}
    config = find(objects, "ConfigMap", "shoal-operator")
    assert config is not None
    told = yaml.safe_load(config["data"]["config.yaml"])["extProc"]
    assert told == {"enabled": True, "proxyNamespaces": ["istio-ingress"]}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"gateway": {"extProc": {"enabled": True}}}, "proxyNamespaces"),
        ({**ON, "transport": {"mtls": {"enabled": False}}}, "secretName"),
        (
            {"gateway": {"extProc": {**ON["gateway"]["extProc"], "tls": {"clientCertificates": True}}}},
            "clientCertificates needs secretName",
        ),
    ],
)
def test_what_would_be_open_is_refused(values: dict[str, Any], why: str) -> None:
    done = helm("template", "shoal", str(CHART), values=values)
    assert done.returncode
    assert why in done.stderr


def test_a_certificate_of_ones_own_is_mounted() -> None:
    tls = {"secretName": "proxies", "clientCertificates": True}
    objects = rendered({"gateway": {"extProc": {**ON["gateway"]["extProc"], "tls": tls}}})
    env = {e["name"]: e.get("value") for e in gateway(objects)["env"]}
    assert env["SHOAL_GATEWAY_EXT_PROC_TLS_DIR"] == "/etc/shoal/extproc-tls"
    assert env["SHOAL_GATEWAY_EXT_PROC_CLIENT_CERTIFICATES"] == "true"
    assert "/etc/shoal/extproc-tls" in [m["mountPath"] for m in gateway(objects)["volumeMounts"]]


def test_the_operators_rights_are_those_that_it_uses_and_only_in_its_scope() -> None:
    assert find(rendered({}), "ClusterRole", "shoal-operator-proxies") is None
    objects = rendered(ON)
    role = find(objects, "ClusterRole", "shoal-operator-proxies")
    assert role is not None
    assert role["rules"] == permissions.rules(permissions.OPERATOR_PROXIES)
    assert find(objects, "ClusterRoleBinding", "shoal-operator-proxies") is not None
    scoped = rendered({**ON, "scope": {"namespaces": ["chat"]}})
    assert find(scoped, "ClusterRoleBinding", "shoal-operator-proxies") is None
    bound = [o for o in scoped if (o["kind"], o["metadata"]["name"]) == ("RoleBinding", "shoal-operator-proxies")]
    assert "chat" in [o["metadata"]["namespace"] for o in bound]
