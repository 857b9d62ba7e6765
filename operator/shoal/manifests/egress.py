"""What the pods that fetch sources may reach: names and the ports of sources, and nothing that is of the node."""

from typing import Final
from urllib.parse import urlsplit

from shoal.api.config import OperatorConfig
from shoal.api.meta import JsonObject

NEVER: Final = {
    "0.0.0.0/0": ("169.254.0.0/16", "168.63.129.16/32", "100.100.100.200/32", "192.0.0.192/32"),
    "::/0": ("fe80::/10", "fd00:ec2::/64", "fd20:ce::/64"),
}
"""Networks, and in each what is link-local or a cloud's metadata server."""
_IDENTITY: Final = (
    ("169.254.170.23/32", 80),  # AWS: EKS Pod Identity
    ("fd00:ec2::23/128", 80),
    ("169.254.169.254/32", 80),  # Google Cloud: GKE's metadata server, by its address and behind it
    ("169.254.169.252/32", 988),
)
_PORTS: Final = {"http": 80, "https": 443}


def rules(config: OperatorConfig, *, identity: bool) -> list[JsonObject]:
    """Egress of a Model's pods. `identity`: they ask the node who they are in the cloud."""
    found: list[JsonObject] = [
        {"ports": [_port(53, "UDP"), _port(53, "TCP")]},
        {
            "ports": [_port(number) for number in ports(config)],
            "to": [
                *({"ipBlock": {"cidr": network, "except": list(never)}} for network, never in NEVER.items()),
                # Of a cluster whose CNI does not count pods among the addresses; a Service leads to pods.
                {"namespaceSelector": {}},
            ],
        },
    ]
    if identity:
        found += [{"ports": [_port(number)], "to": [{"ipBlock": {"cidr": address}}]} for address, number in _IDENTITY]
    return found


def ports(config: OperatorConfig) -> list[int]:
    """TCP ports of sources, of the hub's mirror, of proxies, and of the traces' collector."""
    named = [config.hub_endpoint, config.proxy.http, config.proxy.https]
    named += [config.tracing.endpoint] if config.tracing.engines else []
    return sorted({*config.sources.ports, *(number for url in named if (number := _port_of(url)))})


def _port_of(url: str) -> int | None:
    try:
        parts = urlsplit(url)
        return parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None


def _port(number: int, protocol: str = "TCP") -> JsonObject:
    return {"protocol": protocol, "port": number}
