"""ClusterIP Services: from Services and EndpointSlices to one nftables table. Pure; `cluster.py` watches and loads.

The choices are kube-proxy's: ready endpoints; if there are none, those that terminate but still serve; if there are
none either, the connection is refused. A connection from a pod to itself through its Service is masqueraded.
"""

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from shoal_dev.lab import network

TABLE: Final = "shoal_services"
_SERVICE_NAME: Final = "kubernetes.io/service-name"
_PROTOCOLS: Final = {"TCP": "tcp", "UDP": "udp"}


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """One address of a Service's port."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class ServicePort:
    """One port of one Service, and where its connections go."""

    namespace: str
    service: str
    name: str
    cluster_ip: str
    protocol: str
    """tcp or udp."""
    port: int
    sticky: bool
    """sessionAffinity ClientIP: one client, one endpoint, while the set of endpoints stays."""
    endpoints: tuple[Endpoint, ...]


Object = Mapping[str, Any]


def is_ready(endpoint: Object) -> bool:
    """A missing condition is to be read as true (API documentation of EndpointConditions)."""
    conditions: Object = endpoint.get("conditions") or {}
    return conditions.get("ready") is not False


def _serves_while_terminating(endpoint: Object) -> bool:
    conditions: Object = endpoint.get("conditions") or {}
    return bool(conditions.get("terminating")) and bool(conditions.get("serving"))


def slices_by_service(slices: Iterable[Object]) -> dict[tuple[str, str], list[Object]]:
    """(namespace, service) -> its IPv4 EndpointSlices."""
    result: dict[tuple[str, str], list[Object]] = defaultdict(list)
    for item in slices:
        labels: Object = item["metadata"].get("labels") or {}
        service = labels.get(_SERVICE_NAME)
        if service and item.get("addressType") == "IPv4":
            result[item["metadata"]["namespace"], service].append(item)
    return result


def service_ports(services: Iterable[Object], slices: Iterable[Object]) -> list[ServicePort]:
    """Every port of every Service with an IPv4 ClusterIP, in a stable order.

    Left out: headless and ExternalName Services (DNS answers for them), and the cluster DNS itself, which listens on
    its ClusterIP.
    """
    by_service = slices_by_service(slices)
    result: list[ServicePort] = []
    for service in services:
        spec = service["spec"]
        address = spec.get("clusterIP") or "None"
        if address in ("None", network.DNS) or ipaddress.ip_address(address).version != 4:
            continue
        namespace, name = service["metadata"]["namespace"], service["metadata"]["name"]
        for port in spec.get("ports") or ():
            protocol = _PROTOCOLS.get(port.get("protocol", "TCP"))
            if protocol is None:
                continue
            port_name = port.get("name", "")
            result.append(
                ServicePort(
                    namespace,
                    name,
                    port_name,
                    address,
                    protocol,
                    int(port["port"]),
                    spec.get("sessionAffinity") == "ClientIP",
                    _endpoints(by_service.get((namespace, name), ()), port_name, protocol),
                )
            )
    return sorted(result, key=lambda p: (p.namespace, p.service, p.protocol, p.port))


def _endpoints(slices: Iterable[Object], port_name: str, protocol: str) -> tuple[Endpoint, ...]:
    ready: set[Endpoint] = set()
    terminating: set[Endpoint] = set()
    for item in slices:
        numbers = [
            int(port["port"])
            for port in item.get("ports") or ()
            if (port.get("name") or "") == port_name
            and _PROTOCOLS.get(port.get("protocol", "TCP")) == protocol
            and port.get("port")
        ]
        for endpoint in item.get("endpoints") or ():
            # Only the first address counts: API documentation of Endpoint.addresses.
            targets = [Endpoint(endpoint["addresses"][0], number) for number in numbers]
            if is_ready(endpoint):
                ready.update(targets)
            elif _serves_while_terminating(endpoint):
                terminating.update(targets)
    return tuple(sorted(ready or terminating))


def ruleset(ports: Iterable[ServicePort], *, masquerade_all: bool) -> str:
    """The table as one atomic transaction for `nft -f -`. Connections that are already open keep their endpoint."""
    dispatch: list[str] = []
    refuse: list[str] = []
    chains: list[str] = []
    addresses: set[str] = set()
    for number, port in enumerate(ports):
        match = f"{port.cluster_ip} . {port.protocol} . {port.port}"
        if not port.endpoints:
            refuse.append(match)
            continue
        chain = f"port_{number}"
        dispatch.append(f"{match} : goto {chain}")
        pick = "jhash ip saddr" if port.sticky else "numgen random"
        targets = ", ".join(f"{i} : {e.address} . {e.port}" for i, e in enumerate(port.endpoints))
        chains.append(
            f"  chain {chain} {{ # {port.namespace}/{port.service}:{port.port}\n"
            f"    meta l4proto {port.protocol} dnat ip to {pick} mod {len(port.endpoints)} map {{ {targets} }}\n  }}"
        )
        addresses.update(e.address for e in port.endpoints)

    def elements(items: list[str]) -> str:
        return f"\n    elements = {{ {', '.join(items)} }}" if items else ""

    masquerade = (
        "ct status dnat masquerade" if masquerade_all else "ct status dnat ip saddr . ip daddr @hairpin masquerade"
    )
    # A reset for TCP: an ICMP error in answer to a bridged pod's first packet does not reach it on every kernel.
    refusal = [
        "    meta l4proto tcp ip daddr . meta l4proto . th dport @refused reject with tcp reset",
        "    ip daddr . meta l4proto . th dport @refused reject",
    ]
    lines = [
        f"add table ip {TABLE}",
        f"delete table ip {TABLE}",
        f"table ip {TABLE} {{",
        "  map dispatch {",
        "    type ipv4_addr . inet_proto . inet_service : verdict" + elements(dispatch),
        "  }",
        "  set refused {",
        "    type ipv4_addr . inet_proto . inet_service" + elements(refuse),
        "  }",
        "  set hairpin {",
        "    type ipv4_addr . ipv4_addr" + elements([f"{a} . {a}" for a in sorted(addresses)]),
        "  }",
        *chains,
        "  chain prerouting {",
        "    type nat hook prerouting priority dstnat; policy accept;",
        "    ip daddr . meta l4proto . th dport vmap @dispatch",
        "  }",
        "  chain output {",
        "    type nat hook output priority -100; policy accept;",
        "    ip daddr . meta l4proto . th dport vmap @dispatch",
        "  }",
        "  chain postrouting {",
        "    type nat hook postrouting priority srcnat; policy accept;",
        f"    {masquerade}",
        "  }",
        "  chain refuse_forwarded {",
        "    type filter hook forward priority filter; policy accept;",
        *refusal,
        "  }",
        "  chain refuse_own {",
        "    type filter hook output priority filter; policy accept;",
        *refusal,
        "  }",
        "}",
        "",
    ]
    return "\n".join(lines)
