"""KEDA's way to the operator in the chart: its Service, its certificate, the ports."""

from typing import Any

from shoal.api import names
from tests.support.charts import CHART, helm, rendered

SCALER = {"operator": {"scaling": {"keda": {"tlsSecretName": "from-cert-manager"}}}}
PLAIN = {"operator": {"scaling": {"keda": {"tls": False}}}}


def find(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any] | None:
    return next((o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name)), None)


def operator(values: dict[str, Any]) -> dict[str, Any]:
    found = find(rendered(values), "Deployment", "shoal-operator")
    assert found is not None
    return found["spec"]["template"]["spec"]


def test_the_service_has_no_selector_so_that_only_the_leader_is_behind_it() -> None:
    service = find(rendered({}), "Service", names.SCALER_SERVICE)
    assert service is not None
    assert "selector" not in service["spec"]
    assert [p["port"] for p in service["spec"]["ports"]] == [names.SCALER_PORT]


def test_the_operator_knows_its_address_and_finds_its_certificate() -> None:
    spec = operator({})
    (container,) = spec["containers"]
    fields = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in container["env"] if "valueFrom" in e}
    assert fields["POD_IP"] == "status.podIP"
    assert fields["POD_UID"] == "metadata.uid"
    assert names.SCALER_PORT in [p["containerPort"] for p in container["ports"]]
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert mounts["scaler-tls"] == names.SCALER_TLS_DIR
    secrets = {v["name"]: v["secret"] for v in spec["volumes"] if "secret" in v}
    # Without KEDA nobody misses it.
    assert secrets["scaler-tls"] == {"secretName": names.SCALER_TLS_SECRET, "optional": True}


def test_keda_may_reach_the_operators_port() -> None:
    policy = find(rendered({}), "NetworkPolicy", "shoal-operator")
    assert policy is not None
    assert [rule["ports"][0]["port"] for rule in policy["spec"]["ingress"]] == [names.SCALER_PORT, names.OPS_PORT]


def test_a_certificate_of_ones_own_is_mounted() -> None:
    volumes = {v["name"]: v for v in operator(SCALER)["volumes"]}
    assert volumes["scaler-tls"]["secret"]["secretName"] == "from-cert-manager"


def test_without_tls_no_certificate_is_mounted() -> None:
    assert "scaler-tls" not in [v["name"] for v in operator(PLAIN)["volumes"]]


def test_a_driver_that_does_not_exist_is_refused() -> None:
    done = helm("template", "shoal", str(CHART), values={"operator": {"scaling": {"driver": "HPA"}}})
    assert done.returncode != 0
    assert "operator.scaling.driver" in done.stderr.replace("/", ".")
