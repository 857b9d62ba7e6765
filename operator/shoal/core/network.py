"""Which hosts and addresses a source may be fetched from, and where a server may redirect to. Pure: names in, a reason
out.

A source is written by a tenant and fetched by Shoal's pods, which stand where the tenant does not: beside the metadata
server of the cloud, behind network policies, on the node. So an address is held against these rules when it is
connected to, and not only when it is written: a name may resolve to something else by then.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from shoal.api.config import HUB_STORES, Sources

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
METADATA: Final = frozenset(
    map(
        ipaddress.ip_address,
        (
            "100.100.100.200",  # Alibaba Cloud
            "168.63.129.16",  # Azure: the host of a virtual machine
            "192.0.0.192",  # Oracle Cloud
            "fd00:ec2::23",  # AWS: EKS Pod Identity
            "fd00:ec2::254",  # AWS
            "fd20:ce::254",  # Google Cloud
        ),
    )
)
"""Metadata servers whose addresses are not link-local."""
_METADATA_NAMES: Final = ("metadata", "metadata.google.internal", "instance-data", "instance-data.ec2.internal")
_NAT64: Final = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))
_NUMERIC: Final = re.compile(r"^(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+))*\.?$", re.IGNORECASE)
_LABEL: Final = r"[a-z0-9_]([-a-z0-9_]{0,61}[a-z0-9_])?"
_NAME: Final = re.compile(rf"^(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*$")


@dataclass(frozen=True, slots=True)
class SourceNetwork:
    """The platform's rules. The default reaches public addresses, and the stores of the public hub."""

    allowed_hosts: tuple[str, ...] = ()
    """Hosts, and networks (CIDR), that the platform vouches for: they may have private and loopback addresses. A name
    that begins with "." means every name below it."""
    redirect_hosts: tuple[str, ...] = HUB_STORES
    """Hosts to which any source may redirect, in the same spelling."""
    private_addresses: bool = False
    """Every host may have private addresses."""
    folders: tuple[str, ...] = ("/opt/shoal",)
    """Folders that `file://` may name, or what is below them."""

    def with_hosts(self, hosts: Iterable[str]) -> "SourceNetwork":
        """The same, vouching for these as well."""
        more = tuple(host for host in hosts if host not in self.allowed_hosts)
        if not more:
            return self
        return replace(self, allowed_hosts=(*self.allowed_hosts, *more))

    def host_problem(self, host: str) -> str | None:
        """Why a host may not be asked, as far as its name tells; None: it depends on its addresses."""
        name = _plain(host)
        if (address := _address(name)) is not None:
            return self.address_problem(name, str(address))
        if not name.isascii() or not _NAME.fullmatch(name):
            return f"{host!r} is no host name: write it in ASCII, as DNS has it"
        if _NUMERIC.fullmatch(name):
            return f"{host!r} is another spelling of an address: write the address or a name"
        if name in _METADATA_NAMES:
            return f"{host} is a cloud's metadata server, which is no source"
        if (name == "localhost" or name.endswith(".localhost")) and not self._vouched(name, None):
            return f"{host} is the pod itself: a source lies elsewhere"
        return None

    def address_problem(self, host: str, address: str) -> str | None:
        """Why `host` may not be asked at this address; None: it may."""
        found = _address(address)
        if found is None:
            return f"{host} has {address!r}, which is no address"
        if found.is_link_local or found in METADATA:
            return f"{host} has the address {found}, link-local or of a cloud's metadata server: never a source"
        if found.is_multicast or found.is_unspecified or (found.version == 4 and found.is_reserved):
            return f"{host} has the address {found}, which is nobody's"
        if found.is_global or self._vouched(_plain(host), found):
            return None
        if found.is_loopback:
            return f"{host} has the address {found}, the pod itself: a source lies elsewhere"
        if self.private_addresses:
            return None
        return (
            f"{host} has the private address {found}: whoever runs the cluster may name the host in the chart's "
            "sources.allowedHosts"
        )

    def redirect_problem(self, host: str, target: str) -> str | None:
        """Why a server at `host` may not redirect to `target`; None: it may, if `target` may be asked at all."""
        if _plain(host) == _plain(target) or _named(_plain(target), (*self.redirect_hosts, *self.allowed_hosts)):
            return None
        return (
            f"{host} redirects to {target}, refused: name the host where the files are, or whoever runs the cluster "
            "adds it to the chart's sources.redirectHosts"
        )

    def folder_problem(self, folder: str) -> str | None:
        """Why `file://` may not name this folder, a path without links; None: it may."""
        if any(folder == root or folder.startswith(f"{root.rstrip('/')}/") for root in self.folders):
            return None
        return (
            f"file://{folder} is none of the folders that file:// may name: put the model into a bucket or a volume; "
            "whoever runs the cluster may add the folder to the chart's sources.folders"
        )

    def _vouched(self, name: str, address: _Address | None) -> bool:
        named = (*self.allowed_hosts, *self.redirect_hosts)
        return _named(name, named) or (address is not None and _within(address, self.allowed_hosts))


PUBLIC: Final = SourceNetwork()
EVERYWHERE: Final = SourceNetwork(
    allowed_hosts=(".localhost", "localhost", "127.0.0.0/8", "::1/128"), private_addresses=True, folders=("/",)
)
"""For a person's own machine. Metadata servers are refused all the same."""


def of_config(sources: Sources) -> SourceNetwork:
    """The rules that the chart's `sources` states."""
    return SourceNetwork(
        allowed_hosts=sources.allowed_hosts,
        redirect_hosts=sources.redirect_hosts,
        private_addresses=sources.allow_private_addresses,
        folders=sources.folders,
    )


def _named(name: str, hosts: Iterable[str]) -> bool:
    for host in map(_plain, hosts):
        if name == host or (host.startswith(".") and name.endswith(host) and _address(name) is None):
            return True
    return False


def _within(address: _Address, networks: Iterable[str]) -> bool:
    for text in networks:
        try:
            network = ipaddress.ip_network(text, strict=False)
        except ValueError:
            continue
        if address.version == network.version and address in network:
            return True
    return False


def _plain(host: str) -> str:
    return host.strip("[]").lower().removesuffix(".")


def _address(text: str) -> _Address | None:
    """The address that is meant: that of an IPv4 host in one of the spellings that IPv6 has for it, where it is one."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv4Address):
        return found
    inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
    if inner is None and (any(found in network for network in _NAT64) or 1 < int(found) < 1 << 32):
        inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
    return inner or found
