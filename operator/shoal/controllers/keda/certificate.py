"""The certificate that the operator issues for its external scaler, where the installation names none of its own.

The chart does not make it: a template that makes a key renders differently each time, which GitOps tools report as a
change for ever. The kubelet mounts the Secret into the operators' pods (`tls.py` reads it there), so the first
certificate is usable about a minute after the installation.
"""

import asyncio
import base64
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final

import structlog

from shoal.api import names
from shoal.api.config import KEDA
from shoal.api.meta import JsonObject
from shoal.core.certificates import Leaf
from shoal.core.keda.certificate import LIFE, HostCertificate, renewal_reason, scaler_hosts
from shoal.kube.client import KubeClient
from shoal.kube.errors import KubeError, NotFound
from shoal.kube.resources import SECRETS
from shoal.manifests import certificates as manifests
from shoal.net import pki
from shoal.net.pki import CertificateAuthority, CertificatePair

log = structlog.get_logger()

CHECK_SECONDS: Final = 30.0


class ScalerCertificate:
    """Keeps the Secret `shoal-scaler-tls` valid. `run` it while this operator leads."""

    def __init__(self, client: KubeClient, namespace: str, settings: KEDA, now: Callable[[], datetime]) -> None:
        self._client, self._namespace, self._now = client, namespace, now
        self._wanted = settings.tls and not settings.tls_secret_name
        self._hosts = scaler_hosts(namespace, settings.address)

    async def run(self) -> None:
        """Checks the Secret from time to time, until cancelled. A deleted Secret is made again."""
        while self._wanted:
            try:
                await self.ensure()
            except KubeError as error:
                log.warning("certificate of the external scaler", error=str(error))
            await asyncio.sleep(CHECK_SECONDS)

    async def ensure(self) -> str | None:
        """Issues a certificate if one is due. Returns why it was issued; None: the present one is kept. Raises
        KubeError."""
        now, namespace = self._now(), self._namespace
        try:
            found = read(await self._client.get(SECRETS, names.SCALER_TLS_SECRET, namespace))
        except NotFound:
            found = None
        reason = renewal_reason(found, self._hosts, now)
        if reason is not None:
            authority = CertificateAuthority.make(f"shoal-scaler {namespace}", now, LIFE)
            pair = authority.issue_for_hosts(self._hosts, now, LIFE)
            leaf = Leaf(now, now + LIFE, "", ",".join(self._hosts), "", ())
            secret = manifests.scaler(namespace, pair, authority.pair.certificate, leaf)
            await self._client.apply(SECRETS, secret, manager=names.MANAGER_INSTALL)
            log.info("issued the certificate of the external scaler", reason=reason, hosts=self._hosts)
        return reason


def read(secret: JsonObject) -> HostCertificate | None:
    """Certificate of a Secret; None: a part of it is missing or unreadable."""
    data: Mapping[str, str] = secret.get("data") or {}
    files = (names.CERTIFICATE_FILE, names.CERTIFICATE_KEY_FILE, names.TRUST_FILE)
    try:
        chain, key, authority = (base64.b64decode(data[file], validate=True).decode("ascii") for file in files)
        certificate = pki.read_pair(CertificatePair(chain, key))
        pki.read_certificates(authority)
    except (KeyError, ValueError):  # also of base64, and CertificateUnusable
        return None
    return HostCertificate(pki.hosts_of(certificate), certificate.not_valid_after_utc)
