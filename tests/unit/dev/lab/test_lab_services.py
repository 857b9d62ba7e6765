"""Which endpoints a Service's connections go to, and what the cluster DNS answers."""

from typing import Any

import pytest
from dnslib import QTYPE, RCODE, DNSRecord

from shoal_dev.lab import dns, services


def _service(name: str = "web", cluster_ip: str = "10.96.1.1", **spec: Any) -> dict[str, Any]:
    ports = [{"name": "http", "port": 80, "protocol": "TCP"}]
    return {
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"clusterIP": cluster_ip, "ports": ports} | spec,
    }


def _slice(*endpoints: dict[str, Any], service: str = "web", kind: str = "IPv4") -> dict[str, Any]:
    return {
        "metadata": {"name": "s", "namespace": "ns", "labels": {"kubernetes.io/service-name": service}},
        "addressType": kind,
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": list(endpoints),
    }


def _endpoint(address: str, hostname: str | None = None, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions} | ({"hostname": hostname} if hostname else {})


READY = _endpoint("10.244.1.2", ready=True, serving=True, terminating=False)
UNREADY = _endpoint("10.244.1.3", ready=False, serving=False, terminating=False)
DRAINING = _endpoint("10.244.1.4", ready=False, serving=True, terminating=True)
UNKNOWN = _endpoint("10.244.1.5")


@pytest.mark.parametrize(
    ("endpoints", "chosen"),
    [
        ([READY, UNREADY, DRAINING], ["10.244.1.2"]),
        ([UNREADY, DRAINING], ["10.244.1.4"]),
        ([UNREADY], []),
        ([UNKNOWN, DRAINING], ["10.244.1.5"]),
        ([], []),
    ],
    ids=["ready only", "terminating that serve when none is ready", "none", "unknown means ready", "empty"],
)
def test_endpoints_are_chosen_as_kube_proxy_does(endpoints: list[dict[str, Any]], chosen: list[str]) -> None:
    (port,) = services.service_ports([_service()], [_slice(*endpoints)])
    assert [e.address for e in port.endpoints] == chosen
    assert {e.port for e in port.endpoints} <= {8080}


def test_headless_external_and_ipv6_services_are_not_proxied() -> None:
    given = [
        _service("headless", "None"),
        _service("external", type="ExternalName", externalName="example.org") | {},
        _service("six", "fd00::1"),
    ]
    given[1]["spec"].pop("clusterIP")
    assert services.service_ports(given, [_slice(READY, kind="IPv6")]) == []


def test_table_sends_refuses_and_sticks() -> None:
    ports = services.service_ports(
        [_service(), _service("none", "10.96.1.2"), _service("sticky", "10.96.1.3", sessionAffinity="ClientIP")],
        [_slice(READY, UNKNOWN), _slice(READY, service="sticky")],
    )
    table = services.ruleset(ports, masquerade_all=False)
    assert "numgen random mod 2 map { 0 : 10.244.1.2 . 8080, 1 : 10.244.1.5 . 8080 }" in table
    assert "jhash ip saddr mod 1" in table
    assert "elements = { 10.96.1.2 . tcp . 80 }" in table
    assert "ct status dnat ip saddr . ip daddr @hairpin masquerade" in table
    assert "ct status dnat masquerade" in services.ruleset(ports, masquerade_all=True)


def _zone() -> dns.Zone:
    given = [
        _service(),
        _service("pods", "None"),
        _service("outside", "None", type="ExternalName", externalName="Example.org."),
    ]
    slices = [
        _slice(
            _endpoint("10.244.1.2", "web-0", ready=True), _endpoint("10.244.1.3", "web-1", ready=False), service="pods"
        )
    ]
    return dns.Zone.build(given, slices)


def _ask(name: str, kind: str = "A") -> DNSRecord:
    return _zone().answer(DNSRecord.question(name, kind))


@pytest.mark.parametrize(
    ("name", "kind", "answers"),
    [
        ("web.ns.svc.cluster.local", "A", ["10.96.1.1"]),
        ("WEB.ns.SVC.cluster.local", "A", ["10.96.1.1"]),
        ("pods.ns.svc.cluster.local", "A", ["10.244.1.2"]),
        ("web-0.pods.ns.svc.cluster.local", "A", ["10.244.1.2"]),
        ("10-244-9-9.ns.pod.cluster.local", "A", ["10.244.9.9"]),
        ("_http._tcp.web.ns.svc.cluster.local", "SRV", ["0 100 80 web.ns.svc.cluster.local."]),
        ("_http._tcp.pods.ns.svc.cluster.local", "SRV", ["0 100 8080 web-0.pods.ns.svc.cluster.local."]),
        ("outside.ns.svc.cluster.local", "A", ["example.org."]),
        ("1.1.96.10.in-addr.arpa", "PTR", ["web.ns.svc.cluster.local."]),
    ],
)
def test_names_that_exist(name: str, kind: str, answers: list[str]) -> None:
    reply = _ask(name, kind)
    assert reply.header.rcode == RCODE.NOERROR
    assert [str(r.rdata) for r in reply.rr] == answers


@pytest.mark.parametrize("name", ["web.ns.svc.cluster.local", "ns.svc.cluster.local", "svc.cluster.local"])
def test_no_ipv6_is_an_empty_answer_and_not_a_missing_name(name: str) -> None:
    # NXDOMAIN to the AAAA question would make resolvers give up on the A answer as well.
    reply = _ask(name, "AAAA")
    assert reply.header.rcode == RCODE.NOERROR
    assert reply.rr == []
    assert [QTYPE[r.rtype] for r in reply.auth] == ["SOA"]


@pytest.mark.parametrize(
    "name",
    ["no.ns.svc.cluster.local", "web-1.pods.ns.svc.cluster.local", "no.cluster.local", "x.ns.pod.cluster.local"],
)
def test_names_that_do_not_exist(name: str) -> None:
    assert _ask(name).header.rcode == RCODE.NXDOMAIN


def test_other_names_are_the_hosts_resolvers_business() -> None:
    zone = _zone()
    assert not zone.is_mine("example.com")
    assert not zone.is_mine("1.0.0.127.in-addr.arpa")
    assert zone.is_mine("typo.ns.svc.cluster.local")


async def test_without_a_resolver_on_the_host_the_answer_is_a_failure_at_once() -> None:
    reply = await dns.DNSServer().answer(bytes(DNSRecord.question("example.com").pack()))
    assert reply is not None
    assert DNSRecord.parse(reply).header.rcode == RCODE.SERVFAIL
    assert await dns.DNSServer().answer(b"\x00\x01no dns") is None


def test_host_resolver_is_the_first_usable_one() -> None:
    assert (
        dns.host_resolver("# x\nsearch a\nnameserver nonsense\nnameserver 10.0.0.53\nnameserver 1.1.1.1") == "10.0.0.53"
    )
    assert dns.host_resolver("nameserver fe80::1%eth0") == "fe80::1"
    assert dns.host_resolver("") is None
