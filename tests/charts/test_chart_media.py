"""Where gateways may call: nothing is fetched for clients unless a value says so."""

import ipaddress
import json
from functools import cache
from typing import Any

import pytest

from shoal.core.fields.remote import contactable
from tests.support.charts import rendered

API_SERVER = "34.0.0.10"
BOUND = {"gatewayEgress": True, "apiServers": [f"{API_SERVER}/32"]}
MEDIA: dict[str, Any] = {"media": {"egress": True}}


def values(*, bound: bool = True, **gateway: Any) -> dict[str, Any]:
    return {"networkPolicy": BOUND if bound else {}, "gateway": gateway}


def gateway(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, "shoal-gateway")]
    return found


@cache
def policy(given: str) -> dict[str, Any]:
    return gateway(rendered(json.loads(given)), "NetworkPolicy")["spec"]


def reaches(given: dict[str, Any], address: str, port: int) -> bool:
    """Whether a network that enforces policies lets a gateway through."""
    spec = policy(json.dumps(given))
    if "Egress" not in spec["policyTypes"]:
        return True
    there = ipaddress.ip_address(address)

    def within(cidr: str) -> bool:
        network = ipaddress.ip_network(cidr)
        return network.version == there.version and there in network

    return any(
        ("ports" not in rule or port in [each["port"] for each in rule["ports"]])
        and (
            "to" not in rule
            or any(
                within(peer["ipBlock"]["cidr"]) and not any(map(within, peer["ipBlock"].get("except", ())))
                for peer in rule["to"]
                if "ipBlock" in peer
            )
        )
        for rule in spec["egress"]
    )


@pytest.mark.parametrize("egress", [False, True])
def test_gateways_fetch_only_where_a_value_says_so(egress: bool) -> None:
    pod = gateway(rendered(values(media={"egress": egress})), "StatefulSet")["spec"]["template"]["spec"]
    env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert env["SHOAL_GATEWAY_MEDIA_EGRESS"] == str(egress).lower()
    assert reaches(values(media={"egress": egress}), "8.8.8.8", 443) is egress
    assert reaches(values(media={"egress": egress}), "2606:4700::1111", 443) is egress
    assert not reaches(values(media={"egress": egress}), "8.8.8.8", 80)


INSIDE = (
    *("169.254.169.254", "168.63.129.16", "127.0.0.1", "0.0.0.1", "100.100.100.200", "192.0.0.192", "224.0.0.1"),
    *("240.0.0.1", "fe80::1", "fd00:ec2::254", "fd20:ce::254", "::1", "ff02::1", "64:ff9b::a9fe:a9fe"),
)


@pytest.mark.parametrize("address", INSIDE)
def test_nothing_beside_pods_and_private_networks_is_reached_inside(address: str) -> None:
    assert not reaches(values(**MEDIA), address, 443)
    assert not reaches(values(**MEDIA), address, 80)
    assert not contactable(address)  # by the gateway itself
    # The companion: without the policy the network lets it through.
    assert reaches(values(bound=False, **MEDIA), address, 443)


def test_what_gateways_need_is_reached() -> None:
    given = values()
    for address, port in ((API_SERVER, 443), ("10.1.2.3", 8000), ("192.168.1.1", 6443), ("fd01::1", 8443)):
        assert reaches(given, address, port)
    assert reaches(given, "8.8.8.8", 53)
    rules = gateway(rendered(given), "NetworkPolicy")["spec"]["egress"]
    assert any({"namespaceSelector": {}} in rule.get("to", ()) for rule in rules)  # engines, the ledger, other gateways


def test_a_collector_and_a_bucket_are_reached_wherever_they_are() -> None:
    assert not reaches(values(), "8.8.8.8", 4318)
    assert reaches({**values(), "tracing": {"endpoint": "http://otel.example.com:4318"}}, "8.8.8.8", 4318)
    assert reaches({**values(), "tracing": {"endpoint": "https://otel.example.com"}}, "8.8.8.8", 443)
    bucket = values(requestLog={"bucket": {"url": "s3://logs", "secretName": "key"}})
    assert reaches(bucket, "8.8.8.8", 443)
    assert not reaches(bucket, "169.254.169.254", 80)
    assert reaches(values(requestLog={"bucket": {"url": "s3://logs"}}), "169.254.169.254", 80)


def test_by_default_the_network_says_nothing_of_where_gateways_call() -> None:
    assert gateway(rendered({}), "NetworkPolicy")["spec"]["policyTypes"] == ["Ingress"]
