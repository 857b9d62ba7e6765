"""For any address and any URL: nothing inside is reached, whatever form it is written in."""

import ipaddress

from hypothesis import example, given
from hypothesis import strategies as st

from shoal.core.fields.kinds import FieldProblem
from shoal.core.fields.remote import MOST_URL, Remote, contactable, remote

HOSTS = frozenset({"images.example.com", "xn--bcher-kva.example"})
V4 = st.integers(0, 2**32 - 1).map(ipaddress.IPv4Address)
INSIDE = st.sampled_from(
    [
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
        *("192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4"),
    ]
).flatmap(lambda text: st.ip_addresses(v=4, network=text))
INSIDE_V6 = st.sampled_from(["::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8", "2001:db8::/32"]).flatmap(
    lambda text: st.ip_addresses(v=6, network=text)
)
FORMS = {
    "mapped": lambda v4: 0xFFFF << 32 | v4,
    "compatible": lambda v4: v4,
    "translated": lambda v4: 0xFFFF << 48 | v4,
    "NAT64": lambda v4: 0x0064_FF9B << 96 | v4,
    "local NAT64": lambda v4: 0x0064_FF9B_0001 << 80 | v4,
    "6to4": lambda v4: 0x2002 << 112 | v4 << 80 | 1,
    "Teredo": lambda v4: 0x2001 << 112 | v4 ^ 0xFFFF_FFFF,
    "ISATAP": lambda v4: 0x2606_4700 << 96 | 0x5EFE << 32 | v4,
}
"""How IPv6 writes an IPv4 address inside of its own."""


@given(INSIDE, st.sampled_from(sorted(FORMS)))
def test_an_address_inside_is_never_called_in_any_form(address: ipaddress.IPv4Address, form: str) -> None:
    assert not contactable(str(address))
    assert not contactable(str(ipaddress.IPv6Address(FORMS[form](int(address)))))


@given(INSIDE_V6)
def test_nor_one_of_ipv6(address: ipaddress.IPv6Address) -> None:
    inner = address.ipv4_mapped
    assert not contactable(str(address)) or (inner is not None and contactable(str(inner)))


@given(V4, st.sampled_from(["mapped", "NAT64"]))
def test_a_form_that_networks_translate_is_judged_as_what_it_leads_to(v4: ipaddress.IPv4Address, form: str) -> None:
    assert contactable(str(ipaddress.IPv6Address(FORMS[form](int(v4))))) == contactable(str(v4))


@given(st.one_of(V4, st.ip_addresses(v=6, network="2000::/3")))
def test_what_is_called_is_routed_everywhere(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if contactable(str(address)):
        assert address.is_global
        assert not any((address.is_private, address.is_multicast, address.is_reserved, address.is_link_local))


@given(st.text(max_size=100))
@example("127.0.0.1\n")
def test_what_is_no_address_is_not_called(text: str) -> None:
    if contactable(text):
        ipaddress.ip_address(text)


PARTS = st.sampled_from(
    (
        *sorted(HOSTS),
        "evil.com",
        "https://",
        "HTTPS://",
        "127.0.0.1",
        "bücher",
        "443",
        "%2e",
        "a",
        *"@:/\\?#.[]。%\t\n\0",
    )
)


@given(st.one_of(st.text(max_size=60), st.lists(PARTS, max_size=8).map("".join)).map(lambda text: "https://" + text))
def test_a_url_that_passes_leads_to_an_allowed_host_for_any_reader(url: str) -> None:
    found = remote(url, "at", HOSTS)
    if isinstance(found, FieldProblem):
        return
    assert isinstance(found, Remote)
    assert found.host in HOSTS
    assert found.target.startswith("/")
    assert found.target.isascii()
    assert found.target.isprintable()
    assert not set(found.url) & set('\\#" \t\r\n<>`')
    # Once more it is the same: what is asked for is what was judged.
    assert remote(found.url, "at", HOSTS) == found
    assert len(url) <= MOST_URL
