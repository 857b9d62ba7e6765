"""What NetworkPolicies say of the way from gateways to replicas.

Policies add up: a pod that at least one policy selects for a direction accepts what any of them allows. What only a
cluster's network can know, such as a port's name or a label of a namespace that was not read, counts as allowed.
Policies of other kinds (a service mesh's, a cloud's firewall) are not seen.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any, Final, Literal

from shoal.api import names
from shoal.core.layers import faults, texts
from shoal.core.layers.candidates import Candidate, Level
from shoal.core.layers.types import Evidence, PolicyView, WhyPod

Direction = Literal["Ingress", "Egress"]
_NAME_LABEL: Final = "kubernetes.io/metadata.name"
"""Kubernetes sets it on every namespace."""
_MOST: Final = 4
"""Policies that are named."""


@dataclass(frozen=True, slots=True)
class _Block:
    direction: Direction
    policies: tuple[str, ...]
    """Those that select the pod and do not allow the connection."""


def candidates(
    replicas: Iterable[WhyPod], gateways: Iterable[WhyPod], policies: Sequence[PolicyView]
) -> Iterator[Candidate]:
    """A fault where every gateway is kept from a replica that is ready."""
    callers = [pod for pod in gateways if pod.ready and not pod.deleting]
    found: dict[_Block, list[WhyPod]] = {}
    for replica in replicas:
        if not replica.ready or replica.deleting or not callers:
            continue
        blocks = [_block(caller, replica, policies) for caller in callers]
        if (first := blocks[0]) is not None and all(block is not None for block in blocks):
            found.setdefault(first, []).append(replica)
    for block, cut in found.items():
        shown = ", ".join(block.policies[:_MOST])
        to = "from gateways" if block.direction == "Ingress" else "to replicas"
        pods = ", ".join(sorted(pod.key for pod in cut)[:_MOST])
        yield Candidate(
            faults.NETWORK_POLICY,
            f"no gateway may connect to port {_port(cut[0])} of {pods}: NetworkPolicy {texts.shorten(shown)} allows "
            f"nothing {to}",
            Level.POD,
            (Evidence(f"{block.direction} of NetworkPolicy {texts.shorten(shown)}", "NetworkPolicies", None),),
            frozenset(pod.key for pod in cut),
        )


def _block(caller: WhyPod, replica: WhyPod, policies: Sequence[PolicyView]) -> _Block | None:
    port = _port(replica)
    ends: tuple[tuple[Direction, WhyPod, WhyPod], ...] = (("Ingress", replica, caller), ("Egress", caller, replica))
    for direction, pod, other in ends:
        selecting = [each for each in policies if _selects(each, pod, direction)]
        if selecting and not any(_allows(each, direction, other, port) for each in selecting):
            return _Block(direction, tuple(sorted(f"{each.namespace}/{each.name}" for each in selecting)))
    return None


def _port(replica: WhyPod) -> int:
    """To which gateways connect."""
    encrypted = any(container.name == names.CONTAINER_TLS for container in replica.containers)
    return names.ENGINE_TLS_PORT if encrypted else names.ENGINE_PORT


def _selects(policy: PolicyView, pod: WhyPod, direction: Direction) -> bool:
    types = policy.spec.get("policyTypes") or (["Ingress", "Egress"] if policy.spec.get("egress") else ["Ingress"])
    if policy.namespace != pod.namespace or direction not in types:
        return False
    return _matches(_map(policy.spec.get("podSelector")), pod.labels)


def _allows(policy: PolicyView, direction: Direction, other: WhyPod, port: int) -> bool:
    peers = "from" if direction == "Ingress" else "to"
    return any(
        _has_port(rule, port)
        and (not _seq(rule.get(peers)) or any(_is(peer, other, policy.namespace) for peer in _seq(rule.get(peers))))
        for rule in _seq(policy.spec.get(direction.lower()))
    )


def _has_port(rule: Mapping[str, Any], port: int) -> bool:
    ports = _seq(rule.get("ports"))
    return not ports or any(_is_port(each, port) for each in ports)


def _is_port(entry: Mapping[str, Any], port: int) -> bool:
    if entry.get("protocol") not in (None, "TCP"):
        return False
    first, last = entry.get("port"), entry.get("endPort")
    if not isinstance(first, int):
        return True  # every port, or one by its name
    return first <= port <= (last if isinstance(last, int) else first)


def _is(peer: Mapping[str, Any], pod: WhyPod, namespace: str) -> bool:
    """Whether a peer of a policy in `namespace` is this pod."""
    if "ipBlock" in peer:
        return _in_block(_map(peer.get("ipBlock")), pod.address)
    if "namespaceSelector" in peer:
        if not _matches(_map(peer.get("namespaceSelector")), {_NAME_LABEL: pod.namespace}, complete=False):
            return False
    elif pod.namespace != namespace:
        return False
    return _matches(_map(peer.get("podSelector")), pod.labels)


def _in_block(block: Mapping[str, Any], address: str | None) -> bool:
    try:
        ip = ip_address(address or "")
        excluded: Any = block.get("except") or ()
        return ip in ip_network(str(block.get("cidr"))) and not any(ip in ip_network(str(each)) for each in excluded)
    except ValueError:
        return True


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str], *, complete: bool = True) -> bool:
    """Whether a label selector matches. Not `complete`: labels that are not there may exist, and match."""

    def known(key: str) -> bool:
        return complete or key in labels

    equal = _map(selector.get("matchLabels"))
    if any(known(key) and labels.get(key) != value for key, value in equal.items()):
        return False
    return all(
        not known(str(each.get("key"))) or _holds(each, labels.get(str(each.get("key"))))
        for each in _seq(selector.get("matchExpressions"))
    )


def _holds(expression: Mapping[str, Any], value: str | None) -> bool:
    listed: Any = expression.get("values") or ()
    match expression.get("operator"):
        case "In":
            return value in listed
        case "NotIn":
            return value not in listed
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:
            return True


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _seq(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]
