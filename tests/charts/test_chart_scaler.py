"""KEDA's way to the operator in the chart: its Service, its certificate, the ports."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from shoal.api import names
from shoal.controllers.keda.tls import CertificateFiles
from tests.support.apiserver import ApiServer, start
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


async def test_the_certificate_is_one_that_the_operator_takes_and_names_the_service(tmp_path: Path) -> None:
    secret = find(rendered({}), "Secret", names.SCALER_TLS_SECRET)
    assert secret is not None
    assert secret["type"] == "kubernetes.io/tls"
    data = {name: base64.b64decode(text) for name, text in secret["data"].items()}
    for name, content in data.items():
        (tmp_path / name).write_bytes(content)
    files = CertificateFiles(tmp_path, names.SCALER_TLS_SECRET)
    taken = await files.refresh()

    assert taken is not None, files.problem
    leaf, ca = (x509.load_pem_x509_certificate(data[name]) for name in ("tls.crt", "ca.crt"))
    leaf.verify_directly_issued_by(ca)
    said = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "shoal-scaler.shoal-system.svc" in said.get_values_for_type(x509.DNSName)


@pytest.mark.parametrize("address", ["10.0.0.9:9666", "keda.example.com:443"])
def test_an_address_of_ones_own_stands_in_the_certificate(address: str) -> None:
    values = {"operator": {"scaling": {"keda": {"address": address}}}}
    secret = find(rendered(values), "Secret", names.SCALER_TLS_SECRET)
    assert secret is not None
    leaf = x509.load_pem_x509_certificate(base64.b64decode(secret["data"]["tls.crt"]))
    said = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    known = [str(name.value) for name in said]
    assert address.partition(":")[0] in known
    assert "shoal-scaler.shoal-system.svc" in known


def test_a_certificate_of_ones_own_is_mounted_and_none_is_made() -> None:
    objects = rendered(SCALER)
    assert find(objects, "Secret", names.SCALER_TLS_SECRET) is None
    volumes = {v["name"]: v for v in operator(SCALER)["volumes"]}
    assert volumes["scaler-tls"]["secret"]["secretName"] == "from-cert-manager"


def test_without_tls_there_is_no_certificate() -> None:
    assert find(rendered(PLAIN), "Secret", names.SCALER_TLS_SECRET) is None
    assert "scaler-tls" not in [v["name"] for v in operator(PLAIN)["volumes"]]


def test_a_driver_that_does_not_exist_is_refused() -> None:
    done = helm("template", "shoal", str(CHART), values={"operator": {"scaling": {"driver": "HPA"}}})
    assert done.returncode != 0
    assert "operator.scaling.driver" in done.stderr.replace("/", ".")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server that has never heard of Shoal."""
    yield from start(tmp_path_factory.mktemp("bare"))


@pytest.mark.apiserver
def test_the_certificate_is_kept_over_upgrades(bare: ApiServer) -> None:
    def secret() -> dict[str, str]:
        return bare.json("get", "secret", names.SCALER_TLS_SECRET, "-n=shoal-system")["data"]

    def release(verb: str, values: dict[str, Any]) -> None:
        place = (f"--kubeconfig={bare.kubeconfig}", "--namespace=shoal-system", "--create-namespace")
        done = helm(verb, "shoal", str(CHART), *place, values=values)
        assert done.returncode == 0, done.stderr

    release("install", {})
    first = secret()
    release("upgrade", {"gateway": {"replicas": 1}})
    assert secret() == first
    # The way to another one.
    bare.kubectl("delete", "secret", names.SCALER_TLS_SECRET, "-n=shoal-system")
    release("upgrade", {})
    assert secret()["ca.crt"] != first["ca.crt"]
