"""Authorities and certificates: made, signed, and read again. P-256 throughout: small, fast, and every TLS library has
it. Signing takes 0.1 ms, so it may happen on the event loop."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal.api.identity import CertificateIdentity

CLOCK_SKEW: Final = timedelta(minutes=5)
"""By so much the clocks of two nodes may differ."""


class CertificateUnusable(ValueError):
    """A certificate or key that cannot be used; the message says why and holds neither."""


@dataclass(frozen=True, slots=True, repr=False)
class CertificatePair:
    """A certificate and its key, PEM. Never logged: hence no repr."""

    certificate: str
    key: str


class CertificateAuthority:
    """A certificate that signs others, with its key."""

    def __init__(self, certificate: x509.Certificate, key: CertificateIssuerPrivateKeyTypes) -> None:
        self._certificate, self._key = certificate, key
        self.fingerprint = fingerprint(certificate)
        self.not_before = certificate.not_valid_before_utc
        self.not_after = certificate.not_valid_after_utc

    @classmethod
    def make(cls, name: str, now: datetime, life: timedelta) -> "CertificateAuthority":
        """A new one that signs itself."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + life)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def read(cls, pair: CertificatePair) -> "CertificateAuthority":
        """Raises Unusable."""
        try:
            certificate = x509.load_pem_x509_certificate(pair.certificate.encode())
            key = serialization.load_pem_private_key(pair.key.encode(), password=None)
        except (ValueError, TypeError):
            raise CertificateUnusable("tls.crt or tls.key is not PEM") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) and not hasattr(key, "sign"):
            raise CertificateUnusable("tls.key cannot sign")
        if key.public_key() != certificate.public_key():
            raise CertificateUnusable("tls.key does not belong to tls.crt")
        try:
            constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        except x509.ExtensionNotFound:
            constraints = None
        if constraints is None or not constraints.ca:
            raise CertificateUnusable(
                "tls.crt is no authority (basicConstraints CA): with cert-manager, set isCA: true"
            )
        return cls(certificate, key)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType] - it can sign

    @property
    def pair(self) -> CertificatePair:
        return CertificatePair(_pem(self._certificate), _key_pem(self._key))

    def issue(self, identity: CertificateIdentity, now: datetime, life: timedelta, *, calls: bool) -> CertificatePair:
        """A certificate for `identity`, which ends no later than this authority. `calls`: it may also be shown by a
        client; without, no TLS server takes it from one."""
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if calls else [])]
        return self._sign([x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.dns)], usages, now, life)

    def issue_for_hosts(self, hosts: Sequence[str], now: datetime, life: timedelta) -> CertificatePair:
        """A certificate of a server that clients reach under `hosts`, DNS names and addresses."""
        return self._sign([_host_name(host) for host in hosts], [ExtendedKeyUsageOID.SERVER_AUTH], now, life)

    def _sign(
        self,
        names: Sequence[x509.GeneralName],
        usages: Sequence[x509.ObjectIdentifier],
        now: datetime,
        life: timedelta,
    ) -> CertificatePair:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "shoal")]))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(max(now - CLOCK_SKEW, self.not_before))
            .not_valid_after(min(now + life, self.not_after))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._certificate.public_key()),  # pyright: ignore[reportArgumentType]
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return CertificatePair(_pem(certificate), _key_pem(key))


def fingerprint(certificate: x509.Certificate) -> str:
    """Names a certificate: 16 hex digits of its SHA-256."""
    return certificate.fingerprint(hashes.SHA256()).hex()[:16]


def read_certificates(pem: str) -> list[x509.Certificate]:
    """All of a bundle. Raises Unusable."""
    try:
        return x509.load_pem_x509_certificates(pem.encode())
    except ValueError:
        raise CertificateUnusable("it is not PEM") from None


def read_pair(pair: CertificatePair) -> x509.Certificate:
    """The certificate, the first of a chain, whose key the pair has. Raises CertificateUnusable."""
    try:
        key = serialization.load_pem_private_key(pair.key.encode(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise CertificateUnusable("its key is not PEM") from None
    certificate = read_certificates(pair.certificate)[0]
    if key.public_key() != certificate.public_key():
        raise CertificateUnusable("its key belongs to another certificate")
    return certificate


def uri_of(certificate: x509.Certificate) -> str | None:
    """The URI in it; None where there is none."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return uris[0] if uris else None


def hosts_of(certificate: x509.Certificate) -> frozenset[str]:
    """The DNS names and addresses in it."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    addresses = names.get_values_for_type(x509.IPAddress)
    return frozenset([*names.get_values_for_type(x509.DNSName), *map(str, addresses)])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: CertificateIssuerPrivateKeyTypes) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
