"""--ledger-url and --gateway-url with mutual TLS: which server is verified how, and what a person is told."""

import asyncio
import base64
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp.connector
import pytest
from click.testing import CliRunner, Result

from shoal.api import keys, names
from shoal.cli.main import main
from shoal.net.pki import CertificatePair
from tests.support.cannedapi import CannedApi
from tests.support.ledger import INSTALL_KEY, Served, served
from tests.support.mutual import HOUR, InstallationPKI, listener, model, process

SYSTEM = "/api/v1/namespaces/shoal-system"
CONFIG_MAP = f"{SYSTEM}/configmaps/shoal-mtls-ca"
BILLING_KEY = keys.derive(INSTALL_KEY, "billing", keys.LEDGER)
BODY = b'{"object": "list", "has_more": false, "missing": [], "data": []}'
LOGS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    len(BODY),
    BODY,
)


async def shoal(*arguments: str, **environment: str) -> Result:
    # A command runs an event loop of its own.
    given = {"COLUMNS": "200", "SHOAL_CA_FILE": None, **environment}
    return await asyncio.to_thread(CliRunner().invoke, main, list(arguments), env=given)


@dataclass
class Installation:
    pki: InstallationPKI
    api: CannedApi
    kubeconfig: Path

    def cluster(self) -> tuple[str, str]:
        return ("--kubeconfig", str(self.kubeconfig))

    def asked_for_the_ca(self) -> bool:
        return CONFIG_MAP in self.api.asked


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncGenerator[Installation]:
    pki = InstallationPKI()
    key = keys.derive(INSTALL_KEY, "logs", keys.DEMAND)
    api = CannedApi(
        {
            CONFIG_MAP: {"metadata": {"name": "shoal-mtls-ca"}, "data": {"ca.crt": pki.trust}},
            f"{SYSTEM}/secrets/shoal-key-logs": _secret(key),
            f"{SYSTEM}/secrets/shoal-key-billing": _secret(BILLING_KEY),
            f"{SYSTEM}/persistentvolumeclaims": {"metadata": {"resourceVersion": "1"}, "items": []},
            f"{SYSTEM}/pods": {"metadata": {"resourceVersion": "1"}, "items": []},
            "/apis/shoal.dev/v1alpha1/tenants/acme": {
                "metadata": {"name": "acme"},
                "spec": {"logging": {"mode": "All"}},
            },
        }
    )
    with api.kubeconfig(tmp_path) as kubeconfig:
        yield Installation(pki, api, kubeconfig)


def _secret(key: str) -> dict[str, Any]:
    return {"metadata": {}, "data": {"key": base64.b64encode(key.encode()).decode()}}


@contextlib.asynccontextmanager
async def ledger(installation: Installation, folder: Path) -> AsyncGenerator[Served]:
    """As on a default install: mutual TLS, and a plain port that answers probes only."""
    installation.pki.write(folder / "tls", process("ledger"))
    given: dict[str, Any] = {"mtls": True, "mtls_dir": folder / "tls", "mtls_port": 0}
    async with served(f"sqlite:///{folder}/ledger.sqlite", folder, **given) as it:
        yield it


def tls_url(it: Served) -> str:
    assert it.process.peers is not None
    return f"https://127.0.0.1:{it.process.peers.port}"


async def test_the_ledger_is_reached_by_a_forwarded_port(installation: Installation, tmp_path: Path) -> None:
    async with ledger(installation, tmp_path) as it:
        for key in ((), ("--ledger-key", BILLING_KEY)):
            told = await shoal("usage", "--ledger-url", tls_url(it), *key, *installation.cluster())
            assert told.exit_code == 0, told.output
        assert installation.asked_for_the_ca()


async def test_its_plain_port_names_the_one_that_answers(installation: Installation, tmp_path: Path) -> None:
    async with ledger(installation, tmp_path) as it:
        url = it.url
        told = await shoal("usage", "--ledger-url", url, "--ledger-key", BILLING_KEY)
    assert told.exit_code == 1
    assert told.stderr == (
        f"Error: mutual TLS is on, so {url} answers probes only. Try: kubectl -n shoal-system port-forward "
        "service/shoal-ledger 8543, and --ledger-url https://127.0.0.1:8543\n"
    )


async def test_with_a_file_of_the_ca_and_a_key_no_cluster_is_needed(installation: Installation, tmp_path: Path) -> None:
    file = tmp_path / "ca.crt"
    file.write_text(installation.pki.trust)
    nowhere = {"KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)}
    async with ledger(installation, tmp_path) as it:
        direct = ("usage", "--ledger-url", tls_url(it), "--ledger-key", BILLING_KEY)
        told = await shoal(*direct, "--ca-file", str(file), **nowhere)
        assert told.exit_code == 0, told.output
        told = await shoal(*direct, SHOAL_CA_FILE=str(file), **nowhere)
        assert told.exit_code == 0, told.output
        told = await shoal(*direct, **nowhere)
        assert told.exit_code == 1
        assert "which cannot be read: there is no cluster to read it from" in told.stderr
        assert "use --ca-file" in told.stderr
        for text, why in (("nonsense", "there is no certificate in it"), (None, "No such file")):
            file.unlink() if text is None else file.write_text(text)
            told = await shoal(*direct, "--ca-file", str(file), **nowhere)
            assert (told.exit_code, why in told.stderr) == (1, True), told.output


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            (403, "configmaps is forbidden"),
            "needs the right to get the ConfigMap shoal-mtls-ca in namespace shoal-system",
        ),
        ((404, "not found"), "there is no ConfigMap shoal-mtls-ca in namespace shoal-system"),
        ({"metadata": {}, "data": {}}, "has no certificate in ca.crt"),
    ],
)
async def test_a_ca_that_cannot_be_read_is_told(
    installation: Installation, tmp_path: Path, answer: Any, why: str
) -> None:
    installation.api.answers[CONFIG_MAP] = answer
    async with ledger(installation, tmp_path) as it:
        told = await shoal("usage", "--ledger-url", tls_url(it), *installation.cluster())
    assert told.exit_code == 1
    assert why in told.stderr
    assert "use --ca-file" in told.stderr


async def test_the_request_log_is_reached_by_a_forwarded_port(installation: Installation) -> None:
    context = installation.pki.credentials(process("gateway")).server(optional=True)
    async with listener(context, LOGS) as heard:
        url = f"https://127.0.0.1:{heard.port}"
        told = await shoal("logs", "--tenant", "acme", "--gateway-url", url, *installation.cluster())
        assert told.exit_code == 0, told.output
        assert "GET /v1/logs?tenant=acme" in heard
        # `why request/ID` and `top routes` have options of their own.
        for path, command in (("choices", ("why", "request/abc")), ("routestats", ("top", "routes", "--once"))):
            await shoal(*command, "--gateway-url", url, *installation.cluster())
            assert f"GET /v1/{path}" in heard


async def test_a_gateway_s_plain_port_names_the_one_that_answers(installation: Installation) -> None:
    body = json.dumps({"error": {"message": "mutual TLS is needed: this port answers probes only"}}).encode()
    refusal = b"HTTP/1.1 403 Forbidden\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    async with listener(None, refusal) as heard:
        url = f"http://127.0.0.1:{heard.port}"
        told = await shoal("logs", "--tenant", "acme", "--gateway-url", url, *installation.cluster())
    assert (told.exit_code, "port-forward service/shoal-gateway-pods 9443, and --gateway-url https://127.0.0.1:9443"
            in told.stderr) == (1, True), told.output  # fmt: skip


@pytest.mark.parametrize("who", ["another authority", "a replica", "a gateway"])
async def test_an_impostor_is_told_no_key(installation: Installation, who: str) -> None:
    pki = installation.pki
    credentials = {
        "another authority": InstallationPKI().credentials(process("ledger"), trust=pki.trust),
        "a replica": pki.credentials(model("uid")),
        "a gateway": pki.credentials(process("gateway")),
    }[who]
    async with listener(credentials.server(optional=True), LOGS) as heard:
        url = f"https://127.0.0.1:{heard.port}"
        told = await shoal("usage", "--ledger-url", url, *installation.cluster())
        assert told.exit_code == 1
        assert f"the certificate at {url} is not that of this installation's ledger" in told.stderr
        assert not heard.raw


def server(pair: CertificatePair, folder: Path) -> ssl.SSLContext:
    file = folder / "server.pem"
    file.write_text(pair.certificate + pair.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context


@pytest.mark.parametrize("host", ["127.0.0.1", "ledger.example.com"])
async def test_a_host_with_a_certificate_of_its_own_is_reached_as_before(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """An Ingress, whose certificate this machine trusts."""
    public = InstallationPKI()
    authority = tmp_path / "public.crt"
    authority.write_text(public.trust)
    context = server(public.authority.issue_for_hosts([host], datetime.now(UTC), HOUR), tmp_path)
    body = b'{"from": "2026-11-01T00:00:00Z", "to": "2026-12-01T00:00:00Z", "by": [], "rows": []}'
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)

    async with listener(context, answer) as heard:
        resolve(monkeypatch, host)
        trust_in_public(monkeypatch, authority)
        url = f"https://{host}:{heard.port}"
        told = await shoal("usage", "--ledger-url", url, "--ledger-key", "k", *installation.cluster())
        assert told.exit_code == 0, told.output
        assert "GET /v1/usage" in heard
        # One that is not of this machine is no reason to ask the cluster for a CA.
        assert installation.asked_for_the_ca() == (host == "127.0.0.1")


async def test_a_load_balancer_s_address_may_lead_to_the_ledger_itself(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ledger(installation, tmp_path) as it:
        resolve(monkeypatch, "ledger.example.com")
        url = tls_url(it).replace("127.0.0.1", "ledger.example.com")
        told = await shoal("usage", "--ledger-url", url, *installation.cluster())
        assert told.exit_code == 0, told.output


def resolve(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """The host is this machine."""
    real = socket.getaddrinfo

    def resolved(name: Any, *args: Any, **more: Any) -> Any:
        return real("127.0.0.1" if name == host else name, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


def trust_in_public(monkeypatch: pytest.MonkeyPatch, authority: Path) -> None:
    """As SSL_CERT_FILE does it. aiohttp makes its context once, when it is imported."""
    context = ssl.create_default_context(cafile=str(authority))
    monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", context)


@pytest.mark.parametrize(
    ("arguments", "component", "pod", "port", "command"),
    [
        (("usage",), "ledger", "shoal-ledger-0", 8543,
         "kubectl -n shoal-system port-forward service/shoal-ledger 8543, and --ledger-url https://127.0.0.1:8543"),
        (("logs", "--tenant", "acme"), "gateway", "shoal-gateway-0", 9443,
         "kubectl -n shoal-system port-forward shoal-gateway-0 9443, and --gateway-url https://127.0.0.1:9443"),
    ],
)  # fmt: skip
async def test_where_the_api_server_is_cut_off_the_advice_is_that_of_mutual_tls(
    installation: Installation, arguments: tuple[str, ...], component: str, pod: str, port: int, command: str
) -> None:
    labels = {"app.kubernetes.io/component": component, "app.kubernetes.io/part-of": "shoal"}
    metadata = {"namespace": "shoal-system", "name": pod, "uid": pod, "labels": labels}
    metadata |= {"annotations": {names.ANNOTATION_TRANSPORT: names.TRANSPORT_MTLS}}
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    installation.api.answers[f"{SYSTEM}/pods"] = {"metadata": {}, "items": [{"metadata": metadata, "status": status}]}
    for path in ("usage", "logs"):
        installation.api.answers[f"{SYSTEM}/pods/https:{pod}:{port}/proxy/v1/{path}"] = (
            503,
            f"error trying to reach service: dial tcp 10.0.0.9:{port}: i/o timeout",
        )
    told = await shoal(*arguments, *installation.cluster())
    assert told.exit_code == 1
    assert command in told.stderr
