"""The certificate of the external scaler: the operator issues it, renews it, and KEDA accepts it."""

import base64
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from shoal.api import names
from shoal.api.config import KEDA
from shoal.api.meta import JsonObject
from shoal.controllers.keda.certificate import ScalerCertificate
from shoal.controllers.keda.tls import CertificateFiles
from shoal.core.keda.certificate import HostCertificate, renewal_reason, scaler_hosts
from shoal.kube.errors import NotFound
from shoal.manifests.certificates import read_annotation
from tests.support.kedaclient import REF, Leadership, Said, keda, leading, scaler, wants

NOW = datetime.now(UTC).replace(microsecond=0)


class Secrets:
    """The API server, as far as one Secret goes."""

    def __init__(self) -> None:
        self.stored: JsonObject | None = None

    async def get(self, _resource: Any, name: str, _namespace: str) -> JsonObject:
        assert name == names.SCALER_TLS_SECRET
        if self.stored is None:
            raise NotFound("no such Secret")
        return self.stored

    async def apply(self, _resource: Any, body: JsonObject, **_: Any) -> JsonObject:
        self.stored = body
        return body

    def file(self, name: str) -> bytes:
        assert self.stored is not None
        return base64.b64decode(self.stored["data"][name])


class Certificate:
    def __init__(self, **settings: Any) -> None:
        self.server, self.now = Secrets(), NOW
        self.change(**settings)

    def change(self, **settings: Any) -> None:
        self.issuer = ScalerCertificate(self.server, "shoal-system", KEDA(**settings), lambda: self.now)  # type: ignore[arg-type]

    async def ensure(self) -> str | None:
        return await self.issuer.ensure()


async def test_it_is_issued_once_and_keda_accepts_the_operator_by_it(tmp_path: Path) -> None:
    it = Certificate()
    assert await it.ensure() == "Missing"
    assert await it.ensure() is None
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).write_bytes(it.server.file(name))
    leaf, ca = (x509.load_pem_x509_certificate(it.server.file(name)) for name in ("tls.crt", "ca.crt"))
    leaf.verify_directly_issued_by(ca)
    files = CertificateFiles(tmp_path, names.SCALER_TLS_SECRET)
    assert await files.refresh() is not None, files.problem
    said = Said()
    said.say(wants(2))
    it.change(address="localhost:9666")
    await it.ensure()
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).write_bytes(it.server.file(name))
    server = scaler(said, Leadership(), certificate=files)
    async with leading(server), keda(server.port, it.server.file("ca.crt").decode()) as stub:
        assert (await stub.IsActive(REF, timeout=10)).result


async def test_its_end_is_known_without_reading_the_secrets_content() -> None:
    it = Certificate()
    await it.ensure()
    assert it.server.stored is not None
    leaf = read_annotation(it.server.stored)
    certificate = x509.load_pem_x509_certificate(it.server.file("tls.crt"))
    assert leaf is not None
    assert leaf.not_after == certificate.not_valid_after_utc
    assert leaf.dns.split(",")[0] == "shoal-scaler.shoal-system.svc"


async def test_it_is_renewed_before_its_end_and_after_it_was_deleted() -> None:
    it = Certificate()
    await it.ensure()
    first = it.server.file("ca.crt")
    it.now = NOW + timedelta(days=334)
    assert await it.ensure() is None
    it.now = NOW + timedelta(days=336)
    assert await it.ensure() == "Due"
    assert it.server.file("ca.crt") != first
    it.server.stored = None
    assert await it.ensure() == "Missing"


@pytest.mark.parametrize("address", ["10.0.0.9:9666", "keda.example.com:443", "[fd00::9]:9666"])
async def test_an_address_of_ones_own_is_named_in_the_certificate(address: str) -> None:
    it = Certificate()
    await it.ensure()
    it.change(address=address)
    assert await it.ensure() == "Hosts"
    assert await it.ensure() is None
    said = x509.load_pem_x509_certificate(it.server.file("tls.crt")).extensions
    found = [str(each.value) for each in said.get_extension_for_class(x509.SubjectAlternativeName).value]
    assert address.rpartition(":")[0].strip("[]") in found
    assert "shoal-scaler.shoal-system.svc" in found


@pytest.mark.parametrize("file", ["tls.crt", "tls.key", "ca.crt"])
@pytest.mark.parametrize("content", [None, "", "bm90IFBFTQ==", "not base64", "/w=="])
async def test_a_broken_secret_is_replaced(file: str, content: str | None) -> None:
    it = Certificate()
    await it.ensure()
    assert it.server.stored is not None
    if content is None:
        del it.server.stored["data"][file]
    else:
        it.server.stored["data"][file] = content
    assert await it.ensure() == "Missing"
    assert await it.ensure() is None


@pytest.mark.parametrize("settings", [{"tls": False}, {"tls_secret_name": "from-cert-manager"}])
async def test_none_is_issued_where_it_is_not_used(settings: dict[str, Any]) -> None:
    it = Certificate(**settings)
    await it.issuer.run()  # ends at once
    assert it.server.stored is None


def test_hosts_and_reasons() -> None:
    hosts = scaler_hosts("ns", "")
    assert hosts == ("shoal-scaler.ns.svc", "shoal-scaler.ns", "shoal-scaler.ns.svc.cluster.local")
    assert scaler_hosts("ns", "shoal-scaler.ns.svc:9666") == hosts
    assert scaler_hosts("ns", "fd00::9")[-1] == "fd00::9"
    good = HostCertificate(frozenset(hosts), NOW + timedelta(days=31))
    assert renewal_reason(good, hosts, NOW) is None
    assert renewal_reason(good, (*hosts, "other"), NOW) == "Hosts"
    assert renewal_reason(good, hosts, NOW + timedelta(days=2)) == "Due"
    assert renewal_reason(None, hosts, NOW) == "Missing"
