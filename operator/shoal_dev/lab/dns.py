"""The cluster DNS: answers as the Kubernetes DNS specification says, from Services and EndpointSlices; asks the host's
resolver about everything else.

`Zone` is pure. `serve` listens on UDP and TCP; answers too long for UDP are truncated, and clients come again by TCP.
"""

# dnslib has annotations for a part of itself only.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import asyncio
import ipaddress
import secrets
import socket
import struct
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final, cast

import structlog
from dnslib import CNAME, PTR, QTYPE, RCODE, RR, SOA, SRV, A, DNSError, DNSHeader, DNSRecord

from shoal_dev.lab import network
from shoal_dev.lab.services import is_ready, slices_by_service

_log = structlog.get_logger()
_TTL: Final = 5
_MAX_UDP: Final = 1232
"""Bytes; the usual EDNS size that fits every path."""
_UPSTREAM_TIMEOUT_S: Final = 4.0
_IDLE_TCP_S: Final = 10.0

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """A record set of SRV: priority and weight are always 0 and 100."""

    port: int
    target: str


@dataclass(slots=True)
class Zone:
    """Names, lower case, fully qualified, without the last dot."""

    domain: str = network.DOMAIN
    addresses: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    services: dict[str, list[ServiceRecord]] = field(default_factory=dict[str, list[ServiceRecord]])
    reverse: dict[str, str] = field(default_factory=dict[str, str])
    branches: set[str] = field(default_factory=set[str])
    """Names that only have names below them: they exist, and have no records."""

    @classmethod
    def build(cls, services: Iterable[Object], slices: Iterable[Object], domain: str = network.DOMAIN) -> "Zone":
        zone = cls(domain)
        by_service = slices_by_service(slices)
        for service in services:
            namespace, name = service["metadata"]["namespace"], service["metadata"]["name"]
            zone._add(service, by_service.get((namespace, name), ()), f"{name}.{namespace}.svc.{domain}")
        for name in (*zone.addresses, *zone.aliases, *zone.services):
            parts = name.split(".")
            zone.branches.update(".".join(parts[i:]) for i in range(1, len(parts)))
        return zone

    def _add(self, service: Object, slices: Iterable[Object], name: str) -> None:
        spec = service["spec"]
        if spec.get("type") == "ExternalName":
            self.aliases[name] = str(spec["externalName"]).rstrip(".").lower()
            return
        address = spec.get("clusterIP") or "None"
        ports = spec.get("ports") or ()
        if address != "None":
            if ipaddress.ip_address(address).version == 4:
                self.addresses[name] = [address]
                self.reverse[address] = name
            for port in ports:
                self._add_port(name, port.get("name"), port.get("protocol", "TCP"), int(port["port"]), name)
            return
        # Headless: the ready endpoints themselves, and each by its hostname (StatefulSet pods have one).
        self.addresses.setdefault(name, [])
        for item in slices:
            for endpoint in item.get("endpoints") or ():
                if not is_ready(endpoint):
                    continue
                address = endpoint["addresses"][0]
                label = endpoint.get("hostname") or address.replace(".", "-")
                self.addresses[name].append(address)
                self.addresses.setdefault(f"{label}.{name}", []).append(address)
                if endpoint.get("hostname"):
                    self.reverse[address] = f"{label}.{name}"
                for port in item.get("ports") or ():
                    if port.get("port"):
                        number, protocol = int(port["port"]), port.get("protocol", "TCP")
                        self._add_port(name, port.get("name"), protocol, number, f"{label}.{name}")

    def _add_port(self, name: str, port: str | None, protocol: str, number: int, target: str) -> None:
        if port:
            self.services.setdefault(f"_{port}._{protocol.lower()}.{name}", []).append(ServiceRecord(number, target))

    def is_mine(self, name: str) -> bool:
        """Whether this zone answers for the name, be it with NXDOMAIN."""
        return (
            name == self.domain
            or name.endswith("." + self.domain)
            or (_reverse_address(name) or "").startswith(("10.96.", "10.244."))
        )

    def answer(self, request: DNSRecord) -> DNSRecord:
        """The answer to a question about one of its own names."""
        name, kind = _question(request)
        reply = request.reply(ra=1, aa=1)
        known = self._records(reply, name, kind)
        if not known:
            reply.header.rcode = RCODE.NXDOMAIN
        if not reply.rr:  # an empty or negative answer carries the SOA, so that it may be cached for a short time
            reply.add_auth(
                RR(self.domain, QTYPE.SOA, ttl=_TTL, rdata=SOA(f"ns.dns.{self.domain}", times=(1, 60, 60, 60, _TTL)))
            )
        return reply

    def _records(self, reply: DNSRecord, name: str, kind: str) -> bool:
        """Adds the records; returns whether the name exists."""
        address = _reverse_address(name)
        if address is not None:
            if address in self.reverse and kind in ("PTR", "ANY"):
                reply.add_answer(RR(name, QTYPE.PTR, ttl=_TTL, rdata=PTR(self.reverse[address])))
            return address in self.reverse
        pod = _pod_address(name, self.domain)
        if pod is not None:
            if kind in ("A", "ANY"):
                reply.add_answer(RR(name, QTYPE.A, ttl=_TTL, rdata=A(pod)))
            return True
        if name in self.aliases:
            reply.add_answer(RR(name, QTYPE.CNAME, ttl=_TTL, rdata=CNAME(self.aliases[name])))
            return True
        if kind in ("A", "ANY"):
            for address in self.addresses.get(name, ()):
                reply.add_answer(RR(name, QTYPE.A, ttl=_TTL, rdata=A(address)))
        if kind in ("SRV", "ANY"):
            for service in self.services.get(name, ()):
                reply.add_answer(RR(name, QTYPE.SRV, ttl=_TTL, rdata=SRV(0, 100, service.port, service.target)))
                for address in self.addresses.get(service.target, ()):
                    reply.add_ar(RR(service.target, QTYPE.A, ttl=_TTL, rdata=A(address)))
        return name in self.addresses or name in self.services or name in self.branches or name == self.domain


def _question(request: DNSRecord) -> tuple[str, str]:
    name = str(request.q.qname).rstrip(".").lower()
    return name, str(QTYPE.get(request.q.qtype))


def _reverse_address(name: str) -> str | None:
    """10.0.96.10.in-addr.arpa -> 10.96.0.10; None for a name that is no IPv4 reverse name."""
    if not name.endswith(".in-addr.arpa"):
        return None
    parts = name.removesuffix(".in-addr.arpa").split(".")
    return ".".join(reversed(parts)) if len(parts) == 4 else None


def _pod_address(name: str, domain: str) -> str | None:
    """10-244-1-2.NAMESPACE.pod.cluster.local -> 10.244.1.2."""
    if not name.endswith(f".pod.{domain}"):
        return None
    label, _, rest = name.removesuffix(f".pod.{domain}").partition(".")
    try:
        return str(ipaddress.IPv4Address(label.replace("-", "."))) if rest and "." not in rest else None
    except ValueError:
        return None


class HostResolver(asyncio.DatagramProtocol):
    """The host's resolver, over a UDP socket that was opened in the host's network namespace.

    Many questions share the socket, each under an id of its own.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        if len(data) >= 12:
            waiting = self._waiting.pop(struct.unpack("!H", data[:2])[0], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(data)

    def error_received(self, exc: Exception) -> None:
        _log.info("upstream_dns_error", error=str(exc))

    async def ask(self, question: bytes) -> bytes:
        """Raises TimeoutError."""
        assert self._transport is not None  # noqa: S101 - made before serving
        number = secrets.randbelow(65536)
        while number in self._waiting:
            number = secrets.randbelow(65536)
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            self._transport.sendto(struct.pack("!H", number) + question[2:])
            async with asyncio.timeout(_UPSTREAM_TIMEOUT_S):
                return question[:2] + (await waiting)[2:]
        finally:
            self._waiting.pop(number, None)


class DNSServer:
    """Answers questions; `zone` is replaced whenever Services or endpoints change."""

    def __init__(self) -> None:
        self.zone = Zone()
        self._upstream: HostResolver | None = None
        self._tasks = asyncio.TaskGroup()

    async def answer(self, question: bytes) -> bytes | None:
        """None for what is no question at all."""
        try:
            request = DNSRecord.parse(question)
            name, _ = _question(request)
        except (DNSError, IndexError, AttributeError, struct.error, UnicodeError):
            return None
        if self.zone.is_mine(name):
            return bytes(self.zone.answer(request).pack())
        if self._upstream is not None:
            try:
                return await self._upstream.ask(question)
            except TimeoutError:
                _log.info("upstream_dns_timeout")
        return _failure(request)

    async def serve(self, address: str, port: int, upstream: socket.socket | None) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            if upstream is not None:
                transport, self._upstream = await loop.create_datagram_endpoint(HostResolver, sock=upstream)
                stack.callback(transport.close)
            udp, _ = await loop.create_datagram_endpoint(lambda: _Udp(self), local_addr=(address, port))
            stack.callback(udp.close)
            await stack.enter_async_context(await asyncio.start_server(self._serve_tcp, address, port))
            async with self._tasks:
                await asyncio.Event().wait()

    def question_received(self, transport: asyncio.DatagramTransport, data: bytes, client: tuple[str, int]) -> None:
        self._tasks.create_task(self._answer_udp(transport, data, client))

    async def _answer_udp(self, transport: asyncio.DatagramTransport, data: bytes, client: tuple[str, int]) -> None:
        reply = await self.answer(data)
        if reply is None:
            return
        if len(reply) > _MAX_UDP:
            reply = bytes(DNSRecord.parse(reply).truncate().pack())
        transport.sendto(reply, client)

    async def _serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                async with asyncio.timeout(_IDLE_TCP_S):
                    (length,) = struct.unpack("!H", await reader.readexactly(2))
                    question = await reader.readexactly(length)
                reply = await self.answer(question)
                if reply is None:
                    return
                writer.write(struct.pack("!H", len(reply)) + reply)
                async with asyncio.timeout(_IDLE_TCP_S):
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: DNSServer) -> None:
        self._server = server
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        assert self._transport is not None  # noqa: S101 - by asyncio's contract
        self._server.question_received(self._transport, data, (addr[0], addr[1]))


def _failure(request: DNSRecord) -> bytes:
    header = DNSHeader(id=request.header.id, qr=1, ra=1, rcode=RCODE.SERVFAIL)
    return bytes(DNSRecord(header, q=request.q).pack())


def host_resolver(text: str) -> str | None:
    """The first nameserver of a resolv.conf; None when it names none."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            try:
                return str(ipaddress.ip_address(words[1].partition("%")[0]))
            except ValueError:
                continue
    return None


def open_upstream(resolver: str) -> socket.socket:
    """A UDP socket to the host's resolver; to be called in the host's network namespace. Raises OSError."""
    family = socket.AF_INET6 if ":" in resolver else socket.AF_INET
    upstream = socket.socket(family, socket.SOCK_DGRAM)
    try:
        upstream.connect((resolver, 53))
    except OSError:
        upstream.close()
        raise
    return upstream
