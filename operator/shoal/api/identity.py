"""Identities in the certificates of Shoal's processes.

Each certificate has two names: a URI in the style of SPIFFE, from which a server derives its caller's role, and a DNS
name, which a client verifies during the TLS handshake.

    spiffe://TRUST DOMAIN/ns/NAMESPACE/gateway          gateway.shoal.internal
    spiffe://TRUST DOMAIN/ns/NAMESPACE/model/UID        UID.model.shoal.internal

NAMESPACE is Shoal's own namespace, for Models too, so two installations in one trust domain do not accept each other.
"""

from dataclasses import dataclass
from typing import Final, Literal, get_args

DOMAIN: Final = "shoal.internal"
"""Domain of the DNS names. It is not resolvable: peers are dialled by address."""

ProcessRole = Literal["gateway", "operator", "ledger"]
MTLS_NEEDED: Final = "mutual TLS is needed: this port answers probes only"
"""What a plain port says where every process uses mutual TLS."""
PROCESS_ROLES: Final[tuple[ProcessRole, ...]] = get_args(ProcessRole)


@dataclass(frozen=True, slots=True)
class CertificateIdentity:
    """The two names of one certificate."""

    uri: str
    dns: str


def process(trust_domain: str, namespace: str, role: ProcessRole) -> CertificateIdentity:
    """Identity of one of Shoal's processes. All gateways share one identity."""
    return CertificateIdentity(f"{_prefix(trust_domain, namespace)}{role}", server_name(role))


def model(trust_domain: str, namespace: str, uid: str) -> CertificateIdentity:
    """Identity of the pods of the Model with this uid. `namespace` is Shoal's own."""
    return CertificateIdentity(f"{_prefix(trust_domain, namespace)}model/{uid}", model_server_name(uid))


def server_name(role: ProcessRole) -> str:
    """DNS name that a client expects of one of Shoal's processes."""
    return f"{role}.{DOMAIN}"


def model_server_name(uid: str) -> str:
    """DNS name that a client expects of an engine pod."""
    return f"{uid}.model.{DOMAIN}"


def role_of(own_uri: str, uri: str) -> ProcessRole | None:
    """Role of the peer with this URI, for a process with the URI `own_uri`; None: the peer belongs to another
    installation, or to a Model."""
    prefix = own_uri.removesuffix("/").rpartition("/model/")[0] or own_uri.rpartition("/")[0]
    for role in PROCESS_ROLES:
        if uri == f"{prefix}/{role}":
            return role
    return None


def _prefix(trust_domain: str, namespace: str) -> str:
    return f"spiffe://{trust_domain}/ns/{namespace}/"
