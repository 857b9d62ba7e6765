"""Certificates of the installation's own CAs, beside those that everybody trusts."""

import ssl
from pathlib import Path

import certifi

_SYSTEM = Path("/etc/ssl/certs/ca-certificates.crt")


def with_public_roots(bundle: Path, combined: Path) -> Path:
    """Writes the public roots and those of `bundle` into `combined`, and returns it.

    SSL_CERT_FILE replaces what a process trusts, while the chart's caBundle is meant to add to it. Raises OSError, and
    ssl.SSLError when `bundle` holds no certificate.
    """
    further = bundle.read_bytes()
    ssl.create_default_context(cadata=further.decode("ascii", errors="replace"))
    roots = _SYSTEM if _SYSTEM.is_file() else Path(certifi.where())
    combined.write_bytes(roots.read_bytes() + b"\n" + further)
    return combined
