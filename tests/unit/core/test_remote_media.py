"""Which URLs of media may be fetched, and from which addresses."""

from typing import Any

import pytest
from pydantic import ValidationError

from shoal.api.model import Media, Model
from shoal.core.fields.check import check
from shoal.core.fields.kinds import Facts, FieldProblem
from shoal.core.fields.media import MOST_MEDIA
from shoal.core.fields.remote import MOST_URL, Remote, contactable, put, remote, wanted
from shoal.core.fields.table import CHAT
from shoal.core.routing.resolve import served_model
from tests.support import pictures

ALLOWED = "images.example.com"
FOREIGN = "xn--bcher-kva.example"
HOSTS = frozenset({ALLOWED, FOREIGN})
AT = "messages[0].content[0].image_url.url"
FACTS = Facts(vocabulary=512, context_length=4096, media=frozenset({"image", "audio"}), media_hosts=HOSTS)


def body(*urls: str, kind: str = "image_url") -> dict[str, Any]:
    parts = [{"type": kind, kind: {"url": url}} for url in urls]
    return {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]}


@pytest.mark.parametrize(
    ("url", "host", "target"),
    [
        (f"https://{ALLOWED}/a/b.png?X-Amz-Signature=a%2Fb&c[0]=1", ALLOWED, "/a/b.png?X-Amz-Signature=a%2Fb&c[0]=1"),
        (f"https://{ALLOWED}", ALLOWED, "/"),
        (f"https://{ALLOWED}?a", ALLOWED, "/?a"),
        (f"https://{ALLOWED}:443/a", ALLOWED, "/a"),
        (f"HTTPS://{ALLOWED.upper()}/A", ALLOWED, "/A"),
        (f"https://{ALLOWED}./a", ALLOWED, "/a"),
        ("https://bücher.example/a", FOREIGN, "/a"),
        ("https://BÜCHER.example/a", FOREIGN, "/a"),
        (f"https://{FOREIGN}/a", FOREIGN, "/a"),
        # In other letters of the same name; what is called is the name of the list.
        ("https://ｉｍａｇｅｓ。example.com/a", ALLOWED, "/a"),
    ],
)
def test_an_https_url_of_a_host_that_the_model_allows_may_be_fetched(url: str, host: str, target: str) -> None:
    found = remote(url, AT, HOSTS)
    assert isinstance(found, Remote)
    assert found == Remote(host, target)
    assert found.url == f"https://{host}{target}"


ATTACKS = {
    "no TLS": f"http://{ALLOWED}/a",
    "a file": "file:///etc/passwd",
    "a path": "/etc/passwd",
    "another scheme": f"ftp://{ALLOWED}/a",
    "a scheme in front": f" https://{ALLOWED}/a",
    "another host": "https://evil.com/a",
    "a user name": f"https://{ALLOWED}@evil.com/a",
    "a user name and a port": f"https://{ALLOWED}:443@evil.com/a",
    "a user name of the host": f"https://evil@{ALLOWED}/a",
    "a host below another": f"https://{ALLOWED}.evil.com/a",
    "a host that ends so": f"https://evil-{ALLOWED}/a",
    "a host below": f"https://a.{ALLOWED}/a",
    "an address": "https://169.254.169.254/latest/meta-data",
    "an address in one number": "https://2852039166/",
    "an address in hex": "https://0xa9fea9fe/",
    "IPv6": "https://[::ffff:169.254.169.254]/",
    "IPv6 of the machine": "https://[::1]/",
    "a scope": "https://[fe80::1%25eth0]/",
    "a port": f"https://{ALLOWED}:8443/a",
    "another spelling of the port": f"https://{ALLOWED}:0443/a",
    "no port": f"https://{ALLOWED}:/a",
    "two ports": f"https://{ALLOWED}:443:443/a",
    "two dots": f"https://{ALLOWED}../a",
    "a dot in front": f"https://.{ALLOWED}/a",
    "a backslash": f"https://{ALLOWED}\\@evil.com/a",
    "a backslash behind another": f"https://evil.com\\.{ALLOWED}/a",
    "a backslash in the path": f"https://{ALLOWED}/\\evil.com",
    "a fragment": f"https://{ALLOWED}/a#b",
    "a fragment before the user name": f"https://evil.com#@{ALLOWED}/a",
    "an empty fragment": f"https://{ALLOWED}/a#",
    "a query before the user name": f"https://evil.com?@{ALLOWED}/a",
    "an encoded dot": f"https://{ALLOWED}%2eevil.com/a",
    "a zero byte": f"https://{ALLOWED}\0.evil.com/a",
    "a line": f"https://{ALLOWED}/a\r\nx-evil: 1",
    "a line at the end": f"https://{ALLOWED}\n",
    "a blank": f"https://{ALLOWED}/a b",
    "letters that are not ASCII": f"https://{ALLOWED}/ä",
    "no host": "https:///a",
    "one slash": f"https:/{ALLOWED}/a",
    "Cyrillic": "https://imаges.example.com/a",
    "a foreign name that is none": "https://xn--zzzzzzzz.example/",
    "a separator of its own": f"https://{ALLOWED}\u2044evil.com/",
    "a dot of its own": f"https://{ALLOWED}。evil.com/a",
    "a long one": f"https://{ALLOWED}/{'a' * MOST_URL}",
    "a long host": f"https://{'a.' * 500}{ALLOWED}/",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_any_other_is_refused(attack: str) -> None:
    found = remote(ATTACKS[attack], AT, HOSTS)
    assert isinstance(found, FieldProblem)
    assert (found.param, found.code in ("invalid_media_url", "url_not_allowed")) == (AT, True)
    # What the client wrote may hold a signature: it is not repeated.
    assert "evil" not in found.message


def test_a_check_of_how_a_url_begins_would_let_some_through() -> None:
    naive = {name for name, url in ATTACKS.items() if url.lower().startswith(f"https://{ALLOWED}")}
    assert {"a user name", "a host below another", "a backslash", "a port", "a line"} <= naive
    assert ATTACKS["a host below"].split("/")[2].endswith(ALLOWED)


def test_without_hosts_the_message_says_what_to_set() -> None:
    found = check(body(f"https://{ALLOWED}/a"), CHAT, Facts(media=FACTS.media))
    assert found is not None
    assert (found.code, found.param) == ("url_not_allowed", "messages[1].content[0].image_url.url")
    assert "`spec.media.allowedHosts`" in found.message
    assert "`gateway.media.egress`" in found.message


@pytest.mark.parametrize("kind", ["image_url", "audio_url"])
def test_a_request_names_its_files_in_order_and_gets_them_in_their_places(kind: str) -> None:
    data = pictures.data_url("image/png", pictures.made("PNG"))
    fields = body(f"https://{ALLOWED}/1", f"https://{ALLOWED}/2", kind=kind)
    fields["messages"].append({"role": "user", "content": [{"type": "text", "text": "https://evil.com"}]})
    assert check(fields, CHAT, FACTS) is None
    found = wanted(fields, HOSTS)
    assert [(each.at, each.remote.target) for each in found] == [
        (f"messages[1].content[{n}].{kind}.url", f"/{n + 1}") for n in range(2)
    ]
    assert {each.medium for each in found} == {kind.removesuffix("_url")}
    assert put(fields, [data, "data:2"]) == len(data) + 6 - 2 * len(f"https://{ALLOWED}/1")
    assert [part[kind]["url"] for part in fields["messages"][1]["content"]] == [data, "data:2"]
    assert wanted(fields, HOSTS) == []


def test_files_that_are_there_already_stay() -> None:
    data = pictures.data_url("image/png", pictures.made("PNG"))
    fields = body(data, f"https://{ALLOWED}/2")
    put(fields, ["data:new"])
    assert [part["image_url"]["url"] for part in fields["messages"][1]["content"]] == [data, "data:new"]
    with pytest.raises(ValueError, match="longer"):
        put(body(f"https://{ALLOWED}/2"), ["data:1", "data:2"])


def test_there_are_as_many_as_other_media() -> None:
    assert check(body(*[f"https://{ALLOWED}/a"] * MOST_MEDIA), CHAT, FACTS) is None
    found = check(body(*[f"https://{ALLOWED}/a"] * (MOST_MEDIA + 1)), CHAT, FACTS)
    assert found is not None
    assert str(MOST_MEDIA) in found.message


def test_a_model_that_reads_text_only_fetches_nothing() -> None:
    found = check(body(f"https://{ALLOWED}/a"), CHAT, Facts(media_hosts=HOSTS))
    assert found is not None
    assert found.code == "media_not_supported"


def test_the_hosts_are_the_models() -> None:
    spec: dict[str, Any] = {"source": {"uri": "hf://a/b"}, "media": {"allowedHosts": [ALLOWED]}}
    model = Model.model_validate({"metadata": {"name": "m", "namespace": "n", "uid": "u"}, "spec": spec})
    assert served_model(model).facts.media_hosts == {ALLOWED}
    del spec["media"]
    model = Model.model_validate({"metadata": {"name": "m", "namespace": "n", "uid": "u"}, "spec": spec})
    assert served_model(model).facts.media_hosts == frozenset()


@pytest.mark.parametrize(
    "host",
    [
        *("Images.example.com", "images.example.com.", "*.example.com", ".example.com", "example", "localhost", ""),
        *("10.0.0.1", "1.2.3.0x4", "2130706433", "::1", "[::1]", "images.example.com:443", "https://example.com"),
        *("images.example.com/", "a@example.com", "bücher.example", "-a.example.com", "a-.example.com", "a..example"),
        *(f"{'a' * 64}.example", f"{'a.' * 130}example"),
    ],
)
def test_a_host_of_a_model_is_an_exact_name(host: str) -> None:
    with pytest.raises(ValidationError):
        Media(allowed_hosts=(host,))


def test_a_model_names_thirty_two_at_most() -> None:
    assert len(Media(allowed_hosts=tuple(f"a{n}.example" for n in range(32))).allowed_hosts) == 32
    with pytest.raises(ValidationError):
        Media(allowed_hosts=tuple(f"a{n}.example" for n in range(33)))


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"])
def test_an_address_that_is_routed_everywhere_may_be_called(address: str) -> None:
    assert contactable(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.100.100.200"),
        *("0.0.0.0", "255.255.255.255", "224.0.0.1", "240.0.0.1", "192.0.0.192", "192.0.2.1", "198.18.0.1"),
        *("168.63.129.16", "192.88.99.1", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254"),
        *("ff02::1", "ff0e::1", "fec0::1", "100::1", "2001:db8::1", "3fff::1", "5f00::1", "::ffff:10.0.0.1"),
        *("::ffff:169.254.169.254", "::10.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808", "2002:a9fe:a9fe::1"),
        *("2001::1", "2606:4700::5efe:a00:1", "2606:4700::200:5efe:a00:1", "2002:808:808::1"),
        *("2606:4700::1%1", "", "localhost", "8.8.8.8:443", "0x8.8.8.8", "134744072", "8.8.8", " 8.8.8.8"),
    ],
)
def test_no_other_address_may(address: str) -> None:
    assert not contactable(address)
