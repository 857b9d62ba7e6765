"""Connections of sources: each to an address that the rules allow, whatever its name resolved to before."""

import socket
import urllib.request
from typing import Final

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from shoal.api import reasons
from shoal.artifacts.errors import ArtifactError
from shoal.core.network import SourceNetwork

_PROXIED: Final = ("http", "https", "all")


class CheckedResolver(AbstractResolver):
    """Resolves names, and gives out only addresses that may be connected to: those that are then connected to."""

    def __init__(self, network: SourceNetwork) -> None:
        self._network = network.with_hosts(proxy_hosts())
        self._inner = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises OSError, and ArtifactError where every address is refused."""
        found = await self._inner.resolve(host, port, family)
        problems = [self._network.address_problem(host, each["host"]) for each in found]
        allowed = [each for each, problem in zip(found, problems, strict=True) if problem is None]
        if not allowed and problems:
            raise refused(str(problems[0]))
        return allowed

    async def close(self) -> None:
        await self._inner.close()


def require_host(network: SourceNetwork, host: str | None) -> None:
    """Raises ArtifactError for a host that is refused by its name, or is an address that is refused."""
    if (problem := network.host_problem(host or "")) is not None:
        raise refused(problem)


def refused(problem: str) -> ArtifactError:
    return ArtifactError(reasons.SOURCE_REFUSED, problem)


def proxy_hosts() -> list[str]:
    """Hosts of the proxies that the chart names: they may lie anywhere."""
    proxies = urllib.request.getproxies()
    return [host for kind in _PROXIED if (url := proxies.get(kind)) and (host := URL(url).host)]
