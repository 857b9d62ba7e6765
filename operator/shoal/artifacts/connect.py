"""Connections to sources: only to allowed addresses, and with trusted certificates."""

import socket
import ssl
import urllib.request
from pathlib import Path
from typing import Final

import certifi
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from shoal.api import reasons
from shoal.artifacts.errors import ArtifactError
from shoal.core.network import SourceNetwork

_PROXIED: Final = ("http", "https", "all")


class CheckedResolver(AbstractResolver):
    """Resolves names and returns only allowed addresses, which are then connected to; DNS cannot change in between."""

    def __init__(self, network: SourceNetwork) -> None:
        self._network = network.with_hosts(proxy_hosts())
        self._inner = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises OSError; ArtifactError if every address is refused."""
        found = await self._inner.resolve(host, port, family)
        problems = [self._network.address_problem(host, each["host"]) for each in found]
        allowed = [each for each, problem in zip(found, problems, strict=True) if problem is None]
        if not allowed and problems:
            raise refused(str(problems[0]))
        return allowed

    async def close(self) -> None:
        await self._inner.close()


def require_host(network: SourceNetwork, host: str | None) -> None:
    """Raises ArtifactError for a refused host name or a refused address."""
    if (problem := network.host_problem(host or "")) is not None:
        raise refused(problem)


def refused(problem: str) -> ArtifactError:
    return ArtifactError(reasons.SOURCE_REFUSED, problem)


def proxy_hosts() -> list[str]:
    """Hosts of the chart's proxies. They are allowed at any address."""
    proxies = urllib.request.getproxies()
    return [host for kind in _PROXIED if (url := proxies.get(kind)) and (host := URL(url).host)]


_SYSTEM = Path("/etc/ssl/certs/ca-certificates.crt")


def with_public_roots(bundle: Path, combined: Path) -> Path:
    """Writes the public root certificates and those of `bundle` into `combined`, and returns it.

    SSL_CERT_FILE replaces the trusted certificates of a process, while the chart's caBundle adds to them. Raises
    OSError, and ssl.SSLError when `bundle` contains no certificate.
    """
    further = bundle.read_bytes()
    ssl.create_default_context(cadata=further.decode("ascii", errors="replace"))
    roots = _SYSTEM if _SYSTEM.is_file() else Path(certifi.where())
    combined.write_bytes(roots.read_bytes() + b"\n" + further)
    return combined
