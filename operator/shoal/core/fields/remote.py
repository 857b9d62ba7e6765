"""Media that a request names by https URL: which of them a gateway may fetch, and from which addresses. An engine never
gets such a URL.
"""

import ipaddress
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import idna

from shoal.core.fields.kinds import FieldProblem, Medium, wrong
from shoal.core.network import METADATA

MOST_URL: Final = 2048
"""Characters of a URL."""
PORT: Final = 443
PARTS: Final[Mapping[str, Medium]] = {"image_url": "image", "audio_url": "audio"}
"""Types of message parts that hold a URL, and the medium behind it."""
_LABEL: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
HOST: Final = rf"^({_LABEL}\.)+[a-z]([-a-z0-9]{{0,61}}[a-z0-9])?$"
"""A DNS name with a domain. The last label begins with a letter, so it cannot be an IP address."""
MOST_HOST: Final = 253
_HOST: Final = re.compile(HOST)
_URL: Final = re.compile(r"(?i:https)://([^/?#]*)(/[^?#]*)?(\?[^#]*)?(#.*)?", re.DOTALL)
_TARGET: Final = re.compile(r"[A-Za-z0-9\-._~!$&'()*+,;=:@/?%\[\]{}|^]*")
_WRONG: Final = "invalid_media_url"


@dataclass(frozen=True, slots=True)
class Remote:
    """A file that a gateway may fetch."""

    host: str
    """One of the Model's hosts, in DNS form."""
    target: str
    """Path and query."""

    @property
    def url(self) -> str:
        """Built from the checked parts: the client's text is not parsed a second time."""
        return f"https://{self.host}{self.target}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file that a request needs before it can be sent to an engine."""

    at: str
    """The field, such as `messages[0].content[1].image_url.url`."""
    medium: Medium
    remote: Remote


# --- addresses of files ---------------------------------------------------------------------------------------------


def remote(url: str, at: str, hosts: Collection[str]) -> Remote | FieldProblem:
    """The file to fetch for a URL that is no `data:` URL, or why it is refused. `hosts`: those of the Model."""
    if len(url) > MOST_URL:
        return wrong(at, f"a `data:` URL, or an https URL of at most {MOST_URL} characters", _WRONG)
    if not hosts or (found := _URL.fullmatch(url)) is None:
        # An engine would fetch it from anywhere it can reach, and follow redirects; or open it as a file.
        text = (
            f"`{at}` must be a `data:` URL in base64. A gateway fetches https URLs only, of the hosts that the Model "
            "names in `spec.media.allowedHosts`, where the installation allows it (`gateway.media.egress`)."
        )
        return FieldProblem(at, text, "url_not_allowed")
    authority, path, query, fragment = cast(tuple[str, str | None, str | None, str | None], found.groups())
    target = (path or "/") + (query or "")
    if fragment is not None or _TARGET.fullmatch(target) is None:
        return wrong(at, "a URL without a fragment (#), and with what is special percent-encoded", _WRONG)
    host, colon, port = authority.partition(":")
    if "@" in authority or "\\" in authority:
        return wrong(at, "a URL without a user name", _WRONG)
    if (colon and port != str(PORT)) or (name := _dns(host)) is None:
        return wrong(at, "an https URL of a host by its name, at port 443", _WRONG)
    if name not in hosts:
        text = f"The host of `{at}` is none that the Model names in `spec.media.allowedHosts`. Send a `data:` URL."
        return FieldProblem(at, text, "url_not_allowed")
    return Remote(name, target)


def _dns(host: str) -> str | None:
    """A host's name in DNS form: lower case, ASCII, without the root's dot. None: it is no such name."""
    if len(host) > MOST_HOST:
        return None
    if not host.isascii():
        try:
            host = idna.encode(host, uts46=True).decode()
        except UnicodeError:
            return None
    name = host.lower().removesuffix(".")
    return name if len(name) <= MOST_HOST and _HOST.fullmatch(name) else None

    # --- files of a request -----------------------------------------------------------------------------------------


def wanted(fields: Mapping[str, Any], hosts: Collection[str]) -> list[Wanted]:
    """The files that a chat needs which was checked with the same hosts, in the chat's order."""
    found: list[Wanted] = []
    for at, medium, inside in _places(fields):
        there = remote(inside["url"], at, hosts)
        if isinstance(there, Remote):
            found.append(Wanted(at, medium, there))
    return found


def put(fields: Mapping[str, Any], data: Sequence[str]) -> int:
    """Replaces the URLs found by `wanted` by `data:` URLs. Returns the growth of the body in characters.

    Raises:
        ValueError: their numbers differ.
    """
    more = 0
    for (_, _, inside), url in zip(list(_places(fields)), data, strict=True):
        more += len(url) - len(inside["url"])
        inside["url"] = url
    return more


def _places(fields: Mapping[str, Any]) -> Iterator[tuple[str, Medium, dict[str, Any]]]:
    for index, message in enumerate(cast(list[dict[str, Any]], fields["messages"])):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for place, part in enumerate(cast(list[dict[str, Any]], content)):
            kind: str = part["type"]
            if (medium := PARTS.get(kind)) is None:
                continue
            inside = cast(dict[str, Any], part[kind])
            if not inside["url"].startswith("data:"):
                yield f"messages[{index}].content[{place}].{kind}.url", medium, inside


# --- addresses of hosts ---------------------------------------------------------------------------------------------

_UNICAST: Final = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is routed between networks."""
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
"""Prefix by which an IPv6-only cluster reaches IPv4: the address is in the last 32 bits."""
_SPECIAL: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # protocols' own
            "192.88.99.0/24",  # relays of 6to4
            "2001::/23",  # protocols' own, Teredo among them
            "2001:db8::/32",  # examples
            "2002::/16",  # 6to4: any IPv4 address, also a private one
            "3fff::/20",  # examples
        ),
    )
)
"""Networks within the routed ones that belong to no host, or lead to another network."""
_ISATAP: Final = (0x0000_5EFE, 0x0200_5EFE)


def contactable(address: str) -> bool:
    """Whether a gateway may connect to an address for a client: only to globally routed addresses of single hosts.

    Addresses behind a network's own translation prefix cannot be recognised.
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.scope_id is not None:
            return False
        if found in _NAT64:
            found = ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF)
        elif found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        elif found not in _UNICAST or (int(found) >> 32) & 0xFFFF_FFFF in _ISATAP:
            return False
    return (
        found.is_global
        and not (found.is_multicast or found.is_reserved or found.is_private)
        and found not in METADATA
        and not any(found.version == network.version and found in network for network in _SPECIAL)
    )
