"""When certificates expire."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from shoal.core.doctor.results import ok, result, some, unread
from shoal.core.doctor.types import DoctorResult, DoctorSnapshot
from shoal.core.layers.layer import Layer
from shoal.core.layers.types import Unread

EXPIRED: Final = "CertificateExpired"
EXPIRES: Final = "CertificateExpires"
SOON: Final = timedelta(hours=24)
"""A certificate is renewed after a third of its life, and lives a week by default: one that expires this soon should
have been renewed."""
_DO: Final = "Look at the operator's log: it renews certificates while it leads."


def check(seen: DoctorSnapshot, now: datetime) -> Iterator[DoctorResult]:
    """Each certificate in Shoal's namespace."""
    name = "certificates"
    if isinstance(seen.certificates, Unread):
        yield unread(name, Layer.CONTROL, seen.certificates)
        return
    well, silent = 0, list[str]()
    for each in seen.certificates:
        if each.not_after is None:
            silent.append(each.secret)
        elif each.not_after <= now:
            text = f"the certificate in Secret {each.secret} expired on {each.not_after:%Y-%m-%d %H:%M} UTC"
            yield result(name, "error", EXPIRED, Layer.CONTROL, text, _DO)
        elif each.not_after - now < SOON:
            text = f"the certificate in Secret {each.secret} expires on {each.not_after:%Y-%m-%d %H:%M} UTC"
            yield result(name, "warning", EXPIRES, Layer.CONTROL, text, _DO)
        else:
            well += 1
    if silent:
        text = f"Secret {some(sorted(silent))} does not say in its metadata when its certificate expires"
        do = "Its alert ShoalScalerCertificateExpires watches it; read tls.crt for the date."
        yield result(name, "unknown", "DateUnknown", Layer.CONTROL, text, do)
    if well == len(seen.certificates):
        text = f"{well} certificates are valid for more than a day" if well else "there are no certificates"
        yield ok(name, Layer.CONTROL, text)
