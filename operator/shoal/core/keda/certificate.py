"""Which hosts the external scaler's certificate names, and when the operator issues another one."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from shoal.api import names

LIFE: Final = timedelta(days=365)
RENEW_BEFORE: Final = timedelta(days=30)
"""Time before the end at which a certificate is replaced. It is longer than the seven days of the alert
`ShoalScalerCertificateExpires`, which therefore tells of a renewal that failed."""

Reason = Literal["Missing", "Hosts", "Due"]


@dataclass(frozen=True, slots=True)
class HostCertificate:
    """A server's certificate without its key. `hosts` are DNS names and addresses."""

    hosts: frozenset[str]
    not_after: datetime


def scaler_hosts(namespace: str, address: str) -> tuple[str, ...]:
    """Hosts at which KEDA may reach the external scaler. `address` is host and port from the configuration; "": only
    the Service."""
    service = f"{names.SCALER_SERVICE}.{namespace}"
    hosts = [f"{service}.svc", service, f"{service}.svc.cluster.local"]
    host = address.rpartition(":")[0].strip("[]") if _has_port(address) else address.strip("[]")
    return tuple(dict.fromkeys(filter(None, [*hosts, host])))


def renewal_reason(found: HostCertificate | None, hosts: Iterable[str], now: datetime) -> Reason | None:
    """Why a certificate is issued now; None: the present one is kept. `found` None: there is none that can be used."""
    if found is None:
        return "Missing"
    if not found.hosts.issuperset(hosts):
        return "Hosts"
    return "Due" if now >= found.not_after - RENEW_BEFORE else None


def _has_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return port.isdigit() and (":" not in host or host.startswith("["))
