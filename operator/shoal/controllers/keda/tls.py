"""The external scaler's certificate: a mounted Secret, read again when it changes."""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import prometheus_client
import structlog
from cryptography import x509

log = structlog.get_logger()

READ_SECONDS: Final = 10.0

EXPIRES = prometheus_client.Gauge(
    "shoal_keda_certificate_expiry_timestamp_seconds",
    "Time at which the external scaler's certificate expires, in seconds since the epoch; 0 without a certificate.",
)


@dataclass(frozen=True, slots=True, repr=False)
class Certificate:
    """As PEM. Never logged: hence no repr."""

    chain: bytes
    key: bytes
    ca: str | None
    """By which KEDA knows it; None: the Secret says none, as one of a public authority."""
    expires: datetime


class CertificateFiles:
    """tls.crt, tls.key and, if there is one, ca.crt in a folder that may appear later."""

    def __init__(self, directory: Path, secret: str) -> None:
        """`secret`: its name, for people."""
        self._directory, self._secret = directory, secret
        self._loaded: tuple[tuple[int, int], ...] | None = None
        self.certificate: Certificate | None = None
        self.problem: str | None = None
        """Why there is none that can be used, or why a newer one is not, with what to do."""
        self.changed: list[Callable[[], None]] = []

    async def run(self) -> None:
        """Looks again from time to time, until cancelled."""
        while True:
            await asyncio.sleep(READ_SECONDS)
            await self.refresh()

    async def refresh(self) -> Certificate | None:
        """Looks now. A pair that does not fit together, as between two writes, leaves the last one in use."""
        seen = await asyncio.to_thread(self._stamp)
        if seen is None:
            self.problem = (
                f"Secret {self._secret} is not mounted, so KEDA cannot be answered. The kubelet mounts it within about "
                "a minute of its creation: the operator creates shoal-scaler-tls, and one that you name in "
                "operator.scaling.keda.tlsSecretName is yours to create"
            )
            return self.certificate
        if seen == self._loaded:
            return self.certificate
        try:
            read = await asyncio.to_thread(self._read)
        except (OSError, ValueError) as error:
            self.problem = f"the certificate in Secret {self._secret} cannot be used: {error}"
            log.warning("certificate of the external scaler", problem=self.problem)
            return self.certificate
        self._loaded, self.problem = seen, None
        if read != self.certificate:
            self.certificate = read
            EXPIRES.set(read.expires.timestamp())
            log.info("certificate of the external scaler", secret=self._secret, expires=read.expires.isoformat())
            for listener in self.changed:
                listener()
        return read

    def _stamp(self) -> tuple[tuple[int, int], ...] | None:
        found: list[tuple[int, int]] = []
        for name in ("tls.crt", "tls.key", "ca.crt"):
            try:
                stat = (self._directory / name).stat()
            except OSError:
                if name != "ca.crt":
                    return None
                continue
            found.append((stat.st_mtime_ns, stat.st_ino))
        return tuple(found)

    def _read(self) -> Certificate:
        """Raises OSError, ValueError."""
        chain_file, key_file = self._directory / "tls.crt", self._directory / "tls.key"
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain_file, key_file)
        except ssl.SSLError as error:
            raise ValueError(f"tls.crt and tls.key do not go together ({error.reason or error})") from error
        chain = chain_file.read_bytes()
        leaf = x509.load_pem_x509_certificate(chain)
        if leaf.not_valid_after_utc <= datetime.now(UTC):
            raise ValueError(f"it ended on {leaf.not_valid_after_utc:%Y-%m-%d}; renew it")
        ca_file = self._directory / "ca.crt"
        try:
            ca = ca_file.read_text(encoding="ascii") if ca_file.is_file() else None
        except UnicodeDecodeError as error:
            raise ValueError("ca.crt is not text, as PEM is") from error
        return Certificate(chain, key_file.read_bytes(), ca or None, leaf.not_valid_after_utc)
