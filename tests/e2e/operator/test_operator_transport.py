"""Who gets a certificate, when engine pods begin to speak mutual TLS, and that a restarted operator issues nothing."""

import base64
import contextlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shoal.api import names
from shoal.api.config import MTLS, TransportConfig
from shoal.api.identity import role_of
from shoal.api.meta import JsonObject
from shoal.controllers import transport
from shoal.core import certificates
from shoal.kube.client import KubeClient
from shoal.kube.errors import NotFound
from shoal.kube.resources import DEPLOYMENTS, MODELS, PODS, SECRETS
from shoal.manifests.certificates import read_annotation
from shoal.net import pki
from tests.support.controlplane import Fleet
from tests.support.operators import CONFIG, NAMESPACE, eventually, model, model_with, running_operator

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
]

MUTUAL = CONFIG.model_copy(update={"transport": TransportConfig(mtls=MTLS(enabled=True))})


def gateway(name: str, *, mtls: bool) -> JsonObject:
    labels = {names.LABEL_COMPONENT: names.COMPONENT_GATEWAY, names.LABEL_PART_OF: "shoal"}
    annotations = {names.ANNOTATION_TRANSPORT: names.TRANSPORT_MTLS} if mtls else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels, "annotations": annotations},
        "spec": {"containers": [{"name": "gateway", "image": "shoal:test"}]},
    }


async def pod_template(client: KubeClient, namespace: str) -> JsonObject:
    found = await client.get(DEPLOYMENTS, "chat-l4", namespace)
    return found["spec"]["template"]


def speaks(template: JsonObject) -> bool:
    annotated = template["metadata"]["annotations"].get(names.ANNOTATION_TRANSPORT) == names.TRANSPORT_MTLS
    sidecars = [c["name"] for c in template["spec"]["initContainers"]]
    assert annotated == (names.CONTAINER_TLS in sidecars)
    return annotated


async def secret(client: KubeClient, name: str, namespace: str = NAMESPACE) -> dict[str, str] | None:
    try:
        found = await client.get(SECRETS, name, namespace)
    except NotFound:
        return None
    return {key: base64.b64decode(text).decode() for key, text in found["data"].items()}


async def test_engines_speak_it_once_the_last_gateway_from_before_is_gone(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    await client.apply(PODS, gateway("shoal-gateway-0", mtls=False), manager="test")
    async with running_operator(client, fleet.kubeconfig, config=MUTUAL) as operator:
        await fleet.apply(model("chat", ns))
        await model_with(client, ns, "chat", "Ready", "True")
        assert not speaks(await pod_template(client, ns))
        given: Any = await eventually(lambda: secret(client, "shoal-gateway-tls"), bool)
        assert names.STRICT_FILE not in given
        certificate = pki.read_certificates(given["tls.crt"])[0]
        uri = pki.uri_of(certificate)
        assert uri is not None
        assert role_of(uri, uri) == "gateway"
        assert timedelta(hours=167) < certificate.not_valid_after_utc - certificate.not_valid_before_utc

        await client.delete(PODS, "shoal-gateway-0", NAMESPACE)
        await client.apply(PODS, gateway("shoal-gateway-1", mtls=True), manager="test")
        template = await eventually(lambda: pod_template(client, ns), speaks, what="mutual TLS")
        engine = template["spec"]["containers"][0]
        assert "--host=127.0.0.1" in engine["args"]
        assert engine["readinessProbe"]["httpGet"]["port"] == names.ENGINE_PROBE_PORT
        shown: Any = await secret(client, "chat-tls", ns)
        assert {"tls.crt", "tls.key", "ca.crt", "certificate.json", "trust.json", "strict"} == set(shown)
        assert shown["ca.crt"] == given["ca.crt"]
        await eventually(lambda: secret(client, "shoal-gateway-tls"), lambda found: "strict" in found, what="strict")
        assert operator.transport.credentials


async def test_switched_off_pods_from_before_are_still_called_and_nobody_is_strict(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    await client.apply(PODS, gateway("shoal-gateway-0", mtls=True), manager="test")
    async with running_operator(client, fleet.kubeconfig, config=MUTUAL):
        await fleet.apply(model("chat", ns))
        await model_with(client, ns, "chat", "Ready", "True")
        await eventually(lambda: pod_template(client, ns), speaks, what="mutual TLS")
        await eventually(
            lambda: secret(client, "shoal-gateway-tls"), lambda found: bool(found) and "strict" in found, what="strict"
        )
    async with (
        await KubeClient.from_environment(kubeconfig=fleet.kubeconfig) as own,
        running_operator(own, fleet.kubeconfig, identity="second") as operator,
    ):
        # The engine pods are replaced one by one, and the gateway serves until it is: both have to be called.
        await eventually(lambda: _true(bool(operator.transport.credentials)), bool, what="its own certificate")
        await eventually(
            lambda: secret(client, "shoal-gateway-tls"), lambda found: "strict" not in (found or {}), what="not strict"
        )
        await eventually(lambda: pod_template(client, ns), lambda template: not speaks(template), what="plain pods")


async def test_switched_off_from_the_beginning_there_is_no_authority(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace
    with contextlib.suppress(NotFound):  # of another test
        await client.delete(SECRETS, names.AUTHORITY_SECRET, NAMESPACE)
    await client.apply(PODS, gateway("shoal-gateway-0", mtls=True), manager="test")
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("chat", ns))
        await model_with(client, ns, "chat", "Ready", "True")
        assert await secret(client, names.AUTHORITY_SECRET) is None


async def test_a_restarted_operator_issues_nothing_and_rolls_nothing(fleet: Fleet) -> None:
    client, ns = fleet.client, fleet.namespace

    async def versions() -> list[object]:
        found = [("chat-tls", ns), ("shoal-gateway-tls", NAMESPACE), (names.AUTHORITY_SECRET, NAMESPACE)]
        return [(await client.get(SECRETS, name, space))["metadata"]["resourceVersion"] for name, space in found]

    async with running_operator(client, fleet.kubeconfig, config=MUTUAL):
        await fleet.apply(model("chat", ns))
        await model_with(client, ns, "chat", "Ready", "True")
        await eventually(lambda: pod_template(client, ns), speaks)
        metadata = await client.get_metadata(SECRETS, "chat-tls", ns)
        leaf = read_annotation(metadata)
        assert leaf is not None
        assert metadata["metadata"]["ownerReferences"][0]["kind"] == "Model"
        await eventually(lambda: secret(client, "shoal-gateway-tls"), bool)
        before, generation = await versions(), (await client.get(DEPLOYMENTS, "chat-l4", ns))["metadata"]
    async with (
        await KubeClient.from_environment(kubeconfig=fleet.kubeconfig) as own,
        running_operator(own, fleet.kubeconfig, config=MUTUAL, identity="second") as operator,
    ):
        await eventually(lambda: _true(bool(operator.transport.credentials)), bool)
        await eventually(lambda: _true(operator.elector.leading), bool)
        operator.models.enqueue_all()
        await eventually(lambda: _true(bool(operator.transport.issued)), bool)
        await model_with(client, ns, "chat", "Ready", "True")
        assert await versions() == before
        assert (await client.get(DEPLOYMENTS, "chat-l4", ns))["metadata"]["generation"] == generation["generation"]


async def test_an_authority_that_is_given_is_taken_over_trust_first(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "READ_SECONDS", 0.2)
    client, ns = fleet.client, fleet.namespace
    ours = MUTUAL.model_copy(update={"transport": TransportConfig(mtls=MTLS(enabled=True, ca_secret_name="ours"))})
    now = datetime.now(UTC)

    async def give(authority: pki.CertificateAuthority) -> None:
        pair = authority.pair
        data = {"tls.crt": pair.certificate, "tls.key": pair.key}
        encoded = {name: base64.b64encode(text.encode()).decode() for name, text in data.items()}
        metadata = {"name": "ours", "namespace": NAMESPACE}
        await client.apply(
            SECRETS,
            {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "kubernetes.io/tls", "data": encoded},
            manager="test",
        )

    async def leaf() -> tuple[str, tuple[str, ...]] | None:
        found = read_annotation(await client.get_metadata(SECRETS, "chat-tls", ns))
        return found and (found.authority, found.trust)

    first, second = (pki.CertificateAuthority.make(name, now, timedelta(days=30)) for name in ("first", "second"))
    await give(first)
    async with running_operator(client, fleet.kubeconfig, config=ours):
        await fleet.apply(model("chat", ns))
        await model_with(client, ns, "chat", "Ready", "True")
        await eventually(lambda: pod_template(client, ns), speaks, what="mutual TLS")
        assert await leaf() == (first.fingerprint, (first.fingerprint,))
        # A Model that Shoal must not touch goes on serving, so its certificate is renewed all the same.
        paused = {"metadata": {"annotations": {names.ANNOTATION_PAUSED: "true"}}}
        await client.merge_patch(MODELS, "chat", ns, paused, manager="test")
        await give(second)
        both = tuple(sorted((first.fingerprint, second.fingerprint)))
        await eventually(leaf, lambda found: found == (first.fingerprint, both), what="trust in both")
        monkeypatch.setattr(certificates, "OVERLAP", timedelta(0))
        await eventually(leaf, lambda found: found == (second.fingerprint, both), what="a certificate of the second")
        kept: Any = await secret(client, names.AUTHORITY_SECRET)
        assert kept["tls.crt"] == second.pair.certificate
        assert set(kept) == {"tls.crt", "tls.key", "ca.crt", "former.crt", "since.json"}


async def _true(found: bool) -> bool:
    return found
