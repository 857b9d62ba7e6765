"""One process's side of mutual TLS: its certificate and the trusted authorities, read again when they change.

A client verifies its server's name within the handshake, so nothing is sent to another server. A server asks for a
certificate of the same authority, and reads the caller's role from it. A renewed certificate is used for the next
connection; open connections continue.
"""

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import structlog

from shoal.api import names
from shoal.api.identity import MTLS_NEEDED, PROCESS_ROLES, ProcessRole, role_of, server_name
from shoal.net import pki
from shoal.net.pki import CertificatePair, CertificateUnusable

log = structlog.get_logger()

_FILES: Final = (names.CERTIFICATE_FILE, names.CERTIFICATE_KEY_FILE, names.TRUST_FILE, names.STRICT_FILE)


class NoCertificate(Exception):
    """There is none yet: a peer that speaks mutual TLS cannot be called."""


class TLSCredentials:
    """Certificate, key and trust of one process, and the TLS contexts made from them.

    `directory` is that of a mounted Secret, which may appear later; None: `put` says them. `serves`: whether this
    process answers over mutual TLS at all; without, it is never strict.
    """

    def __init__(self, directory: Path | None = None, *, serves: bool = True) -> None:
        self._directory, self._serves = directory, serves
        self._seen: tuple[tuple[str, int, int], ...] = ()
        self._client: ssl.SSLContext | None = None
        self._servers: dict[ssl.VerifyMode, ssl.SSLContext] = {}
        self._uri = ""
        self.version = 0
        """Grows with each certificate that comes into use."""
        self._newer = asyncio.Event()
        self.not_after: datetime | None = None
        self.strict = False
        """Nobody is answered without mutual TLS: every process of Shoal speaks it."""
        self.problem: str | None = None

    def __bool__(self) -> bool:
        return self._client is not None

    @property
    def missing(self) -> str | None:
        """Why no peer can be called yet, for a readiness probe; None when it can."""
        if self._client is not None:
            return None
        return self.problem or f"no certificate in {self._directory}: the operator issues it"

    def refresh(self) -> bool:
        """Reads the files when they have changed; True when they had. Cheap enough to poll. What cannot be read leaves
        the last ones in use."""
        if self._directory is None:
            return False
        seen: list[tuple[str, int, int]] = []
        for name in _FILES:
            try:
                stat = (self._directory / name).stat()
            except OSError:
                continue
            seen.append((name, stat.st_mtime_ns, stat.st_ino))
        if tuple(seen) == self._seen:
            return False
        try:
            certificate, key, trust = ((self._directory / name).read_text() for name in _FILES[:3])
            self.put(
                CertificatePair(certificate, key), trust, strict=any(name == names.STRICT_FILE for name, *_ in seen)
            )
        except (OSError, UnicodeError) as error:
            if seen:
                self._fail(getattr(error, "strerror", None) or "a file is no text")
        except CertificateUnusable as error:
            self._fail(str(error))
        else:
            self._seen = tuple(seen)
            return True
        return False

    def put(self, pair: CertificatePair, trust: str, *, strict: bool = False) -> None:
        """Uses these from the next connection on. Raises Unusable."""
        certificate = pki.read_certificates(pair.certificate)[0]
        uri = pki.uri_of(certificate)
        if uri is None:
            raise CertificateUnusable("the certificate has no URI in its subject alternative names")
        pki.read_certificates(trust)
        # OpenSSL reads certificates from files only. This one is in memory and has no name.
        descriptor = os.memfd_create("certificate")
        try:
            with os.fdopen(descriptor, "w", closefd=False) as file:
                file.write(pair.certificate + pair.key)
            path = f"/proc/self/fd/{descriptor}"
            client = _context(ssl.PROTOCOL_TLS_CLIENT, path, trust)
            servers = {mode: _server(mode, path, trust) for mode in (ssl.CERT_REQUIRED, ssl.CERT_OPTIONAL)}
        except (ssl.SSLError, OSError) as error:
            reason = getattr(error, "reason", None) or "OpenSSL does not take it"
            raise CertificateUnusable(f"the certificate cannot be used: {reason}") from None
        finally:
            os.close(descriptor)
        self._client, self._servers, self._uri = client, servers, uri
        self.not_after, self.strict, self.problem = certificate.not_valid_after_utc, strict and self._serves, None
        self.version += 1
        self._newer.set()
        self._newer = asyncio.Event()
        log.info("certificate", uri=uri, until=self.not_after.isoformat(timespec="minutes"), strict=strict)

    async def newer(self, than: int) -> None:
        """Returns once a later certificate than that of version `than` is in use."""
        while self.version == than:
            await self._newer.wait()

    def client(self) -> ssl.SSLContext:
        """For the next connection to a peer; give it the peer's `server_hostname`. Raises NoCertificate."""
        if self._client is None:
            raise NoCertificate(self.missing or "")
        return self._client

    def server(self, *, optional: bool = False) -> ssl.SSLContext:
        """For a listener, for good: each handshake is made with the newest certificate, and fails while there is none.
        `optional`: a client may come without a certificate (then `role` is None), but not with a wrong one."""
        mode = ssl.CERT_OPTIONAL if optional else ssl.CERT_REQUIRED
        front = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        front.minimum_version = ssl.TLSVersion.TLSv1_3
        front.verify_mode = mode
        front.num_tickets = 0

        def newest(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _front: ssl.SSLContext) -> int | None:
            context = self._servers.get(mode)
            if context is None:
                return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
            connection.context = context
            return None

        front.sni_callback = newest  # type: ignore[assignment]
        return front

    def role(self, extra: Callable[[str], Any]) -> ProcessRole | None:
        """The role of the peer whose transport's `get_extra_info` this is; None: it showed no certificate, or one of
        no role in this installation."""
        certificate: Mapping[str, Any] | None = extra("peercert")
        if not certificate:
            return None
        for kind, value in certificate.get("subjectAltName", ()):
            if kind == "URI" and (role := role_of(self._uri, value)) is not None:
                return role
        return None

    def expired(self, now: datetime | None = None) -> bool:
        """Whether the certificate has run out: peers refuse it."""
        return self.not_after is not None and (now or datetime.now(UTC)) >= self.not_after

    def _fail(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("the certificate cannot be read; the last one stays in use", problem=problem)
        self.problem = problem


def refusal(credentials: TLSCredentials | None, role: str, *, secured: bool, shown: ProcessRole | None) -> str | None:
    """Why a caller with a key of `role` is not answered; None: it is. `secured`: over TLS; `shown`: the role in its
    certificate.

    A process of Shoal shows the certificate of its role: a key that was read somewhere is of no use without. People
    have none: they come through the API server's proxy, which shows none either, and their key decides.
    """
    if not secured:
        strict = credentials is not None and credentials.strict
        return MTLS_NEEDED if strict else None
    if role in PROCESS_ROLES and shown != role:
        return f"a certificate of role {role} is needed besides its key"
    return None


def dial(credentials: TLSCredentials | None, name: str | None) -> dict[str, Any]:
    """What a call of aiohttp's needs besides its https URL to reach a peer of that name; nothing for one that speaks
    plain HTTP. Raises NoCertificate."""
    if name is None:
        return {}
    if credentials is None:
        raise NoCertificate("this process has no certificate, and the peer speaks mutual TLS only")
    return {"ssl": credentials.client(), "server_hostname": name}


def ledger_name(url: str) -> str | None:
    """Name that the certificate of the ledger at this URL must have; None: it is called without mutual TLS."""
    return server_name("ledger") if url.startswith("https:") else None


def _context(protocol: Any, path: str, trust: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(path)
    context.load_verify_locations(cadata=trust)
    # An authority from outside may itself be signed by another one: it is trusted all the same.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _server(mode: ssl.VerifyMode, path: str, trust: str) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_SERVER, path, trust)
    context.verify_mode = mode
    context.num_tickets = 0  # no client of ours resumes
    return context
