"""The authorities of an installation as their Secret keeps them: the one in force, the next one, the former ones."""

import base64
import binascii
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

import orjson

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.core import certificates
from shoal.net import pki
from shoal.net.pki import CertificateAuthority, CertificatePair, CertificateUnusable

_SINCE: Final = "since.json"
_NEXT: Final = ("next.crt", "next.key")
_FORMER: Final = "former.crt"


@dataclass(frozen=True, slots=True, repr=False)
class KeptAuthorities:
    """Never logged: hence no repr."""

    current: CertificateAuthority | None = None
    next: CertificateAuthority | None = None
    former: tuple[str, ...] = ()
    """Their certificates, PEM."""
    since: tuple[tuple[str, datetime], ...] = ()
    """Fingerprint -> when it got the place that it has."""

    @staticmethod
    def texts(secret: JsonObject) -> dict[str, str]:
        """A Secret's data as text. Raises Unusable."""
        data: dict[str, str] = secret.get("data") or {}
        try:
            return {name: base64.b64decode(value).decode() for name, value in data.items()}
        except (binascii.Error, UnicodeError):
            raise CertificateUnusable("its data is no text") from None

    @classmethod
    def read(cls, secret: JsonObject) -> "KeptAuthorities":
        """Raises Unusable."""
        texts = cls.texts(secret)
        try:
            said = orjson.loads(texts.get(_SINCE) or "{}").items()
            since = tuple((str(mark), datetime.fromisoformat(str(at))) for mark, at in said)
        except (ValueError, AttributeError):
            raise CertificateUnusable("its data is not as the operator wrote it") from None
        return cls(
            _pair(texts, names.CERTIFICATE_FILE, names.CERTIFICATE_KEY_FILE),
            _pair(texts, *_NEXT),
            tuple(_split(texts.get(_FORMER, ""))),
            since,
        )

    def data(self) -> dict[str, str]:
        """As `read` takes it."""
        texts: dict[str, str] = {
            _SINCE: orjson.dumps({mark: at.isoformat() for mark, at in self.since}).decode(),
            names.TRUST_FILE: self.trust,
        }
        for authority, (certificate, key) in (
            (self.current, (names.CERTIFICATE_FILE, names.CERTIFICATE_KEY_FILE)),
            (self.next, _NEXT),
        ):
            if authority is not None:
                texts |= {certificate: authority.pair.certificate, key: authority.pair.key}
        if self.former:
            texts[_FORMER] = "".join(self.former)
        return {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}

    @property
    def trust(self) -> str:
        """The bundle that all processes trust, PEM."""
        known = [a.pair.certificate for a in (self.current, self.next) if a is not None]
        return "".join([*known, *self.former])

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Of the bundle, sorted."""
        return tuple(sorted(pki.fingerprint(c) for c in pki.read_certificates(self.trust))) if self.trust else ()

    def facts(self) -> certificates.Authorities:
        """What decisions read."""
        since = dict(self.since)
        epoch = datetime.fromtimestamp(0, UTC)

        def fact(mark: str, not_before: datetime, not_after: datetime) -> certificates.AuthorityFacts:
            return certificates.AuthorityFacts(mark, not_before, not_after, since.get(mark, epoch))

        def of(authority: CertificateAuthority | None) -> certificates.AuthorityFacts | None:
            return authority and fact(authority.fingerprint, authority.not_before, authority.not_after)

        former = [
            fact(pki.fingerprint(c), c.not_valid_before_utc, c.not_valid_after_utc)
            for pem in self.former
            for c in pki.read_certificates(pem)
        ]
        return certificates.Authorities(of(self.current), of(self.next), former)

    def take(
        self,
        step: certificates.RotationStep,
        made: CertificateAuthority | None,
        now: datetime,
        leaf_life_over: set[str],
    ) -> "KeptAuthorities":
        """After a step. `made` is the authority of Make and Prepare; `leaf_life_over` are the fingerprints that Forget
        forgets."""
        former = [] if self.current is None else [self.current.pair.certificate]
        match step.kind:
            case "Make":
                kept = replace(self, current=made, next=None, former=(*former, *self.former))
            case "Prepare":
                kept = replace(self, next=made)
            case "Promote":
                kept = replace(self, current=self.next, next=None, former=(*former, *self.former))
            case "Forget":
                gone = leaf_life_over
                kept = replace(self, former=tuple(p for p in self.former if _mark(p) not in gone))
        return replace(kept, since=kept._stamped(self, now))

    def _stamped(self, before: "KeptAuthorities", now: datetime) -> tuple[tuple[str, datetime], ...]:
        """When each got its place: now, where it has another than before."""
        places, old, since = self._places(), before._places(), dict(before.since)
        return tuple(
            (mark, since[mark] if old.get(mark) == place and mark in since else now) for mark, place in places.items()
        )

    def _places(self) -> dict[str, str]:
        places = {_mark(pem): "former" for pem in self.former}
        if self.next is not None:
            places[self.next.fingerprint] = "next"
        if self.current is not None:
            places[self.current.fingerprint] = "current"
        return places


def _mark(pem: str) -> str:
    return pki.fingerprint(pki.read_certificates(pem)[0])


def _pair(texts: dict[str, str], certificate: str, key: str) -> CertificateAuthority | None:
    if certificate not in texts and key not in texts:
        return None
    return CertificateAuthority.read(CertificatePair(texts.get(certificate, ""), texts.get(key, "")))


def _split(bundle: str) -> list[str]:
    end = "-----END CERTIFICATE-----\n"
    return [part + end for part in bundle.split(end) if part.strip()]
