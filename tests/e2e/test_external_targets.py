"""An external target on a live fleet: its key from a Secret through operator, mount and gateway to a TLS server, what
rotation and deletion of the Secret do, and that no other host gets it."""

import base64
import json
import os
from collections.abc import Generator
from datetime import UTC, datetime
from typing import Any, Final

import httpx
import pytest

from shoal.api.meta import API_VERSION
from shoal.core.routing.external import SECRET_TYPE
from shoal_dev.demo.steps import LAB_IMAGE, install
from shoal_dev.lab import network
from shoal_dev.lab.pki import LabAuthority
from tests.e2e.conftest import VALUES, Fleet
from tests.support.helperpods import helper_pod
from tests.support.providerpod import fingerprint
from tests.support.tenantfixture import TenantFixture, admitted
from tests.support.waiting import until

# A key takes as long as the operator's reading and the kubelet's mount: up to two minutes each time.
pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(900)]

PROVIDER_NAMESPACE: Final = "provider"
PROVIDER_PORT: Final = 8443
PROVIDER, OTHER_PROVIDER = (f"{name}.{PROVIDER_NAMESPACE}.svc.cluster.local" for name in ("api", "other"))
HOSTS: Final = [
    {"host": host, "port": PROVIDER_PORT, "networks": [network.SERVICE_RANGE]} for host in (PROVIDER, OTHER_PROVIDER)
]
TENANT: Final = f"external-e2e-{os.getpid()}"
STRANGER: Final = f"external-e2e-{os.getpid()}-other"
SPACE, ROUTE, SECRET = "demo", "external-e2e", "external-e2e-key"
FIRST, SECOND = "sk-first-0123456789", "sk-second-0123456789"
CHAT: Final = {"model": ROUTE, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module", autouse=True)
def allowed(fleet: Fleet) -> Generator[None]:
    """The installation allows both names of the provider, while these tests run."""
    install(fleet, "simulator", LAB_IMAGE, VALUES | {"gateway": {"external": {"allowedHosts": HOSTS}}})
    try:
        yield
    finally:
        install(fleet, "simulator", LAB_IMAGE, VALUES)


@pytest.fixture(scope="module")
def authority(fleet: Fleet) -> Generator[LabAuthority]:
    """A running provider, by the authority of its certificate. It has two names."""
    made = LabAuthority("provider", datetime.now(UTC))
    pair = made.server(PROVIDER, (PROVIDER, OTHER_PROVIDER))
    fleet.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": PROVIDER_NAMESPACE}})
    until(lambda: "default" in fleet.kubectl("get", "serviceaccounts", "-n", PROVIDER_NAMESPACE), 30)
    names = [host.partition(".")[0] for host in (PROVIDER, OTHER_PROVIDER)]
    volume = {"name": "tls", "secret": {"secretName": "tls"}}
    file = "/etc/provider/server.pem"
    pod = helper_pod(
        "provider", PROVIDER_NAMESPACE, "tests.support.providerpod", str(PROVIDER_PORT), file, image=LAB_IMAGE
    )
    pod["spec"]["volumes"].append(volume)
    pod["spec"]["containers"][0]["volumeMounts"].append({"name": "tls", "mountPath": "/etc/provider"})
    port = {"port": PROVIDER_PORT, "targetPort": PROVIDER_PORT}
    fleet.apply(
        secret("tls", {"server.pem": (pair.certificate + pair.key).decode()}, "Opaque", PROVIDER_NAMESPACE),
        pod,
        *(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name, "namespace": PROVIDER_NAMESPACE},
                "spec": {"selector": {"app": "provider"}, "ports": [port]},
            }
            for name in names
        ),
    )
    try:
        wait = ("wait", "--for=condition=Ready", "pod/provider", "-n", PROVIDER_NAMESPACE, "--timeout=60s")
        fleet.kubectl(*wait, timeout=70)
        yield made
    finally:
        fleet.kubectl("delete", "namespace", PROVIDER_NAMESPACE, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="module")
def tenants(fleet: Fleet) -> Generator[TenantFixture]:
    """One tenant that grants the route, and one that grants only the Model of its fallback."""
    made, names = TenantFixture(fleet), (TENANT, STRANGER)
    for name in names:
        spec: dict[str, Any] = {"models": [{"namespace": SPACE, "name": "tiny-chat"}]}
        if name == TENANT:
            spec["routes"] = [{"namespace": SPACE, "names": [ROUTE]}]
        fleet.apply({"apiVersion": API_VERSION, "kind": "Tenant", "metadata": {"name": name}, "spec": spec})
    try:
        for name in names:
            made.keys[name] = made.make_key("first", tenant=name)
            admitted(made, made.keys[name])
        yield made
    finally:
        fleet.kubectl("delete", "tenants.shoal.dev", *names, "--ignore-not-found")
        fleet.kubectl("delete", f"modelroutes.shoal.dev/{ROUTE}", f"secret/{SECRET}", "-n", SPACE, "--ignore-not-found")


def secret(name: str, data: dict[str, str], type: str = SECRET_TYPE, namespace: str = SPACE) -> dict[str, Any]:
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "type": type, "metadata": metadata, "data": encoded}


def put(fleet: Fleet, authority: LabAuthority, host: str = PROVIDER) -> None:
    outside = {
        "name": "outside",
        "url": f"https://{host}:{PROVIDER_PORT}/v1",
        "model": "theirs",
        "credentials": {"name": SECRET, "auth": "XApiKey"},
        "caBundle": authority.pair.certificate.decode(),
    }
    spec = {"rules": [{"targets": [{"external": {"name": "outside"}}]}], "externalTargets": [outside]}
    metadata = {"name": ROUTE, "namespace": SPACE}
    fleet.apply({"apiVersion": API_VERSION, "kind": "ModelRoute", "metadata": metadata, "spec": spec})


def accepted(fleet: Fleet) -> dict[str, Any]:
    found = json.loads(fleet.kubectl("get", "modelroutes.shoal.dev", ROUTE, "-n", SPACE, "-o", "json"))
    if found.get("status", {}).get("observedGeneration") != found["metadata"]["generation"]:
        return {}
    return next((c for c in found["status"]["conditions"] if c["type"] == "Accepted"), {})


def ask(tenants: TenantFixture, tenant: str = TENANT) -> httpx.Response:
    """Over a connection of its own, so that one gateway or the other answers."""
    url = f"http://127.0.0.1:{tenants.fleet.lab.forward_port()}/v1/chat/completions"
    return httpx.post(url, json=CHAT, headers={"authorization": f"Bearer {tenants.keys[tenant]}"}, timeout=30)


def told(tenants: TenantFixture) -> set[str]:
    """What several requests were answered: the text, or the error's code."""
    found: set[str] = set()
    for _ in range(6):
        answer = ask(tenants).json()
        found.add(answer["error"]["code"] if "error" in answer else answer["choices"][0]["message"]["content"])
    return found


def log(fleet: Fleet) -> list[str]:
    """What the provider was asked."""
    lines = fleet.kubectl("logs", "provider", "-n", PROVIDER_NAMESPACE).splitlines()
    return [line for line in lines if line.startswith("asked")]


def test_the_key_of_a_secret_reaches_its_host_and_no_other(
    fleet: Fleet, authority: LabAuthority, tenants: TenantFixture
) -> None:
    # Without its Secret, the route says what to create, and requests are refused.
    put(fleet, authority)
    until(lambda: accepted(fleet).get("reason") == "SecretNotFound", 60, lambda: accepted(fleet))
    assert f"--type={SECRET_TYPE}" in accepted(fleet)["message"]
    until(lambda: told(tenants) == {"external_unavailable"}, 60, lambda: told(tenants))

    # With it, the answer comes from outside, under the route's name, and the record names route and target.
    fleet.apply(secret(SECRET, {"host": PROVIDER, "token": FIRST}))
    until(lambda: accepted(fleet).get("reason") == "Valid", 90, lambda: accepted(fleet))
    until(lambda: told(tenants) == {f"{fingerprint(FIRST)} theirs"}, 180, lambda: told(tenants))
    response = ask(tenants)
    assert response.json()["model"] == ROUTE
    id = response.headers["x-request-id"]

    def row() -> dict[str, Any]:
        rows = [row for row in tenants.rows("--tenant", TENANT) if row["request"] == id and row["ended"]]
        return rows[0] if rows else {}

    until(lambda: bool(row()), 60)
    assert (row()["route"], row()["model"]) == (f"{SPACE}/{ROUTE}", f"{SPACE}/{ROUTE}/outside")
    assert (row()["input_tokens"], row()["output_tokens"]) == (7, 3)
    # A tenant that does not grant the route reaches nothing by it.
    assert ask(tenants, STRANGER).status_code == 404

    # A new key takes effect without anybody's doing.
    fleet.apply(secret(SECRET, {"host": PROVIDER, "token": SECOND}))
    until(lambda: told(tenants) == {f"{fingerprint(SECOND)} theirs"}, 180, lambda: told(tenants))

    # Who may write routes names another host, which the installation allows too: it gets no request and no key.
    put(fleet, authority, OTHER_PROVIDER)
    until(lambda: accepted(fleet).get("reason") == "SecretRefused", 60, lambda: accepted(fleet))
    assert f"is not for {OTHER_PROVIDER}" in accepted(fleet)["message"]
    until(lambda: told(tenants) == {"external_unavailable"}, 60, lambda: told(tenants))
    assert {line.split()[1] for line in log(fleet)} == {f"host={PROVIDER}"}

    # A Secret that goes takes the key away from gateways.
    put(fleet, authority)
    until(lambda: accepted(fleet).get("reason") == "Valid", 60, lambda: accepted(fleet))
    until(lambda: told(tenants) == {f"{fingerprint(SECOND)} theirs"}, 180, lambda: told(tenants))
    fleet.kubectl("delete", "secret", SECRET, "-n", SPACE)
    until(lambda: accepted(fleet).get("reason") == "SecretNotFound", 90, lambda: accepted(fleet))
    until(lambda: told(tenants) == {"external_unavailable"}, 180, lambda: told(tenants))
    answer = ask(tenants)
    assert answer.status_code == 503
    assert "key of its external target has not arrived" in answer.json()["error"]["message"]
    assert FIRST not in answer.text
    assert SECOND not in answer.text
