"""Certificates and kubeconfigs of one lab, made anew at each `up` (P-256: about 0.1 s in all).

The same identities as a kubeadm cluster: admin (system:masters), the two controllers, one client per node
(`system:node:NAME` in `system:nodes`, so that the Node authoriser and NodeRestriction mean something), the API server's
own clients of kubelets and of aggregated API servers.
"""

import base64
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import orjson
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALIDITY: Final = timedelta(days=365)
_CLOCK_SKEW: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A key and its certificate, PEM."""

    certificate: bytes
    key: bytes


def _pem(key: PrivateKeyTypes) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _name(common_name: str, organization: str | None) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization is not None:
        attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(attributes)


class LabAuthority:
    """A certificate authority that lives in memory; its key is written out only where a component signs with it."""

    def __init__(self, common_name: str, now: datetime) -> None:
        self._now = now
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _name(common_name, None)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(self._subject)
            .issuer_name(self._subject)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + _VALIDITY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_usage(sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.pair = KeyPair(certificate.public_bytes(serialization.Encoding.PEM), _pem(self._key))

    def client(self, common_name: str, organization: str | None = None) -> KeyPair:
        """A client certificate: `common_name` is the user, `organization` the group."""
        return self._issue(common_name, organization, ExtendedKeyUsageOID.CLIENT_AUTH, ())

    def server(self, common_name: str, names: Sequence[str]) -> KeyPair:
        """A serving certificate for DNS names and IP addresses."""
        return self._issue(common_name, None, ExtendedKeyUsageOID.SERVER_AUTH, names)

    def _issue(
        self, common_name: str, organization: str | None, usage: x509.ObjectIdentifier, names: Sequence[str]
    ) -> KeyPair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(common_name, organization))
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _CLOCK_SKEW)
            .not_valid_after(self._now + _VALIDITY)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_san(n) for n in names]), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def _san(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=not sign,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign,
        crl_sign=sign,
        encipher_only=False,
        decipher_only=False,
    )


def kubeconfig(server: str, authority: bytes, user: str, client: KeyPair) -> bytes:
    """A kubeconfig (JSON is YAML) with everything inside, so that the file can be moved.

    `server` is a URL; the context and the cluster are both called `shoal-lab`.
    """

    def b64(data: bytes) -> str:
        return base64.b64encode(data).decode()

    return orjson.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "shoal-lab",
            "contexts": [{"name": "shoal-lab", "context": {"cluster": "shoal-lab", "user": user}}],
            "clusters": [
                {"name": "shoal-lab", "cluster": {"server": server, "certificate-authority-data": b64(authority)}}
            ],
            "users": [
                {
                    "name": user,
                    "user": {
                        "client-certificate-data": b64(client.certificate),
                        "client-key-data": b64(client.key),
                    },
                }
            ],
        },
        option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
    )


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the parts of one lab are reached; the same in every lab, since each has a network of its own."""

    inside: str
    """URL of the API server inside the lab."""
    outside: str
    """URL of the API server's forwarder on the host."""
    api_names: Sequence[str]
    """DNS names and IP addresses that the API server's certificate holds."""
    node_address: str
    """The address that all kubelets share (their ports differ)."""


def write(directory: Path, addresses: Addresses, nodes: Sequence[str], kubeconfig_outside: Path) -> None:
    """Writes every key, certificate and kubeconfig of a lab to `directory` (private to the user).

    Files: `ca`, `front-proxy-ca`, `apiserver`, `apiserver-kubelet-client`, `front-proxy-client`, `kubelet` (serving,
    shared by the nodes) as `.crt` and `.key`; `sa.key`, `sa.pub`; `NAME.kubeconfig` for admin, the controllers and
    `node-NAME`.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    now = datetime.now(UTC)
    ca = LabAuthority("shoal-lab", now)
    front = LabAuthority("shoal-lab-front-proxy", now)
    pairs = {
        "ca": ca.pair,
        "front-proxy-ca": front.pair,
        "apiserver": ca.server("kube-apiserver", addresses.api_names),
        "apiserver-kubelet-client": ca.client("kube-apiserver-kubelet-client", "system:masters"),
        "front-proxy-client": front.client("front-proxy-client"),
        "kubelet": ca.server("kubelet", [addresses.node_address, "127.0.0.1", *nodes]),
    }
    for name, pair in pairs.items():
        _write(directory / f"{name}.crt", pair.certificate)
        _write(directory / f"{name}.key", pair.key)

    # RSA: RS256 is what the API server signs service account tokens with by default, and what verifiers expect.
    account = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    _write(directory / "sa.key", _pem(account))
    _write(
        directory / "sa.pub",
        account.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo),
    )

    admin = ca.client("shoal-lab-admin", "system:masters")
    clients = {
        "admin": ("admin", admin),
        "kube-controller-manager": (
            "system:kube-controller-manager",
            ca.client("system:kube-controller-manager"),
        ),
        "kube-scheduler": ("system:kube-scheduler", ca.client("system:kube-scheduler")),
    }
    for node in nodes:
        clients[f"node-{node}"] = (f"system:node:{node}", ca.client(f"system:node:{node}", "system:nodes"))
    for name, (user, pair) in clients.items():
        _write(directory / f"{name}.kubeconfig", kubeconfig(addresses.inside, ca.pair.certificate, user, pair))
    _write(kubeconfig_outside, kubeconfig(addresses.outside, ca.pair.certificate, "admin", admin))


def _write(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(data)
